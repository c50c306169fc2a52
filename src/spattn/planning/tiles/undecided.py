"""Warn about predicates that are evaluated cell by cell."""

from __future__ import annotations

import warnings

from ...patterns import Pattern

__all__ = ["announce"]

_MOST_CELLS = 1 << 30  # evaluation takes about ten seconds for a few operations, a minute for slow ones


def announce(pattern: Pattern, reason: str, tiles: int, cells: int) -> None:
    """Warn that all `cells` of `tiles` tiles are evaluated because of `reason`; raise ValueError for too many cells."""
    if cells > _MOST_CELLS:
        raise ValueError(
            f"pattern: expected at most {_MOST_CELLS} pairs to evaluate one by one, got {cells} in {pattern!r}: "
            f"allows() cannot be evaluated on whole tiles ({reason}); intersect it (&) with a pattern that excludes "
            "most pairs, such as a window, or use operations that the planner evaluates on whole tiles"
        )
    warnings.warn(
        f"{pattern!r}: allows() cannot be evaluated on whole tiles ({reason}); planning evaluates every cell of "
        f"{tiles} tiles",
        stacklevel=3,
    )
