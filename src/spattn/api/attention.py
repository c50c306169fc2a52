"""The face: a call that repeats finds what was prepared for it; any other is checked, planned and prepared."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

from .._util.imports import whole_imports
from .._util.index_checks import LONGEST
from ..arrays import NUMPY, ArrayKind, autocast, compiling, dtype_name, kind_of, of_any_length, recorder, traced
from ..arrays import signature as signature_of
from ..backends import Backend, SelectingBackend, load
from ..patterns import Mask, Pattern, get
from ..planning import Plan, validate
from ..planning.contract.cache import find_call, keep_call
from ..planning.contract.validated import sealed
from ..request.call import Call, check_gradients, check_options, check_plain, check_results, check_scale, default_scale

if TYPE_CHECKING:
    from ..request.layout import Layout
    from ..selections import Selected

_LEAST_EFFICIENCY = 0.05  # of a plan of which nobody is warned
_MOST_TILES = 4  # of dense attention, that cost what one tile may with queries, keys and partial rows of its own
CONSTANT = (Pattern, Plan, str)  # what stays as it is; anything else is looked at anew by every call

_P = ParamSpec("_P")
_R = TypeVar("_R")
Sizes = tuple[int | None, int | None, int | None, int | None]


def _traceable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, whose place the operator of its name takes in a graph that torch.compile is tracing.

    It would trace the checks, the planning and NumPy as if they were a model's.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if compiling():
            return getattr(_operators(), function.__name__)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _operators() -> Any:
    """What takes the place of the functions here where PyTorch follows calls."""
    from ..torch import _operators  # which needs PyTorch, and these functions

    return _operators


@_traceable
def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: Pattern | Plan | str | Any = "full",
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    precision: str | None = None,
    layout: str = "bhnd",
) -> Any:
    r"""Softmax attention over the (query, key) pairs that a pattern allows.

    Parameters
    ----------
    q : (batch, heads_q, q_len, head_dim) array of float32 | float64 | float16 | bfloat16
        Queries: a NumPy, PyTorch, CuPy or JAX array of any strides. bfloat16 is ``ml_dtypes.bfloat16`` in NumPy.
    k : (batch, heads_kv, kv_len, head_dim) array
        Keys, same kind, dtype and device as `q`; ``heads_q % heads_kv == 0`` (grouped-query attention).
    v : (batch, heads_kv, kv_len, head_dim_v) array
        Values.
    pattern : Pattern, str, Plan or bool array, optional
        What is allowed: a pattern, its registered name, a plan made by :func:`spattn.plan`, a boolean array
        (q_len, kv_len), (heads_q, q_len, kv_len) or (batch, heads_q, q_len, kv_len), or one of
        :mod:`spattn.selections`, for indices on a GPU. Leading axes of a boolean array may be 1, as in PyTorch.
        Default "full": every query attends to every key; ask for "causal" where it is meant.
    scale : float, optional
        Factor of the logits; default ``1 / sqrt(head_dim)``.
    backend : {"auto", "cpu", "cuda", "reference"}, optional
        "auto" goes where the arrays are. A backend asked for by name never gives way to another one.
    return_lse : bool, optional
        Also return the log-sum-exp of each row's logits.
    precision : {None, "tf32"}, optional
        None computes as exactly as the dtype allows. "tf32" rounds the operands of both products to TF32 (11 bits), for
        float32 on the cuda backend only.
    layout : {"bhnd", "bnhd", "thd"}, optional
        The order of the axes of q, k, v and out. "bhnd" is as said above; "bnhd" is (batch, length, heads, head_dim).
        Where the pattern has a grid, its axes may stand in place of the length in either: (batch, heads, \*grid,
        head_dim). "thd" is (total, heads, head_dim): sequences of one batch, packed one after another, which a pattern
        keeps apart, as :meth:`~spattn.patterns.Documents.from_cu_seqlens` does.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) array
        Same kind, dtype, device and layout as `q`.
    lse : (batch, heads_q, q_len) array of float32 (float64 for float64 inputs), only with `return_lse`
        Natural logarithm; −inf for a row that may attend to nothing. Heads are before the queries in every layout:
        (batch, heads_q, \*grid) where q has a grid, (heads_q, total) in "thd".

    Raises
    ------
    TypeError
        If an argument is not an array of a supported dtype, kinds or dtypes differ, or the dtype has no such
        `precision`; if an array, or a mask, is not plain: masked, sparse, nested, quantized or without values, as meta
        tensors, tracers of JAX and tensors under a derivative of :mod:`torch.func` are; if PyTorch makes a graph of
        the call and the pattern's class is not registered; if `pattern`, `scale`, `backend`, `return_lse`, `precision`
        or `layout` is of another type than said above.
    ValueError
        If shapes do not fit each other, the layout or the pattern, arrays have a grid that is not the pattern's, they
        are on different devices or on one that is neither the CPU nor CUDA's, the name of a pattern, backend, precision
        or layout is unknown, `scale` is not finite or, but for float64, beyond float32's largest number, or the backend
        takes no arrays of this device; if the pattern tells batch entries apart under :func:`torch.func.vmap`.
    RuntimeError
        If q, k or v carry a tangent of PyTorch's forward-mode differentiation: only gradients are recorded.
    BackendUnavailable
        If the backend asked for cannot run here.

    Warns
    -----
    EfficiencyWarning
        Once for a plan on the CPU of whose computed pairs fewer than 5 % are allowed, where attention over all pairs
        is predicted to take less time.

    Notes
    -----
    ``out[i] = Σ_j softmax_j(scale · q[i]·k[j]) v[j]`` over the allowed keys j of query i. Query row i stands at
    position ``i + kv_len - q_len``. A row with no allowed key gives 0. Values at keys that are not allowed have no
    influence, NaN included. PyTorch records the gradients of out and lse, as :func:`attention_backward` computes them,
    where a tensor requires one; there is no second derivative. Its graphs (:func:`torch.compile`, :mod:`torch.export`)
    hold a call as one operator, with the pattern in it, or with the mask as an operand. Under ``torch.autocast``, q, k
    and v are cast as those of ``scaled_dot_product_attention`` are, all but float64. In programs of JAX
    ``spattn.jax.attention`` takes its place. Time is O(tiles · head_dim)
    where ``plan.efficiency`` relates tiles to allowed pairs; extra memory is O(batch · heads · q_len · head_dim).

    Examples
    --------
    >>> import numpy as np, spattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 100, 16), dtype=np.float32)
    >>> out = spattn.attention(q, k, v, spattn.patterns.SlidingWindow(8))
    >>> out.shape, out.dtype
    ((1, 2, 100, 16), dtype('float32'))
    """
    check_options(backend, return_lse, precision, layout)
    key = signature_of(q, k, v), backend, precision, return_lse, layout
    prepared = find_call(pattern, key) or _find_any_length(pattern, key) if isinstance(pattern, CONSTANT) else None
    if prepared is None:
        options: dict[str, Any] = {"scale": scale, "backend": backend, "precision": precision, "layout": layout}
        cast = autocast(q, k, v)
        if cast is not None:
            q, k, v = cast
            return attention(q, k, v, pattern, return_lse=return_lse, **options)
        chosen = _selected(pattern)
        if chosen is not None:
            found = _attend_selected(q, k, v, chosen, return_lse, **options)
            return found if return_lse else found[0]
        if traced(q, k, v):
            return _operator("attention")(q, k, v, pattern, return_lse=return_lse, **options)
        record = recorder(q, k, v)
        wants_lse = return_lse or record is not None
        call = Call.of(q, k, v, scale=scale, precision=precision, return_lse=wants_lse, layout=layout)
        if record is None:
            check_gradients("attention", call.kind, q=q, k=k, v=v)
        else:
            # A copy of a mask, which nobody changes before the backward pass.
            constant = pattern if isinstance(pattern, Plan) else as_pattern(pattern, call.sizes)
            del options["scale"]
            record = functools.partial(record, functools.partial(attention_backward, pattern=constant, **options))
        prepared, scale = _prepare(call, pattern, backend, key, record=record), call.scale
    else:
        scale = prepared.scale if scale is None else check_scale(scale, prepared.dtype)
    found = prepared.run(q, k, v, scale)
    return found if return_lse else found[0]


@_traceable
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
    layout: str = "bhnd",
) -> tuple[Any, Any, Any]:
    r"""Gradients of :func:`attention` with respect to q, k and v.

    Parameters
    ----------
    dout : (batch, heads_q, q_len, head_dim_v) array
        Gradient of the loss with respect to `out`; same kind, dtype and device as `q`.
    q, k, v : array
        The inputs of the forward call.
    out, lse : array
        What ``attention(q, k, v, pattern, scale=scale, return_lse=True)`` returned. ``torch.autocast`` casts nothing
        here.
    pattern
        As in the forward call.
    dlse : (batch, heads_q, q_len) array, optional
        Gradient of the loss with respect to `lse`, of its dtype; None is zero. Rows with ``lse = -inf`` ignore theirs.
    scale, backend, precision, layout
        As in the forward call.

    Returns
    -------
    dq, dk, dv : array
        Shapes and dtype of q, k and v.

    Raises
    ------
    TypeError, ValueError, RuntimeError, BackendUnavailable
        As :func:`attention`, for all arrays.

    Notes
    -----
    With ``P = exp(scale · q·k − lse)`` on the allowed pairs and ``δ = rowsum(dout ∘ out) − dlse``:
    ``dv = Pᵀ dout``, ``dS = P ∘ (dout vᵀ − δ)``, ``dq = scale · dS k``, ``dk = scale · dSᵀ q``. P is recomputed tile by
    tile; extra memory is O(batch · heads · (q_len + kv_len) · head_dim). Bitwise repeatable.

    References
    ----------
    Dao, Fu, Ermon, Rudra, Ré. FlashAttention. arXiv:2205.14135, appendix B.

    Examples
    --------
    >>> import numpy as np, spattn
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 2, 100, 16))
    >>> window = spattn.patterns.SlidingWindow(8)
    >>> out, lse = spattn.attention(q, k, v, window, return_lse=True)
    >>> dq, dk, dv = spattn.attention_backward(dout, q, k, v, out, lse, window)
    >>> dq.shape
    (1, 2, 100, 16)
    """
    check_options(backend, precision=precision, layout=layout)
    arrays = (dout, q, k, v, out, lse) if dlse is None else (dout, q, k, v, out, lse, dlse)
    key = signature_of(*arrays), backend, precision, layout
    prepared = find_call(pattern, key) if isinstance(pattern, CONSTANT) else None
    if prepared is None:
        if traced(q, k, v):
            options: dict[str, Any] = {"scale": scale, "backend": backend, "precision": precision, "layout": layout}
            return _operator("attention_backward")(dout, q, k, v, out, lse, pattern, dlse=dlse, **options)
        call = Call.of(q, k, v, scale=scale, precision=precision, layout=layout)
        check_results(call, dout, out, lse, dlse)
        named = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        check_gradients("attention_backward", call.kind, **named, **({} if dlse is None else {"dlse": dlse}))
        prepared, scale = _prepare(call, pattern, backend, key, backward=True), call.scale
    else:
        scale = prepared.scale if scale is None else check_scale(scale, prepared.dtype)
    return prepared.run(dout, q, k, v, out, lse, dlse, scale)


def plan(
    pattern: Pattern,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int | None = None,
    tile: tuple[int, int] | None = None,
    box: tuple[int, ...] | None = None,
    workers: int = 1,
    max_bytes: int | None = None,
    backend: str | None = None,
    like: tuple[Any, Any, Any] | None = None,
    layout: str = "bhnd",
) -> Plan:
    """Compile a pattern at given lengths into a plan that every backend can execute.

    Parameters
    ----------
    pattern : Pattern
        What is allowed.
    q_len, kv_len : int
        Lengths in tokens; `kv_len` defaults to `q_len`. `like` replaces them, and `batch`, `heads`, `tile`, `box` and
        `workers`.
    batch, heads : int, optional
        Batch entries and query heads; they matter only to patterns that tell them apart. `heads` defaults to the
        pattern's own number.
    tile : (int, int), optional
        Queries and keys of a tile, at most 32768; the number of keys is a multiple of 64. The default is 128 × 64, or
        without a `box` 64 × 64 where a head's pairs are listed and scattered: where, of sixteen query tiles, the tiles
        that hold a pair hold fewer than eight in the mean. Hardly any two of such tiles share a bitmask.
    box : tuple of int, optional
        Queries of a tile along each axis of a grid, as many in all as `tile` has; the keys that such a box of queries
        reaches are then a view of their own. Only the parts of a pattern that have spans on as many axes are cut so.
    workers : int, optional
        How many workers (processor cores, multiprocessors) share one head's work, at least 1: long key lists are split
        so that each has about four pieces.
    max_bytes : int, optional
        The most memory that making the plan may take; by default the memory that this process may use (the machine's,
        the cgroup's or what the limit of its address space leaves). It does not change the plan.

    backend : {"auto", "cpu", "cuda", "reference"}, optional
        Only with `like`: the backend whose plan is asked for, by default the one that such arrays go to.
    like : (q, k, v), optional
        Arrays as for :func:`spattn.attention`, whose plan for them is returned: the one with the tiles that its kernels
        have for such a call, so that its efficiency is the one that is paid.
    layout : {"bhnd", "bnhd", "thd"}, optional
        Only with `like`: of its arrays, as for :func:`spattn.attention`.

    Returns
    -------
    Plan
        Those used last are kept, up to 256 plans and 256 MiB with their patterns; a larger one is made anew by every
        call, unless its user keeps it and hands it to :func:`spattn.attention`. See :func:`spattn.plan_cache_info`.

    Raises
    ------
    TypeError
        If `pattern` is not a Pattern, or `batch`, `heads`, `tile`, `box`, `workers` or `max_bytes` is not of integers;
        if neither lengths nor `like` are given, or both; as :func:`spattn.attention` for `like`, `backend` and
        `layout`.
    BackendUnavailable
        If the backend asked for cannot run here.
    ValueError
        If the pattern does not fit the lengths, the batch or the heads; if a number is out of range; if the plan would
        have 2³¹ runs of tiles or more (on a GPU: tiles), or takes at least a number of bytes, which the message says,
        that `max_bytes` does not allow; if ``pattern.parts()`` has a lattice that leaves the sequence or visits a
        position twice.

    Notes
    -----
    Costs O(q_len + kv_len + tiles) where ``allows`` can be followed on whole tiles: integers that depend on the query
    or the key alone always can, and what depends on both if it is made of sums, differences, products, comparisons,
    extrema, absolute values and ``//`` and ``%`` by constants. Anything else is evaluated in every cell of one tile of
    each kind, on the tiles that the rest of the predicate leaves undecided; a warning says on how many. A plan that is
    too large is refused before its tiles are listed, from the tiles that are known to be in it.

    Examples
    --------
    >>> import spattn
    >>> p = spattn.plan(spattn.patterns.SlidingWindow(256), 16384)
    >>> p.nnz, round(p.efficiency, 2)
    (8339200, 0.8)
    >>> import numpy as np
    >>> q = k = v = np.zeros((1, 8, 16384, 64), np.float32)
    >>> spattn.plan(spattn.patterns.SlidingWindow(256), backend="cpu", like=(q, k, v)).tile
    (48, 64)
    """
    if like is None:
        with whole_imports:
            from ..schedule import compiler  # late, as backends are: `import spattn` takes little time

        if q_len is None or backend is not None or layout != "bhnd":
            raise TypeError(
                "plan(): expected q_len, or arrays like=(q, k, v) with which a backend and a layout may be named"
            )
        return compiler.plan(
            pattern, q_len, kv_len, batch=batch, heads=heads, tile=tile, box=box, workers=workers, max_bytes=max_bytes
        )
    given = q_len, kv_len, batch, heads, tile, box, workers
    if given != (None, None, 1, None, None, None, 1):
        raise TypeError("plan(): expected no lengths, batch, heads, tile, box or workers beside like=(q, k, v)")
    backend = "auto" if backend is None else backend
    check_options(backend, layout=layout)
    call = Call.of(*(autocast(*like) or like), layout=layout)
    return find_plan(backend_for(call, backend), pattern, call, max_bytes)


def _operator(name: str) -> Callable[..., Any]:
    with whole_imports:
        return getattr(_operators(), name)


class Prepared(NamedTuple):
    """A prepared call with what checks its scale; one that moves is for `least` keys or more."""

    run: Callable[..., Any]
    scale: float
    dtype: str
    least: int = 0


def _find_any_length(pattern: Any, key: tuple[Any, ...]) -> Prepared | None:
    """The call that was prepared for any number of keys, this one among them: a step of generation is like the last."""
    found = None if key[0] is None else of_any_length(key[0])
    if found is None:
        return None
    signature, kv_len = found
    prepared: Prepared | None = find_call(pattern, (signature, *key[1:]))
    return prepared if prepared is not None and prepared.least <= kv_len <= LONGEST else None


def _prepare(
    call: Call,
    pattern: Any,
    backend: str,
    key: tuple[Any, ...],
    backward: bool = False,
    record: Callable[..., Any] | None = None,
) -> Prepared:
    """What computes calls like this one, on record where `record` is given; kept where nothing that it depends on can
    change behind the key."""
    module = backend_for(call, backend)
    plan = find_plan(module, pattern, call, backward=backward)
    if name_for(call, backend) == "cpu" and _may_lose(plan):
        with whole_imports:
            from .explain import warn_where_dense_wins  # which few calls need

        warn_where_dense_wins(plan, call.batch, call.heads_q, call.head_dim, call.head_dim_v, call.dtype)
    run: Callable[..., Any] = module.prepare_backward(call, plan) if backward else module.prepare(call, plan)
    if module.LIMITS.host_arrays and call.kind is not NUMPY:
        run = _through_numpy(call.kind, run)
    if not call.layout.is_default:
        run = call.layout.around(run)
    if record is not None:
        run = functools.partial(record, run)
    own = sealed(plan)
    goes = module.LIMITS.moves if own.growth is None else module.LIMITS.grows
    moves = goes and call.layout.is_default and not backward and record is None
    least = own.least if moves and not isinstance(pattern, Plan) else None
    prepared = Prepared(run, default_scale(call.head_dim), call.dtype, least or 0)
    if key[0] is not None and isinstance(pattern, CONSTANT):
        found = None if least is None else of_any_length(key[0])
        keep_call(pattern, key if found is None else (found[0], *key[1:]), plan, prepared)
    return prepared


def _selected(pattern: Any) -> Selected | None:
    """What a selection, or one of a pattern, allows; None for anything else. Of a class that nobody has imported there
    is none."""
    found = sys.modules.get("spattn.selections")
    return None if found is None else cast("Selected | None", found.selected(pattern))


def _attend_selected(
    q: Any,
    k: Any,
    v: Any,
    chosen: Selected,
    return_lse: bool,
    *,
    scale: float | None,
    backend: str,
    precision: str | None,
    layout: str,
) -> tuple[Any, Any]:
    """Attention over what a selection allows. Nothing of it is kept but the plan of the pattern; where it is recorded,
    what the selection allows now is computed on the host when a gradient is asked for."""
    if traced(q, k, v):
        raise TypeError("pattern: expected a pattern where PyTorch makes a graph of the call, got a selection")
    record = recorder(q, k, v)
    wants_lse = return_lse or record is not None
    call = Call.of(q, k, v, scale=scale, precision=precision, return_lse=wants_lse, layout=layout)
    if record is None:
        check_gradients("attention", call.kind, q=q, k=k, v=v)
    _check_grid(call.layout, chosen.pattern)
    module = backend_for(call, backend)
    if not module.LIMITS.selects:
        name = name_for(call, backend)
        raise ValueError(
            f"pattern: a selection needs the backend 'cuda', got {name!r}; to_host() makes a pattern of it"
        )
    run: Callable[..., Any] = cast(SelectingBackend, module).prepare_selected(call, chosen)
    if not call.layout.is_default:
        run = call.layout.around(run)
    if record is not None:
        then = replace(chosen, selection=chosen.selection.copied())
        same: dict[str, Any] = {"backend": backend, "precision": precision, "layout": layout}

        def backward(*operands: Any, **options: Any) -> Any:
            of = functools.partial(attention_backward, pattern=then.to_host(call.kv_len), **same)
            return of(*operands, **options)

        run = functools.partial(record, backward, run)
    return cast("tuple[Any, Any]", run(q, k, v, call.scale))


def _may_lose(plan: Plan) -> bool:
    """Whether dense attention may cost less, by what is known before a plan is priced: few of the pairs that it
    computes are allowed, not for want of queries, and dense attention has not many times as many tiles."""
    dense = plan.variants * -(-plan.q_len // plan.block_q) * -(-plan.kv_len // plan.block_kv)
    queries = min(plan.block_q, plan.q_len) / plan.block_q
    return plan.efficiency < _LEAST_EFFICIENCY * queries and plan.tiles * _MOST_TILES > dense


def _through_numpy(kind: ArrayKind, run: Callable[..., Any]) -> Callable[..., Any]:
    """The same of arrays of another kind in host memory."""

    def call(*operands: Any) -> tuple[Any, ...]:
        *arrays, scale = operands
        given = (x if x is None else kind.to_numpy(x) for x in arrays)
        return tuple([kind.from_numpy(x) for x in run(*given, scale)])

    return call


def name_for(call: Call, backend: str) -> str:
    return backend if backend != "auto" else "cpu" if call.device == "cpu" else "cuda"


def backend_for(call: Call, backend: str) -> Backend:
    """The backend that takes a call; ValueError if the one that was asked for does not."""
    name = name_for(call, backend)
    module = load(name)
    if call.precision is not None and call.precision not in module.LIMITS.precisions:
        raise ValueError(f"precision: {call.precision!r} needs a backend that has it, as cuda; got {name!r}")
    if module.LIMITS.host_arrays and call.device != "cpu":
        raise ValueError(f"q: expected host arrays for the backend {name!r}, got one on {call.device}")
    return module


def find_plan(
    module: Backend, pattern: Any, call: Call, max_bytes: int | None = None, *, backward: bool = False
) -> Plan:
    """The plan of `pattern` that a backend wants for a call, or for its gradients."""
    _check_grid(call.layout, pattern)
    needed, most = call.result_bytes(backward), module.memory(call)
    if needed > most:
        raise MemoryError(f"q, k, v: the results take {needed} bytes, more than the {most} bytes of memory")
    if isinstance(pattern, Plan):
        if (pattern.q_len, pattern.kv_len) != (call.q_len, call.kv_len):
            raise ValueError(
                f"pattern: expected a plan for lengths {call.q_len} × {call.kv_len}, "
                f"got one for {pattern.q_len} × {pattern.kv_len}"
            )
        validate(pattern)
        pattern = _plan_or_pattern(pattern, module, call, backward)
        if isinstance(pattern, Plan):
            return pattern
    return module.plan_for(as_pattern(pattern, call.sizes), call, max_bytes, backward=backward)


def _plan_or_pattern(plan: Plan, module: Backend, call: Call, backward: bool) -> Plan | Pattern:
    """The plan itself where its tiles suit the backend, otherwise its pattern, to be planned (and cached) again."""
    index = plan.variant
    if index.shape[0] not in (1, call.batch) or index.shape[1] not in (1, call.heads_q):
        raise ValueError(
            f"pattern: expected a plan for {call.batch} batch entries and {call.heads_q} heads, "
            f"got one for {index.shape[0]} and {index.shape[1]}"
        )
    if module.accepts(plan, call, backward=backward):
        return plan
    if plan.pattern is None:
        order = "gathered keys and " if plan.gathered else "tokens in an order and " if plan.ordered else ""
        raise ValueError(
            "pattern: expected a plan that the backend executes, or that knows its pattern, got one with "
            f"{order}tiles of {plan.block_q} × {plan.block_kv}"
        )
    return plan.pattern


def _check_grid(layout: Layout, pattern: Any) -> None:
    """ValueError where arrays have a grid that is not the pattern's."""
    if layout.grid:
        own = get(pattern) if isinstance(pattern, str) else pattern.pattern if isinstance(pattern, Plan) else pattern
        layout.check_grid(own.grids() if isinstance(own, Pattern) else frozenset())


def as_pattern(pattern: Any, sizes: Sizes = (None, None, None, None)) -> Pattern:
    """Convert the `pattern` argument of attention(), other than a Plan, to a Pattern.

    `sizes` are batch, heads_q, q_len and kv_len of the call, None where they are unknown.
    """
    if isinstance(pattern, Pattern):
        return pattern
    if isinstance(pattern, str):
        return get(pattern)
    what = type(pattern).__name__
    kind = kind_of(pattern)
    if kind is not None:
        if dtype_name(pattern) == "bool":
            check_plain("pattern", pattern)
            check_mask(tuple(pattern.shape), sizes)
            return Mask(kind.to_host(pattern))
        what = f"an array of {dtype_name(pattern)}"
    raise TypeError(f"pattern: expected a Pattern, a registered name, a Plan or a bool array, got {what}")


def check_mask(shape: tuple[int, ...], sizes: Sizes) -> None:
    """Raise ValueError unless a bool mask has all rows and columns, and its leading axes broadcast to those of q."""
    batch, heads, q_len, kv_len = sizes
    if len(shape) < 2:
        return  # Mask says what it expects
    got = f"pattern: a bool mask has shape ([[batch,] heads,] q_len, kv_len), got {shape}"
    if 1 in shape[-2:] and None not in (q_len, kv_len) and shape[-2:] != (q_len, kv_len):
        hint = "np.broadcast_to(mask, shape)"
        if shape[-2] == 1 and shape[-1] == kv_len:
            hint = "spattn.patterns.KeyPadding(mask) for padding of keys"
        raise ValueError(f"{got}; its last axes do not broadcast to {q_len} queries and {kv_len} keys: use {hint}")
    for name, size, wanted in zip(("heads", "batch"), shape[-3::-1], (heads, batch), strict=False):
        if wanted is None or size in (1, wanted):
            continue
        hints = []
        if len(shape) == 3 and batch in (None, size):
            hints.append("insert an axis for one mask per batch entry: mask[:, None]")
        if name == "heads" and size and wanted % size == 0:
            hints.append("use spattn.patterns.Mask(mask) for one mask per group of heads")
        expected = f"expected {wanted} {name}" + (" or 1" if wanted != 1 else "")
        raise ValueError("; ".join([f"{got}: {expected}", *hints]))
