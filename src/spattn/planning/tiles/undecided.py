"""What is said of a predicate that no rule follows, before it is evaluated cell by cell."""

from __future__ import annotations

import warnings

from ...patterns import Pattern

__all__ = ["announce"]

_MOST_CELLS = 1 << 30  # ten seconds of a few operations, a minute of a slow one


def announce(pattern: Pattern, reason: str, tiles: int, cells: int) -> None:
    """Warns that `cells` cells in so many tiles are going to be evaluated; ValueError if that would take too long.

    Parameters
    ----------
    reason : str
        What no rule follows, in words.
    """
    if cells > _MOST_CELLS:
        raise ValueError(
            f"pattern: expected at most {_MOST_CELLS} pairs on which a predicate is evaluated one by one, got {cells} "
            f"of {pattern!r} ({reason}); join it by & with a pattern that excludes most of them, such as a window, or "
            "use operations that are followed on whole tiles"
        )
    warnings.warn(
        f"{pattern!r}: allows() cannot be evaluated on whole tiles ({reason}); planning evaluates every cell of "
        f"{tiles} tiles",
        stacklevel=3,
    )
