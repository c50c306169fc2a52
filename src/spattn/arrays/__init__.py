"""Array backends (NumPy, PyTorch, CuPy, JAX) behind one interface.

Each library is confined to its own module. Libraries are only looked up in ``sys.modules``: an array of a library that
was never imported cannot exist.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .._util.imports import whole_imports
from .namespace import BFLOAT16, DTYPES, ArrayNamespace, NumPy, dtype_name

__all__ = [
    "BFLOAT16",
    "DTYPES",
    "NUMPY",
    "ArrayNamespace",
    "add_plain",
    "autocast",
    "check_plain",
    "compiling",
    "dtype_name",
    "is_array",
    "namespace_of",
    "of_any_length",
    "recorder",
    "cache_key",
    "to_host",
    "traced",
    "unknown",
    "untraced",
]

NUMPY = NumPy()
_IN_GRAPH = ArrayNamespace()  # of tensors without values, while torch.compile traces the caller
_IN_GRAPH.name = "torch"
_CLASSES = {"torch": "Tensor", "cupy": "ndarray", "jax": "Array"}
_kinds: dict[str, ArrayNamespace] = {}
_plain: dict[type, ArrayNamespace] = {np.ndarray: NUMPY}  # dispatch by exact type


def namespace_of(x: Any) -> ArrayNamespace | None:
    """Return the array backend of `x`, or None."""
    return _plain.get(type(x)) or _search(x)


def add_plain(array: type, kind: ArrayNamespace) -> None:
    """Register an array class as plain arrays of `kind`."""
    _plain[array] = kind


def _search(x: Any) -> ArrayNamespace | None:
    if compiling():  # torch.compile cannot trace the imports
        return _IN_GRAPH if isinstance(x, (sys.modules["torch"].Tensor, np.ndarray)) else None
    if isinstance(x, np.ndarray):
        return NUMPY
    for name, array in _CLASSES.items():
        own = getattr(sys.modules.get(name), array, None)  # None while another thread imports the module
        if own is not None and isinstance(x, own):
            kind = _kinds.get(name)
            if kind is None:
                with whole_imports:
                    module = importlib.import_module(f"{__name__}.{name}")
                kind = _kinds.setdefault(name, module.KIND())
            if kind.is_plain(x):
                _plain[type(x)] = kind
            return kind
    return None


def cache_key(*arrays: Any) -> tuple[Any, ...] | None:
    """Return the cache key of a call: array backend, then dtype, device, shape and strides of each array.

    Return None if the arrays differ in their backend or are not plain; such calls are not cached.
    """
    of = type(arrays[0])
    for x in arrays:
        if type(x) is not of:
            return None
    kind = _plain.get(of)
    if kind is None:
        _search(arrays[0])  # registers the class at its first array
        kind = _plain.get(of)
    return None if kind is None else kind.cache_key(*arrays)


def of_any_length(cache_key: tuple[Any, ...]) -> tuple[tuple[Any, ...], int] | None:
    """Split the cache key of q, k and v into (the key without kv_len, kv_len).

    Return None unless k and v are 4-D and of equal length.
    """
    kind, q, (k, _, *of_k), (v, _, *of_v) = cache_key
    if not len(k) == len(v) == 4 or k[2] != v[2]:
        return None
    return (kind, q, k[0], k[1], k[3], v[0], v[1], v[3], *of_k, *of_v), k[2]


def autocast(*operands: Any) -> tuple[Any, ...] | None:
    """See :meth:`ArrayNamespace.autocast`; dispatches on the first operand."""
    kind = namespace_of(operands[0])
    return None if kind is None else kind.autocast(*operands)


def recorder(*operands: Any) -> Callable[..., tuple[Any, Any]] | None:
    """See :meth:`ArrayNamespace.recorder`; dispatches on the first operand."""
    kind = namespace_of(operands[0])
    return None if kind is None else kind.recorder(*operands)


def traced(*operands: Any) -> bool:
    """See :meth:`ArrayNamespace.traced`; dispatches on the first operand."""
    kind = namespace_of(operands[0])
    return kind is not None and kind.traced()


def to_host(x: Any) -> Any:
    """Convert any array to NumPy, copying it from its device if necessary."""
    kind = namespace_of(x)
    return NUMPY.to_host(x) if kind is None else kind.to_host(x)


def is_array(x: Any) -> bool:
    """Return whether `x` is an array; torch.compile may trace this function, but not :func:`namespace_of`."""
    return isinstance(x, (sys.modules["torch"].Tensor, np.ndarray)) if compiling() else namespace_of(x) is not None


def unknown(x: Any) -> bool:
    """Return whether `x` is an array without values, of a program that JAX, torch.export or a vmap is tracing."""
    if isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ())):
        kind = namespace_of(x)
        return kind is not None and kind.traced() and kind.oddity(x) is not None
    core = getattr(sys.modules.get("jax"), "core", None)
    return core is not None and isinstance(x, core.Tracer)


def untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, and all that it calls, without torch.compile: the call breaks a graph."""
    disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)  # None before the first compilation
    return (function if disable is None else disable(function))(*arguments)


def compiling() -> bool:
    """Return whether torch.compile is tracing the caller with fake tensors."""
    traced = getattr(sys.modules.get("torch.compiler"), "is_dynamo_compiling", None)
    return traced is not None and traced()


def check_plain(name: str, x: Any) -> None:
    """Raise TypeError if `x` is an array that is more than its values; see :meth:`ArrayNamespace.oddity`."""
    kind = namespace_of(x)
    odd = None if kind is None else kind.oddity(x)
    if odd is not None:
        raise TypeError(f"{name}: expected a plain array, got {odd}")
