"""Attention of T5 and its variants with spattn: the position bias stays a table of buckets."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..score import t5_bias
from ._without_data import WithoutData

__all__ = ["BucketBias"]

_FAMILIES = {
    "T5Attention": "t5",
    "MT5Attention": "mt5",
    "UMT5Attention": "umt5",
    "SwitchTransformersAttention": "switch_transformers",
}


class BucketBias(WithoutData):
    """A position bias (1, heads, q_len, kv_len) without data, which the model passes from layer to layer."""

    function: t5_bias
    """The bias of a call whose last query has the position of the last key."""
    last: int
    """The position of the last query."""
    compute: Callable[[], torch.Tensor]
    """Compute the bias as the model does."""

    @staticmethod
    def __new__(
        cls, function: t5_bias, q_len: int, kv_len: int, past: int, compute: Callable[[], torch.Tensor]
    ) -> BucketBias:
        table = function.table
        shape = (1, table.shape[1], q_len, kv_len)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=table.dtype, device=table.device)
        self.function, self.last, self.compute = function, past + q_len - 1, compute
        return self

    def __repr__(self) -> str:
        return f"BucketBias({self.function!r}, {tuple(self.shape)})"

    @classmethod
    def computed_with(cls, operation: Any) -> TypeError:
        return TypeError(
            "position_bias: this model computes with its position bias, which is a table of buckets "
            f'(operation {operation}); use attn_implementation="eager"'
        )


class _Buckets:
    """Mixin of attention modules: `compute_bias` returns a :class:`BucketBias`."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compute_bias(
        self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> torch.Tensor:
        past, compute = int(past_seen_tokens), super().compute_bias  # type: ignore[misc]

        def array() -> torch.Tensor:
            return compute(query_length, key_length, device=device, past_seen_tokens=past)

        embedding, farthest = self.relative_attention_bias, self.relative_attention_max_distance
        # An adapter's module, or one that is loaded when it is called, has its values elsewhere.
        plain = type(embedding) is torch.nn.Embedding and not embedding.weight.is_meta
        if not plain or self.config._attn_implementation != "spattn":
            return array()
        function = t5_bias(embedding.weight, not self.is_decoder, farthest)
        return BucketBias(function, query_length, key_length, past, array)


def __getattr__(name: str) -> Any:
    """Make the subclass of an attention class of Transformers on first use, so that others are not imported."""
    family = _FAMILIES.get(name)
    if family is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    globals()[name] = type(name, (_Buckets, base), {"__module__": __name__, "__doc__": base.__doc__})
    return globals()[name]
