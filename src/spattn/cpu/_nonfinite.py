"""Keep NaN and Inf at masked keys from reaching other rows.

The kernels multiply the zero weight of a masked pair by V and, in the backward, its zero gradient by K: 0 · NaN is NaN.
If an output row is non-finite, the call runs again on a finite copy of V or K, which leaves all other rows bitwise
unchanged. Rows that attend to a non-finite key take the float64 fallback, which reads the original array.
"""

from __future__ import annotations

import numpy as np

__all__ = ["without"]


def without(x: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return a copy of K or V with non-finite values zeroed and the (batch, heads, length) uint8 mask of their keys.

    Return None if all values are finite.
    """
    finite = np.isfinite(x)
    if finite.all():
        return None
    return np.where(finite, x, x.dtype.type(0)), (~finite.all(axis=3)).view(np.uint8)
