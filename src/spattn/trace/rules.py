"""Map PyTorch operations on integers and booleans to NumPy operators.

A rule takes the operands of a step and returns PyTorch's result, or NotImplemented. It uses only operators that the
planner evaluates on whole tiles: sums, differences, minima, maxima, absolute values, comparisons, ``//`` and ``%`` by
constants, ``& | ~``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .trace import Constant, Ref, Step

__all__ = ["by_rule"]

_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64, "uint8": 8}  # supported integer dtypes


def by_rule(step: Step, value: Callable[[Any], Any]) -> Any:
    """Evaluate a step by its rule, or return NotImplemented if there is none; `value` resolves operands."""
    name, dtype = step.name.split(".")[1], step.result.dtype
    kinds = {_kind(x) for x in step.args if x is not None}
    rule: Callable[..., Any] | None = None
    if "bool" in kinds and kinds == {dtype} and name in _OF_TRUTH:
        rule = _OF_TRUTH[name]
    elif kinds <= {"bool", "integer"}:
        rule = (_COMPARISONS if dtype == "bool" else _ARITHMETIC if dtype in _BITS else {}).get(name)
    if rule is None or not _numbers_fit(step.args):
        return NotImplemented
    found = rule(*map(value, step.args), **{key: x for key, x in step.options if key in ("alpha", "rounding_mode")})
    return found if found is NotImplemented or dtype in ("bool", "int64") else _wrapped(found, dtype)


def _kind(operand: Any) -> str:
    """Return 'bool', 'integer', or the name of an unsupported type."""
    if isinstance(operand, Constant) and operand.array.ndim:
        return "table"
    if isinstance(operand, (Ref, Constant)):
        dtype = operand.dtype if isinstance(operand, Ref) else operand.array.dtype.name
        return "integer" if dtype in _BITS else dtype
    return {bool: "bool", int: "integer"}.get(type(operand), "number")


def _numbers_fit(operands: tuple[Any, ...]) -> bool:
    """Return True if Python ints fit into the integer dtype of every tensor operand, to which PyTorch casts them."""
    types = [x.dtype for x in operands if isinstance(x, Ref) and x.dtype in _BITS]
    return all(0 <= x - _least(dtype) < 1 << _BITS[dtype] for x in operands if type(x) is int for dtype in types)


def _least(dtype: str) -> int:
    return 0 if dtype == "uint8" else -1 << (_BITS[dtype] - 1)


def _wrapped(value: Any, dtype: str) -> Any:
    """Wrap int64 values around to a dtype of fewer bits, as PyTorch does."""
    return (value - _least(dtype)) % (1 << _BITS[dtype]) + _least(dtype)


def _add(a: Any, b: Any, alpha: int = 1) -> Any:
    return a + b if alpha == 1 else NotImplemented


def _subtract(a: Any, b: Any, alpha: int = 1) -> Any:
    return a - b if alpha == 1 else NotImplemented


def _divide(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of floor division or remainder, which supports only positive constant divisors."""

    def rule(a: Any, b: Any, rounding_mode: str = "floor") -> Any:
        constant = isinstance(b, (int, np.integer)) and b > 0
        return operation(a, int(b)) if constant and rounding_mode == "floor" else NotImplemented

    return rule


def _clamp(a: Any, least: Any = None, most: Any = None) -> Any:
    a = a if least is None else np.maximum(a, least)
    return a if most is None else np.minimum(a, most)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _subtract,
    "rsub": lambda a, b, alpha=1: _subtract(b, a, alpha),
    "neg": np.negative,
    "abs": np.absolute,
    "remainder": _divide(np.remainder),
    "floor_divide": _divide(np.floor_divide),
    "div": _divide(np.floor_divide),
    "minimum": np.minimum,
    "maximum": np.maximum,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda a, most: _clamp(a, None, most),
    "_to_copy": lambda a: a + 0,
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "_to_copy": lambda a: np.not_equal(a, 0),
}
_OF_TRUTH: dict[str, Callable[..., Any]] = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.not_equal,
    "bitwise_not": np.invert,
    "logical_and": np.bitwise_and,
    "logical_or": np.bitwise_or,
    "logical_xor": np.not_equal,
    "logical_not": np.invert,
    "where": lambda where, a, b: (where & a) | (~where & b),
}
