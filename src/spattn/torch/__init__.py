"""For PyTorch: attention with its gradients, as operators.

Whatever reads a graph from a file, as :func:`torch.export.load` does, needs this module: it registers the operators
``spattn::attention`` and ``spattn::attention_backward``.
"""

from .. import attention, attention_backward
from . import _operators

__all__ = ["_operators", "attention", "attention_backward"]
