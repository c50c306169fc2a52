"""Run the cached dispatch of a call, or validate, plan and prepare the call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from .._util.cached import BoundedCache
from .._util.imports import whole_imports
from .._util.index_checks import LONGEST
from .._util.meanwhile import meanwhile
from ..arrays import NUMPY, ArrayNamespace, autocast, namespace_of, of_any_length, recorder, traced
from ..arrays import cache_key as cache_key_of
from ..backends import Backend, CompilingBackend, DynamicMaskBackend, PredictingBackend, RowsBackend
from ..patterns import Pattern
from ..patterns.base.pattern import Deferred
from ..patterns.conversion import as_pattern, from_text, key_padding_of
from ..planning import Plan
from ..planning.contract.cache import find_call, find_rows, keep_call, keep_rows
from ..planning.contract.validated import validated
from ..request.call import Call, check_gradients, check_options, check_results, check_scale, default_scale
from ._efficiency import may_lose, warn_where_dense_wins
from .plans import backend_for, check_grid, check_memory, find_plan, name_for, resolve

if TYPE_CHECKING:
    from ..patterns.dynamic import MaskedPattern
    from .scores import Given

__all__ = ["CONSTANT", "attention", "attention_backward"]

_MAX_PATTERNS = 8  # patterns of few queries that a cached dispatch remembers, of any size
CONSTANT = (Pattern, Plan)  # what calls are cached with; a dynamic mask is neither


def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: Any = "full",
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    precision: str | None = None,
    layout: str = "bhsd",
    gradients: Callable[..., Any] | None = None,
    score: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    key_padding: Any = None,
) -> Any:
    """Implement :func:`spattn.attention` on concrete arrays; return NotImplemented for traced PyTorch tensors.

    `gradients` is the backward function for autograd, by default :func:`attention_backward`.
    """
    check_options(backend, return_lse, precision, layout)
    if isinstance(pattern, str) and key_padding is None:
        pattern = from_text(pattern)
    elif key_padding is not None or not isinstance(pattern, CONSTANT):
        if _selected(pattern) is not None:
            pattern = pattern if key_padding is None else pattern & key_padding_of(key_padding)
        elif traced(q, k, v):
            return NotImplemented
        else:
            pattern = _resolved(pattern, q, k, v, layout, key_padding)
    key: tuple[Any, ...] = (cache_key_of(q, k, v), backend, precision, return_lse, layout)
    plain = score is None and sinks is None and dropout_p == 0.0
    given = None if plain else _read(score, sinks, dropout_p, seed, q, k, v, backend, layout)
    if given is not None:
        key = *key, given.key
    prepared = None
    if isinstance(pattern, CONSTANT):
        prepared = find_call(pattern, key) or _find_step(pattern, key)
    if prepared is None:
        options: dict[str, Any] = {"scale": scale, "backend": backend, "precision": precision, "layout": layout}
        cast = autocast(q, k, v)
        made = as_pattern(pattern) if isinstance(pattern, Deferred) else pattern  # before a graph break
        if cast is not None or made is not pattern:
            q, k, v = cast or (q, k, v)
            options |= {"score": score, "sinks": sinks, "dropout_p": dropout_p, "seed": seed}
            return attention(q, k, v, made, return_lse=return_lse, gradients=gradients, **options)
        chosen = _selected(pattern)
        if chosen is not None:
            found = _attend_masked(q, k, v, chosen, return_lse, gradients or attention_backward, given, **options)
            return found if return_lse else found[0]
        if traced(q, k, v):
            return NotImplemented
        record = recorder(q, k, v, *_captured(given))
        wants_lse = return_lse or record is not None
        call = Call.of(q, k, v, scale=scale, precision=precision, return_lse=wants_lse, layout=layout)
        call = _with_score(call, given)
        work = None
        if record is None:
            check_gradients("attention", call.kind, q=q, k=k, v=v)
        else:
            del options["scale"]
            backward = gradients or attention_backward if given is None else backward_with_score
            record = functools.partial(record, functools.partial(backward, pattern=pattern, **options))
            work = functools.partial(_compile_backward, _with_wanted(call, given), pattern, backend)
        with meanwhile(work):
            prepared = _prepare(call, pattern, backend, key, record=record)
            found = prepared.run(q, k, v, call.scale, *_more(given))
        return found if return_lse else found[0]
    scale = prepared.scale if scale is None else check_scale(scale, prepared.dtype)
    found = prepared.run(q, k, v, scale) if given is None else prepared.run(q, k, v, scale, *_more(given))
    return found if return_lse else found[0]


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    pattern: Pattern | Plan | str | Any = "full",
    *,
    dlse: Any = None,
    scale: float | None = None,
    backend: str = "auto",
    precision: str | None = None,
    layout: str = "bhsd",
    score: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    key_padding: Any = None,
) -> Any:
    """Implement :func:`spattn.attention_backward`; return NotImplemented for traced PyTorch tensors."""
    check_options(backend, precision=precision, layout=layout)
    if key_padding is not None or not isinstance(pattern, CONSTANT) or isinstance(pattern, Deferred):
        if traced(q, k, v):
            return NotImplemented
        pattern = _resolved(pattern, q, k, v, layout, key_padding)
    arrays = dout, q, k, v, out, lse, pattern
    options: dict[str, Any] = {
        "dlse": dlse,
        "scale": scale,
        "backend": backend,
        "precision": precision,
        "layout": layout,
    }
    if score is None and sinks is None and dropout_p == 0.0:
        return _backward(*arrays, given=None, **options)
    given = _read(score, sinks, dropout_p, seed, q, k, v, backend, layout, backward=True)
    found = _backward(*arrays, given=given, **options)
    if found is NotImplemented:
        return found
    dtables: tuple[Any, ...] = ()
    if given is not None:
        *found, of_tables, dsinks = found
        dtables = tuple(x for x in of_tables if x is not None)
    return *found, *(() if score is None else (dtables,)), *(() if sinks is None else (dsinks,))


def backward_with_score(*arrays: Any, given: Given, wanted: tuple[bool, ...], **options: Any) -> tuple[Any, ...]:
    """Compute the gradients of a recorded call; return (dq, dk, dv, dtables, dsinks)."""
    given = given._replace(operands=given.operands._replace(wanted=wanted))
    found: tuple[Any, ...] = _backward(*arrays, given=given, **options)
    return found


def _backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    pattern: Any,
    *,
    dlse: Any = None,
    scale: float | None,
    backend: str,
    precision: str | None,
    layout: str,
    given: Given | None,
) -> Any:
    arrays = (dout, q, k, v, out, lse) if dlse is None else (dout, q, k, v, out, lse, dlse)
    key: tuple[Any, ...] = (cache_key_of(*arrays), backend, precision, layout)
    if given is not None:
        key = *key, given.key
    prepared = find_call(pattern, key)
    if prepared is None:
        if traced(q, k, v):
            return NotImplemented
        call = Call.of(q, k, v, scale=scale, precision=precision, layout=layout)
        check_results(call, dout, out, lse, dlse)
        call = _with_score(call, given)
        named = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        check_gradients("attention_backward", call.kind, **named, **({} if dlse is None else {"dlse": dlse}))
        prepared, scale = _prepare(call, pattern, backend, key, backward=True), call.scale
    else:
        scale = prepared.scale if scale is None else check_scale(scale, prepared.dtype)
    if given is None:
        return prepared.run(dout, q, k, v, out, lse, dlse, scale)
    found = prepared.run(dout, q, k, v, out, lse, dlse, scale, given.operands)
    return _scores().gradients_of(given, found)


def _resolved(pattern: Any, q: Any, k: Any, v: Any, layout: str, key_padding: Any) -> Pattern | Plan:
    """Convert a pattern and key padding for concrete arrays."""
    return resolve(pattern, Call.of(*(autocast(q, k, v) or (q, k, v)), layout=layout).sizes, key_padding)


def _read(score: Any, sinks: Any, dropout_p: float, seed: Any, q: Any, *others: Any, **options: Any) -> Given | None:
    if traced(q):
        return None
    scores = _scores()
    dropout = None if dropout_p == 0.0 else scores.dropout_of(dropout_p, seed, q)
    found: Given | None = scores.read(score, sinks, dropout, q, *others, **options)
    return found


@functools.cache
def _scores() -> Any:
    """Import the module that traces score functions when the first one is used."""
    with whole_imports:
        from . import scores
    return scores


def _captured(given: Given | None) -> tuple[Any, ...]:
    return () if given is None else given.captured


def _more(given: Given | None) -> tuple[Any, ...]:
    """Return the arguments of a cached dispatch after the scale."""
    if given is None:
        return ()
    return (given, *given.captured) if given.recorded else (given.operands,)


def _with_score(call: Call, given: Given | None) -> Call:
    if given is None:
        return call
    given.check(call)
    # A cached dispatch must not keep arrays or process groups alive.
    return replace(call, score=given.operands._replace(tables=(), portion=None))


class CachedCall(NamedTuple):
    """The cached dispatch of a call; if length-polymorphic, it supports kv_len >= `least`."""

    run: Callable[..., Any]
    scale: float
    dtype: str
    least: int = 0


def _find_step(pattern: Any, key: tuple[Any, ...]) -> CachedCall | None:
    """Return the cached dispatch of a call that differs only in kv_len, or that of few queries of any pattern."""
    found = None if key[0] is None else of_any_length(key[0])
    if found is None:
        return None
    cache_key, kv_len = (found[0], *key[1:]), found[1]
    prepared: CachedCall | None = find_call(pattern, cache_key)
    if prepared is not None:
        return prepared if prepared.least <= kv_len <= LONGEST else None
    rows: Callable[[Pattern, int], CachedCall | None] | None = find_rows(cache_key)
    return None if rows is None or not isinstance(pattern, Pattern) else rows(pattern, kv_len)


def _prepare_rows(call: Call, pattern: Any, module: Backend, key: tuple[Any, ...]) -> CachedCall | None:
    """Prepare a call of few queries for all patterns; return None if it is not planned by rows."""
    if not module.LIMITS.rows or not call.layout.is_default or not isinstance(pattern, Pattern):
        return None
    own = cast(RowsBackend, module)
    if not own.by_rows(pattern, call, call.kv_len):
        return None
    check_memory(module, call)
    bind = own.prepare_rows(call)
    bare = replace(call, q=None, k=None, v=None)
    scale, dtype, known = default_scale(call.head_dim), call.dtype, BoundedCache(_MAX_PATTERNS)
    unknown: Any = object()
    plain = _around(module, bare, bind) is bind  # most need no wrapper

    def prepared(pattern: Pattern) -> CachedCall:
        run = bind(pattern)
        return CachedCall(run if plain else _around(module, bare, run), scale, dtype)

    def find(pattern: Pattern, kv_len: int) -> CachedCall | None:
        """Return the cached dispatch of any pattern whose few queries are planned by their rows."""
        lengths = pattern, kv_len.bit_length()  # by_rows() depends on no other digit
        found: CachedCall | None = known.get(lengths, unknown)
        if found is unknown:
            serves = _selected(pattern) is None and own.by_rows(pattern, bare, kv_len)
            found = known.keep(lengths, prepared(pattern) if serves else None)
        return found if 0 < kv_len <= LONGEST else None

    found = None if key[0] is None else of_any_length(key[0])
    if found is not None:
        keep_rows((found[0], *key[1:]), find)
    return prepared(pattern)


def _prepare(
    call: Call,
    pattern: Any,
    backend: str,
    key: tuple[Any, ...],
    backward: bool = False,
    record: Callable[..., Any] | None = None,
) -> CachedCall:
    """Plan and prepare a call; cache it if its key determines the result. `record` wraps the call in autograd."""
    module = backend_for(call, backend)
    if not backward and record is None and (rows := _prepare_rows(call, pattern, module, key)) is not None:
        return rows
    plan = find_plan(module, pattern, call, backward=backward)
    if module.LIMITS.predicts and may_lose(plan):
        warn_where_dense_wins(
            plan, cast(PredictingBackend, module), call.batch, call.heads_q, call.head_dim, call.head_dim_v, call.dtype
        )
    run: Callable[..., Any] = module.prepare_backward(call, plan) if backward else module.prepare(call, plan)
    run = _around(module, call, run)
    if record is not None:
        run = functools.partial(record, run)
    own = validated(plan)
    goes = module.LIMITS.moves if own.growth is None else module.LIMITS.grows
    moves = goes and call.layout.is_default and not backward and record is None
    least = own.least if moves and not isinstance(pattern, Plan) else None
    prepared = CachedCall(run, default_scale(call.head_dim), call.dtype, least or 0)
    if key[0] is not None:
        found = None if least is None else of_any_length(key[0])
        keep_call(pattern, key if found is None else (found[0], *key[1:]), plan, prepared)
    return prepared


def _compile_backward(call: Call, pattern: Pattern | Plan, backend: str) -> None:
    """Start to compile the kernels of a call's backward pass."""
    module = backend_for(call, backend)
    if module.LIMITS.compiles:
        cast(CompilingBackend, module).compile_backward(call, find_plan(module, pattern, call, backward=True))


def _with_wanted(call: Call, given: Given | None) -> Call:
    """Return the call of the backward pass, with the captured arrays that need a gradient; autograd is recording."""
    if given is None or call.score is None:
        return call
    kinds = map(namespace_of, given.tables)
    wanted = tuple(kind is not None and kind.wants_gradient(x) for kind, x in zip(kinds, given.tables, strict=True))
    return replace(call, score=call.score._replace(wanted=wanted))


def _selected(pattern: Any) -> MaskedPattern | None:
    """Return `pattern` as a MaskedPattern, or None; no dynamic pattern can exist before its module is imported."""
    module = sys.modules.get("spattn.patterns.dynamic")
    found: MaskedPattern | None = None if module is None else module.selected(pattern)
    return found


def _attend_masked(
    q: Any,
    k: Any,
    v: Any,
    chosen: MaskedPattern,
    return_lse: bool,
    gradients: Callable[..., Any],
    given: Given | None,
    *,
    scale: float | None,
    backend: str,
    precision: str | None,
    layout: str,
) -> tuple[Any, Any]:
    """Compute attention with a dynamic mask; only the plan of its static pattern is cached."""
    if traced(q, k, v):
        raise TypeError("pattern: a pattern of device arrays is not supported in a PyTorch graph; use .to_host(kv_len)")
    record = recorder(q, k, v, *_captured(given))
    wants_lse = return_lse or record is not None
    call = Call.of(q, k, v, scale=scale, precision=precision, return_lse=wants_lse, layout=layout)
    call = _with_score(call, given)
    if record is None:
        check_gradients("attention", call.kind, q=q, k=k, v=v)
    check_grid(call.layout, chosen.pattern)
    module = backend_for(call, backend)
    if not module.LIMITS.selects:
        name = name_for(call, backend)
        raise ValueError(
            f"pattern: a pattern of device arrays requires backend 'cuda', got {name!r}; use .to_host(kv_len)"
        )
    run: Callable[..., Any] = cast(DynamicMaskBackend, module).prepare_masked(call, chosen)
    run = _around(module, call, run)
    if record is not None:
        # The backward pass converts a copy of the mask, as it is now, to a host pattern.
        then = replace(chosen, selection=chosen.selection.copied())
        same: dict[str, Any] = {"backend": backend, "precision": precision, "layout": layout}

        def backward(*operands: Any, **options: Any) -> Any:
            of = functools.partial(
                gradients if given is None else backward_with_score, pattern=then.to_host(call.kv_len), **same
            )
            return of(*operands, **options)

        run = functools.partial(record, backward, run)
    return cast("tuple[Any, Any]", run(q, k, v, call.scale, *_more(given)))


def _around(module: Backend, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backend's cached dispatch for the arrays and the layout of the caller."""
    scored = call.score is not None
    if module.LIMITS.host_arrays and call.kind is not NUMPY:
        run = (_through_numpy_with_score if scored else _through_numpy)(call.kind, run)
    return run if call.layout.is_default else call.layout.around(run, scored=scored)


def _through_numpy(kind: ArrayNamespace, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a NumPy implementation for host arrays of another library."""

    def call(*operands: Any) -> tuple[Any, ...]:
        *arrays, scale = operands
        given = (x if x is None else kind.to_numpy(x) for x in arrays)
        return tuple([kind.from_numpy(x) for x in run(*given, scale)])

    return call


def _through_numpy_with_score(kind: ArrayNamespace, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a NumPy implementation that takes a score function, and may return gradients of its arrays."""

    def call(*operands: Any) -> tuple[Any, ...]:
        *arrays, scale, score = operands
        given = (x if x is None else kind.to_numpy(x) for x in arrays)
        found = run(*given, scale, score)
        return *(kind.from_numpy(x) for x in found[:3]), *found[3:]

    return call
