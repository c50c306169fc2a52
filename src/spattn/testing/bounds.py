"""How large an error may be: computed from what the naive formula loses, never tuned by hand."""

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

_PRODUCTS = 1 << 21  # in Q Kᵀ, of all evaluations together: with fewer their largest error is a matter of luck


def dense_mask(pattern: Pattern | Plan, batch: int, heads: int, q_len: int, kv_len: int) -> np.ndarray:
    """The pattern's predicate as booleans (batch, heads, q_len, kv_len), evaluated cell by cell.

    Parameters
    ----------
    pattern : Pattern or Plan
        A plan stands for its pattern.
    batch, heads : int
        Batch entries and query heads.
    q_len, kv_len : int
        Lengths in tokens.

    Returns
    -------
    (batch, heads, q_len, kv_len) bool array

    Raises
    ------
    ValueError
        If a plan does not know its pattern.
    """
    named = pattern.pattern if isinstance(pattern, Plan) else pattern
    if named is None:
        raise ValueError("pattern: expected a plan that knows its pattern, got one without")
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
    """Attention as one would write it in a low precision: every step's result is rounded to `dtype`.

    Parameters
    ----------
    q, k, v : arrays as for :func:`spattn.attention`
    mask : bool array that broadcasts to (batch, heads_q, q_len, kv_len)
    scale : float, optional
    dtype : dtype, optional
        Precision of the steps, by default q's.
    order : int, optional
        0 is the formula as it stands. Any other number is the same formula in another order of evaluation: keys and
        features permuted, the scale on the queries instead of the logits, powers of 2 instead of e, sums one after
        another instead of by halves.

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
    """In how many orders a problem is to be evaluated: 2 to 32, the more the fewer products of it show an error.

    Parameters
    ----------
    q, k, mask
        As for :func:`naive`.

    Returns
    -------
    int
    """
    # Rounding errors d and e of two scores whose weights are p and 1 - p move a row by scale · p (1 - p) (d - e) times
    # the distance of their values. So products of pairs that are not allowed show no error, and those of a row with one
    # key show none in `out`: its weight is 1 in every order. Of other rows those near a tie show most, and all features
    # of one show the same draw of d and e: where rows are few it takes many orders to see what is natural to lose.
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
    """:func:`naive` in several orders of evaluation: a list of ``out`` and a list of ``lse`` for :func:`error_bound`.

    One evaluation of a small problem may be exact by luck; what is natural to lose is the most that any order loses.

    Parameters
    ----------
    q, k, v, mask, scale, dtype
        As for :func:`naive`.

    Returns
    -------
    outs, lses : lists of arrays
        One for each order.
    """
    # Every fifth: the first 8 are all that order % 8 can say.
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
    """Gradients as one would write them in a low precision, every step rounded to `dtype`.

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
        Shaped as q, k and v.
    """
    p, _, wide, dtype = _weights(q, k, mask, scale, dtype, 0)
    scale = _scale(scale, q)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    p, do, kk, vv = p.astype(wide), dout.astype(wide), _per_query_head(k, q, wide), _per_query_head(v, q, wide)
    dp = (do @ _swap(vv)).astype(dtype).astype(wide)
    delta = (p * dp).sum(axis=-1, keepdims=True)
    if dlse is not None:
        delta -= dlse[..., None]
    delta = delta.astype(dtype).astype(wide)
    ds = (p * (dp - delta) * wide.type(scale)).astype(dtype).astype(wide)

    def over_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(*k.shape[:2], group, *x.shape[2:]).sum(axis=2).astype(dtype)

    return (ds @ kk).astype(dtype), over_group(_swap(ds) @ q.astype(wide)), over_group(_swap(p) @ do)


def _weights(
    q: np.ndarray, k: np.ndarray, mask: np.ndarray, scale: float | None, dtype: npt.DTypeLike | None, order: int
) -> tuple[np.ndarray, np.ndarray, np.dtype, np.dtype]:
    """(P, lse, accumulator dtype, dtype): a product accumulates in float32 at least and rounds once."""
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
    """The matrix product ``a @ b``, summed one after another as a register accumulates where `order` says so."""
    if not order & 4:
        return a @ b
    b = np.ascontiguousarray(b)
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    term = np.empty_like(total)  # memory that is asked for anew costs more than the arithmetic
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
    """``2 · max|naive_lowprec - reference64| + eps(dtype) · max|reference64|`` over the finite reference values.

    Parameters
    ----------
    reference64 : array
        From :func:`spattn.reference.attend` or :func:`~spattn.reference.gradients`, more precise than `dtype`.
    naive_lowprec : array or list of arrays
        From :func:`naive` or :func:`naive_gradients`; the worst of a list counts.
    dtype : dtype
        Of the inputs under test.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If a naive result is not finite where the reference is: it says nothing about errors then.
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
    """AssertionError unless `actual` is within :func:`error_bound` and has the reference's NaN and infinities.

    Parameters
    ----------
    actual, reference64 : arrays of one shape
    naive_lowprec : array or list of arrays
    dtype : dtype, optional
        Of the inputs, by default `actual`'s.
    what : str
        Name for the message.
    """
    actual = np.asarray(actual)
    dtype = actual.dtype if dtype is None else dtype
    assert actual.shape == reference64.shape, f"{what}: expected shape {reference64.shape}, got {actual.shape}"
    wide, finite = actual.astype(reference64.dtype), np.isfinite(reference64)
    same = np.where(finite, np.isfinite(wide), (wide == reference64) | (np.isnan(wide) & np.isnan(reference64)))
    assert same.all(), f"{what}: {_first(~same, wide, reference64)}"
    budget = error_bound(reference64, naive_lowprec, dtype)
    error = np.abs(np.where(finite, wide, 0) - np.where(finite, reference64, 0))
    assert error.max(initial=0) <= budget, (
        f"{what}: error {error.max():.3g} exceeds the budget {budget:.3g}; "
        f"{_first(error == error.max(), wide, reference64)}"
    )


def _first(wrong: np.ndarray, actual: np.ndarray, reference: np.ndarray) -> str:
    where = tuple(int(n) for n in np.argwhere(wrong)[0])
    return f"at {where}: expected {reference[where]!r}, got {actual[where]!r} ({int(wrong.sum())} such of {wrong.size})"
