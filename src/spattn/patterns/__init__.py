"""Patterns of allowed (query, key) pairs, registered by name in :mod:`spattn.patterns.registry`."""

import importlib
from typing import TYPE_CHECKING

from .._util.imports import whole_imports
from . import conversion as conversion  # converts operands of patterns
from .base.pattern import Pattern
from .listed.masks import BlockLayout, KeyBlocks, Mask
from .listed.pairs import CSR
from .sequence.basic import BlockLocal, Causal, Columns, Full, Sinks, Stride
from .sequence.documents import Documents
from .sequence.intervals import ColumnIntervals, RowIntervals
from .sequence.padding import KeyPadding
from .sequence.tokens import GlobalTokens, Prefix
from .sequence.windows import DilatedWindow, PeriodicWindow, SlidingWindow, VerticalSlash

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
    "PackedWindows",
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
    from . import deepspeed as deepspeed
    from . import interop as interop
    from . import registry as registry
    from . import show as show
    from .base.per_head import PerBatch, PerHead
    from .discovery import discover
    from .grids.neighborhood import Neighborhood
    from .grids.per_axis import PerAxis, axial, windowed
    from .listed.clusters import Clusters
    from .papers.bigbird import BigBird
    from .papers.recipes import a_shape, chunked_causal, fixed, longformer, prefix_lm, shared_prefix, strided, tri_shape
    from .registry import from_json
    from .sequence.packed import PackedWindows
    from .sequence.queries_at import QueriesAt

_MODULES = ("authoring", "deepspeed", "interop", "registry", "show")
_LATER = {
    "discovery": ("discover",),
    "base.per_head": ("PerBatch", "PerHead"),
    "grids.neighborhood": ("Neighborhood",),
    "grids.per_axis": ("PerAxis", "axial", "windowed"),
    "listed.clusters": ("Clusters",),
    "papers.bigbird": ("BigBird",),
    "papers.recipes": (
        "a_shape",
        "chunked_causal",
        "fixed",
        "longformer",
        "prefix_lm",
        "shared_prefix",
        "strided",
        "tri_shape",
    ),
    "registry": ("from_json",),
    "sequence.packed": ("PackedWindows",),
    "sequence.queries_at": ("QueriesAt",),
}


def __getattr__(name: str) -> object:
    """Import submodules on first access, so that ``import spattn`` stays fast."""
    module = name if name in _MODULES else next((m for m, names in _LATER.items() if name in names), None)
    with whole_imports:
        if module is None:
            from .._util.renamed import unknown

            raise unknown(__name__, name)
        found = importlib.import_module(f"{__name__}.{module}")
    if name not in _MODULES:  # the module itself is an attribute of the package now
        found = globals()[name] = getattr(found, name)  # the next access does not come here
    return found
