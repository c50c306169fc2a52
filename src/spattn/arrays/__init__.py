"""The kinds of arrays that spattn takes, described alike: what they are, where they live, how to see them as NumPy.

All that knows a library is in the module of its kind. Libraries are looked up in ``sys.modules`` only: an array of a
library that was never imported cannot exist.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .._util.imports import whole_imports
from .kind import BFLOAT16, DTYPES, ArrayKind, NumPy, dtype_name

__all__ = [
    "BFLOAT16",
    "DTYPES",
    "NUMPY",
    "ArrayKind",
    "add_plain",
    "autocast",
    "check_plain",
    "compiling",
    "dtype_name",
    "kind_of",
    "of_any_length",
    "recorder",
    "signature",
    "to_host",
    "traced",
]

NUMPY = NumPy()
_CLASSES = {"torch": "Tensor", "cupy": "ndarray", "jax": "Array"}
_kinds: dict[str, ArrayKind] = {}
_plain: dict[type, ArrayKind] = {np.ndarray: NUMPY}  # classes whose arrays are known at a glance


def kind_of(x: Any) -> ArrayKind | None:
    """The kind of an array; None for anything else."""
    return _plain.get(type(x)) or _search(x)


def add_plain(array: type, kind: ArrayKind) -> None:
    """From now on arrays of this class, which are plain, are of this kind."""
    _plain[array] = kind


def _search(x: Any) -> ArrayKind | None:
    if isinstance(x, np.ndarray):
        return NUMPY
    for name, array in _CLASSES.items():
        own = getattr(sys.modules.get(name), array, None)  # a module that another thread is importing has none yet
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


def signature(*arrays: Any) -> tuple[Any, ...] | None:
    """What checks, plan and kernels of a call depend on: kind, dtype, device, shape and strides of its arrays.

    None for arrays that differ in kind or are not plain: these are looked at anew by every call.
    """
    of = type(arrays[0])
    for x in arrays:
        if type(x) is not of:
            return None
    kind = _plain.get(of)
    if kind is None:
        _search(arrays[0])  # the first array of a kind
        kind = _plain.get(of)
    return None if kind is None else kind.signature(*arrays)


def of_any_length(signature: tuple[Any, ...]) -> tuple[tuple[Any, ...], int] | None:
    """The signature of q, k and v without how many keys there are and where they lie in memory, and how many there are.

    None for arrays that are no keys and values of one length.
    """
    kind, q, (k, _, *of_k), (v, _, *of_v) = signature
    if not len(k) == len(v) == 4 or k[2] != v[2]:
        return None
    return (kind, q, k[0], k[1], k[3], v[0], v[1], v[3], *of_k, *of_v), k[2]


def autocast(*operands: Any) -> tuple[Any, ...] | None:
    """See :meth:`ArrayKind.autocast`, of the first operand's kind."""
    kind = kind_of(operands[0])
    return None if kind is None else kind.autocast(*operands)


def recorder(*operands: Any) -> Callable[..., tuple[Any, Any]] | None:
    """See :meth:`ArrayKind.recorder`, of the first operand's kind."""
    kind = kind_of(operands[0])
    return None if kind is None else kind.recorder(*operands)


def traced(*operands: Any) -> bool:
    """See :meth:`ArrayKind.traced`, of the first operand's kind."""
    kind = kind_of(operands[0])
    return kind is not None and kind.traced()


def to_host(x: Any) -> Any:
    """Any array as NumPy, copied from its device where it is not in host memory."""
    kind = kind_of(x)
    return NUMPY.to_host(x) if kind is None else kind.to_host(x)


def compiling() -> bool:
    """Whether torch.compile is tracing the caller, whose arrays are stand-ins."""
    traced = getattr(sys.modules.get("torch.compiler"), "is_dynamo_compiling", None)
    return traced is not None and traced()


def check_plain(name: str, x: Any) -> None:
    """An array that is nothing but its values."""
    kind = kind_of(x)
    odd = None if kind is None else kind.oddity(x)
    if odd is not None:
        raise TypeError(f"{name}: expected a plain array, got {odd}")
