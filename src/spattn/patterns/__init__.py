"""Patterns: what is allowed. Every class here is registered by name; see :func:`get` and :func:`names`."""

from . import deepspeed
from ._base import Lattice, Part, Pattern
from ._draw import draw
from ._gallery import a_shape, chunked_causal, example, gallery, shared_prefix, tri_shape
from ._predicate import apply, member
from ._registry import get, names, register
from ._serial import from_dict
from .arrays import BlockLayout, ColumnIntervals, KeyBlocks, Mask
from .basic import BlockLocal, Causal, Columns, DilatedWindow, Full, Sinks, SlidingWindow, Stride
from .bigbird import BigBird
from .child import Fixed, Strided
from .documents import Documents, PrefixLM
from .grid import Axial, Windowed
from .longformer import Longformer
from .neighborhood import Neighborhood
from .per_head import PerHead
from .tokens import GlobalTokens
from .vertical_slash import VerticalSlash

__all__ = [
    "Axial", "BigBird", "BlockLayout", "BlockLocal", "Causal", "ColumnIntervals", "Columns", "DilatedWindow",
    "Documents", "Fixed", "Full", "GlobalTokens", "KeyBlocks", "Lattice", "Longformer", "Mask", "Neighborhood", "Part",
    "Pattern", "PerHead", "PrefixLM", "Sinks", "SlidingWindow", "Stride", "Strided", "VerticalSlash", "Windowed",
    "a_shape", "apply", "chunked_causal", "deepspeed", "draw", "example", "from_dict", "gallery", "get", "member",
    "names", "register", "shared_prefix", "tri_shape",
]
