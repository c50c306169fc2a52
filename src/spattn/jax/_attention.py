"""Attention and its gradients as calls of foreign functions, through which JAX's transformations go."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ..arrays._xla import Buffer
from ..dispatch import as_pattern
from ..patterns import Pattern, from_json
from ..planning import Plan
from ..request.call import Call, check_options
from ._foreign import ATTENTION, ATTENTION_BACKWARD, Options

__all__ = ["attention"]


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
) -> Any:
    r"""Softmax attention over the pairs of a pattern, within programs of JAX too, with its gradients.

    Parameters
    ----------
    q : (batch, heads_q, q_len, head_dim) array of float32 | float64 | float16 | bfloat16
        Queries: an array of JAX, traced or not.
    k : (batch, heads_kv, kv_len, head_dim) array
        Keys, same dtype as `q`; ``heads_q % heads_kv == 0`` (grouped-query attention).
    v : (batch, heads_kv, kv_len, head_dim_v) array
        Values.
    pattern : Pattern, str or bool array, optional
        What is allowed, as for :func:`spattn.attention`; not a plan, because each device has its own. It is a part of
        the program, so a mask has to have values when the program is traced. Default "full".
    scale : float, optional
        Factor of the logits, not traced; default ``1 / sqrt(head_dim)``.
    backend : {"auto", "cpu", "cuda", "reference"}, optional
        "auto" goes where the program runs.
    return_lse : bool, optional
        Also return the log-sum-exp of each row's logits.
    precision : {None, "tf32"}, optional
        As for :func:`spattn.attention`, and of its gradients.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) array
        Same dtype as `q`.
    lse : (batch, heads_q, q_len) array of float32 (float64 for float64 inputs), only with `return_lse`
        Natural logarithm; −inf for a row that may attend to nothing.

    Raises
    ------
    TypeError
        If q, k or v is no array of JAX, or of a dtype that is not supported or not q's, or which has no such
        `precision`; if `pattern` is a plan, a traced mask or of a class that is not registered; if `scale`, `backend`,
        `return_lse` or `precision` is of another type than said above.
    ValueError
        If shapes do not fit each other or the pattern; if the name of a pattern or precision is unknown, or `scale` is
        not finite or, but for float64, beyond float32's largest number; if the pattern tells batch entries apart under
        :func:`jax.vmap`.
    jax.errors.JaxRuntimeError
        While the program runs, with the type and message of an error that only then comes to light: the backend asked
        for cannot run here or takes no arrays of this device, or memory is short.

    Notes
    -----
    Goes through ``jit``, ``grad``, ``value_and_grad``, ``vmap``, ``checkpoint`` and ``shard_map``. out and lse have
    gradients; there is no second derivative and no forward-mode one. Under ``vmap`` operands that are not mapped are
    repeated. Under ``shard_map`` each device attends to what it was given: batch entries and heads may be spread over
    devices, and the pattern is that of the device's own. Without it, a program that is spread over devices gathers q, k
    and v on each of them, and there is no gradient with respect to arrays on explicit axes of a mesh. Arrays are read
    where they lie, on the host and on a GPU, where XLA's own stream and memory are used. A pattern is planned when the
    program first runs.

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
    call = Call.of(*map(_described, "qkv", (q, k, v)), scale=scale, precision=precision)
    if isinstance(pattern, Plan):
        raise TypeError("pattern: expected a Pattern, a registered name or a bool array, got a Plan")
    text = _fitting_text(as_pattern(pattern, call.sizes), *call.sizes)
    found = _attend(Options(text, call.scale, backend, precision), q, k, v)
    return found if return_lse else found[0]


def _described(name: str, x: Any) -> Buffer:
    if not isinstance(x, jax.Array):
        raise TypeError(f"{name}: expected a JAX array, got {type(x).__name__}")
    return Buffer(x.shape, x.dtype)


@functools.lru_cache(maxsize=32)
def _fitting_text(pattern: Pattern, batch: int, heads: int, q_len: int, kv_len: int) -> str:
    """The text of a pattern; an error where it does not fit, which else would come to light when the program runs."""
    for variant in pattern.variants(batch, heads)[0]:
        variant.bind(q_len, kv_len)
    text = pattern._serialized()
    if text is None:
        raise TypeError(
            "pattern: expected one that has a text, as programs hold it: of a class that is registered, with "
            f"parameters that from_json() reads back; got {pattern!r}"
        )
    return text


# -- gradients ---------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _attend(options: Options, *operands: Any) -> tuple[Any, Any]:
    """The sum of no elements changes nothing, and XLA removes it. Operands of an addition vary over the same axes of a
    mesh, and so the operands of a call do; gradients of those that did not are added up over the devices."""
    nothing = jax.lax.stop_gradient(_nothing(operands))
    out, lse = _differentiable(options, *(x + nothing for x in operands))
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(options: Options, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    of_rows = q.shape[:3]
    out, lse = ((*of_rows, v.shape[3]), q.dtype, 0.0), (of_rows, wide, -math.inf)
    return _call(ATTENTION, options, (out, lse), q, k, v)


def _remember(options: Options, *operands: Any) -> tuple[Any, Any]:
    found = _differentiable(options, *operands)
    return found, (*operands, *found)


def _gradients(options: Options, kept: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    results = tuple((x.shape, x.dtype, 0.0) for x in kept[:3])
    return _call(ATTENTION_BACKWARD, options, results, *cotangents, *kept)


_differentiable.defvjp(_remember, _gradients)


# -- foreign functions -------------------------------------------------------------------------------------------------


def _call(name: str, options: Options, results: tuple[Any, ...], *operands: Any) -> tuple[Any, ...]:
    """What a foreign function makes of the operands.

    `results` has for each shape and dtype of one that depends on them, and its value where there is nothing to attend
    to. A batch of calls is one call with more batch entries, in which no pattern may tell them apart.
    """

    def of_nothing(*operands: Any) -> tuple[Any, ...]:
        nothing = _nothing(operands)
        return tuple(jnp.full(shape, value, dtype) + nothing.astype(dtype) for shape, dtype, value in results)

    @custom_vmap  # type: ignore[untyped-decorator]
    def call(*operands: Any) -> tuple[Any, ...]:
        nothing = of_nothing(*operands)
        if not all(x.size for x in operands):
            return nothing
        kinds = tuple(jax.typeof(x) for x in nothing)
        found: tuple[Any, ...] = jax.ffi.ffi_call(name, kinds)(*operands, call=options.text)
        return found

    @call.def_vmap  # type: ignore[untyped-decorator]
    def fold(size: int, mapped: list[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        if from_json(options.pattern).sizes()[0] != 1:
            raise ValueError(
                "pattern: expected one that tells no batch entries apart under jax.vmap, got "
                f"{from_json(options.pattern)}"
            )
        given = (x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in zip(operands, mapped, strict=True))
        folded = [x.reshape(size * x.shape[1], *x.shape[2:]) for x in given]
        more = tuple(((size * shape[0], *shape[1:]), dtype, value) for shape, dtype, value in results)
        found = _call(name, options, more, *folded)
        unfolded = tuple(x.reshape(size, *shape) for x, (shape, _, _) in zip(found, results, strict=True))
        return unfolded, (True,) * len(results)

    made: tuple[Any, ...] = call(*operands)
    return made


def _nothing(arrays: tuple[Any, ...]) -> Any:
    """0, which varies over all axes of a mesh over which one of the arrays does."""
    return functools.reduce(operator.add, (x[:0].sum(dtype=arrays[0].dtype) for x in arrays))
