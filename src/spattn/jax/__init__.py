"""JAX integration: attention under JAX transformations, directly on XLA buffers."""

from ._attention import attention

__all__ = ["attention"]
