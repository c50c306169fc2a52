"""Compare gradients with the reference implementation, within an error bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import reference
from ..patterns import Pattern
from .arrays import random
from .bounds import assert_within_bound, dense_mask, gradients_of_weights, naive, naive_gradients

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
    """Evaluate the formula of :func:`spattn.attention_backward`, with every step rounded.

    The formula takes rounded ``out`` and ``lse``; `order` and `ulps` set their evaluation order and an added error.

    Parameters
    ----------
    dout, q, k, v, mask, scale
        As for :func:`naive_gradients`.
    order : int
        Evaluation order of ``out`` and ``lse``, see :func:`naive`.
    ulps : int
        Error added to ``out`` and ``lse``, in units in the last place.
    dlse : array, optional
        As for :func:`naive_gradients`.

    Returns
    -------
    dq, dk, dv : arrays
    """
    dtype = q.dtype
    wide = np.promote_types(dtype, np.float32)
    factor = wide.type(q.shape[3] ** -0.5 if scale is None else scale)
    out, lse = naive(q, k, v, mask, float(factor), order=order)
    lse = np.where(lse == -np.inf, np.inf, lse + ulps * np.spacing(np.where(np.isfinite(lse), lse, 1)))
    out = out + dtype.type(ulps) * np.spacing(out)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(wide)

    keys = np.repeat(k.astype(wide), q.shape[1] // k.shape[1], axis=1)
    scores = np.where(mask, rounded(rounded(q.astype(wide) @ keys.swapaxes(2, 3)) * factor), -np.inf)
    p = rounded(np.exp(scores - lse[..., None]))
    return gradients_of_weights(p, dout, q, k, v, float(factor), dtype, dlse, out)


class GradientExpectation:
    """Reference gradients and error bounds of a problem, to check any number of implementations.

    Parameters
    ----------
    pattern : Pattern
    q, k, v : arrays
        As for :func:`spattn.attention`.
    scale : float, optional
    with_dlse : bool
        Whether to include a gradient with respect to the log-sum-exp.
    seed : int
        Seed of the upstream gradients.

    Attributes
    ----------
    dout, dlse : arrays
        Upstream gradients; `dlse` is None unless `with_dlse`.
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
        """Assert that all three gradients are within the error bound.

        Parameters
        ----------
        gradients : (dq, dk, dv)
            NumPy arrays.
        what : str
            Name of the implementation in messages.
        """
        for name, got, exact, low in zip(NAMES, gradients, self._exact, self._low, strict=True):
            assert_within_bound(got, exact, list(low), self._dtype, f"{what} {name}".strip())

    def problems(self, gradients: tuple[Any, ...]) -> list[str]:
        """Return the messages of :meth:`check`, one for each gradient that exceeds its bound.

        Parameters
        ----------
        gradients : (dq, dk, dv)
            NumPy arrays.

        Returns
        -------
        list of str
        """
        found = []
        for name, got, exact, low in zip(NAMES, gradients, self._exact, self._low, strict=True):
            try:
                assert_within_bound(got, exact, list(low), self._dtype, name)
            except AssertionError as error:
                found.append(str(error))
        return found
