"""Attention function for Transformers' AttentionInterface."""

from __future__ import annotations

from typing import Any

import torch

from .. import score
from ..api.attention import attention
from ..dispatch.torch_operators import draw_seed
from ..patterns import Causal, Full, KeyPadding, Mask, Pattern
from ..score import ScoreFunction
from ._cache import CachedKeys
from ._configuration import restriction
from ._functions import both
from ._mask import PatternMask, of_layer
from ._t5 import BucketBias

__all__ = ["attend", "refuse"]

_BEYOND = {
    "head_mask": "head masks are not supported",
    "indices": "indexer-selected keys are not supported",
    "block_indices": "indexer-selected keys are not supported",
    "cache": "paged caches are not supported",
    "cu_seq_lens_q": "pass packed sequences as position_ids",
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
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of q, k, v (batch, heads, tokens, head_dim); return (batch, tokens, heads, head_dim), None.

    `softcap` caps the scaled scores, then `position_bias` and the biases in `attention_mask` are added, as in
    Transformers' eager and FlexAttention functions. `s_aux` (heads,) and `sinks` (batch, heads, q_len, 1) are logits of
    the softmax without a value.
    """
    refuse(others)
    layer, dropped = None, 0
    if isinstance(key, CachedKeys):
        layer, dropped, key = key.layer, key.dropped, key.kept
    by_layer = layer is not None and layer.with_first and dropped > 0
    if by_layer:
        _refuse_beside_sinks(attention_mask, position_bias, sinks, dropout)
        pattern, kv_len, mask_bias = None, 0, None
    else:
        pattern, kv_len, mask_bias = _pattern(module, query, key, attention_mask, is_causal, dropped)
    functions: list[ScoreFunction] = [] if softcap is None else [score.softcap(softcap)]
    functions += [] if position_bias is None else [_biased(position_bias, kv_len, dropped)]
    functions += [] if mask_bias is None else [_biased(mask_bias, kv_len)]
    if sinks is not None:
        if s_aux is not None:
            raise ValueError("sinks: expected None, because s_aux has sinks, too")
        # softmax([scores, sink]) = softmax([scores - sink, 0])
        functions.append(score.bias(-sinks))
        s_aux = sinks.new_zeros(query.shape[1])
    options: dict[str, Any] = {"scale": scaling, "sinks": s_aux}
    options["score"] = score.compose(*functions) if functions else None
    if layer is not None and by_layer:
        out = layer.attention(query, attention_mask, module, **options)
    else:
        options |= _dropout(dropout)
        out = attention(query, key[:, :, :kv_len], value[:, :, :kv_len], pattern, **options)
        if layer is not None:
            layer.store(attention_mask)
    return out.transpose(1, 2).contiguous(), None


def _refuse_beside_sinks(mask: Any, position_bias: Any, sinks: Any, dropout: float) -> None:
    """Raise ValueError for what a layer of a cache that keeps first keys does not compute."""
    given = {"attention_mask": getattr(mask, "bias", None), "position_bias": position_bias, "sinks": sinks}
    given["dropout"] = dropout or None
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}: not supported in a layer of spattn.transformers.Cache that keeps first keys, those of "
                "config.spattn_pattern; use a cache of Transformers"
            )


def refuse(given: dict[str, Any]) -> None:
    """Raise ValueError for arguments of an attention layer that would be ignored."""
    for name, expected in _BEYOND.items():
        value = given.get(name)
        plain = isinstance(value, (bool, int, float))
        if value if plain else value is not None:
            got = value if plain else type(value).__name__
            raise ValueError(f'{name}: {expected} with attn_implementation="spattn", got {got}')


def _dropout(p: float) -> dict[str, Any]:
    """Return the keywords of attention dropout; models pass 0 outside training."""
    return {"dropout_p": p, "seed": draw_seed()} if p else {}


def _biased(array: torch.Tensor, kv_len: int, dropped: int = 0) -> ScoreFunction:
    """Return the score function of a bias, without the columns of dropped keys and of unused cache entries."""
    if isinstance(array, BucketBias):
        if array.last == dropped + kv_len - 1:
            return array.function
        array = array.compute()
    return score.bias(_columns(array, dropped, kv_len))


def _columns(array: torch.Tensor, dropped: int, kv_len: int) -> torch.Tensor:
    return array if array.shape[-1] == 1 else array[..., dropped : dropped + kv_len]


def _pattern(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
    dropped: int,
) -> tuple[Pattern, int, torch.Tensor | None]:
    """Return the pattern of a layer, its number of keys and its additive bias.

    The mask is a PatternMask, a 4-D tensor or None, of all keys and of `dropped` earlier ones.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    if isinstance(attention_mask, PatternMask):
        if attention_mask.shape[2:] != (q_len, dropped + kv_len):
            got = tuple(attention_mask.shape[2:])
            raise ValueError(
                f"attention_mask: expected a mask for q_len={q_len} and kv_len={dropped + kv_len}, got {got}"
            )
        mask, bias = attention_mask.behind(dropped, module), attention_mask.bias
        return mask.of(module), mask.kv_len, None if bias is None else _columns(bias, dropped, mask.kv_len)
    if dropped:
        raise ValueError(
            f"attention_mask: expected None or a mask of shape (batch, tokens), got {type(attention_mask).__name__} "
            "from the model, for a layer of spattn.transformers.Cache that dropped keys; use a cache of Transformers"
        )
    own: Pattern
    added = None
    if attention_mask is not None:
        own, added = _given(attention_mask)
    # Layers without is_causal are causal, as in Transformers' sdpa_attention_forward.
    elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        own = Full()
    elif q_len in (1, kv_len):
        own = Causal()
    else:
        raise ValueError(f"attention_mask is required when q_len ({q_len}) differs from kv_len ({kv_len})")
    return both(own, of_layer(restriction(getattr(module, "config", None)), module)), kv_len, added


def _given(mask: torch.Tensor) -> tuple[Pattern, torch.Tensor | None]:
    """Return the pattern of a 4-D mask, boolean (True = attend) or additive, and the bias of an additive one.

    −inf and the dtype's minimum mask a pair; other values, such as position biases, are added to scores.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        got = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: expected a tensor of shape (batch, heads, q_len, kv_len), got {got}")
    added = None
    if mask.is_floating_point():
        masked = mask <= torch.finfo(mask.dtype).min
        # One transfer to the host. A learned bias is added even if it is zero: it has a gradient.
        masks, biased = torch.stack([masked.any(), (~masked & (mask != 0)).any()]).tolist()
        added = mask if biased or mask.requires_grad else None
        if added is not None and not masks:
            return Full(), added
        mask = ~masked
    return KeyPadding(mask) if mask.shape[1:3] == (1, 1) else Mask(mask), added
