"""Symbols, the arguments of a score function while it is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from .recorder import Recorded, is_array, is_symbolic, line

__all__ = ["Symbol", "check_unchanged", "record", "torch_call", "torch_name"]

_SAME = (
    "exp log tanh sigmoid sqrt sign minimum maximum where square exp2 reciprocal rsqrt relu clip invert bitwise_and"
    " bitwise_or bitwise_xor"
)
_NAMES = {name: name for name in _SAME.split()} | {  # function of NumPy or torch -> operation
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
    "logical_not": "not",
    "bitwise_not": "invert",
    "floor_divide": "floordiv",
    "floordiv": "floordiv",
    "remainder": "mod",
    "mod": "mod",
    "true_divide": "div",
    "truediv": "div",
    "divide": "div",
    "div": "div",
    "add": "add",
    "subtract": "sub",
    "sub": "sub",
    "multiply": "mul",
    "mul": "mul",
    "power": "pow",
    "pow": "pow",
    "float_power": "pow",
    "negative": "neg",
    "neg": "neg",
    "absolute": "abs",
    "fabs": "abs",
    "abs": "abs",
    "clamp": "clip",
    "equal": "eq",
    "eq": "eq",
    "not_equal": "ne",
    "ne": "ne",
    "less": "lt",
    "lt": "lt",
    "less_equal": "le",
    "le": "le",
    "greater": "gt",
    "gt": "gt",
    "greater_equal": "ge",
    "ge": "ge",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def record(name: str, *operands: Any) -> Symbol:
    """The result of an operation; at least one operand is a symbol."""
    recorder = next(x.recorder for x in operands if isinstance(x, Recorded))
    return Symbol(recorder, recorder.apply(name, *operands))


_CONVERSIONS = dict.fromkeys(("float", "float32", "float64", "double"), "float")
_CONVERSIONS |= dict.fromkeys(("int", "int32", "int64", "long"), "int") | {"bool": "bool", "bool_": "bool"}


class Symbol(Recorded):
    """A number per pair, in a score function while it is traced."""

    __slots__ = ()
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]
    ndim, shape = 0, ()

    @property
    def dtype(self) -> str:
        """``"float"``, ``"int"`` or ``"bool"``."""
        return self.recorder.dtype(self.index)

    def __repr__(self) -> str:
        return f"<{self.dtype} of every pair>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"score: .{name} is not supported{line()}")

    def __bool__(self) -> bool:
        raise TypeError(f"score: 'if', 'and', 'or' and 'not' need a number; use where(), & | and ~{line()}")

    def _number(self) -> float:
        raise TypeError(
            "score: the function has no numbers when it is traced; use functions of numpy, torch or spattn.score, not "
            f"of math, and arrays, not lists{line()}"
        )

    __float__ = _number
    __int__ = _number
    __index__ = _number

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"score: a number per pair has no elements{line()}")

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        name = _NAMES.get(ufunc.__name__)
        if name is None or method != "__call__":
            called = "" if method == "__call__" else f".{method}"
            raise TypeError(f"score: numpy.{ufunc.__name__}{called} is not supported{line()}")
        if options:
            raise TypeError(f"score: numpy.{ufunc.__name__}: {next(iter(options))}= is not supported{line()}")
        if name in _COMPARISONS:  # NumPy passes its scalars as 0-d arrays; comparisons have no gradient
            operands = tuple(x[()] if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in operands)
        return record(name, *operands)

    def __array_function__(self, function: Any, types_: Any, operands: Any, options: Any) -> Any:
        if function is np.where and len(operands) == 3 and not options:
            return record("where", *operands)
        if function is np.clip:
            options = {key.removeprefix("a_"): x for key, x in options.items()}
            return record("clip", *_arranged("numpy.clip", ("a", "min", "max"), operands, options))
        raise TypeError(f"score: numpy.{function.__name__} is not supported{line()}")

    @classmethod
    def __torch_function__(cls, function: Any, types_: Any, operands: Any = (), options: Any = None) -> Any:
        return torch_call(function, operands, options or {})

    def __neg__(self) -> Symbol:
        return record("neg", self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return record("abs", self)

    def __invert__(self) -> Symbol:
        return record("invert", self)

    def __divmod__(self, other: Any) -> tuple[Symbol, Symbol]:
        return record("floordiv", self, other), record("mod", self, other)

    def clamp(self, min: Any = None, max: Any = None) -> Symbol:
        """Limit to the range from `min` to `max`."""
        return record("clip", self, min, max)

    clip = clamp

    def to(self, dtype: Any, *_: Any, **__: Any) -> Symbol:
        """Convert to another dtype: floats have the dtype of scores, integers have 32 bits."""
        name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
        kind = _CONVERSIONS.get(name)
        if kind is None:
            raise TypeError(
                f"score: conversion to {dtype} is not supported; kernels have floats of the dtype of scores, 32-bit "
                f"integers and bools{line()}"
            )
        return record(f"to_{kind}", self)

    type = astype = to


_OPERANDS = (Recorded, int, float, np.generic)


def _operator(name: str, reverse: bool = False) -> Callable[[Symbol, Any], Any]:
    def method(self: Symbol, other: Any) -> Any:
        if not (isinstance(other, _OPERANDS) or is_array(other) or is_symbolic(other)):
            return NotImplemented
        operands = (other, self) if reverse else (self, other)
        return Symbol(self.recorder, self.recorder.apply(name, *operands))

    return method


_WITHOUT_EFFECT: dict[str, Any] = {"out": None, "inplace": False, "rounding_mode": None}
_OF_TORCH = {"where": ("condition", "input", "other"), "clip": ("input", "min", "max"), "pow": ("input", "exponent")}
_OF_TWO = set("floordiv mod div add sub mul eq ne lt le gt ge and or xor minimum maximum".split())
_OF_TWO |= {"bitwise_and", "bitwise_or", "bitwise_xor"}


def _parameters(name: str) -> tuple[str, ...]:
    """The names that torch gives to the operands of an operation."""
    return _OF_TORCH.get(name) or (("input", "other") if name in _OF_TWO else ("input",))


def _arranged(
    function: str, parameters: Sequence[str], operands: Sequence[Any], options: dict[str, Any]
) -> Sequence[Any]:
    """All operands of a function in order, those given by keyword included; the bounds of a clip may be absent."""
    if len(operands) == len(parameters) and not options:
        return operands
    given = dict(zip(parameters, operands, strict=False))
    for key, value in options.items():
        if key not in parameters or key in given:
            raise TypeError(f"score: {function}: {key}= is not supported{line()}")
        given[key] = value
    missing = [key for key in parameters if key not in given and key not in ("min", "max")]
    if missing or len(operands) > len(parameters):
        raise TypeError(f"score: {function}: expected {', '.join(parameters)}{line()}")
    return [given.get(key) for key in parameters]


def _method(name: str) -> Callable[..., Symbol]:
    parameters = _parameters(name)

    def method(self: Symbol, *others: Any, **options: Any) -> Symbol:
        return record(name, *_arranged(f".{name}", parameters, (self, *others), options))

    method.__name__ = name
    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(Symbol, f"__{_name}__", _operator(_NAMES[_name]))
    setattr(Symbol, f"__r{_name}__", _operator(_NAMES[_name], reverse=True))
for _name in _COMPARISONS:
    setattr(Symbol, f"__{_name}__", _operator(_name))
# The methods of tensors that FlexAttention's functions use.
for _name in "abs tanh exp log sqrt sigmoid sign square pow minimum maximum relu exp2 rsqrt reciprocal".split():
    setattr(Symbol, _name, _method(_name))
for _name, _kind in {"float": "float", "int": "int", "long": "int", "bool": "bool"}.items():
    setattr(Symbol, _name, _method(f"to_{_kind}"))


def torch_name(function: Any) -> str:
    """The name of a function of torch."""
    return str(getattr(function, "__name__", function))


def check_unchanged(name: str, options: dict[str, Any]) -> None:
    """Raise TypeError for a function of torch that changes a tensor."""
    in_place = name.strip("_") == "setitem" or (name.endswith("_") and not name.endswith("__"))
    if in_place or options.get("out") is not None:
        raise TypeError(f"score: a score function must not change arrays{line()}")


def torch_call(function: Any, operands: Sequence[Any], options: dict[str, Any], name: str | None = None) -> Symbol:
    """The result of a function of torch; `name` is its :func:`torch_name`."""
    name = (name or torch_name(function)).strip("_")
    reverse = name not in _NAMES and name.startswith("r")  # Tensor.__rsub__ and so on
    known = _NAMES.get(name.removeprefix("r") if reverse else name)
    if known is None:
        raise TypeError(f"score: torch.{name} is not supported{line()}")
    options = {key: x for key, x in options.items() if key not in _WITHOUT_EFFECT or x is not _WITHOUT_EFFECT[key]}
    if known == "div" and options.get("rounding_mode") == "floor":
        known = "floordiv"
        del options["rounding_mode"]
    if function is sys.modules["torch"].Tensor.where:
        input_, condition, other = _arranged("Tensor.where", ("input", "condition", "other"), operands, options)
        return record("where", condition, input_, other)
    operands = _arranged(f"torch.{name}", _parameters(known), operands, options)
    return record(known, *(operands[::-1] if reverse else operands))
