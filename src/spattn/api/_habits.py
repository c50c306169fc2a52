"""Error hints for keyword arguments of other attention APIs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

__all__ = ["refuse"]

_HINTS = {
    "attn_mask": "pass a bool mask as pattern=mask",
    "block_mask": "pass pattern=spattn.patterns.interop.from_block_mask(block_mask)",
    "causal": 'pass pattern="causal"',
    "dropout": "pass dropout_p= and seed= in training",
    "dropout_rate": "pass dropout_p= and seed= in training",
    "dropout_rng": "pass an integer as seed=",
    "p_dropout": "pass dropout_p= and seed= in training",
    "enable_gqa": "heads_q may be any multiple of heads_kv",
    "is_causal": 'pass pattern="causal" for True; every key is allowed without a pattern',
    "mask": "pass a bool mask as pattern=mask",
    "alibi_slopes": "pass score=spattn.score.alibi(slopes)",
    "attn_bias": "pass score=spattn.score.bias(array)",
    "learnable_sink": "pass sinks=",
    "logits_soft_cap": "pass score=spattn.score.softcap(cap)",
    "s_aux": "pass sinks=",
    "score_mod": "pass score=spattn.score.from_score_mod(function)",
    "softcap": "pass score=spattn.score.softcap(cap)",
    "softmax_scale": "pass scale=",
    "sm_scale": "pass scale=",
    "window_size": "pass pattern=spattn.patterns.interop.from_flash_attention(...), or SlidingWindow(left, right)",
}


def refuse(function: str, names: Iterable[str]) -> NoReturn:
    """Raise TypeError for unexpected keyword arguments, with a hint for those of other attention APIs."""
    name = next(iter(names))
    hint = f"; {_HINTS[name]}" if name in _HINTS else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
