"""The float64 oracle: the formula and nothing clever, forward and backward.

It executes a pattern's own index set, row by row, and never looks at a plan's tiles, so that it can judge them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ._util import limits as _limits
from .backends import Limits, PreparedBackward, PreparedForward
from .index_set import AffineRows
from .patterns import Pattern
from .planning import Plan
from .request.call import Call
from .schedule import compiler

__all__ = [
    "LIMITS",
    "accepts",
    "attend",
    "backward",
    "forward",
    "gradients",
    "info",
    "memory",
    "plan_for",
    "prepare",
    "prepare_backward",
    "unavailable",
]

LIMITS = Limits(host_arrays=True)

_ELEMENTS_AT_ONCE = 1 << 23  # gathered float64 elements of K and V held at a time (64 MiB)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pattern: Pattern | np.ndarray,
    scale: float | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention over a pattern's pairs, everything in one precision, float64 unless said otherwise.

    Parameters
    ----------
    q : (batch, heads_q, q_len, head_dim) array
    k : (batch, heads_kv, kv_len, head_dim) array
    v : (batch, heads_kv, kv_len, head_dim_v) array
    pattern : Pattern or bool array
        What is allowed. An array has shape (q_len, kv_len), (heads_q, q_len, kv_len) or
        (batch, heads_q, q_len, kv_len).
    scale : float, optional
        Factor of the logits, by default ``1 / sqrt(head_dim)``.
    dtype : dtype, optional
        Precision; ``np.longdouble`` judges float64 results.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) array of `dtype`
        ``out[i] = Σ_j exp(s[i, j] - lse[i]) v[j]`` over the allowed keys j, with ``s[i, j] = scale · q[i] · k[j]``.
        0 where no key is allowed or every allowed logit is -inf.
    lse : (batch, heads_q, q_len) array of `dtype`
        ``log Σ_j exp(s[i, j])``, natural logarithm; -inf where ``out`` is 0 for the reasons above.

    Notes
    -----
    O(nnz · (head_dim + head_dim_v)) time. Keys that are not allowed are never read.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    out = np.zeros((*q.shape[:3], v.shape[-1]), dtype)
    lse = np.full(q.shape[:3], -np.inf, dtype)
    for b, h, i, keys in _rows(pattern, q, k, v):
        kv = h // (q.shape[1] // k.shape[1])
        with np.errstate(invalid="ignore", over="ignore"):
            p, lse[b, h, i] = _softmax(_logits(q[b, h, i], _gather(k, b, kv, keys, dtype), scale))
            live = lse[b, h, i] != -np.inf
            out[b[live], h[live], i] = np.einsum("nm,nmd->nd", p[live], _gather(v, b[live], kv[live], keys, dtype))
    return out, lse


def gradients(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pattern: Pattern | np.ndarray,
    scale: float | None = None,
    dtype: npt.DTypeLike = np.float64,
    dlse: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of ``Σ dout · out + Σ dlse · lse`` with respect to q, k and v, everything in one precision.

    Parameters
    ----------
    dout : (batch, heads_q, q_len, head_dim_v) array
    q, k, v, pattern, scale, dtype
        As for :func:`attend`.
    dlse : (batch, heads_q, q_len) array, optional
        None is zero.

    Returns
    -------
    dq, dk, dv : arrays of `dtype`, shaped as q, k and v

    Notes
    -----
    With P the attention weights: ``dv = Pᵀ dout``, ``dP = dout vᵀ``, ``δ[i] = Σ_j P[i, j] dP[i, j] − dlse[i]``,
    ``dS = P ∘ (dP - δ)``, ``dq = scale · dS k``, ``dk = scale · dSᵀ q``. A row without a finite logit contributes
    nothing.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    dq, dk, dv = (np.zeros(a.shape, dtype) for a in (q, k, v))
    for b, h, i, keys in _rows(pattern, q, k, v):
        with np.errstate(invalid="ignore", over="ignore"):
            kk = _gather(k, b, h // (q.shape[1] // k.shape[1]), keys, dtype)
            p, lse = _softmax(_logits(q[b, h, i], kk, scale))
            live = lse != -np.inf
            b, h, p, kk = b[live], h[live], p[live], kk[live]
            kv = h // (q.shape[1] // k.shape[1])
            do, qi = dout[b, h, i].astype(dtype), q[b, h, i].astype(dtype)
            dp = np.einsum("nd,nmd->nm", do, _gather(v, b, kv, keys, dtype))
            delta = (p * dp).sum(axis=1)
            if dlse is not None:
                delta -= dlse[b, h, i]
            ds = p * (dp - delta[:, None]) * scale
            dq[b, h, i] = np.einsum("nm,nmd->nd", ds, kk)
            at = b[:, None], kv[:, None], keys
            np.add.at(dk, at, ds[:, :, None] * qi[:, None, :])
            np.add.at(dv, at, p[:, :, None] * do[:, None, :])
    return dq, dk, dv


def unavailable() -> str | None:
    """None: NumPy is all it needs.

    Returns
    -------
    None
    """
    return None


def memory(call: Call) -> int:
    """Bytes that this process may have."""
    return _limits.memory()


def info() -> dict[str, object]:
    """Facts for :func:`spattn.show_versions`.

    Returns
    -------
    dict
    """
    return {"precision": "float64"}


def plan_for(pattern: Pattern, call: Call, max_bytes: int | None = None, *, backward: bool = False) -> Plan:
    """A plan of the default tile shape; only its pattern matters here.

    Parameters
    ----------
    pattern : Pattern
        What is allowed.
    call : Call
        What it is for.
    max_bytes : int, optional
        As for :func:`spattn.plan`.
    backward : bool, optional
        Whether it is for the gradients, which makes no difference.

    Returns
    -------
    Plan
    """
    return compiler.plan_for(pattern, call, max_bytes=max_bytes)


def accepts(plan: Plan, call: Call, *, backward: bool = False) -> bool:
    """Whether :func:`prepare` takes a plan: any that knows its pattern.

    Parameters
    ----------
    plan : Plan
        Made by anybody.
    call : Call
        What it is for.
    backward : bool
        Whether it is for the gradients.

    Returns
    -------
    bool
    """
    return plan.pattern is not None


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, plan: Plan, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """:func:`attend` as backends compute it: ``out`` in q's dtype, ``lse`` float32 (float64 for float64).

    Parameters
    ----------
    q, k, v : arrays
        As for :func:`attend`.
    plan : Plan
        Only its pattern matters.
    scale : float
        Factor of the logits.

    Returns
    -------
    out, lse : arrays
    """
    out, lse = attend(q, k, v, _pattern_of(plan), scale)
    with np.errstate(over="ignore"):
        return out.astype(q.dtype), lse.astype(np.promote_types(q.dtype, np.float32))


def backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    plan: Plan,
    scale: float,
    dlse: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients as backends compute them, in the dtypes of q, k and v.

    `out` and `lse` are what every backend is given; the oracle computes both afresh, so that the rounding of a forward
    pass does not enter its gradients.

    Parameters
    ----------
    dout : array
        Gradient with respect to `out`.
    q, k, v : arrays
        As for :func:`attend`.
    out, lse : arrays
        Not read.
    plan : Plan
        Only its pattern matters.
    scale : float
        Factor of the logits.
    dlse : array, optional
        Gradient with respect to `lse`.

    Returns
    -------
    dq, dk, dv : arrays
    """
    with np.errstate(over="ignore"):
        dq, dk, dv = gradients(dout, q, k, v, _pattern_of(plan), scale, dlse=dlse)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def prepare(call: Call, plan: Plan) -> PreparedForward:
    """:func:`forward` of a plan.

    Parameters
    ----------
    call : Call
        Of NumPy arrays, or of arrays that are handed over as such.
    plan : Plan
        Only its pattern matters.

    Returns
    -------
    callable
        ``(q, k, v, scale)`` to ``(out, lse)``.

    Raises
    ------
    ValueError
        If the plan does not know its pattern.
    """
    _pattern_of(plan)
    return lambda q, k, v, scale: forward(q, k, v, plan, scale)


def prepare_backward(call: Call, plan: Plan) -> PreparedBackward:
    """:func:`backward` of a plan.

    Parameters
    ----------
    call, plan
        As for :func:`prepare`.

    Returns
    -------
    callable
        ``(dout, q, k, v, out, lse, dlse, scale)`` to ``(dq, dk, dv)``.

    Raises
    ------
    ValueError
        As :func:`prepare`.
    """
    _pattern_of(plan)
    return lambda dout, q, k, v, out, lse, dlse, scale: backward(dout, q, k, v, out, lse, plan, scale, dlse)


def _pattern_of(plan: Plan) -> Pattern:
    if plan.pattern is None:
        raise ValueError("plan: expected one that knows its pattern, got one without")
    return plan.pattern


def _rows(
    pattern: Pattern | np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, int, np.ndarray]]:
    """Yields (batch entries, query heads, row, allowed keys): heads of one index set together, no empty rows."""
    q_len, kv_len = q.shape[2], k.shape[2]
    together = max(1, _ELEMENTS_AT_ONCE // max(1, kv_len * (k.shape[-1] + v.shape[-1])))
    sets, index = _index_sets(pattern, q.shape[0], q.shape[1], q_len, kv_len)
    for number, index_set in enumerate(sets):
        batch, head = np.nonzero(np.broadcast_to(index, q.shape[:2]) == number)
        for first in range(0, len(batch), together):
            b, h = batch[first : first + together], head[first : first + together]
            for i in range(q_len):
                keys = index_set.row(i)
                if len(keys):
                    yield b, h, i, keys


def _index_sets(
    pattern: Pattern | np.ndarray, batch: int, heads: int, q_len: int, kv_len: int
) -> tuple[list[AffineRows], np.ndarray]:
    """The different index sets and which one each (batch entry, head) has."""
    if isinstance(pattern, np.ndarray):
        masks = pattern.reshape((1,) * (4 - pattern.ndim) + pattern.shape)
        index = np.arange(masks.shape[0] * masks.shape[1]).reshape(masks.shape[:2])
        return [AffineRows.from_dense(m) for m in masks.reshape(-1, q_len, kv_len)], index
    patterns, index = pattern.variants(batch, heads)
    return [p.index_set(q_len, kv_len) for p in patterns], index


def _gather(x: np.ndarray, b: np.ndarray, kv: np.ndarray, keys: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """Rows `keys` of the chosen batch entries and heads: (n, keys, d)."""
    return x[b[:, None], kv[:, None], keys].astype(dtype)


def _logits(qi: np.ndarray, kk: np.ndarray, scale: float) -> np.ndarray:
    return np.einsum("nd,nmd->nm", qi.astype(kk.dtype), kk) * scale


def _softmax(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P, lse) of rows of logits; P is 0 and lse -inf where every logit is -inf."""
    row_max = s.max(axis=1)
    shift = np.where(row_max == -np.inf, 0, row_max)
    p = np.exp(s - shift[:, None])
    row_sum = p.sum(axis=1)
    with np.errstate(divide="ignore"):
        return p / np.where(row_sum == 0, 1, row_sum)[:, None], np.log(row_sum) + shift
