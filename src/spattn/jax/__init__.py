"""For JAX: attention that goes through its transformations, on XLA's own buffers."""

from ._attention import attention

__all__ = ["attention"]
