"""PyTorch integration: attention with autograd, and drop-in replacements for PyTorch's functions and layer.

Importing this module registers the operators ``spattn::attention``, ``spattn::scored_attention`` and their backwards.
Import it before loading a saved graph, e.g. with :func:`torch.export.load`.
"""

from .. import attention, attention_backward
from ._drop_ins import flex_attention, scaled_dot_product_attention
from ._sparse_attention import SparseAttention

__all__ = ["SparseAttention", "attention", "attention_backward", "flex_attention", "scaled_dot_product_attention"]
