"""Float64 reference implementation: the attention formula and its gradients, row by row.

It iterates over the pattern's index set and never reads a plan's tiles, so that it can check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ._util import limits as _limits
from .backends import Execution, Limits, PreparedBackward, PreparedForward
from .index_set import AffineRows
from .patterns import Pattern
from .planning import Plan
from .request.call import Call
from .request.score import ScoreOperands
from .schedule import compiler
from .score.evaluate import evaluate
from .score.graph import Graph

__all__ = [
    "LIMITS",
    "accepts",
    "attend",
    "backward",
    "execution",
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

_ELEMENTS_AT_ONCE = 1 << 23  # maximum number of float64 elements of K and V to gather at once (64 MiB)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pattern: Pattern | np.ndarray,
    scale: float | None = None,
    dtype: npt.DTypeLike = np.float64,
    score: ScoreOperands | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute softmax attention over a pattern's pairs in one precision.

    Parameters
    ----------
    q : (batch, heads_q, q_len, head_dim) array
    k : (batch, heads_kv, kv_len, head_dim) array
    v : (batch, heads_kv, kv_len, head_dim_v) array
    pattern : Pattern or bool array
        Allowed pairs. An array has shape (q_len, kv_len), (heads_q, q_len, kv_len) or
        (batch, heads_q, q_len, kv_len).
    scale : float, optional
        Scaling factor applied before the softmax, by default ``1 / sqrt(head_dim)``.
    dtype : dtype, optional
        Precision, by default float64; ``np.longdouble`` checks float64 results.
    score : ScoreOperands, optional
        Score function, sinks and dropout.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) array of `dtype`
        ``out[i] = Σ_j exp(s[i, j] - lse[i]) v[j]`` over the allowed keys j, with ``s[i, j] = scale · q[i] · k[j]``, or
        the function of it. Dropout multiplies the weights by 1 / (1 - p) or 0. It is 0 in rows without an allowed key,
        and in rows whose allowed scores are all -inf.
    lse : (batch, heads_q, q_len) array of `dtype`
        ``log (exp(sink) + Σ_j exp(s[i, j]))``, the natural logarithm; the sink, or -inf, in the rows just named.

    Notes
    -----
    The function takes O(nnz · (head_dim + head_dim_v)) time, and never reads masked keys.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    out = np.zeros((*q.shape[:3], v.shape[-1]), dtype)
    given = score or ScoreOperands(None)
    program, sinks = given.program, _sinks(given, q.shape[1], dtype)
    lse = np.broadcast_to(sinks[:, None], q.shape[:3]).copy()
    offset = k.shape[2] - q.shape[2]
    factors_of = _factors_of(given, q, k, dtype)
    for b, h, i, keys in _rows(pattern, q, k, v):
        kv = h // (q.shape[1] // k.shape[1])
        with np.errstate(invalid="ignore", over="ignore"):
            s = _logits(q[b, h, i], _gather(k, b, kv, keys, dtype), scale)
            values = _gather(v, b, kv, keys, dtype)
            if program is not None:
                (s,) = _evaluated(given, program.forward, s, b, h, i, keys, offset)
                values[s == -np.inf] = 0  # the function removes these pairs
            p, lse[b, h, i] = _softmax(s, sinks[h])
            live = lse[b, h, i] != -np.inf
            p *= factors_of(b, h, i, keys)
            out[b[live], h[live], i] = np.einsum("nm,nmd->nd", p[live], values[live])
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
    score: ScoreOperands | None = None,
) -> tuple[Any, ...]:
    """Compute the gradients of ``Σ dout · out + Σ dlse · lse`` with respect to q, k and v in one precision.

    Parameters
    ----------
    dout : (batch, heads_q, q_len, head_dim_v) array
    q, k, v, pattern, scale, dtype, score
        As for :func:`attend`.
    dlse : (batch, heads_q, q_len) array, optional
        None means zeros.

    Returns
    -------
    dq, dk, dv : arrays of `dtype`, shaped as q, k and v
    dtables : tuple, only with `score`
        Gradients of the captured arrays; None unless wanted.
    dsinks : (heads_q,) array or None, only with `score`

    Notes
    -----
    With P the attention weights: ``dv = Pᵀ dout``, ``dP = dout vᵀ``, ``δ[i] = Σ_j P[i, j] dP[i, j] − dlse[i]``,
    ``dS = P ∘ (dP - δ)``, ``dq = scale · dS k``, ``dk = scale · dSᵀ q``. A row without a finite score contributes
    nothing. Dropout multiplies P in dv, and dP, by 1 / (1 - p) or 0.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    dq, dk, dv = (np.zeros(a.shape, dtype) for a in (q, k, v))
    given = score or ScoreOperands(None)
    program, sinks = given.program, _sinks(given, q.shape[1], dtype)
    dtables = tuple(np.zeros(x.shape, dtype) if wanted else None for x, wanted in _wanted(given))
    lse = np.broadcast_to(sinks[:, None], q.shape[:3]).copy()
    delta = np.zeros(q.shape[:3], dtype) if dlse is None else -dlse.astype(dtype)
    offset = k.shape[2] - q.shape[2]
    factors_of = _factors_of(given, q, k, dtype)
    for b, h, i, keys in _rows(pattern, q, k, v):
        with np.errstate(invalid="ignore", over="ignore"):
            kk = _gather(k, b, h // (q.shape[1] // k.shape[1]), keys, dtype)
            s, derivatives = _logits(q[b, h, i], kk, scale), []
            if program is not None:
                s, *derivatives = _evaluated(given, program.graph, s, b, h, i, keys, offset)
            p, lse[b, h, i] = _softmax(s, sinks[h])
            live = lse[b, h, i] != -np.inf
            b, h, s, p, kk = b[live], h[live], s[live], p[live], kk[live]
            kv = h // (q.shape[1] // k.shape[1])
            do, qi = dout[b, h, i].astype(dtype), q[b, h, i].astype(dtype)
            factors = factors_of(b, h, i, keys)
            dp = np.einsum("nd,nmd->nm", do, _gather(v, b, kv, keys, dtype)) * factors
            if program is not None:
                removed = s == -np.inf
                dp[removed], kk[removed] = 0, 0
            delta[b, h, i] += (p * dp).sum(axis=1)
            ds = p * (dp - delta[b, h, i][:, None])
            if program is not None:
                slope, *uses = (np.where(p == 0, 0, x[live]) for x in derivatives)
                _add_captured(dtables, given, [ds * x for x in uses], b, h, i, keys, offset)
                ds = ds * slope
            ds = ds * scale
            dq[b, h, i] = np.einsum("nm,nmd->nd", ds, kk)
            at = b[:, None], kv[:, None], keys
            np.add.at(dk, at, ds[:, :, None] * qi[:, None, :])
            np.add.at(dv, at, (p * factors)[:, :, None] * do[:, None, :])
    if score is None:
        return dq, dk, dv
    with np.errstate(invalid="ignore"):
        of_sinks = np.where(sinks[:, None] == -np.inf, 0, np.exp(sinks[:, None] - lse) * delta)
    return dq, dk, dv, dtables, None if given.sinks is None else -of_sinks.sum(axis=(0, 2))


def unavailable() -> str | None:
    """Return None: NumPy is the only requirement."""
    return None


def memory(call: Call) -> int:
    """Return the memory limit of this process in bytes."""
    return _limits.memory()


def info() -> dict[str, object]:
    """Return facts for :func:`spattn.show_versions`."""
    return {"precision": "float64"}


def plan_for(pattern: Pattern, call: Call, max_bytes: int | None = None, *, backward: bool = False) -> Plan:
    """Plan `pattern` with the default tile shape; :func:`forward` uses only the plan's pattern."""
    return compiler.plan_for(pattern, call, max_bytes=max_bytes)


def execution(call: Call, plan: Plan) -> Execution:
    """Implement :meth:`.backends.Backend.execution`."""
    return Execution("NumPy, row by row", "float64", 1, "thread: the reference is not parallel")


def accepts(plan: Plan, call: Call, *, backward: bool = False) -> bool:
    """Return whether the plan has a pattern."""
    return plan.pattern is not None


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, plan: Plan, scale: float, score: ScoreOperands | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Run :func:`attend` with the dtypes of a backend: ``out`` as q, ``lse`` float32 (float64 for float64)."""
    out, lse = attend(q, k, v, _pattern_of(plan), scale, score=score)
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
    score: ScoreOperands | None = None,
) -> tuple[Any, ...]:
    """Run :func:`gradients` with the dtypes of a backend: those of q, k and v.

    The function ignores `out` and `lse`, so that the rounding of a forward pass does not enter the gradients.
    """
    with np.errstate(over="ignore"):
        dq, dk, dv, *others = gradients(dout, q, k, v, _pattern_of(plan), scale, dlse=dlse, score=score)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), *others


def prepare(call: Call, plan: Plan) -> PreparedForward:
    """Implement :meth:`.backends.Backend.prepare` for plans that have a pattern."""
    _pattern_of(plan)
    return lambda q, k, v, scale, score=None: forward(q, k, v, plan, scale, score)


def prepare_backward(call: Call, plan: Plan) -> PreparedBackward:
    """Implement :meth:`.backends.Backend.prepare_backward` for plans that have a pattern."""
    _pattern_of(plan)

    def run(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, scale: float, score: Any = None
    ) -> tuple[Any, ...]:
        return backward(dout, q, k, v, out, lse, plan, scale, dlse, score)

    return run


def _pattern_of(plan: Plan) -> Pattern:
    if plan.pattern is None:
        raise ValueError("plan: the reference backend needs plan.pattern, got None")
    return plan.pattern


def _rows(
    pattern: Pattern | np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, int, np.ndarray]]:
    """Yield (batch entries, query heads, row, allowed keys) of non-empty rows; joins heads with equal index sets."""
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
    """Return the distinct index sets, and for each (batch entry, head) the index of its own."""
    if isinstance(pattern, np.ndarray):
        masks = pattern.reshape((1,) * (4 - pattern.ndim) + pattern.shape)
        index = np.arange(masks.shape[0] * masks.shape[1]).reshape(masks.shape[:2])
        return [AffineRows.from_dense(m) for m in masks.reshape(-1, q_len, kv_len)], index
    patterns, index = pattern.variants(batch, heads)
    return [p.index_set(q_len, kv_len) for p in patterns], index


def _gather(x: np.ndarray, b: np.ndarray, kv: np.ndarray, keys: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """Gather the rows `keys` of the given batch entries and heads: (n, keys, d)."""
    return x[b[:, None], kv[:, None], keys].astype(dtype)


def _logits(qi: np.ndarray, kk: np.ndarray, scale: float) -> np.ndarray:
    return np.einsum("nd,nmd->nm", qi.astype(kk.dtype), kk) * scale


def _softmax(s: np.ndarray, sink: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (P, lse) of rows of scores with a sink; P is 0 and lse -inf where every score and the sink are -inf."""
    row_max = np.maximum(s.max(axis=1), sink)
    shift = np.where(row_max == -np.inf, 0, row_max)
    p = np.exp(s - shift[:, None])
    row_sum = p.sum(axis=1) + np.exp(sink - shift)
    with np.errstate(divide="ignore"):
        return p / np.where(row_sum == 0, 1, row_sum)[:, None], np.log(row_sum) + shift


def _sinks(score: ScoreOperands, heads: int, dtype: npt.DTypeLike) -> np.ndarray:
    """Return one sink for each query head; -inf without sinks."""
    return np.full(heads, -np.inf, dtype) if score.sinks is None else np.asarray(score.sinks, dtype)


def _factors_of(
    score: ScoreOperands, q: np.ndarray, k: np.ndarray, dtype: npt.DTypeLike
) -> Callable[[np.ndarray, np.ndarray, int, np.ndarray], Any]:
    """Return a function of (batch entries, heads, row, keys): the factors by which dropout multiplies the weights."""
    dropout = score.dropout
    if dropout is None:
        return lambda b, h, i, keys: 1
    batch, heads, q_len = q.shape[:3]
    words = dropout.words(batch, heads, q_len, k.shape[2])
    factor = np.asarray(2**32, dtype) / (2**32 - dropout.threshold)
    return lambda b, h, i, keys: factor * words.kept(b[:, None], h[:, None], i, keys)


def _wanted(score: ScoreOperands) -> Iterator[tuple[np.ndarray, bool]]:
    return zip(score.tables, score.wanted or (False,) * len(score.tables), strict=True)


def _inputs(b: np.ndarray, h: np.ndarray, i: int, keys: np.ndarray, offset: int) -> dict[str, Any]:
    """Return the inputs of a score function for row `i` of some batch entries and heads, except for the score."""
    return {"b": b[:, None], "h": h[:, None], "q": i + offset, "k": keys[None], "offset": offset}


def _evaluated(
    score: ScoreOperands,
    graph: Graph,
    s: np.ndarray,
    b: np.ndarray,
    h: np.ndarray,
    i: int,
    keys: np.ndarray,
    offset: int,
) -> list[np.ndarray]:
    """Return the results of a graph, each with the shape of the scores `s`."""
    found = evaluate(graph, {"score": s, **_inputs(b, h, i, keys, offset)}, score.parameters, score.tables, s.dtype)
    return [np.broadcast_to(x, s.shape).copy() for x in found]


def _add_captured(
    dtables: tuple[np.ndarray | None, ...],
    score: ScoreOperands,
    of_uses: list[np.ndarray],
    b: np.ndarray,
    h: np.ndarray,
    i: int,
    keys: np.ndarray,
    offset: int,
) -> None:
    """Add the gradients of each use of a captured array, (n, keys), to the gradient of the array."""
    program = score.program
    assert program is not None
    for use, gradient in zip(program.captured, of_uses, strict=True):
        table = dtables[use.number] if use.name == "look_up" else None
        if table is None:
            continue
        graph = Graph(program.graph.operations, use.indices)
        inputs = {"score": np.zeros_like(gradient), **_inputs(b, h, i, keys, offset)}
        at = evaluate(graph.only(use.indices), inputs, score.parameters, score.tables)
        indices = tuple(np.broadcast_to(x, gradient.shape) for x in at)
        inside = np.ones(gradient.shape, bool)
        for index, size in zip(indices, table.shape, strict=True):
            inside &= (-size <= index) & (index < size)
        first = np.zeros(np.count_nonzero(inside), int)  # for tables without axes, which NumPy cannot index by arrays
        np.add.at(table[None], (first, *(x[inside] for x in indices)), gradient[inside])
