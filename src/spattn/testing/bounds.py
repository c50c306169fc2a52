"""Error bounds, computed from the rounding errors of the naive formula instead of tuned by hand."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..patterns import Pattern
from ..planning.contract.types import Plan
from .arrays import eps

__all__ = [
    "assert_within_bound",
    "count_orders",
    "dense_mask",
    "error_bound",
    "naive",
    "naive_gradients",
    "naive_orders",
]

_PRODUCTS = 1 << 21  # minimum products of Q Kᵀ over all orders; with fewer, the maximum error varies too much


def dense_mask(pattern: Pattern | Plan, batch: int, heads: int, q_len: int, kv_len: int) -> np.ndarray:
    """Evaluate the pattern's predicate for every pair.

    Parameters
    ----------
    pattern : Pattern or Plan
        A pattern, or a plan with a pattern.
    batch, heads : int
        Batch size and query heads.
    q_len, kv_len : int
        Lengths in tokens.

    Returns
    -------
    (batch, heads, q_len, kv_len) bool array

    Raises
    ------
    ValueError
        If a plan has no pattern.
    """
    named = pattern.pattern if isinstance(pattern, Plan) else pattern
    if named is None:
        raise ValueError("pattern: expected a plan with a pattern, got a plan without")
    q, k = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)[None, :]
    patterns, index = named.variants(batch, heads)
    masks = np.zeros((max(len(patterns), 1), q_len, kv_len), dtype=bool)
    for mask, own in zip(masks, patterns, strict=False):
        mask[...] = own.bind(q_len, kv_len).allows(q, k)
    return masks[np.broadcast_to(index, (batch, heads))]


def naive(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    scale: float | None = None,
    dtype: npt.DTypeLike | None = None,
    *,
    order: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention by the textbook formula, with the result of every step rounded to `dtype`.

    Parameters
    ----------
    q, k, v : arrays as for :func:`spattn.attention`
    mask : bool array that broadcasts to (batch, heads_q, q_len, kv_len)
    scale : float, optional
    dtype : dtype, optional
        Precision of the steps, by default that of q.
    order : int, optional
        Order of evaluation. 0 is the formula as written. Other values permute keys and features, scale q instead of the
        scores, use powers of 2 instead of e, or sum sequentially instead of pairwise.

    Returns
    -------
    out, lse
        ``out`` in `dtype`, ``lse`` float32 (float64 when `dtype` is float64).
    """
    if order:
        rng = np.random.default_rng(order)
        features, keys = rng.permutation(q.shape[3]), rng.permutation(k.shape[2])
        q, k, v = q[..., features], k[:, :, keys][..., features], v[:, :, keys]
        mask = np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))[..., keys]
    p, lse, wide, narrow = _weights(q, k, mask, scale, dtype, order)
    return _product(p.astype(wide), _per_query_head(v, q, wide), order).astype(narrow), lse


def count_orders(q: np.ndarray, k: np.ndarray, mask: np.ndarray) -> int:
    """Return the number of evaluation orders for a problem, 2 to 32; more if fewer products contribute to the error.

    Parameters
    ----------
    q, k, mask
        As for :func:`naive`.

    Returns
    -------
    int
    """
    # Rounding errors d and e of two products q·k with softmax weights p and 1 - p change a row by
    # scale · p (1 - p) (d - e) times the difference of their values. Masked pairs contribute no error, and neither does
    # a row with one key, whose weight is always 1. Rows near a tie contribute most, and all features of a row share the
    # same d and e, so problems with few rows need many orders to sample the typical error.
    keys = np.broadcast_to(mask, (*q.shape[:3], k.shape[2])).sum(axis=3)
    return min(max(_PRODUCTS // max(1, q.shape[3] * int(keys[keys > 1].sum())), 2), 32)


def naive_orders(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    scale: float | None = None,
    dtype: npt.DTypeLike | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Evaluate :func:`naive` in several orders, for :func:`error_bound`.

    A single evaluation of a small problem may be exact by chance; the bound uses the maximum error over all orders.

    Parameters
    ----------
    q, k, v, mask, scale, dtype
        As for :func:`naive`.

    Returns
    -------
    outs, lses : lists of arrays
        One per order.
    """
    # The low three bits of `order` select the variants; steps of 5 cover all 8 combinations in the first 8 orders.
    orders = range(0, 5 * count_orders(q, k, mask), 5)
    both = [naive(q, k, v, mask, scale, dtype, order=order) for order in orders]
    return [out for out, _ in both], [lse for _, lse in both]


def naive_gradients(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    scale: float | None = None,
    dtype: npt.DTypeLike | None = None,
    dlse: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute gradients by the textbook formula, with the result of every step rounded to `dtype`.

    Parameters
    ----------
    dout : (batch, heads_q, q_len, head_dim_v) array
        Gradient with respect to the output.
    q, k, v, mask, scale, dtype
        As for :func:`naive`.
    dlse : (batch, heads_q, q_len) array, optional
        Gradient with respect to `lse`.

    Returns
    -------
    dq, dk, dv : arrays of `dtype`
        Of the shapes of q, k and v.
    """
    p, _, wide, dtype = _weights(q, k, mask, scale, dtype, 0)
    return gradients_of_weights(p.astype(wide), dout, q, k, v, _scale(scale, q), dtype, dlse)


def gradients_of_weights(
    p: np.ndarray,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    dtype: np.dtype,
    dlse: np.ndarray | None,
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute gradients from the weights P, with every step rounded; `out`, if given, yields the row sums of P∘dP."""
    wide, group = p.dtype, q.shape[1] // k.shape[1] if k.shape[1] else 1

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(wide)

    def over_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(*k.shape[:2], group, *x.shape[2:]).sum(axis=2).astype(dtype)

    do = dout.astype(wide)
    dp = rounded(do @ _swap(_per_query_head(v, q, wide)))
    delta = (p * dp if out is None else do * out.astype(wide)).sum(axis=-1, keepdims=True)
    delta = rounded(delta if dlse is None else delta - dlse[..., None])
    ds = rounded(p * (dp - delta) * wide.type(scale))
    dq = (ds @ _per_query_head(k, q, wide)).astype(dtype)
    return dq, over_group(_swap(ds) @ q.astype(wide)), over_group(_swap(p) @ do)


def _weights(
    q: np.ndarray, k: np.ndarray, mask: np.ndarray, scale: float | None, dtype: npt.DTypeLike | None, order: int
) -> tuple[np.ndarray, np.ndarray, np.dtype, np.dtype]:
    """Return (P, lse, accumulator dtype, dtype); products accumulate in at least float32 and round once."""
    dtype = q.dtype if dtype is None else np.dtype(dtype)
    wide = np.promote_types(dtype, np.float32)
    log_base = wide.type(math.log(2) if order & 1 else 1)
    factor = wide.type(_scale(scale, q) / float(log_base))

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(wide)

    early, late = (factor, wide.type(1)) if order & 2 else (wide.type(1), factor)
    s = rounded(_product(rounded(q.astype(wide) * early), _swap(_per_query_head(k, q, wide)), order))
    s = rounded(s * late)
    s = np.where(mask, s, -np.inf).astype(wide)
    shift = s.max(axis=-1, keepdims=True, initial=-np.inf)
    shift = np.where(shift == -np.inf, 0, shift).astype(wide)
    p = np.exp2(s - shift) if order & 1 else np.exp(s - shift)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log2(total) + shift) * log_base if order & 1 else np.log(total) + shift
    return (p / np.where(total == 0, 1, total)).astype(dtype), lse[..., 0], wide, dtype


def _product(a: np.ndarray, b: np.ndarray, order: int) -> np.ndarray:
    """Compute ``a @ b``; if ``order & 4``, sum sequentially, like an accumulator register."""
    if not order & 4:
        return a @ b
    b = np.ascontiguousarray(b)
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    term = np.empty_like(total)  # repeated allocation would cost more than the arithmetic
    for n in range(a.shape[-1]):
        total += np.multiply(a[..., n, None], b[..., n, None, :], out=term)
    return total


def _scale(scale: float | None, q: np.ndarray) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _per_query_head(x: np.ndarray, q: np.ndarray, wide: np.dtype) -> np.ndarray:
    return np.repeat(x.astype(wide), q.shape[1] // x.shape[1], axis=1)


def _swap(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def error_bound(reference64: np.ndarray, naive_lowprec: np.ndarray | list[np.ndarray], dtype: npt.DTypeLike) -> float:
    """Return ``2 · max|naive_lowprec - reference64| + eps(dtype) · max|reference64|`` over finite reference values.

    Parameters
    ----------
    reference64 : array
        Result of :func:`spattn.reference.attend` or :func:`~spattn.reference.gradients`, more precise than `dtype`.
    naive_lowprec : array or list of arrays
        Results of :func:`naive` or :func:`naive_gradients`; of a list, the maximum error is used.
    dtype : dtype
        Dtype of the inputs under test.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If a naive result is not finite where the reference is, so that its error is undefined.
    """
    finite = np.isfinite(reference64)
    ref, loss = reference64[finite], 0.0
    for low in naive_lowprec if isinstance(naive_lowprec, list) else [naive_lowprec]:
        low = np.asarray(low).astype(ref.dtype)[finite]
        if not np.isfinite(low).all():
            raise ValueError("naive_lowprec: expected finite values where the reference is finite; use a wider dtype")
        loss = max(loss, np.abs(low - ref).max(initial=0))
    return float(2 * loss + eps(dtype) * np.abs(ref).max(initial=0))


def assert_within_bound(
    actual: np.ndarray,
    reference64: np.ndarray,
    naive_lowprec: np.ndarray | list[np.ndarray],
    dtype: npt.DTypeLike | None = None,
    what: str = "out",
) -> None:
    """Assert that `actual` is within :func:`error_bound` and has the reference's NaN and infinities.

    Parameters
    ----------
    actual, reference64 : arrays of equal shape
    naive_lowprec : array or list of arrays
    dtype : dtype, optional
        Dtype of the inputs, by default that of `actual`.
    what : str
        Name of the array in messages.
    """
    actual = np.asarray(actual)
    dtype = actual.dtype if dtype is None else dtype
    assert actual.shape == reference64.shape, f"{what}: expected shape {reference64.shape}, got {actual.shape}"
    wide, finite = actual.astype(reference64.dtype), np.isfinite(reference64)
    same = np.where(finite, np.isfinite(wide), (wide == reference64) | (np.isnan(wide) & np.isnan(reference64)))
    assert same.all(), f"{what}: {_first(~same, wide, reference64)}"
    limit = error_bound(reference64, naive_lowprec, dtype)
    error = np.abs(np.where(finite, wide, 0) - np.where(finite, reference64, 0))
    assert error.max(initial=0) <= limit, (
        f"{what}: error {error.max():.3g} exceeds the bound {limit:.3g}; "
        f"{_first(error == error.max(), wide, reference64)}"
    )


def _first(wrong: np.ndarray, actual: np.ndarray, reference: np.ndarray) -> str:
    where = tuple(int(n) for n in np.argwhere(wrong)[0])
    return f"at {where}: expected {reference[where]!r}, got {actual[where]!r} ({int(wrong.sum())} of {wrong.size})"
