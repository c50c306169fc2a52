"""Combine attention results over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays import dtype_name, namespace_of

__all__ = ["merge_attentions"]


def merge_attentions(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Merge attention results over disjoint sets of keys into the result over all keys.

    Used for cascade attention, where requests share a prefix, and for ring attention, where each device holds a part of
    the keys.

    Parameters
    ----------
    outs : sequence of (..., q_len, head_dim_v) array
        Results of :func:`spattn.attention` for the same queries over disjoint sets of keys: NumPy, PyTorch, CuPy or
        JAX arrays of one library.
    lses : sequence of (..., q_len) array
        Their log-sum-exps, from ``return_lse=True``.

    Returns
    -------
    out : (..., q_len, head_dim_v) array
        In the dtype of ``outs[0]``; 0 in rows with no allowed key.
    lse : (..., q_len) array
        In the dtype of ``lses[0]``; −inf in rows with no allowed key.

    Raises
    ------
    TypeError
        If an element is not an array, or array libraries or dtypes differ.
    ValueError
        If the sequences are empty or differ in length, or shapes differ.

    Notes
    -----
    ``lse = log Σ exp(lseᵢ)``, ``out = Σ exp(lseᵢ − lse) outᵢ``, computed in the dtype of `lses`. The function is
    differentiable in PyTorch and JAX. The result may differ by rounding from one call over all keys.

    Examples
    --------
    >>> import numpy as np, spattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 16))
    >>> halves = [spattn.attention(q, k[:, :, h], v[:, :, h], return_lse=True) for h in (slice(0, 50), slice(50, 100))]
    >>> out, lse = spattn.merge_attentions(*zip(*halves))
    >>> bool(np.allclose(out, spattn.attention(q, k, v)))
    True
    """
    xp = _namespace(outs, lses)
    largest = lses[0]
    for lse in lses[1:]:
        largest = xp.maximum(largest, lse)
    base = xp.where(xp.isfinite(largest), largest, xp.zeros_like(largest))  # −inf − −inf is NaN
    weights = [xp.exp(lse - base) for lse in lses]
    total = sum(weights[1:], weights[0])
    some = total > 0
    scale = xp.where(some, 1 / xp.where(some, total, xp.ones_like(total)), xp.zeros_like(total))
    merged = sum((_cast(out, lses[0]) * (weight * scale)[..., None] for out, weight in zip(outs, weights, strict=True)))
    logarithm = base + xp.log(xp.where(some, total, xp.ones_like(total)))
    return _cast(merged, outs[0]), xp.where(some, logarithm, largest)


def _namespace(outs: Sequence[Any], lses: Sequence[Any]) -> Any:
    """Validate the arrays and return their array namespace."""
    if len(outs) != len(lses) or not len(outs):
        raise ValueError(
            f"outs, lses: expected sequences of the same length, at least 1, got {len(outs)} and {len(lses)}"
        )
    for name, arrays in (("outs", outs), ("lses", lses)):
        for number, x in enumerate(arrays):
            if namespace_of(x) is None or namespace_of(x) is not namespace_of(outs[0]):
                raise TypeError(f"{name}[{number}]: expected an array like outs[0], got {type(x).__name__}")
            if dtype_name(x) != dtype_name(arrays[0]):
                raise TypeError(f"{name}[{number}]: expected dtype {dtype_name(arrays[0])}, got {dtype_name(x)}")
            if tuple(x.shape) != tuple(arrays[0].shape):
                raise ValueError(f"{name}[{number}]: expected shape {tuple(arrays[0].shape)}, got {tuple(x.shape)}")
    if tuple(outs[0].shape[:-1]) != tuple(lses[0].shape):
        raise ValueError(f"lses: expected shape {tuple(outs[0].shape[:-1])}, got {tuple(lses[0].shape)}")
    kind = namespace_of(outs[0])
    assert kind is not None, "checked above"
    return kind.functions()


def _cast(x: Any, like: Any) -> Any:
    return x.astype(like.dtype) if hasattr(x, "astype") else x.to(like.dtype)
