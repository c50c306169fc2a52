"""Attention and its gradients as XLA FFI calls, with custom_vjp and custom_vmap rules."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from ..arrays import unknown
from ..arrays.xla import Buffer
from ..dispatch import resolve
from ..patterns import Pattern
from ..patterns.base.in_graphs import described, serialized_call, stand_in
from ..patterns.base.pattern import Deferred
from ..patterns.base.walk import leaves
from ..patterns.sequence.packed import PackedWindows
from ..planning import Plan
from ..request.call import Call, check_options
from ..request.dropout import Dropout, checked_seed
from ..score.kept_traces import find_or_trace
from ..score.recorder import Sizes
from ..score.serialized import from_json as graph_of
from ..score.serialized import serialize
from ._foreign import ATTENTION, ATTENTION_BACKWARD, Options

__all__ = ["attention", "buffer_of", "serialized", "with_score"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: Pattern | str | Any = "full",
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    precision: str | None = None,
    score: Callable[..., Any] | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    key_padding: Any = None,
) -> Any:
    r"""Compute softmax attention over the pairs that a pattern allows, for JAX arrays and transformations.

    Parameters
    ----------
    q : (batch, heads_q, q_len, head_dim) array of float32 | float64 | float16 | bfloat16
        Query: a JAX array, concrete or traced.
    k : (batch, heads_kv, kv_len, head_dim) array
        Key, with the dtype of `q`; ``heads_q % heads_kv == 0`` (grouped-query attention).
    v : (batch, heads_kv, kv_len, head_dim_v) array
        Value.
    pattern : Pattern, str, sparse matrix or mask, optional
        The allowed pairs, as for :func:`spattn.attention`, but neither a plan, as each device plans the pattern, nor a
        mask_mod. A mask, and arrays of a pattern, may be traced, as in ``Causal() & Documents.from_segment_ids(ids)``:
        one program then runs with all their values, and checks and plans each. Numbers are constants of the program.
        Default "full".
    scale : float, optional
        Factor of the scores, not traced; default ``1 / sqrt(head_dim)``.
    backend : {"auto", "cpu", "cuda", "reference"}, optional
        "auto" selects the backend by the device that runs the program.
    return_lse : bool, optional
        Also return the log-sum-exp of each row's scores.
    precision : {None, "tf32"}, optional
        As for :func:`spattn.attention`; applies to gradients too.
    score : callable, optional
        Score function, as for :func:`spattn.attention`. The JAX arrays that it captures may be traced, and get
        gradients. Numbers and NumPy arrays are constants of the program: ``jit`` does not see later changes.
    sinks : (heads_q,) array, optional
        As for :func:`spattn.attention`.
    dropout_p : float, optional
        As for :func:`spattn.attention`; a constant of the program.
    seed : int or integer array without axes, optional
        As for :func:`spattn.attention`; required if ``dropout_p > 0``. An array may be traced, and is taken modulo
        2**64. Of a key, pass ``jax.random.bits(key)``.
    key_padding : (batch, kv_len) array, optional
        As for :func:`spattn.attention`; may be traced.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) array
        In the dtype of `q`.
    lse : (batch, heads_q, q_len) array of float32 (float64 for float64 inputs), only with `return_lse`
        Natural logarithm; −inf for a row with no allowed key.

    Raises
    ------
    TypeError
        If q, k or v is not a JAX array, or has an unsupported dtype; if dtypes differ; if the dtype does not support
        `precision`; if `pattern` is a plan, has a traced number or is of an unregistered class; if `scale`, `backend`,
        `return_lse`, `precision`, `dropout_p` or `seed` has the wrong type.
    ValueError
        If shapes do not match each other or the pattern; if the name of a pattern or precision is unknown; if `scale`
        is not finite, or exceeds the float32 range and `q` is not float64; if `dropout_p` or a seed that is not an
        array is out of range, or a seed is missing; if, under :func:`jax.vmap`, the pattern differs between batch
        entries.
    jax.errors.JaxRuntimeError
        At run time, if the named backend cannot run on this machine or does not support the device, or if memory is
        exhausted. The message contains the type and the message of the original error.

    Notes
    -----
    Supports ``jit``, ``grad``, ``value_and_grad``, ``vmap``, ``checkpoint`` and ``shard_map``. out and lse are
    differentiable once, in reverse mode only. ``vmap`` broadcasts unmapped operands; it calls
    the kernels once, except if captured arrays or sinks are mapped, if they get gradients, if the score function
    depends on the batch entry, or with dropout: then the entries run one after another. Entries that share a seed drop
    the same pairs; map a seed for each entry, too, if they must differ. Under ``shard_map``, each device
    computes attention on its shard: batch and heads may be sharded, and the pattern applies to the shard. Without
    ``shard_map``, a partitioned program all-gathers q, k and v on each device, and gradients with respect to arrays on
    explicit mesh axes are not supported. Arrays are not copied, on the host or on a GPU; GPU calls use XLA's stream and
    allocator. The pattern is planned on the first run of the program.

    Examples
    --------
    >>> import jax, spattn.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 100, 16))
    >>> window = spattn.patterns.SlidingWindow(8)
    >>> loss = jax.jit(lambda q, k, v: spattn.jax.attention(q, k, v, window).sum())
    >>> dq, dk, dv = jax.grad(loss, (0, 1, 2))(q, k, v)
    >>> dq.shape
    (1, 2, 100, 16)
    """
    check_options(backend, return_lse, precision)
    call = Call.of(*map(buffer_of, "qkv", (q, k, v)), scale=scale, precision=precision)
    if isinstance(pattern, Plan):
        raise TypeError("pattern: expected a Pattern, a registered name or a bool array, got a Plan")
    text, arrays = _described_pattern(resolve(pattern, call.sizes, key_padding), call.sizes)
    options, captured = with_score(Options(text, call.scale, backend, precision), call, score, sinks)
    if Dropout.of(dropout_p, None if seed is None else 0) is not None:
        options, captured = options._replace(dropout_p=float(dropout_p)), (*captured, _words_of(seed))
    found = _attend(options._replace(arrays=len(arrays)), q, k, v, *captured, *arrays)
    return found if return_lse else found[0]


def with_score(options: Options, call: Call, score: Any, sinks: Any) -> tuple[Options, tuple[Any, ...]]:
    """Return the options with a score function and sinks, and the captured arrays."""
    wide = jnp.float64 if call.dtype == "float64" else jnp.float32
    captured: list[Any] = []
    if sinks is not None:
        sinks = jnp.asarray(sinks)
        if sinks.shape != (call.heads_q,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
            raise ValueError(f"sinks: expected floats of shape ({call.heads_q},), got {sinks.dtype} of {sinks.shape}")
        captured.append(sinks.astype(wide))
    if score is not None:
        text, floats, integers, given = serialize(find_or_trace(score, Sizes(*call.sizes)))
        tables = [jnp.asarray(x) for x in given]
        captured += [x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in tables]
        options = options._replace(score=(text, tuple(floats), tuple(integers)), tables=len(tables))
    return options._replace(sinks=sinks is not None), tuple(captured)


def _words_of(seed: Any) -> Any:
    """Return the low and the high 32 bits of a seed: without x64, JAX has no wider integers."""
    if not isinstance(seed, jax.Array):
        number = checked_seed(seed)
        return jnp.asarray([number & 0xFFFFFFFF, number >> 32], jnp.uint32)
    if seed.shape != () or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            f"seed: expected an integer without axes, got {seed.dtype} of shape {seed.shape}; of a key, pass "
            "jax.random.bits(key)"
        )
    high = seed >> 32 if seed.dtype.itemsize == 8 else -(seed < 0).astype(jnp.int32)
    return jnp.stack([seed.astype(jnp.uint32), high.astype(jnp.uint32)])


def buffer_of(name: str, x: Any) -> Buffer:
    """Return the shape and dtype of a JAX array, concrete or traced."""
    if not isinstance(x, jax.Array):
        raise TypeError(f"{name}: expected a JAX array, got {type(x).__name__}")
    return Buffer(x.shape, x.dtype)


def _described_pattern(pattern: Any, sizes: tuple[int, int, int, int]) -> tuple[str, list[Any]]:
    """Return the serialized pattern, and its arrays if the program has yet to compute some of them."""
    if not isinstance(pattern, Deferred):
        return _fitting_text(pattern, *sizes), []
    given: list[Any] = []
    call = described(pattern, given, by_text=True)
    arrays = list(map(_operand, given))
    if not all(x.ndim for x in arrays):
        raise TypeError(
            f"pattern: numbers of a pattern are constants of the program, got a traced one in {pattern!r}; name the "
            "argument in jax.jit(static_argnames=...)"
        )
    text = serialized_call(call, len(arrays))
    if text is None:
        raise TypeError(f"pattern: expected registered patterns of arrays and constants, got {pattern!r}")
    alike = stand_in(text, arrays)
    if alike is not None and not any(isinstance(x, PackedWindows) for x in leaves(alike)):  # its lengths are values
        _check_fit(alike, *sizes)
    return text, arrays


def _operand(x: Any) -> jax.Array:
    """Return an array of a pattern as an operand of the program."""
    made = jnp.asarray(x)
    if not unknown(x) and made.dtype != x.dtype and not np.array_equal(made, x):
        raise ValueError(f"pattern: JAX converts {x.dtype} to {made.dtype}, which loses values; set jax_enable_x64")
    return made


def _check_fit(pattern: Pattern, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    """Raise errors at trace time if the pattern does not match the sizes."""
    for variant in pattern.variants(batch, heads)[0]:
        variant.bind(q_len, kv_len)


@functools.lru_cache(maxsize=32)
def _fitting_text(pattern: Pattern, batch: int, heads: int, q_len: int, kv_len: int) -> str:
    """Serialize a pattern that fits the sizes."""
    _check_fit(pattern, batch, heads, q_len, kv_len)
    return serialized(pattern)


def serialized(pattern: Pattern) -> str:
    """Return the text of a pattern that a program stores."""
    text = pattern._serialized()
    if text is None:
        raise TypeError(
            "pattern: a JAX program requires a serializable pattern, of a registered class with parameters that "
            f"from_json() restores; got {pattern!r}"
        )
    return text


# -- gradients ---------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _attend(options: Options, *operands: Any) -> tuple[Any, Any]:
    """Make the operands vary over the same mesh axes, and compute attention.

    Adding an empty sum changes no value, and XLA removes it. But each operand then varies over all mesh axes over which
    any operand varies, and JAX sums its gradient over the axes that were added.
    """
    own = len(operands) - options.captured
    varying = any(
        getattr(jax.typeof(x), "vma", ()) for x in operands
    )  # else vmap would map all operands if it maps one
    nothing = jax.lax.stop_gradient(_nothing(operands if varying else operands[:own]))
    arrays, captured = [x + nothing for x in operands[:own]], operands[own:]
    if varying:
        captured = tuple(x + nothing.astype(x.dtype) for x in captured)
    out, lse = _differentiable(options, *arrays, *captured)
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(options: Options, q: Any, k: Any, v: Any, *captured: Any) -> tuple[Any, ...]:
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    of_rows = q.shape[:3]
    out, lse = ((*of_rows, v.shape[3]), q.dtype, 0.0), (of_rows, wide, -math.inf)
    return _call(ATTENTION, options, (out, lse), q, k, v, *captured)


def _remember(options: Options, *operands: Any) -> tuple[Any, Any]:
    found = _differentiable(options, *operands)
    return found, (*operands, *found)


def _gradients(options: Options, kept: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    q, k, v, *captured, out, lse = kept
    sinks, tables = captured[: options.sinks], captured[options.sinks :]
    own = len(tables) - options.arrays
    wanted = [jnp.issubdtype(x.dtype, jnp.floating) and n < own for n, x in enumerate(tables)]
    like = (q, k, v, *(x for x, own in zip(tables, wanted, strict=True) if own), *sinks)
    results = tuple((x.shape, x.dtype, 0.0) for x in like)
    dq, dk, dv, *rest = _call(ATTENTION_BACKWARD, options, results, *cotangents, q, k, v, out, lse, *captured)
    dsinks, of_floats = rest[len(rest) - options.sinks :], iter(rest)
    return dq, dk, dv, *dsinks, *(next(of_floats) if own else None for own in wanted)


_differentiable.defvjp(_remember, _gradients)


# -- FFI calls ---------------------------------------------------------------------------------------------------------


def _call(name: str, options: Options, results: tuple[Any, ...], *operands: Any) -> tuple[Any, ...]:
    """Call an FFI target, with a vmap rule: a call on a folded batch axis, or one call after another.

    `results` holds (shape, dtype, value if an operand is empty) of each result. Under vmap, the pattern must not differ
    between batch entries.
    """
    own = len(operands) - options.captured

    def of_nothing(*operands: Any) -> tuple[Any, ...]:
        nothing = _nothing(operands)
        return tuple(jnp.full(shape, value, dtype) + nothing.astype(dtype) for shape, dtype, value in results)

    @custom_vmap  # type: ignore[untyped-decorator]
    def call(*operands: Any) -> tuple[Any, ...]:
        nothing = of_nothing(*operands)
        if not all(x.size for x in operands[:own]):
            return nothing
        kinds = tuple(jax.typeof(x) for x in nothing)
        found: tuple[Any, ...] = jax.ffi.ffi_call(name, kinds)(*operands, call=options.text)
        return found

    @call.def_vmap  # type: ignore[untyped-decorator]
    def fold(size: int, mapped: list[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        differs = _differs(name, options, mapped[own:])
        if not any(mapped[len(mapped) - options.arrays :]):
            pattern = stand_in(options.pattern, operands[len(operands) - options.arrays :])
            differs |= pattern is None
            if pattern is not None and pattern.sizes()[0] != 1:
                raise ValueError(f"pattern: must not differ between batch entries under jax.vmap, got {pattern}")
        if differs:
            return _one_by_one(name, options, results, mapped, operands), (True,) * len(results)
        pairs = zip(operands[:own], mapped[:own], strict=True)
        given = (x if over else jnp.broadcast_to(x, (size, *x.shape)) for x, over in pairs)
        folded = [x.reshape(size * x.shape[1], *x.shape[2:]) for x in given]
        more = tuple(((size * shape[0], *shape[1:]), dtype, value) for shape, dtype, value in results)
        found = _call(name, options, more, *folded, *operands[own:])
        unfolded = tuple(x.reshape(size, *shape) for x, (shape, _, _) in zip(found, results, strict=True))
        return unfolded, (True,) * len(results)

    made: tuple[Any, ...] = call(*operands)
    return made


def _differs(name: str, options: Options, mapped: list[bool]) -> bool:
    """Whether one call on all entries would mix captured arrays, batch indices or dropped pairs of several entries."""
    names = () if options.score is None else [step.name for step in graph_of(options.score[0]).operations]
    # Gradients of captured arrays would be sums over the entries.
    return options.dropout_p != 0 or any(mapped) or "b" in names or (bool(mapped) and name == ATTENTION_BACKWARD)


def _one_by_one(
    name: str, options: Options, results: tuple[Any, ...], mapped: list[bool], operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    def entry(own: tuple[Any, ...]) -> tuple[Any, ...]:
        rest = iter(own)
        return _call(
            name, options, results, *(next(rest) if over else x for x, over in zip(operands, mapped, strict=True))
        )

    found: tuple[Any, ...] = jax.lax.map(entry, tuple(x for x, over in zip(operands, mapped, strict=True) if over))
    return found


def _nothing(arrays: tuple[Any, ...]) -> Any:
    """Return a zero that varies over all mesh axes over which any of the arrays varies."""
    return functools.reduce(operator.add, (jnp.atleast_1d(x)[:0].sum(dtype=arrays[0].dtype) for x in arrays))
