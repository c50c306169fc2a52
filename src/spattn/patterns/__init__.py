"""Patterns: what is allowed. Every class here is registered by name; see :func:`get` and :func:`names`."""

import importlib
from typing import TYPE_CHECKING

from .._util.imports import whole_imports
from .base.content import ByContent
from .base.named import example, get
from .base.parameters import Range
from .base.pattern import Part, Pattern
from .base.predicate import apply, member
from .base.registry import names, register
from .base.serialize import from_dict, from_text
from .grids.neighborhood import Neighborhood
from .grids.per import PerAxis, PerBatch, PerHead
from .grids.windowed import Axial, Windowed
from .hints.lattice import Ends, Lattice, Span
from .listed.clusters import Clusters
from .listed.masks import BlockLayout, KeyBlocks, Mask
from .listed.pairs import CSR, RowRuns
from .papers import deepspeed
from .papers.bigbird import BigBird
from .papers.child import Fixed, Strided
from .papers.longformer import Longformer
from .sequence.basic import BlockLocal, Causal, Columns, Full, Sinks, Stride
from .sequence.documents import Documents, PrefixLM
from .sequence.intervals import ColumnIntervals, RowIntervals
from .sequence.padding import KeyPadding
from .sequence.queries_at import QueriesAt
from .sequence.tokens import GlobalTokens, Prefix
from .sequence.vertical_slash import VerticalSlash
from .sequence.windows import DilatedWindow, PeriodicWindow, SlidingWindow

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
    from .discovery import discover
    from .interop.flex_attention import from_block_mask, from_mask_mod
    from .interop.other_libraries import from_deepspeed, from_flash_attention, from_flashmask, from_natten
    from .interop.xformers import from_xformers
    from .listed.sparse import from_pairs, from_scipy, from_torch_sparse
    from .papers.recipes import a_shape, chunked_causal, gallery, shared_prefix, tri_shape
    from .show.draw import draw

_LATER = {
    "a_shape": "papers.recipes",
    "chunked_causal": "papers.recipes",
    "discover": "discovery",
    "draw": "show.draw",
    "from_block_mask": "interop.flex_attention",
    "from_deepspeed": "interop.other_libraries",
    "from_flash_attention": "interop.other_libraries",
    "from_flashmask": "interop.other_libraries",
    "from_mask_mod": "interop.flex_attention",
    "from_natten": "interop.other_libraries",
    "from_pairs": "listed.sparse",
    "from_scipy": "listed.sparse",
    "from_torch_sparse": "listed.sparse",
    "from_xformers": "interop.xformers",
    "gallery": "papers.recipes",
    "shared_prefix": "papers.recipes",
    "tri_shape": "papers.recipes",
}


def __getattr__(name: str) -> object:
    """What makes pictures, or reads what other libraries call a mask, is imported when somebody asks for it."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with whole_imports:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
