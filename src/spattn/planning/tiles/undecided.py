"""Predicates that are evaluated pair by pair: a limit, and reasons for warnings about slow plans."""

from __future__ import annotations

from ..._util.making import note
from ...patterns import Pattern

__all__ = ["announce"]

_MOST_CELLS = 1 << 30  # evaluation takes about ten seconds for a few operations, a minute for slow ones
_ADVICE = (
    "intersect it (&) with a pattern that excludes most pairs, such as a window, or use operations that the planner "
    "evaluates on whole tiles"
)


def announce(pattern: Pattern, unfollowed: list[str], tiles: int, cells: int) -> None:
    """Note that all `cells` of `tiles` tiles are evaluated because of `unfollowed`; raise ValueError for too many."""
    why = f"allows() cannot be evaluated on whole tiles ({unfollowed[0]})" if unfollowed else "no two tiles are alike"
    if cells > _MOST_CELLS:
        raise ValueError(
            f"pattern: expected at most {_MOST_CELLS} pairs to evaluate one by one, got {cells} in {pattern!r}: "
            f"{why}; {_ADVICE}"
        )
    note(f"{cells} pairs in {tiles} tiles were evaluated one by one, because {why}; {_ADVICE}")
