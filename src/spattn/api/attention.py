"""Public functions for attention and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

from .. import dispatch
from .._util.imports import whole_imports
from ..arrays import compiling
from ..patterns import Pattern
from ..planning import Plan

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
    score: Callable[..., Any] | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    key_padding: Any = None,
    **others: Never,
) -> Any:
    r"""Compute softmax attention over the (query, key) pairs that a pattern allows.

    Parameters
    ----------
    q : (batch, heads_q, q_len, head_dim) array of float32 | float64 | float16 | bfloat16
        Query: a NumPy, PyTorch, CuPy or JAX array with any strides. NumPy's bfloat16 is ``ml_dtypes.bfloat16``.
    k : (batch, heads_kv, kv_len, head_dim) array
        Key, with the array library, dtype and device of `q`; ``heads_q % heads_kv == 0`` (grouped-query attention).
    v : (batch, heads_kv, kv_len, head_dim_v) array
        Value.
    pattern : Pattern, str, Plan, mask_mod, BlockMask, sparse matrix or mask, optional
        The allowed pairs. Default "full": every query attends to every key. Pass "causal" for causal attention.

        - A pattern, its class if that needs no parameters, or a plan from :func:`spattn.plan`. A pattern of GPU indices
          is read on the device (:mod:`spattn.patterns.dynamic`).
        - Text: a registered name, an expression like ``"causal & sliding_window(255, 0)"``, a pattern's repr or JSON.
        - A ``mask_mod(b, h, q_idx, kv_idx)`` or ``BlockMask`` of FlexAttention, whose indices count from the first
          query. Each call traces it again: convert it once (:mod:`spattn.patterns.interop`) if calls are short.
        - A sparse matrix of SciPy or PyTorch, (q_len, kv_len): its non-zero entries are allowed.
        - A boolean mask (True = attend) of shape (q_len, kv_len), (heads_q, q_len, kv_len) or (batch, heads_q, q_len,
          kv_len), whose leading axes may be 1; or an additive one, whose elements are all 0 (attend) or −∞.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    backend : {"auto", "cpu", "cuda", "reference"}, optional
        "auto" selects the backend by the device of the arrays. A named backend never falls back to another one.
    return_lse : bool, optional
        Also return the log-sum-exp of each row's scores.
    precision : {None, "tf32"}, optional
        None keeps the full precision of the dtype. "tf32" rounds the operands of both products to 11 significant bits
        (TF32) or more; it requires float32 inputs and the cuda backend.
    layout : {"bhsd", "bshd", "thd"}, optional
        Axis order of q, k, v and out. "bhsd" is the order above; "bshd" is (batch, length, heads, head_dim). If the
        pattern has a grid, its axes may replace the length axis: (batch, heads, \*grid, head_dim). "thd" is
        (total, heads, head_dim): a packed batch of variable-length sequences. The pattern must separate the
        sequences, as :meth:`~spattn.patterns.Documents.from_cu_seqlens` does.
    score : callable, optional
        A function ``(score, b, h, q, k) -> score`` of the scaled score, the batch entry, the query head and the
        positions of query and key, which replaces the scores of the allowed pairs before the softmax. It is traced
        once per call with symbols: see :mod:`spattn.score`, which also has ALiBi, soft-caps and position biases.
    sinks : (heads_q,) array, optional
        A logit per query head that takes part in the softmax without a value, as in gpt-oss. `score` and `scale` do
        not apply to it.
    dropout_p : float, optional
        Share of the attention weights to drop, in [0, 1), rounded to a multiple of 2⁻³²; the others are divided by
        ``1 - dropout_p``. Pass it in training only. :func:`spattn.testing.dropout_mask` returns the pairs.
    seed : int or integer array without axes, optional
        In [0, 2**64); required if ``dropout_p > 0``. Calls with equal seeds and shares drop the same pairs. A PyTorch
        tensor on the GPU of `q` is read by the kernels, modulo 2**64.
    key_padding : (batch, kv_len) array, optional
        Keys that are not padding: True, or 1 in a tokenizer's integer mask; or an additive mask of floats, 0 at tokens
        and −∞ at padding. The pattern is restricted to these keys. PyTorch's ``key_padding_mask`` is its complement.
    **others
        Not accepted: keywords of other attention functions raise a TypeError that says what to pass instead.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) array
        Array library, dtype, device and layout of `q`.
    lse : (batch, heads_q, q_len) array of float32 (float64 for float64 inputs), only with `return_lse`
        Natural logarithm; −inf for a row with no allowed key. It includes the sink, but no dropout. Heads precede
        queries in every layout: the shape is (batch, heads_q, \*grid) if q has a grid, and (heads_q, total) in "thd".

    Raises
    ------
    TypeError
        If an argument has the wrong type or an unsupported dtype; if array libraries or dtypes differ; if the dtype
        does not support `precision`; if an array or mask is masked, nested, quantized or without data (a meta tensor, a
        JAX tracer, a tensor under a :mod:`torch.func` derivative); if `pattern` is an integer mask, or a float mask
        with numbers other than 0 and −∞; if PyTorch traces the call and the pattern has no serialized form.
    ValueError
        If shapes do not match each other, the layout or the pattern; if arrays have a grid that is not the pattern's;
        if arrays are on different or unsupported devices, or the backend does not support their device; if the name of
        a pattern, backend, precision or layout is unknown; if `scale` is not finite, or exceeds the float32 range and
        `q` is not float64; if `dropout_p` or `seed` is out of range, or a seed is missing; if the pattern differs
        between batch entries under :func:`torch.func.vmap`.
    RuntimeError
        If q, k or v is a dual tensor: forward-mode differentiation is not supported.
    BackendUnavailableError
        If the named backend cannot run on this machine.

    Warns
    -----
    EfficiencyWarning
        Once per CPU plan, if fewer than 5 % of the computed pairs are allowed and dense attention is predicted to be
        faster.
    PlanningWarning
        If a new plan takes more than a second, or more than 0.25 s and ten times the predicted time of the call.

    Notes
    -----
    ``out[i] = Σ_j softmax_j(score(scale · q[i]·k[j])) v[j]`` over the allowed keys j of query i, where `score` is the
    identity by default. Query row i is at position ``i + kv_len - q_len``. A row with no allowed key gives 0. Keys and
    values outside the pattern have no influence on the result, NaN included.

    Time is O(tiles · head_dim), where ``plan.efficiency`` relates tiles to allowed pairs; extra memory is
    O(batch · heads · q_len · head_dim).

    PyTorch autograd differentiates out and lse once, through :func:`attention_backward`, also with respect to the
    tensors that `score` captures; double backward is not supported. In graphs of :func:`torch.compile` and
    :mod:`torch.export` the call is a single operator with the serialized pattern as an attribute. A mask is an input;
    so are tensors from which the program makes a pattern, and under :func:`torch.compile` all arrays of patterns. A
    score function's expression is an attribute, too, and what it captures and `seed` are inputs.
    ``torch.autocast`` casts q, k and v as it does for ``scaled_dot_product_attention``, except float64. In JAX programs
    use ``spattn.jax.attention``.

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
        with whole_imports:
            from ._habits import refuse

        refuse("attention", others)
    if not compiling():  # torch.compile would trace the checks, the planner and NumPy into the graph
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
            score=score,
            sinks=sinks,
            dropout_p=dropout_p,
            seed=seed,
            key_padding=key_padding,
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
        key_padding=key_padding,
        **modifiers(score, sinks, dropout_p, seed),
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
    score: Callable[..., Any] | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    key_padding: Any = None,
) -> tuple[Any, ...]:
    r"""Compute the gradients of :func:`attention` with respect to q, k and v, captured arrays and sinks.

    Parameters
    ----------
    dout : (batch, heads_q, q_len, head_dim_v) array
        Gradient with respect to `out`, with the array library, dtype and device of `q`.
    q, k, v : array
        Inputs of the forward call.
    out, lse : array
        Results of ``attention(q, k, v, pattern, scale=scale, return_lse=True)``.
    pattern
        As in the forward call.
    dlse : (batch, heads_q, q_len) array, optional
        Gradient with respect to `lse`, in its dtype; None means zero. It is ignored in rows with ``lse = -inf``.
    scale, backend, precision, layout, score, sinks, dropout_p, seed, key_padding
        As in the forward call.

    Returns
    -------
    dq, dk, dv : array
        Gradients with the shapes and dtype of q, k and v.
    dcaptured : tuple of arrays, only with `score`
        Gradients of the arrays of floats that the function captures, in the order of ``spattn.score.captured(score)``.
    dsinks : (heads_q,) array, only with `sinks`
        Gradient of the sinks.

    Raises
    ------
    TypeError, ValueError, RuntimeError, BackendUnavailableError
        As :func:`attention`, for all arrays.

    Notes
    -----
    With ``P = exp(scale · q·k − lse)`` on the allowed pairs and ``δ = rowsum(dout ∘ out) − dlse``:
    ``dv = Pᵀ dout``, ``dS = P ∘ (dout vᵀ − δ)``, ``dq = scale · dS k``, ``dk = scale · dSᵀ q``. P is recomputed tile by
    tile; extra memory is O(batch · heads · (q_len + kv_len) · head_dim). Results are bitwise deterministic. Dropout
    multiplies P in dv, and ``dout vᵀ``, by ``1 / (1 - dropout_p)`` or 0.
    ``torch.autocast`` does not cast the arguments.

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
    options: dict[str, Any] = {"dlse": dlse, "scale": scale, "backend": backend, "precision": precision}
    options |= modifiers(score, sinks, dropout_p, seed) | {"key_padding": key_padding}
    if not compiling():
        found = dispatch.attention_backward(*arrays, layout=layout, **options)
        if found is not NotImplemented:
            return found
    return _operators().attention_backward(*arrays, layout=layout, **options)


def modifiers(score: Any, sinks: Any, dropout_p: Any, seed: Any) -> dict[str, Any]:
    """Return the arguments that modify the softmax; empty if none of them has an effect."""
    if score is None and sinks is None and dropout_p == 0.0:
        return {}
    return {"score": score, "sinks": sinks, "dropout_p": dropout_p, "seed": seed}


def _operators() -> Any:
    """Import and return the module of the PyTorch custom operators."""
    if compiling():
        from ..dispatch import torch_operators  # not under the lock, which torch.compile cannot trace

        return torch_operators
    with whole_imports:
        from ..dispatch import torch_operators

    return torch_operators
