"""For PyTorch: attention with its gradients, and a layer in place of :class:`torch.nn.MultiheadAttention`.

Whatever reads a graph from a file, as :func:`torch.export.load` does, needs this module: it registers the operators
``spattn::attention`` and ``spattn::attention_backward``.
"""

from .. import attention, attention_backward
from ._sparse_attention import SparseAttention

__all__ = ["SparseAttention", "attention", "attention_backward"]
