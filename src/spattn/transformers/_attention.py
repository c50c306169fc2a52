"""Attention function for Transformers' AttentionInterface."""

from __future__ import annotations

from typing import Any

import torch

from ..api.attention import attention
from ..patterns import Causal, Full, KeyPadding, Mask, Pattern
from ._configuration import restriction
from ._functions import both
from ._mask import PatternMask, of_layer

__all__ = ["attend"]

_BEYOND = {
    "softcap": "logit soft-capping is not supported",
    "s_aux": "learned sinks are not supported",
    "sinks": "learned sinks are not supported",
    "position_bias": "position biases are not supported",
    "head_mask": "head masks are not supported",
    "indices": "indexer-selected keys are not supported",
    "block_indices": "indexer-selected keys are not supported",
    "cache": "paged caches are not supported",
    "cu_seq_lens_q": "pass packed sequences as position_ids",
    "dropout": "must be 0 (set it in the configuration, or call eval())",
    "output_attentions": "attention weights are never materialized",
}
"""Error messages of unsupported arguments, which would change the result or request further results."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of q, k, v (batch, heads, tokens, head_dim); return (batch, tokens, heads, head_dim), None."""
    _refuse({"dropout": dropout} | others)
    pattern, kv_len = _pattern(module, query, key, attention_mask, is_causal), key.shape[2]
    if isinstance(attention_mask, PatternMask):
        kv_len = attention_mask.kv_len
    out = attention(query, key[:, :, :kv_len], value[:, :, :kv_len], pattern, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _refuse(given: dict[str, Any]) -> None:
    for name, expected in _BEYOND.items():
        value = given.get(name)
        plain = isinstance(value, (bool, int, float))
        if value if plain else value is not None:
            got = value if plain else type(value).__name__
            raise ValueError(f'{name}: {expected} with attn_implementation="spattn", got {got}')


def _pattern(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
) -> Pattern:
    """Return the pattern of a layer, from a PatternMask, a 4-D mask tensor, or no mask."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if isinstance(attention_mask, PatternMask):
        if attention_mask.shape[2:] != (q_len, kv_len):
            got = tuple(attention_mask.shape[2:])
            raise ValueError(f"attention_mask: expected a mask for q_len={q_len} and kv_len={kv_len}, got {got}")
        return attention_mask.of(module)
    if attention_mask is not None:
        own = _given(attention_mask)
    # Layers without is_causal are causal, as in Transformers' sdpa_attention_forward.
    elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        own = Full()
    elif q_len in (1, kv_len):
        own = Causal()
    else:
        raise ValueError(f"attention_mask is required when q_len ({q_len}) differs from kv_len ({kv_len})")
    return both(own, of_layer(restriction(getattr(module, "config", None)), module))


def _given(mask: torch.Tensor) -> Pattern:
    """Return the pattern of a 4-D mask, boolean (True = attend) or additive."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        got = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: expected a tensor of shape (batch, heads, q_len, kv_len), got {got}")
    if mask.is_floating_point():
        if not ((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all():
            raise ValueError(
                "attention_mask: expected 0 (attend) and −inf or the dtype's minimum (mask); additive biases are not "
                "supported"
            )
        mask = mask == 0
    return KeyPadding(mask) if mask.shape[1:3] == (1, 1) else Mask(mask)
