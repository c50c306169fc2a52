"""Keep the traces of the library's functions, without their arrays."""

from __future__ import annotations

from types import NoneType
from typing import Any, NamedTuple, cast

import numpy as np

from .._util.cached import BoundedCache
from .composition import Composition, ScoreFunction
from .graph import Graph
from .recorder import Sizes, is_array
from .tracing import Traced, trace

__all__ = ["find_or_trace"]

_LIBRARY = f"{__package__}.library."
_traces = BoundedCache(256)


class _Kept(NamedTuple):
    """A trace. `tables` has the positions of tables among the function's arrays, and the constants of the library."""

    graph: Graph
    parameters: tuple[float, ...]
    tables: tuple[int | np.ndarray, ...]
    sizes: dict[str, int]  # those that the function reads


class _AskedSizes:
    """The sizes of a call. Records which ones a function reads."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self.asked: dict[str, int] = {}

    def __getattr__(self, name: str) -> int:
        self.asked[name] = getattr(self._sizes, name)
        return self.asked[name]


def find_or_trace(function: Any, sizes: Sizes) -> Traced:
    """Trace a score function, or look up the trace of a function of the library.

    The trace of a library function depends only on its class, its numbers, the shapes and dtypes of its arrays, and the
    sizes that it reads. Every call compares these, and combines the kept trace with its own arrays. Other functions,
    and compositions with them, may depend on anything, so every call traces them.
    """
    key: list[Any] = []
    arrays: list[Any] = []
    if not _describe(function, key, arrays):
        return trace(function, sizes)
    structure = tuple(key)
    kept: _Kept | None = _traces.get(structure)
    if kept is not None and all(getattr(sizes, name) == size for name, size in kept.sizes.items()):
        tables = tuple([arrays[x] if type(x) is int else x for x in kept.tables])
        return Traced(kept.graph, kept.parameters, tables)
    asking = _AskedSizes(sizes)
    found = trace(function, cast(Sizes, asking))
    tables = tuple([_place(table, arrays) for table in found.tables])
    if not any(table is None for table in tables):  # None: an array that the function computes from its own
        _traces.pop(structure, None)
        _traces.keep(structure, _Kept(found.graph, found.parameters, tables, asking.asked))
    return found


def _place(table: Any, arrays: list[Any]) -> int | np.ndarray | None:
    """The position of a table in the function's arrays; the table itself if it is a constant; else None."""
    at = next((at for at, array in enumerate(arrays) if array is table), None)
    constant = type(table) is np.ndarray and table.base is None and not table.flags.writeable
    return table if at is None and constant else at


def _describe(value: Any, key: list[Any], arrays: list[Any]) -> bool:
    """Append the values that a trace depends on to `key`, and arrays to `arrays`; return False if it cannot be kept."""
    kind = type(value)
    if kind is float or isinstance(value, np.number):
        key += kind, repr(value)  # 0.0 == -0.0
    elif kind in (int, bool, str, NoneType):
        key += kind, value
    elif kind in (tuple, list):
        key += kind, len(value)
        return all(_describe(x, key, arrays) for x in value)
    elif kind is Composition or (isinstance(value, ScoreFunction) and str(kind.__module__).startswith(_LIBRARY)):
        fields = vars(value)
        key += kind, len(fields)
        return all(_describe(x, key, arrays) for x in fields.values())
    elif is_array(value):
        place = next((at for at, array in enumerate(arrays) if array is value), len(arrays))
        key += kind, value.dtype, tuple(value.shape), place
        arrays.append(value)
    else:
        return False
    return True
