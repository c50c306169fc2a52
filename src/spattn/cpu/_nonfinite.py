"""Keep NaN and Inf at masked keys from reaching other rows.

Tiles multiply the weight 0 of a masked pair by V, and in the backward its gradient by K: 0 · NaN is NaN. A call with a
non-finite row is repeated on a finite copy, which leaves all other rows bitwise unchanged. Non-finite keys are marked;
rows that attend to one take the float64 fallback, which reads the original. Finite inputs cost nothing.
"""

from __future__ import annotations

import numpy as np

__all__ = ["without"]


def without(x: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (copy of K or V with non-finite values zeroed, (batch, heads, length) uint8 mask of their keys).

    None if all values are finite.
    """
    finite = np.isfinite(x)
    if finite.all():
        return None
    return np.where(finite, x, x.dtype.type(0)), (~finite.all(axis=3)).view(np.uint8)
