"""What the checks of a plan say."""

from __future__ import annotations

import numpy as np

__all__ = ["partitions", "require"]


def require(sound, field: str, expected: str) -> None:
    """ValueError unless all of `sound` is true: ``plan: expected ..., got another in FIELD``, with the first number."""
    if not np.all(sound):
        at = f"[{int(np.argmin(sound))}]" if np.ndim(sound) == 1 else ""
        raise ValueError(f"plan: expected {expected}, got another in {field}{at}")


def partitions(ends: np.ndarray, length: int) -> bool:
    """Whether `ends` rises from 0 to `length`."""
    return bool(len(ends) and ends[0] == 0 and ends[-1] == length and (ends[1:] >= ends[:-1]).all())
