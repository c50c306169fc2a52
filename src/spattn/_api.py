"""The face: check the arguments, find the plan, call the backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arguments, _arrays, _backends, _routes
from ._arrays import eager
from ._errors import BackendUnavailable
from .patterns import Mask, Pattern, get
from .plan import Plan, validate


@eager
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
        What is allowed: a pattern, its registered name, a plan made by :func:`spattn.plan`, or a boolean array
        (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len). Default "full": every query attends
        to every key; ask for "causal" where it is meant.
    scale : float, optional
        Factor of the logits; default ``1 / sqrt(head_dim)``.
    backend : {"auto", "cpu", "cuda", "reference"}, optional
        "auto" goes where the arrays are. A backend asked for by name never gives way to another one.
    return_lse : bool, optional
        Also return the log-sum-exp of each row's logits.
    precision : {None, "tf32"}, optional
        None computes as exactly as the dtype allows. "tf32" rounds the operands of both products to TF32 (11 bits), for
        float32 on the cuda backend only.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) array
        Same kind, dtype and device as `q`.
    lse : (batch, heads_q, q_len) array of float32 (float64 for float64 inputs), only with `return_lse`
        Natural logarithm; −inf for a row that may attend to nothing.

    Raises
    ------
    TypeError
        If an argument is not an array of a supported dtype, kinds or dtypes differ, or the dtype has no such
        `precision`; if an array, or a mask, is not plain: masked, sparse, nested, quantized or without values, as meta
        and fake tensors, tracers and tensors under :mod:`torch.func` are; if `pattern`, `scale`, `backend`,
        `return_lse` or `precision` is of another type than said above.
    ValueError
        If shapes do not fit each other or the pattern, arrays are on different devices or on one that is neither the
        CPU nor CUDA's, the name of a pattern, backend or precision is unknown, `scale` is not finite or, but for
        float64, beyond float32's largest number, or the backend takes no arrays of this device.
    RuntimeError
        If PyTorch would record a gradient through q, k or v, or they carry a tangent of forward-mode differentiation:
        nothing here is recorded.
    BackendUnavailable
        If the backend asked for cannot run here.

    Notes
    -----
    ``out[i] = Σ_j softmax_j(scale · q[i]·k[j]) v[j]`` over the allowed keys j of query i. Query row i stands at
    position ``i + kv_len - q_len``. A row with no allowed key gives 0. Values at keys that are not allowed have no
    influence, NaN included. Time is O(tiles · head_dim) where ``plan.efficiency`` relates tiles to allowed pairs;
    extra memory is O(batch · heads · q_len · head_dim).

    Examples
    --------
    >>> import numpy as np, spattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 100, 16), dtype=np.float32)
    >>> out = spattn.attention(q, k, v, spattn.patterns.SlidingWindow(8))
    >>> out.shape, out.dtype
    ((1, 2, 100, 16), dtype('float32'))
    """
    _arguments.check_options(backend, return_lse)
    routes, key = _routes.of_call(q, k, v, pattern, backend)
    route = routes.get(key)
    if route is not None and precision is None:
        found = route(q, k, v, None if scale is None else _arguments.check_scale(scale, q))
        if found is not None:
            return found if return_lse else found[0]
    _arguments.check_arrays(q, k, v)
    _arguments.check_shapes(q, k, v)
    scale = _arguments.check_scale(scale, q)
    _arguments.check_precision(precision, q, _resolve_backend(backend, q))
    _arguments.check_gradients("attention", q=q, k=k, v=v)
    module = _backends.load(_resolve_backend(backend, q))
    if not module.HOST_ARRAYS:
        plan = find_plan(module, pattern, q, k, v)
        out, lse = module.forward(q, k, v, plan, scale, precision=precision)
        if key is not None and key not in routes:
            _routes.remember(routes, key, module.route(q, k, v, plan, _arguments.check_scale(None, q)))
    else:
        arrays = [_host_array(name, x, module) for name, x in (("q", q), ("k", k), ("v", v))]
        plan = find_plan(module, pattern, *arrays)
        out, lse = (_arrays.from_numpy(x, q) for x in module.forward(*arrays, plan, scale))
    return (out, lse) if return_lse else out


@eager
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    pattern: Pattern | Plan | str | Any = "full",
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Any, Any, Any]:
    r"""Gradients of :func:`attention` with respect to q, k and v.

    Parameters
    ----------
    dout : (batch, heads_q, q_len, head_dim_v) array
        Gradient of the loss with respect to `out`; same kind, dtype and device as `q`.
    q, k, v : array
        The inputs of the forward call.
    out, lse : array
        What ``attention(q, k, v, pattern, scale=scale, return_lse=True)`` returned.
    pattern, scale, backend
        As in the forward call.

    Returns
    -------
    dq, dk, dv : array
        Shapes and dtype of q, k and v.

    Raises
    ------
    TypeError, ValueError, RuntimeError, BackendUnavailable
        As :func:`attention`, for all six arrays; BackendUnavailable also where the backend has no backward.

    Notes
    -----
    With ``P = exp(scale · q·k − lse)`` on the allowed pairs and ``δ = rowsum(dout ∘ out)``:
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
    _arguments.check_options(backend)
    _arguments.check_arrays(q, k, v)
    _arguments.check_shapes(q, k, v)
    _arguments.check_results(q, v, dout, out, lse)
    scale = _arguments.check_scale(scale, q)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    _arguments.check_gradients("attention_backward", **arrays)
    module = _backends.load(_resolve_backend(backend, q))
    if not hasattr(module, "backward"):
        raise BackendUnavailable(f"backend {module.__name__} has no backward yet; use backend='cpu' on host arrays")
    if not module.HOST_ARRAYS:
        return module.backward(dout, q, k, v, out, lse, find_plan(module, pattern, q, k, v), scale)
    host = [_host_array(name, x, module) for name, x in arrays.items()]
    plan = find_plan(module, pattern, *host[1:4])
    return tuple(_arrays.from_numpy(x, q) for x in module.backward(*host, plan, scale))


def find_plan(module, pattern, q, k, v) -> Plan:
    """The plan of `pattern` that a backend wants for these arrays."""
    lengths = q.shape[2], k.shape[2]
    if isinstance(pattern, Plan):
        if (pattern.q_len, pattern.kv_len) != lengths:
            raise ValueError(
                f"pattern: expected a plan for lengths {lengths[0]} × {lengths[1]}, "
                f"got one for {pattern.q_len} × {pattern.kv_len}"
            )
        validate(pattern)
        pattern = _plan_or_pattern(pattern, module, q, k, v)
        if isinstance(pattern, Plan):
            return pattern
    return module.plan_for(as_pattern(pattern), q, k, v)


def _plan_or_pattern(plan: Plan, module, q, k, v) -> Plan | Pattern:
    """The plan itself where its tiles suit the backend, otherwise its pattern, to be planned (and cached) again."""
    index = plan.variant
    if index.shape[0] not in (1, q.shape[0]) or index.shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"pattern: expected a plan for {q.shape[0]} batch entries and {q.shape[1]} heads, "
            f"got one for {index.shape[0]} and {index.shape[1]}"
        )
    if module.accepts(plan, q, k, v):
        return plan
    if plan.pattern is None:
        raise ValueError(f"pattern: expected a plan with tiles that the backend has kernels for, got {plan.tile}")
    return plan.pattern


def as_pattern(pattern) -> Pattern:
    """A pattern from anything that attention() takes as one."""
    if isinstance(pattern, Pattern):
        return pattern
    if isinstance(pattern, str):
        return get(pattern)
    if _arrays.kind(pattern) is not None and _arrays.dtype_name(pattern) == "bool":
        _arguments.check_plain("pattern", pattern)
        return Mask(_arrays.to_host(pattern))
    what = type(pattern).__name__
    if _arrays.kind(pattern) is not None:
        what = f"an array of {_arrays.dtype_name(pattern)}"
    raise TypeError(f"pattern: expected a Pattern, a registered name, a Plan or a bool array, got {what}")


def _resolve_backend(backend: str, q) -> str:
    if backend != "auto":
        return backend
    return "cpu" if _arrays.device_of(q) == "cpu" else "cuda"


def _host_array(name: str, x, module) -> np.ndarray:
    if _arrays.device_of(x) != "cpu":
        raise ValueError(f"{name}: expected host arrays for {module.__name__}, got one on {_arrays.device_of(x)}")
    return _arrays.to_numpy(x)
