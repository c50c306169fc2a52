"""JAX integration: attention under JAX transformations, directly on XLA buffers."""

from ._attention import attention
from ._kv_cache import KVCache

__all__ = ["KVCache", "attention"]
