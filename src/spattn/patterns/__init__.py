"""Patterns: what is allowed. Every class here is registered by name; see :func:`get` and :func:`names`."""

import importlib
from typing import TYPE_CHECKING

from .._imports import whole_imports
from . import deepspeed
from ._codec import from_dict, from_text
from ._content import ByContent
from ._lattice import Ends, Lattice, Part, Span
from ._parameters import Range
from ._pattern import Pattern
from ._predicate import apply, member
from ._registry import example, get, names, register
from .arrays import BlockLayout, KeyBlocks, Mask
from .basic import BlockLocal, Causal, Columns, Full, Sinks, Stride
from .bigbird import BigBird
from .child import Fixed, Strided
from .clusters import Clusters
from .documents import Documents, PrefixLM
from .grid import Axial, Windowed
from .intervals import ColumnIntervals, RowIntervals
from .longformer import Longformer
from .neighborhood import Neighborhood
from .padding import KeyPadding
from .pairs import CSR, RowRuns
from .per_head import PerAxis, PerBatch, PerHead
from .queries_at import QueriesAt
from .tokens import GlobalTokens, Prefix
from .vertical_slash import VerticalSlash
from .windows import DilatedWindow, PeriodicWindow, SlidingWindow

__all__ = [
    "CSR",
    "Axial",
    "BigBird",
    "BlockLayout",
    "BlockLocal",
    "ByContent",
    "Causal",
    "Clusters",
    "ColumnIntervals",
    "Columns",
    "DilatedWindow",
    "Documents",
    "Ends",
    "Fixed",
    "Full",
    "GlobalTokens",
    "KeyBlocks",
    "KeyPadding",
    "Lattice",
    "Longformer",
    "Mask",
    "Neighborhood",
    "Part",
    "Pattern",
    "PerAxis",
    "PerBatch",
    "PerHead",
    "PeriodicWindow",
    "Prefix",
    "PrefixLM",
    "QueriesAt",
    "Range",
    "RowIntervals",
    "RowRuns",
    "Sinks",
    "SlidingWindow",
    "Span",
    "Stride",
    "Strided",
    "VerticalSlash",
    "Windowed",
    "a_shape",
    "apply",
    "chunked_causal",
    "deepspeed",
    "discover",
    "draw",
    "example",
    "from_block_mask",
    "from_deepspeed",
    "from_dict",
    "from_text",
    "from_flash_attention",
    "from_flashmask",
    "from_mask_mod",
    "from_natten",
    "from_pairs",
    "from_scipy",
    "from_torch_sparse",
    "from_xformers",
    "gallery",
    "get",
    "member",
    "names",
    "register",
    "shared_prefix",
    "tri_shape",
]

if TYPE_CHECKING:
    from ._draw import draw
    from ._gallery import a_shape, chunked_causal, gallery, shared_prefix, tri_shape
    from .discovery import discover
    from .flex_attention import from_block_mask, from_mask_mod
    from .other_libraries import from_deepspeed, from_flash_attention, from_flashmask, from_natten
    from .sparse import from_pairs, from_scipy, from_torch_sparse
    from .xformers import from_xformers

_LATER = {
    "a_shape": "_gallery",
    "chunked_causal": "_gallery",
    "discover": "discovery",
    "draw": "_draw",
    "from_block_mask": "flex_attention",
    "from_deepspeed": "other_libraries",
    "from_flash_attention": "other_libraries",
    "from_flashmask": "other_libraries",
    "from_mask_mod": "flex_attention",
    "from_natten": "other_libraries",
    "from_pairs": "sparse",
    "from_scipy": "sparse",
    "from_torch_sparse": "sparse",
    "from_xformers": "xformers",
    "gallery": "_gallery",
    "shared_prefix": "_gallery",
    "tri_shape": "_gallery",
}


def __getattr__(name: str) -> object:
    """What makes pictures, or reads what other libraries call a mask, is imported when somebody asks for it."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with whole_imports:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
