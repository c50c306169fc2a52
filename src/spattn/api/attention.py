"""Attention and its gradients: the public calls."""

from __future__ import annotations

from typing import Any, Never

from .. import dispatch
from .._util.imports import whole_imports
from ..arrays import compiling
from ..patterns import Pattern
from ..planning import Plan
from ._habits import refuse

__all__ = ["attention", "attention_backward"]


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
    layout: str = "bhsd",
    **others: Never,
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
        (q_len, kv_len), (heads_q, q_len, kv_len) or (batch, heads_q, q_len, kv_len), or a pattern of indices
        on a GPU (:mod:`spattn.patterns.dynamic`). Leading axes of a boolean array may be 1, as in PyTorch.
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
    layout : {"bhsd", "bshd", "thd"}, optional
        The order of the axes of q, k, v and out. "bhsd" is as said above; "bshd" is (batch, length, heads, head_dim).
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
    BackendUnavailableError
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
    if others:
        refuse("attention", others)
    if not compiling():  # else torch.compile would trace the checks, the planner and NumPy as part of the model
        found = dispatch.attention(
            q,
            k,
            v,
            pattern,
            scale=scale,
            backend=backend,
            return_lse=return_lse,
            precision=precision,
            layout=layout,
            gradients=attention_backward,
        )
        if found is not NotImplemented:
            return found
    return _operators().attention(
        q,
        k,
        v,
        pattern,
        scale=scale,
        backend=backend,
        return_lse=return_lse,
        precision=precision,
        layout=layout,
    )


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
    TypeError, ValueError, RuntimeError, BackendUnavailableError
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
    arrays = dout, q, k, v, out, lse, pattern
    if not compiling():
        found = dispatch.attention_backward(
            *arrays, dlse=dlse, scale=scale, backend=backend, precision=precision, layout=layout
        )
        if found is not NotImplemented:
            return found
    return _operators().attention_backward(
        *arrays, dlse=dlse, scale=scale, backend=backend, precision=precision, layout=layout
    )


def _operators() -> Any:
    """The custom operators that stand for the calls in PyTorch's graphs."""
    if compiling():
        from ..dispatch import torch_operators  # torch.compile cannot trace the lock

        return torch_operators
    with whole_imports:
        from ..dispatch import torch_operators

    return torch_operators
