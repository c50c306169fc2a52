"""BLOOM's attention with spattn."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bloom import modeling_bloom

from ._attention import attend

__all__ = ["BloomAttention"]


class BloomAttention(modeling_bloom.BloomAttention):  # type: ignore[misc]
    """Transformers' module with the scores, softmax and product with values by spattn."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: torch.Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention's output with the residual added; `alibi` is (batch * heads, 1, kv_len)."""
        if self.pretraining_tp > 1 and self.slow_but_exact:
            raise ValueError("slow_but_exact: expected False, because this model's projection then omits its bias")
        batch, q_len, _ = hidden_states.shape
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        out, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.inv_norm_factor,
            dropout=self.attention_dropout.p if self.training else 0.0,
            position_bias=alibi.view(batch, self.num_heads, 1, -1),
            output_attentions=output_attentions,
        )
        out = self.dense(out.reshape(batch, q_len, -1))
        return modeling_bloom.dropout_add(out, residual, self.hidden_dropout, self.training), None
