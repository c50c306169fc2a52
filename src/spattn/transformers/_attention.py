"""Attention as layers of Transformers call it."""

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
    "softcap": "no soft-capping of logits",
    "s_aux": "no learnt sinks",
    "sinks": "no learnt sinks",
    "position_bias": "no bias of positions",
    "head_mask": "no mask of heads",
    "indices": "no keys that an indexer chooses",
    "block_indices": "no keys that an indexer chooses",
    "cache": "no paged cache",
    "cu_seq_lens_q": "packed sequences told by position_ids",
    "dropout": "no dropout of weights, so 0 in the configuration, or eval(),",
    "output_attentions": "no weights to return, which are nowhere written down",
}
"""Arguments that change the result, or ask for another one, and what is expected of each."""


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
    """The attention of "spattn": (batch, heads, tokens, head_dim) in, (batch, tokens, heads, head_dim) and None out."""
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
            raise ValueError(f'{name}: expected {expected} with attn_implementation="spattn", got {got}')


def _pattern(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
) -> Pattern:
    """The pattern of a layer, also of one whose model has made no mask, or got one of four axes."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if isinstance(attention_mask, PatternMask):
        if attention_mask.shape[2:] != (q_len, kv_len):
            got = tuple(attention_mask.shape[2:])
            raise ValueError(f"attention_mask: expected one for {q_len} queries and {kv_len} keys, got one for {got}")
        return attention_mask.of(module)
    if attention_mask is not None:
        own = _given(attention_mask)
    # A layer that does not say is causal, as in Transformers' own implementation.
    elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        own = Full()
    elif q_len in (1, kv_len):
        own = Causal()
    else:
        raise ValueError(f"attention_mask: expected one, as {q_len} queries may attend to {kv_len} keys; got None")
    return both(own, of_layer(restriction(getattr(module, "config", None)), module))


def _given(mask: torch.Tensor) -> Pattern:
    """A mask of four axes: True at what is allowed, or added to logits."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        got = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: expected a tensor of shape (batch, heads, q_len, kv_len), got {got}")
    if mask.is_floating_point():
        if not ((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all():
            raise ValueError("attention_mask: expected 0, and −inf or the dtype's least number, which are no biases")
        mask = mask == 0
    return KeyPadding(mask) if mask.shape[1:3] == (1, 1) else Mask(mask)
