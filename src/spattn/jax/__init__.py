"""JAX integration: attention under JAX transformations, directly on XLA buffers."""

from ._attention import attention
from ._kv_cache import KVCache
from ._sequence import sequence_attention

__all__ = ["KVCache", "attention", "sequence_attention"]
