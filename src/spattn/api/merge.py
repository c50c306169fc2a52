"""Combine attention results over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..arrays import DTYPES, check_plain, dtype_name, namespace_of

__all__ = ["merge_attentions"]


def merge_attentions(outs: Iterable[Any], lses: Iterable[Any], *, layout: str = "bhsd") -> tuple[Any, Any]:
    """Merge attention results over disjoint sets of keys into the result over all keys.

    Cascade attention needs this, where requests share a prefix, and ring attention, where each device holds a part of
    the keys.

    Parameters
    ----------
    outs : sequence of (..., q_len, head_dim_v) array
        Results of :func:`spattn.attention` for the same queries over disjoint sets of keys: NumPy, PyTorch, CuPy or
        JAX arrays of one library.
    lses : sequence of (..., q_len) array
        Their log-sum-exps, from ``return_lse=True``.
    layout : {"bhsd", "bshd", "thd"}, optional
        The layout of the calls: it says where the heads are in `outs`.

    Returns
    -------
    out : (..., q_len, head_dim_v) array
        In the dtype of ``outs[0]``; 0 in rows with no allowed key.
    lse : (..., q_len) array
        In the dtype of ``lses[0]``; −inf in rows with no allowed key.

    Raises
    ------
    TypeError
        If an element is not a plain array of a supported dtype, or array libraries or dtypes differ.
    ValueError
        If the sequences are empty or differ in length, shapes differ or do not fit the layout, or `layout` is unknown.

    Notes
    -----
    ``lse = log Σ exp(lseᵢ)``, ``out = Σ exp(lseᵢ − lse) outᵢ``, computed in the dtype of `lses`. The function is
    differentiable in PyTorch and JAX. The result may differ by rounding from one call over all keys.

    Each sink takes part in one part only: call :func:`spattn.attention` with sinks for one element of `outs`.

    Examples
    --------
    >>> import numpy as np, spattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 16))
    >>> halves = [spattn.attention(q, k[:, :, h], v[:, :, h], return_lse=True) for h in (slice(0, 50), slice(50, 100))]
    >>> out, lse = spattn.merge_attentions(*zip(*halves))
    >>> bool(np.allclose(out, spattn.attention(q, k, v)))
    True
    """
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    xp = _namespace(outs, lses, layout)
    largest = lses[0]
    for lse in lses[1:]:
        largest = xp.maximum(largest, lse)
    base = xp.where(xp.isfinite(largest), largest, xp.zeros_like(largest))  # −inf − −inf is NaN
    weights = [xp.exp(lse - base) for lse in lses]
    total = sum(weights[1:], weights[0])
    some = total > 0
    scale = xp.where(some, 1 / xp.where(some, total, xp.ones_like(total)), xp.zeros_like(total))
    merged = None
    for out, weight in zip(outs, weights, strict=True):
        share = _beside(xp, weight * scale, layout)[..., None]
        part = xp.where(share > 0, _cast(out, lses[0]) * share, xp.zeros_like(share))  # rows without a key may hold NaN
        merged = part if merged is None else merged + part
    logarithm = base + xp.log(xp.where(some, total, xp.ones_like(total)))
    return _cast(merged, outs[0]), xp.where(some, logarithm, largest)


def _listed(name: str, arrays: Any) -> list[Any]:
    if not isinstance(arrays, Iterable):
        raise TypeError(f"{name}: expected a sequence of arrays, got {type(arrays).__name__}")
    return list(arrays)


def _beside(xp: Any, lse: Any, layout: str) -> Any:
    """Return `lse` with its axes in the order of `out`; its heads precede the queries in every layout."""
    return lse if layout == "bhsd" else xp.moveaxis(lse, 1 if layout == "bshd" else 0, -1)


def _namespace(outs: list[Any], lses: list[Any], layout: str) -> Any:
    """Validate the arrays and return their array namespace."""
    if len(outs) != len(lses) or not len(outs):
        raise ValueError(
            f"outs, lses: expected sequences of the same length, at least 1, got {len(outs)} and {len(lses)}"
        )
    if layout not in ("bhsd", "bshd", "thd"):
        raise ValueError(f"layout: expected one of 'bhsd', 'bshd', 'thd'; got {layout!r}")
    for name, arrays, dtypes in (("outs", outs, DTYPES), ("lses", lses, DTYPES[:2])):
        for number, x in enumerate(arrays):
            library, what = namespace_of(x), f"{name}[{number}]"
            if library is None:
                raise TypeError(f"{what}: expected a NumPy, PyTorch, CuPy or JAX array, got {type(x).__name__}")
            if library.name != "jax":  # JAX traces it
                check_plain(what, x)
            if dtype_name(x) not in dtypes:
                raise TypeError(f"{what}: expected one of {', '.join(dtypes)}, got {dtype_name(x)}")
            if library is not namespace_of(outs[0]):
                raise TypeError(f"{what}: expected an array like outs[0], got {type(x).__name__}")
            if dtype_name(x) != dtype_name(arrays[0]):
                raise TypeError(f"{what}: expected dtype {dtype_name(arrays[0])}, got {dtype_name(x)}")
            if tuple(x.shape) != tuple(arrays[0].shape):
                raise ValueError(f"{what}: expected shape {tuple(arrays[0].shape)}, got {tuple(x.shape)}")
    rows = tuple(outs[0].shape[:-1])
    if layout != "bhsd":  # heads are last in out, and follow the batch entries in lse
        first = 1 if layout == "bshd" else 0
        rows = (*rows[:first], rows[-1], *rows[first:-1])
    if rows != tuple(lses[0].shape):
        raise ValueError(f"lses: expected shape {rows} in layout {layout!r}, got {tuple(lses[0].shape)}")
    library = namespace_of(outs[0])
    assert library is not None, "checked above"
    return library.functions()


def _cast(x: Any, like: Any) -> Any:
    return x.astype(like.dtype) if hasattr(x, "astype") else x.to(like.dtype)
