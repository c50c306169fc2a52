"""PyTorch integration: attention with autograd, and a replacement for :class:`torch.nn.MultiheadAttention`.

Importing this module registers the operators ``spattn::attention``, ``spattn::scored_attention`` and their backwards.
Import it before loading a saved graph, e.g. with :func:`torch.export.load`.
"""

from .. import attention, attention_backward
from ._sparse_attention import SparseAttention

__all__ = ["SparseAttention", "attention", "attention_backward"]
