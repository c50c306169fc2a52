"""Patterns in traced programs: serialized calls of constructors, whose arrays are operands of the program."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..._util.cached import BoundedCache
from ..._util.frozen import content, owner_of
from ..._util.imports import whole_imports
from ...arrays import is_array, unknown
from .check import WRITEABLE
from .class_registry import CONVERSIONS, OPERATORS, generation, pattern_class
from .codec import decode
from .composition import Composite
from .pattern import CONSTRUCTORS, Deferred, Pattern

__all__ = ["described", "resolved", "restored", "serialized_call", "stand_in"]

_restored = BoundedCache(32)
_MOST_BYTES = 1 << 24  # of arrays in a key of _restored
_UNKNOWN = ("unknown",)


def described(value: Any, operands: list[Any], by_text: bool = False) -> Any:
    """Return the call that creates a pattern, as nested tuples; append its arrays to `operands`.

    torch.compile traces this function. If `by_text`, patterns without operands are serialized.
    """
    if isinstance(value, Deferred):
        args = tuple([described(x, operands, by_text) for x in value.args])
        values = tuple([described(x, operands, by_text) for x in value.values])
        return ("call", value.target, value.make, args, value.names, values)
    if isinstance(value, Composite):
        return ("call", value.symbol, None, tuple([described(x, operands, by_text) for x in value.operands]), (), ())
    if isinstance(value, Pattern):
        text = value._serialized() if by_text else None
        return _described_fields(value, operands) if text is None else ("text", text)
    if isinstance(value, (tuple, list)):
        return ("tuple", tuple([described(x, operands, by_text) for x in value]))
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):
        return operator.index(value)  # torch.compile makes it a constant
    if is_array(value):
        operands.append(value)
        return ("operand", len(operands) - 1)
    return _UNKNOWN


def _described_fields(value: Pattern, operands: list[Any]) -> Any:
    cls = type(value)
    if cls._registered is not cls:
        return _UNKNOWN
    make, names = (None, cls._parameters) if cls._in_graph is None else cls._in_graph
    args = [getattr(value, WRITEABLE + name, None) for name in names]
    args = [getattr(value, name) if x is None else x for name, x in zip(names, args, strict=True)]
    return ("call", value.name, make, tuple([described(x, operands) for x in args]), (), ())


def serialized_call(call: Any, operands: int) -> str | None:
    """Serialize a call; that of a pattern without operands like the pattern. Return None if an argument is unknown."""
    with whole_imports:
        import json

    text = json.dumps(call, separators=(",", ":"))
    if json.dumps(_UNKNOWN) in text:
        return None
    if operands:
        return text
    try:
        return _run(call, ())._serialized()
    except (TypeError, ValueError):
        return text  # the program raises the error


def restored(text: str, operands: Sequence[np.ndarray] = ()) -> Pattern:
    """Return the pattern of a text and its operands. Cached by value."""
    with whole_imports:
        import json

    operands = [owner_of(x) for x in operands]
    nbytes = sum(x.nbytes for x in operands)
    key = None
    if nbytes <= _MOST_BYTES:
        key = (text, generation(), *((x.dtype, x.shape, content(x)) for x in operands))
        if key in _restored:
            return _restored[key]
    data = json.loads(text)
    found: Pattern = decode(data) if isinstance(data, dict) else _run(data, operands)
    return found if key is None else _restored.keep(key, found)


def stand_in(text: str, operands: Sequence[Any]) -> Pattern | None:
    """Return a pattern like that of a text, for shapes: its arrays are 0. Return None if 0 is no valid value."""
    kinds = [(x.shape, str(x.dtype).removeprefix("torch.")) for x in operands]
    try:
        return restored(text, [np.zeros(tuple(map(int, shape)), np.dtype(dtype)) for shape, dtype in kinds])
    except ValueError:
        if not operands:
            raise
        return None  # the program checks its values


def resolved(value: Any) -> Any:
    """Return the pattern of a call whose arrays have values, as after a graph break; other values are unchanged."""
    if isinstance(value, Deferred):
        args, values = resolved(value.args), resolved(value.values)
        if _is_open(args) or _is_open(values):
            return value
        return _called(value.target, value.make, args, dict(zip(value.names, values, strict=True)))
    return tuple(map(resolved, value)) if isinstance(value, (tuple, list)) else value


def _is_open(value: Any) -> bool:
    """Return whether a value has arrays of a JAX program that is being traced."""
    if isinstance(value, (tuple, list)):
        return any(map(_is_open, value))
    return isinstance(value, Deferred) or unknown(value)


def _run(call: Any, operands: Sequence[Any]) -> Any:
    if not isinstance(call, (tuple, list)):
        return call
    kind, *rest = call
    if kind == "operand":
        x = operands[rest[0]]
        return x if x.ndim else x.item()
    if kind == "text":
        return restored(rest[0])
    if kind == "tuple":
        return tuple(_run(x, operands) for x in rest[0])
    name, make, args, names, values = rest
    options = {key: _run(x, operands) for key, x in zip(names, values, strict=True)}
    return _called(name, make, (_run(x, operands) for x in args), options)


def _called(name: str, make: str | None, args: Iterable[Any], options: dict[str, Any]) -> Any:
    """Call an operator, a class, its constructor `make` or, without a name, the conversion `make`."""
    if not name:
        return CONVERSIONS[str(make)](*args, **options)
    function: Any = OPERATORS[name].of if name in OPERATORS else pattern_class(name)
    if make is not None:
        if make not in CONSTRUCTORS:
            raise ValueError(f"pattern: expected a constructor of {', '.join(sorted(CONSTRUCTORS))}, got {make!r}")
        function = getattr(function, make)
    return function(*args, **options)
