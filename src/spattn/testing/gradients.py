"""Gradients under test against the oracle, within what the formula loses when every step is rounded."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import reference
from ..patterns import Pattern
from .arrays import random
from .bounds import assert_within_bound, dense_mask, naive, naive_gradients

__all__ = ["GradientExpectation", "naive_from_results"]

NAMES = ("dq", "dk", "dv")


def naive_from_results(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    scale: float | None = None,
    *,
    order: int = 0,
    ulps: int = 0,
    dlse: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The formula of :func:`spattn.attention_backward` as it stands, every step rounded.

    Its arguments ``out`` and ``lse`` are rounded numbers: here they come from an order of evaluation of their own, see
    :func:`naive`, and are so many units in the last place off.

    Parameters
    ----------
    dout, q, k, v, mask, scale
        As for :func:`naive_gradients`.
    order, ulps : int
        See above.
    dlse : array, optional
        As for :func:`naive_gradients`.

    Returns
    -------
    dq, dk, dv : arrays
    """
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    wide = np.promote_types(dtype, np.float32)
    factor = wide.type(q.shape[3] ** -0.5 if scale is None else scale)
    out, lse = naive(q, k, v, mask, float(factor), order=order)
    lse = np.where(lse == -np.inf, np.inf, lse + ulps * np.spacing(np.where(np.isfinite(lse), lse, 1)))
    out = out + dtype.type(ulps) * np.spacing(out)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(wide)

    def over_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(*k.shape[:2], group, *x.shape[2:]).sum(axis=2).astype(dtype)

    kk, vv = (np.repeat(x.astype(wide), group, axis=1) for x in (k, v))
    qq, do = q.astype(wide), dout.astype(wide)
    logits = np.where(mask, rounded(rounded(qq @ kk.swapaxes(2, 3)) * factor), -np.inf)
    p = rounded(np.exp(logits - lse[..., None]))
    delta = (do * out.astype(wide)).sum(axis=3, keepdims=True)
    delta = rounded(delta if dlse is None else delta - dlse[..., None])
    ds = rounded(p * (rounded(do @ vv.swapaxes(2, 3)) - delta) * factor)
    return (ds @ kk).astype(dtype), over_group(ds.swapaxes(2, 3) @ qq), over_group(p.swapaxes(2, 3) @ do)


class GradientExpectation:
    """What the gradients of a problem must be, for results of several implementations.

    Parameters
    ----------
    pattern : Pattern
    q, k, v : arrays
        As for :func:`spattn.attention`.
    scale : float, optional
    with_dlse : bool
        Whether there is a gradient of the log-sum-exp too.
    seed : int
        Of the upstream gradients.

    Attributes
    ----------
    dout, dlse : arrays
        Upstream gradients; `dlse` is None without one.
    """

    def __init__(
        self,
        pattern: Pattern,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        scale: float | None = None,
        *,
        with_dlse: bool = False,
        seed: int = 99,
    ):
        wide = np.promote_types(q.dtype, np.float32)
        self.dout = random((*q.shape[:3], v.shape[3]), q.dtype, seed=seed)
        self.dlse = random(q.shape[:3], wide, seed=seed + 1) if with_dlse else None
        exact = np.longdouble if q.dtype == np.float64 else np.float64
        self._exact = reference.gradients(self.dout, q, k, v, pattern, scale, exact, self.dlse)
        mask = dense_mask(pattern, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        low = [naive_gradients(self.dout, q, k, v, mask, scale, dlse=self.dlse)]
        for order, ulps in ((0, 0), (1, 0), (4, 1)):
            low.append(naive_from_results(self.dout, q, k, v, mask, scale, order=order, ulps=ulps, dlse=self.dlse))
        self._low, self._dtype = list(zip(*low, strict=True)), q.dtype

    def check(self, gradients: tuple[Any, ...], what: str = "") -> None:
        """AssertionError unless all three are within the budget.

        Parameters
        ----------
        gradients : (dq, dk, dv)
            NumPy arrays.
        what : str
            Names the implementation in messages.
        """
        for name, got, exact, low in zip(NAMES, gradients, self._exact, self._low, strict=True):
            assert_within_bound(got, exact, list(low), self._dtype, f"{what} {name}".strip())
