"""Patterns of allowed (query, key) pairs, registered by name in :mod:`spattn.patterns.registry`."""

import importlib
from typing import TYPE_CHECKING

from .._util.imports import whole_imports
from . import deepspeed as deepspeed  # a public module
from .base.pattern import Pattern
from .grids.neighborhood import Neighborhood
from .grids.per import PerAxis, PerBatch, PerHead
from .grids.windowed import axial, windowed
from .listed.clusters import Clusters
from .listed.masks import BlockLayout, KeyBlocks, Mask
from .listed.pairs import CSR
from .papers.bigbird import BigBird
from .papers.recipes import a_shape, chunked_causal, fixed, longformer, prefix_lm, shared_prefix, strided, tri_shape
from .registry import from_json
from .sequence.basic import BlockLocal, Causal, Columns, Full, Sinks, Stride
from .sequence.documents import Documents
from .sequence.intervals import ColumnIntervals, RowIntervals
from .sequence.padding import KeyPadding
from .sequence.queries_at import QueriesAt
from .sequence.tokens import GlobalTokens, Prefix
from .sequence.vertical_slash import VerticalSlash
from .sequence.windows import DilatedWindow, PeriodicWindow, SlidingWindow

__all__ = [
    "CSR",
    "BigBird",
    "BlockLayout",
    "BlockLocal",
    "Causal",
    "Clusters",
    "ColumnIntervals",
    "Columns",
    "DilatedWindow",
    "Documents",
    "Full",
    "GlobalTokens",
    "KeyBlocks",
    "KeyPadding",
    "Mask",
    "Neighborhood",
    "Pattern",
    "PerAxis",
    "PerBatch",
    "PerHead",
    "PeriodicWindow",
    "Prefix",
    "QueriesAt",
    "RowIntervals",
    "Sinks",
    "SlidingWindow",
    "Stride",
    "VerticalSlash",
    "a_shape",
    "axial",
    "chunked_causal",
    "discover",
    "fixed",
    "from_json",
    "longformer",
    "prefix_lm",
    "shared_prefix",
    "strided",
    "tri_shape",
    "windowed",
]

if TYPE_CHECKING:
    from . import authoring as authoring
    from . import interop as interop
    from . import show as show
    from .discovery import discover


def __getattr__(name: str) -> object:
    """Import rarely used modules, and discover(), on first access."""
    if name not in ("authoring", "discover", "interop", "show"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with whole_imports:
        if name == "discover":
            return importlib.import_module(f"{__name__}.discovery").discover
        return importlib.import_module(f"{__name__}.{name}")
