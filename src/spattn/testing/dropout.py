"""The pairs that attention dropout keeps."""

from __future__ import annotations

import numpy as np

from ..request.dropout import Dropout

__all__ = ["dropout_mask"]


def dropout_mask(seed: int, dropout_p: float, batch: int, heads: int, q_len: int, kv_len: int) -> np.ndarray:
    """Return which attention weights dropout keeps.

    Parameters
    ----------
    seed, dropout_p
        As for :func:`spattn.attention`.
    batch, heads : int
        Batch size and query heads of the call.
    q_len, kv_len : int
        Lengths in tokens.

    Returns
    -------
    (batch, heads, q_len, kv_len) bool array
        True for the weights that are kept, for allowed and other pairs.

    Examples
    --------
    >>> from spattn.testing import dropout_mask
    >>> mask = dropout_mask(7, 0.25, 2, 4, 100, 100)
    >>> mask.shape, round(float(mask.mean()), 2)
    ((2, 4, 100, 100), 0.75)
    """
    dropout = Dropout.of(dropout_p, seed)
    if dropout is None:
        return np.ones((batch, heads, q_len, kv_len), bool)
    return dropout.words(batch, heads, q_len, kv_len).kept(*np.ogrid[:batch, :heads, :q_len, :kv_len])
