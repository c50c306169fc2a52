"""Error hints for keyword arguments of other attention APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = ["refuse"]

_CAUSAL = 'write pattern="causal", or pattern="queries_at(causal, 0)" to align the first query with the first key'
_DROPOUT = "write dropout_p= and seed= in training"
_MASK = "write pattern=mask, True where a query attends; a bias is score=spattn.score.bias(array)"
_PADDING = "write key_padding=mask, True at tokens"
_LENGTHS = "write pattern=spattn.patterns.Documents.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k)"
_SEQUENCES = "write key_padding=spattn.patterns.KeyPadding.from_lengths(lengths, kv_len)"
_NONE = "leave it out"


def _causal(value: Any) -> str:
    return _CAUSAL if value else "leave it out: without a pattern, every key is allowed"


def _window(value: Any) -> str:
    """FlashAttention's (left, right) or JAX's local_window_size, an int or (left, right)."""
    left, right = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, value)
    if not isinstance(left, int) or not isinstance(right, int):
        left, right = "left", "right"
    return f'write pattern="sliding_window({left}, {right})", or "causal & sliding_window({left}, 0)"'


def _tokens(value: Any) -> str:
    """Transformers' sliding_window, which counts the query's own key."""
    before = value - 1 if isinstance(value, int) else "tokens - 1"
    return f'write pattern="sliding_window({before}, 0)"'


_HINTS: dict[str, str | Callable[[Any], str]] = {
    # PyTorch
    "attn_mask": _MASK,
    "is_causal": _causal,
    "enable_gqa": f"{_NONE}: heads_q may be any multiple of heads_kv",
    "block_mask": "write pattern=block_mask",
    "mask_mod": "write pattern=mask_mod",
    "score_mod": "write score=spattn.score.from_score_mod(score_mod)",
    "kernel_options": f"{_NONE}: each backend chooses its tiles",
    "return_aux": "write return_lse=True",
    "key_padding_mask": "write key_padding=~key_padding_mask: True marks tokens, not padding",
    "need_weights": f"{_NONE}: attention weights are never materialized",
    "average_attn_weights": f"{_NONE}: attention weights are never materialized",
    # FlashAttention
    "causal": _causal,
    "softmax_scale": "write scale=softmax_scale",
    "window_size": _window,
    "softcap": "write score=spattn.score.softcap(softcap)",
    "alibi_slopes": "write score=spattn.score.alibi(alibi_slopes, symmetric=True)",
    "deterministic": f"{_NONE}: results are always deterministic",
    "return_attn_probs": "write return_lse=True; attention weights are never materialized",
    "return_softmax_lse": "write return_lse=True",
    "cu_seqlens_q": _LENGTHS,
    "cu_seqlens_k": _LENGTHS,
    "max_seqlen_q": _NONE,
    "max_seqlen_k": _NONE,
    "cache_seqlens": _SEQUENCES,
    "learnable_sink": "write sinks=learnable_sink",
    # xFormers, Triton
    "attn_bias": "write pattern=attn_bias for a mask of xFormers, and score=spattn.score.bias(attn_bias) for a tensor",
    "p": _DROPOUT,
    "p_dropout": _DROPOUT,
    "sm_scale": "write scale=sm_scale",
    # JAX, Keras
    "bias": "write score=spattn.score.bias(bias)",
    "mask": _MASK,
    "query_seq_lengths": _SEQUENCES,
    "key_value_seq_lengths": _SEQUENCES,
    "local_window_size": _window,
    "implementation": "write backend=",
    "logits_soft_cap": "write score=spattn.score.softcap(logits_soft_cap)",
    "dropout_rng": "write an integer as seed=",
    "dropout_rate": _DROPOUT,
    "segment_ids": "write pattern=spattn.patterns.Documents.from_segment_ids(segment_ids)",
    "use_causal_mask": _causal,
    # DeepSpeed
    "sparsity_config": "write pattern=spattn.patterns.interop.from_deepspeed(config), with a dict",
    # Transformers
    "attention_mask": "write key_padding=attention_mask for (batch, kv_len), and pattern=attention_mask for pairs",
    "dropout": _DROPOUT,
    "scaling": "write scale=scaling",
    "sliding_window": _tokens,
    "s_aux": "write sinks=s_aux",
    "output_attentions": f"{_NONE}: attention weights are never materialized",
}


def refuse(function: str, given: Mapping[str, Any]) -> NoReturn:
    """Raise TypeError for unexpected keyword arguments, with the line to write instead of those of other APIs."""
    name, value = next(iter(given.items()))
    hint = _HINTS.get(name, "")
    advice = hint(value) if callable(hint) else hint
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{'; ' * bool(advice)}{advice}")
