"""MPT's attention with spattn."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpt import modeling_mpt

from ._attention import attend, refuse

__all__ = ["MptAttention", "MptBlock"]


class MptAttention(modeling_mpt.MptAttention):  # type: ignore[misc]
    """Transformers' module with the scores, softmax and product with values by spattn."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: torch.Tensor | None,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention's output; `position_bias` is (heads, 1, max_seq_len), for the last keys of a cache."""
        cache = past_key_values if cache is None else cache  # its name in older versions
        batch, q_len, _ = hidden_states.shape
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            x.reshape(batch, q_len, self.n_heads, self.head_dim).transpose(1, 2) for x in qkv.chunk(3, dim=2)
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        kv_len = key.shape[2]
        if position_bias is not None:
            if position_bias.shape[2] < kv_len:
                raise ValueError(f"max_seq_len: expected at least {kv_len} (keys), got {self.max_seq_length}")
            position_bias = position_bias[..., position_bias.shape[2] - kv_len :]
        out, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.softmax_scale,
            dropout=self.attn_dropout_p if self.training else 0.0,
            position_bias=position_bias,
        )
        return self.out_proj(out.reshape(batch, q_len, -1)), None


class MptBlock(modeling_mpt.MptBlock):  # type: ignore[misc]
    """Transformers' module, which does not pass `output_attentions` on to its attention module."""

    def forward(self, *arguments: Any, output_attentions: bool = False, **others: Any) -> Any:
        refuse({"output_attentions": output_attentions})
        return super().forward(*arguments, **others)
