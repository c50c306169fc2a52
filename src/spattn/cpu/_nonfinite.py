"""NaN and infinities at keys, of which a row that may not attend to them must not notice anything.

The tiles multiply the weight of a pair that is not allowed, 0, by V, and in the backward its gradient by K: 0 · NaN is
NaN. A call that meets such a row is made again on a finite copy, so that the row comes out as with any other numbers
there, to the last bit. Keys that are not finite are marked, and rows that attend to one are left to the exact path,
which reads the original. It costs nothing while all is finite.
"""

from __future__ import annotations

import numpy as np

__all__ = ["without"]


def without(x: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """A copy of K or V with 0 for what is not finite, and (batch, heads, length) bytes that mark its keys.

    None when all of it is finite.
    """
    finite = np.isfinite(x)
    if finite.all():
        return None
    return np.where(finite, x, x.dtype.type(0)), (~finite.all(axis=3)).view(np.uint8)
