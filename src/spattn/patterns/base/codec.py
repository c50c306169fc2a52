"""Encode patterns as JSON-compatible dicts, and decode them."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from typing import Any, ClassVar

import numpy as np

from ..._util.imports import whole_imports
from .check import integers
from .class_registry import DEEPEST, OPERATORS, pattern_class

__all__ = ["Serializable", "decode", "encode"]

_LARGEST_ARRAY = 1 << 28
_DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
_DEEPEST_DATA = 2 * DEEPEST  # a pattern in a tuple of patterns adds two levels


def encode(value: Any) -> Any:
    """Encode a parameter as JSON-compatible data for :func:`decode`."""
    if hasattr(value, "_description"):
        return value._description()
    if isinstance(value, np.ndarray):
        packed = np.packbits(value) if value.dtype == bool else value
        return {"array": packed.tobytes().hex(), "dtype": value.dtype.name, "shape": list(value.shape)}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def decode(data: Any, depth: int = 0) -> Any:
    """Decode a pattern; safe on untrusted data."""
    if not isinstance(data, dict) or not isinstance(data.get("pattern"), str):
        raise ValueError(f"data: expected a dict with a 'pattern' name, got {reprlib.repr(data)}")
    _check_depth(depth)
    name, fields = data["pattern"], {k: v for k, v in data.items() if k != "pattern"}
    if name in OPERATORS:
        return _decode_operator(name, fields, depth)
    cls = pattern_class(name)
    known = {f.name for f in dataclasses.fields(cls)}
    if not set(fields) <= known:
        raise ValueError(f"data: expected the fields {sorted(known)} of {name}, got {reprlib.repr(list(fields))}")
    try:
        return cls._read({k: _decode(v, depth + 1) for k, v in fields.items()})
    except TypeError as error:
        raise ValueError(f"data: {error}") from error


def _decode_operator(symbol: str, fields: dict[str, Any], depth: int) -> Any:
    operands = fields.get("operands")
    if set(fields) != {"operands"} or not isinstance(operands, list) or (len(operands) == 1) != (symbol == "~"):
        raise ValueError(f"data: expected a list of operands of {symbol!r}, got {reprlib.repr(fields)}")
    if not operands:
        raise ValueError(f"data: expected operands of {symbol!r}, got none")
    return OPERATORS[symbol].of(*(decode(o, depth + 1) for o in operands))


def _check_depth(depth: int) -> None:
    if depth > _DEEPEST_DATA:
        raise ValueError(f"data: expected lists and dicts nested at most {_DEEPEST_DATA} deep, got more")


def _decode(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        return _decode_array(value) if "array" in value else decode(value, depth)
    if isinstance(value, list):
        _check_depth(depth)
        return tuple(_decode(v, depth + 1) for v in value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise ValueError(f"data: expected integers, strings, lists or patterns, got {reprlib.repr(value)}")


def _decode_array(value: dict[str, Any]) -> np.ndarray:
    try:
        shape = integers("shape", value["shape"], 0, _LARGEST_ARRAY)
        if value["dtype"] not in _DTYPES:
            raise TypeError(value["dtype"])
        dtype = np.dtype(value["dtype"])
        if math.prod(shape) > _LARGEST_ARRAY:
            raise ValueError(f"data: expected an array of at most {_LARGEST_ARRAY} elements, got shape {shape}")
        raw = np.frombuffer(bytes.fromhex(value["array"]), dtype=np.uint8 if dtype.kind == "b" else dtype)
    except (KeyError, TypeError) as error:
        raise ValueError(f"data: expected an array of {', '.join(_DTYPES)}; got {reprlib.repr(value)}") from error
    if dtype.kind == "b" and raw.size == -(-math.prod(shape) // 8):  # np.unpackbits would pad a short input
        raw = np.unpackbits(raw, count=math.prod(shape)).astype(bool)
    if raw.dtype != dtype or raw.size != math.prod(shape):
        raise ValueError(f"data: expected {math.prod(shape)} elements for shape {shape}, got {raw.size}")
    return raw.reshape(shape)


class Serializable:
    """Mixin that serializes a pattern as JSON."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]

    def to_json(self) -> str:
        """Serialize this pattern as JSON, which :func:`spattn.patterns.from_json` reads in any process.

        Returns
        -------
        str

        Raises
        ------
        ValueError
            If the pattern's class is not registered, or a parameter is not JSON-serializable.
        """
        text = self._serialized()
        if text is None:
            raise ValueError(f"pattern: expected a registered class with JSON-serializable parameters, got {self!r}")
        return text

    def _description(self) -> dict[str, Any]:
        """Return the pattern as JSON-compatible data."""
        return {"pattern": self.name} | {f.name: encode(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def _read(cls, fields: dict[str, Any]) -> Any:
        """Create the pattern from decoded JSON. Subclasses override it to convert fields of older versions."""
        return cls(**fields)

    def _serialized(self) -> str | None:
        """Return the JSON, or None if it does not round-trip."""
        with whole_imports:  # late: keeps `import spattn` fast
            import json

        try:
            # While torch.compile traces, a new object has only the fields with defaults.
            if not {field.name for field in dataclasses.fields(self)} <= vars(self).keys():
                return None
            text = json.dumps(self._description(), separators=(",", ":"))
            return text if decode(json.loads(text)) == self else None
        except (TypeError, ValueError):
            return None
