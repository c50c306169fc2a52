"""Attention on float8 arrays with scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from .. import dispatch
from .._util.cached import BoundedCache
from ..arrays import FLOAT8, NUMPY, ArrayNamespace, cache_key, check_plain, compiling, namespace_of, traced
from ..arrays.namespace import BFLOAT16
from ..dispatch.plans import backend_for, find_plan, name_for, resolve
from ..patterns import Pattern
from ..planning import Plan
from ..planning.contract.cache import find_call, keep_call
from ..request.call import Call, check_gradients, check_options, check_scale, default_scale
from ..request.score import ScoreOperands

__all__ = ["float8_attention"]

_FACTORS_KEPT = 64
_NAMES = ("q_scale", "k_scale", "v_scale")
_factors = BoundedCache(_FACTORS_KEPT)  # arrays of scales that were given as numbers


def float8_attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: Pattern | Plan | str | Any = "full",
    *,
    scales: tuple[Any, Any, Any] = (1.0, 1.0, 1.0),
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    layout: str = "bhsd",
) -> Any:
    r"""Compute softmax attention of float8 queries, keys and values over the pairs that a pattern allows.

    On GPUs of compute capability 9.0, both products multiply float8 numbers on the tensor cores. At head dimension 128
    dense and causal patterns take about 0.8 times as long as in bfloat16, short windows as long; at 64 bfloat16 is
    faster. On the CPU the arrays are converted to float32.

    Parameters
    ----------
    q : (batch, heads_q, q_len, head_dim) array of float8_e4m3fn
        Query: a PyTorch, JAX or NumPy array (``ml_dtypes.float8_e4m3fn``). GPUs require head dimensions that are
        multiples of 16, at most 128, and contiguous rows that start at multiples of 16 bytes.
    k, v : (batch, heads_kv, kv_len, head_dim) array
        Key and value.
    pattern
        As in :func:`spattn.attention`; no pattern of GPU indices.
    scales : (q_scale, k_scale, v_scale), optional
        The numbers that the elements of q, k and v are to be multiplied by: floats, or arrays of q's library and
        device that broadcast to (batch, heads_q), (batch, heads_kv) and (batch, heads_kv).
    scale, backend, return_lse, layout
        As in :func:`spattn.attention`.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) array of bfloat16
        Array library, device and layout of `q`.
    lse : (batch, heads_q, q_len) array of float32, only with `return_lse`
        See :func:`spattn.attention`.

    Raises
    ------
    TypeError, ValueError, BackendUnavailableError
        As :func:`spattn.attention`; on GPUs also for other compute capabilities, head dimensions and strides. There
        are no gradients, no score functions, sinks and dropout, and no graphs of PyTorch or JAX.

    Notes
    -----
    Kernels round the weights to float8, too: :doc:`/numerics` states the error bound.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, spattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 16)).astype(ml_dtypes.float8_e4m3fn)
    >>> out = spattn.float8_attention(q, k, v, "causal", scales=(0.5, 0.5, 2.0))
    >>> out.shape, out.dtype
    ((1, 2, 100, 16), dtype(bfloat16))
    """
    check_options(backend, return_lse, layout=layout)
    if compiling() or traced(q, k, v):
        raise TypeError("q: float8_attention is not supported in graphs; call it outside of them")
    key = cache_key(q, k, v), FLOAT8, backend, return_lse, layout
    prepared = find_call(pattern, key) if isinstance(pattern, dispatch.CONSTANT) and key[0] is not None else None
    if prepared is None:
        call = Call.of(q, k, v, scale=scale, return_lse=return_lse, layout=layout, dtypes=(FLOAT8,))
        check_gradients("float8_attention", call.kind, q=q, k=k, v=v)
        own = resolve(pattern, call.sizes)
        prepared = _prepare(call, own, backend, pattern if key[0] is not None else None, key)
    run, call = prepared
    factors = _factors_of(scales, call, q)
    scale = call.scale if scale is None else check_scale(scale, FLOAT8)
    out, lse = run(q, k, v, scale, ScoreOperands(None, scales=factors))
    return (out, lse) if return_lse else out


def _prepare(
    call: Call, pattern: Pattern | Plan, backend: str, given: Any, key: Any
) -> tuple[Callable[..., Any], Call]:
    """Return the cached dispatch of a call, and the call without arrays, whose scale is the default one."""
    bare = replace(call, q=None, k=None, v=None, scale=default_scale(call.head_dim))
    if name_for(call, backend) != "cuda":
        if call.device != "cpu":
            raise ValueError(f"q: backend {backend!r} requires host arrays, got an array on {call.device}")
        run = _on_host(call.kind, pattern, backend)
        return run if call.layout.is_default else call.layout.around(run, scored=True), bare
    module = backend_for(call, backend)
    plan = find_plan(module, pattern, call)
    scored = replace(call, score=ScoreOperands(None, scales=True))
    run = module.prepare(scored, plan)
    found = run if call.layout.is_default else call.layout.around(run, scored=True), bare
    if isinstance(given, dispatch.CONSTANT):
        keep_call(given, key, plan, found)
    return found


def _on_host(kind: ArrayNamespace, pattern: Pattern | Plan, backend: str) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes a call in float32 on the CPU."""

    def run(q: Any, k: Any, v: Any, scale: float, score: ScoreOperands) -> tuple[Any, Any]:
        q, k, v = (_widened(x, kind) for x in (q, k, v))
        scales = kind.to_numpy(score.scales)[:, :, None]
        q = q * scales[..., :1]
        options: dict[str, Any] = {"scale": scale, "backend": backend, "return_lse": True}
        out, lse = dispatch.attention(q, k, v, pattern, **options)
        return kind.from_numpy((out * scales[..., 1:]).astype(BFLOAT16)), kind.from_numpy(lse)

    return run


def _widened(x: Any, kind: ArrayNamespace) -> np.ndarray:
    """Return a host array as float32."""
    if kind.name == "torch":
        x = x.detach().contiguous().view(kind.functions().uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return np.asarray(x).astype(np.float32)


def _factors_of(scales: tuple[Any, Any, Any], call: Call, q: Any) -> Any:
    """Return the factors of each head's dot products and values, (batch, heads_q, 2) float32, on the device of q."""
    if not isinstance(scales, tuple) or len(scales) != len(_NAMES):
        raise TypeError(f"scales: expected a tuple ({', '.join(_NAMES)}), got {scales!r}")
    kind, shape = call.kind, (call.batch, call.heads_q)
    if all(isinstance(x, (int, float)) for x in scales):
        numbers = tuple(check_scale(x, FLOAT8) for x in scales)
        key = kind.name, call.device, shape, numbers
        found = _factors.get(key)
        if found is None:
            made = np.empty((*shape, 2), np.float32)
            made[...] = numbers[0] * numbers[1], numbers[2]
            found = _factors.keep(key, made if kind is NUMPY else kind.on_device(made, q))
        return found
    xp = kind.functions()
    q_scale, k_scale, v_scale = (
        _scale_of(x, name, call, q, heads, xp)
        for x, name, heads in zip(scales, _NAMES, (call.heads_q, call.heads_kv, call.heads_kv), strict=True)
    )
    grouped = (call.batch, call.heads_kv, call.group)
    k_scale, v_scale = (xp.broadcast_to(x[:, :, None], grouped).reshape(shape) for x in (k_scale, v_scale))
    return xp.stack((q_scale * k_scale, v_scale), -1)


def _scale_of(x: Any, name: str, call: Call, q: Any, heads: int, xp: Any) -> Any:
    """Return one scale as an array (batch, heads) of float32."""
    if isinstance(x, (int, float)):
        x = np.float32(check_scale(x, FLOAT8)).reshape(1, 1)
        x = x if call.kind is NUMPY else call.kind.on_device(x, q)
    kind = namespace_of(x)
    if kind is not call.kind or kind.device(x) != call.device:
        raise TypeError(f"{name}: expected a float, or an array of {call.kind.name} on {call.device} like q, got {x!r}")
    check_plain(name, x)
    x = x.to(xp.float32) if kind.name == "torch" else x.astype(np.float32)
    try:
        return xp.broadcast_to(x, (call.batch, heads))
    except (ValueError, RuntimeError) as error:
        shape = tuple(x.shape)
        raise ValueError(f"{name}: expected a shape that broadcasts to {(call.batch, heads)}, got {shape}") from error
