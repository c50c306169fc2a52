"""Functions with the signatures of PyTorch's attention functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention.bias import CausalBias

from ..api.attention import attention
from ..arrays import traced
from ..dispatch.torch_operators import draw_seed
from ..score.composition import compose
from ..score.library.bias import bias
from ..score.library.from_score_mod import from_score_mod

__all__ = ["Masked", "flex_attention", "masked", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention with the arguments of ``torch.nn.functional.scaled_dot_product_attention``.

    Parameters
    ----------
    query : (..., heads_q, q_len, head_dim) tensor
        Two or more axes; leading axes of the three tensors broadcast.
    key : (..., heads_kv, kv_len, head_dim) tensor
    value : (..., heads_kv, kv_len, head_dim_v) tensor
    attn_mask : tensor, optional
        Broadcasts to (..., heads_q, q_len, kv_len). Boolean: True where a query attends to a key. Floating-point, with
        the dtype of `query` or float32: added to the scores; it gets a gradient if it requires one, and pairs with −∞
        are skipped. Or a ``torch.nn.attention.bias.CausalBias``.
    dropout_p : float, optional
        Share of the attention weights to drop; also in evaluation mode, as in PyTorch. Each call draws a seed from
        PyTorch's generator on the CPU.
    is_causal : bool, optional
        Allow key j for query i if ``j <= i``: the first query is aligned with the first key, unlike "causal" of
        :func:`spattn.attention`.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    enable_gqa : bool, optional
        Whether heads_q may be a multiple of heads_kv.

    Returns
    -------
    out : (..., heads_q, q_len, head_dim_v) tensor

    Raises
    ------
    TypeError
        If `attn_mask` has another dtype; as :func:`spattn.attention`.
    ValueError
        If `attn_mask` is given with ``is_causal=True``; if shapes do not broadcast; if heads_q differs from heads_kv
        and `enable_gqa` is False; as :func:`spattn.attention`.

    Notes
    -----
    A row with no allowed key gives 0, as PyTorch 2.13 does. A mask is read on the host during planning, which
    synchronizes with the GPU; a pattern given to :func:`spattn.attention` is faster.

    Examples
    --------
    >>> import torch
    >>> from spattn.torch import scaled_dot_product_attention
    >>> q, k, v = torch.randn(3, 2, 4, 100, 16)
    >>> out = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> same = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(out, same, atol=1e-5)
    True
    """
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal: expected False with attn_mask; write attn_mask=attn_mask & causal_mask")
    q, k, v, leading = _four_axes(query, key, value, enable_gqa)
    pattern: Any = "full"
    given = Masked(None, None)
    if is_causal:
        pattern = "causal" if q.shape[2] == k.shape[2] else "queries_at(causal, 0)"
    elif isinstance(attn_mask, CausalBias):
        pattern = attn_mask
    elif attn_mask is not None:
        given = masked(_broadcast(attn_mask, leading, q, k), q, k)
    key_padding = None
    if given.allowed is not None and given.allowed.ndim == 2:
        key_padding = given.allowed
    elif given.allowed is not None:
        pattern = given.allowed
    out = attention(
        q,
        k,
        v,
        pattern,
        scale=scale,
        score=given.score,
        dropout_p=dropout_p,
        seed=draw_seed() if dropout_p != 0.0 else None,
        key_padding=key_padding,
    )
    return out.reshape(*leading[max(0, 4 - _axes(query, key, value)) :], *out.shape[2:])


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute attention with the arguments of ``torch.nn.attention.flex_attention.flex_attention``.

    Parameters
    ----------
    query : (batch, heads_q, q_len, head_dim) tensor
    key : (batch or 1, heads_kv, kv_len, head_dim) tensor
    value : (batch or 1, heads_kv, kv_len, head_dim_v) tensor
    score_mod : callable, optional
        ``(score, b, h, q_idx, kv_idx) -> score``; the tensors that it captures get gradients.
    block_mask : BlockMask, optional
        From ``create_block_mask``, for the lengths of `query` and `key`. Its mask_mod is traced in each call.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    enable_gqa : bool, optional
        Whether heads_q may be a multiple of heads_kv.
    return_lse : bool, optional
        Also return the log-sum-exp of the scores.
    kernel_options : dict, optional
        Must be empty: each backend chooses its tiles.
    return_aux : AuxRequest, optional
        Return an ``AuxOutput`` with `lse` if requested; ``max_scores=True`` is not supported.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) tensor
    lse : (batch, heads_q, q_len) tensor, only with `return_lse`
        Natural logarithm, as in FlexAttention; −∞ for a row with no allowed key, whose output is 0.
    aux : AuxOutput, only with `return_aux`

    Raises
    ------
    TypeError
        As :func:`spattn.attention` and :func:`spattn.patterns.interop.from_block_mask`.
    ValueError
        If the tensors do not have four axes; if `block_mask` has other lengths; if heads_q differs from heads_kv and
        `enable_gqa` is False; if an argument has an unsupported value; as :func:`spattn.attention`.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from spattn.torch import flex_attention
    >>> q, k, v = torch.randn(3, 2, 4, 100, 16)
    >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 100, 100, device="cpu")
    >>> flex_attention(q, k, v, block_mask=causal).shape
    torch.Size([2, 4, 100, 16])
    """
    if any(x.ndim != 4 for x in (query, key, value)):
        raise ValueError(f"query: expected (batch, heads, length, head_dim), got {tuple(query.shape)}")
    if kernel_options:
        raise ValueError(f"kernel_options: each backend chooses its tiles; leave out {', '.join(kernel_options)}")
    if return_lse and return_aux is not None:
        raise ValueError("return_lse: expected False with return_aux; write return_aux=AuxRequest(lse=True)")
    if return_aux is not None and return_aux.max_scores:
        raise ValueError("return_aux: max_scores is not supported; write return_aux=AuxRequest(lse=True)")
    q, k, v, _ = _four_axes(query, key, value, enable_gqa)
    if block_mask is not None:
        _check_lengths(block_mask, q.shape[2], k.shape[2])
    out, lse = attention(
        q,
        k,
        v,
        "full" if block_mask is None else block_mask,
        scale=scale,
        score=None if score_mod is None else from_score_mod(score_mod),
        return_lse=True,
    )
    if return_aux is None:
        return (out, lse) if return_lse else out
    module = sys.modules[type(return_aux).__module__]  # of AuxRequest, which PyTorch 2.8 lacks
    return out, module.AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)


def _check_lengths(block_mask: Any, *lengths: int) -> None:
    """Raise ValueError for a BlockMask of other lengths, which a mask_mod that indexes tensors would not notice."""
    shape = getattr(block_mask, "shape", None)
    if shape is None:
        raise TypeError(f"block_mask: expected a BlockMask, got {type(block_mask).__name__}")
    one_block = all(size >= 1 << 30 for size in block_mask.BLOCK_SIZE)  # FlexAttention's mask of all pairs
    if tuple(shape[-2:]) != lengths and not one_block:
        raise ValueError(
            f"block_mask: expected {lengths[0]} queries and {lengths[1]} keys, got {tuple(shape)}; write "
            f"create_block_mask(mask_mod, B, H, {lengths[0]}, {lengths[1]})"
        )


def _axes(*tensors: torch.Tensor) -> int:
    return max(x.ndim for x in tensors)


def _four_axes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Return q, k and v of one batch axis, whose heads divide q's, and the leading axes of the result, heads last."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 2:
            raise ValueError(f"{name}: expected at least two axes, got shape {tuple(x.shape)}")
    q, k, v = (x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x for x in (query, key, value))
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    except RuntimeError as error:
        raise ValueError(f"query, key, value: batch axes must broadcast, got {_shapes(q, k, v)}") from error
    heads = max(x.shape[-3] for x in (q, k, v))
    fit = [x.shape[-3] for x in (k, v)]
    if enable_gqa:
        if q.shape[-3] != heads or any(not n or heads % n for n in fit):
            raise ValueError(f"key, value: numbers of heads must divide the query's, got {_shapes(q, k, v)}")
    elif any(n not in (1, heads) for n in (q.shape[-3], *fit)):
        raise ValueError(f"key, value: heads differ; write enable_gqa=True for grouped heads, got {_shapes(q, k, v)}")
    if fit[0] != fit[1]:
        k, v = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (k, v))
    q = q.expand(*batch, heads, -1, -1)
    k, v = (x.expand(*batch, -1, -1, -1) for x in (k, v))
    if len(batch) != 1:
        q, k, v = (x.flatten(0, len(batch) - 1) for x in (q, k, v))
    return q, k, v, (*batch, heads)


def _shapes(*tensors: torch.Tensor) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)


# -- masks -------------------------------------------------------------------------------------------------------------


class Masked(NamedTuple):
    """A mask of PyTorch: the allowed pairs or keys, and what is added to the scores; None if all, or nothing.

    `allowed` has the shape (batch or 1, heads or 1, q_len, kv_len) or, for keys, (batch or 1, kv_len).
    """

    allowed: torch.Tensor | None
    score: Callable[..., Any] | None

    def joined(self, other: Masked) -> Masked:
        """Return both masks in one."""
        scores = [x for x in (self.score, other.score) if x is not None]
        score = compose(*scores) if len(scores) == 2 else next(iter(scores), None)
        one, two = self.allowed, other.allowed
        if one is None or two is None:
            return Masked(two if one is None else one, score)
        if one.ndim != two.ndim:
            one, two = (x[:, None, None] if x.ndim == 2 else x for x in (one, two))
        return Masked(one & two, score)


def masked(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Masked:
    """Convert a mask with four axes that broadcast: a boolean one, or one that is added to the scores."""
    if mask.dtype == torch.bool:
        return Masked(_allowed(mask, q, k), None)
    values = mask.detach()
    allowed = values != -torch.inf
    if not (torch.compiler.is_compiling() or traced(q)):
        if not mask.requires_grad and bool((~allowed | (values == 0)).all()):
            return Masked(_allowed(allowed, q, k), None)
        if bool(allowed.all()):
            return Masked(None, bias(mask))
    return Masked(_allowed(allowed, q, k), bias(mask.masked_fill(~allowed, 0.0)))  # kernels add finite numbers only


def _allowed(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if mask.shape[1] == mask.shape[2] == 1:
        return mask[:, 0, 0].expand(-1, k.shape[2])
    return mask.expand(-1, -1, q.shape[2], k.shape[2])


def _broadcast(mask: Any, leading: tuple[int, ...], q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return a mask with axes (batch or 1, heads or 1, q_len or 1, kv_len or 1)."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attn_mask: expected a tensor, got {type(mask).__name__}")
    full = *leading, q.shape[2], k.shape[2]
    if mask.dtype not in (torch.bool, q.dtype, torch.float32):
        hint = f"mask.to({q.dtype})" if mask.is_floating_point() else "mask.bool()"
        raise TypeError(f"attn_mask: expected bool, {q.dtype} or float32, got {mask.dtype}; write {hint}")
    axes = mask.ndim
    if not 2 <= axes <= len(full) or any(n not in (1, m) for n, m in zip(mask.shape[::-1], full[::-1], strict=False)):
        raise ValueError(f"attn_mask: expected a shape that broadcasts to {full}, got {tuple(mask.shape)}")
    mask = mask[(None,) * (len(full) - axes)]
    if len(full) > 4:
        batch = [1] * (len(full) - 3) if all(n == 1 for n in mask.shape[:-3]) else full[:-3]
        mask = mask.expand(*batch, -1, -1, -1).flatten(0, len(full) - 4)
    return mask
