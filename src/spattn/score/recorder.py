"""The graph and the captured values of a score function that is being traced."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from ..arrays import compiling, dtype_name, namespace_of
from .graph import BOOL, FLOAT, INT, Graph
from .shared_builder import SharedBuilder

__all__ = [
    "CURRENT",
    "Constant",
    "Recorded",
    "Recorder",
    "Sizes",
    "constant",
    "is_array",
    "is_float",
    "is_symbolic",
    "kind_of",
    "line",
]

_SWAPPED = {"gt": "lt", "ge": "le"}
_BITWISE = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "invert": "not"}
_LN2 = math.log(2)
_KINDS = {"f": FLOAT, "b": BOOL, "i": INT, "u": INT}
_OF_SIZES = {"SymInt": INT, "SymFloat": FLOAT}
_FOREIGN = {"numpy", "torch", "jax", "cupy", "spattn"}


class Sizes(NamedTuple):
    """The sizes of a call, for functions whose captured arrays depend on them.

    Attributes
    ----------
    batch, heads, q_len, kv_len : int
        `heads` counts query heads.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int


class Constant(int):
    """An integer that becomes a constant of the graph, not a parameter, such as a size of an array."""


def constant(value: int) -> int:
    """An integer as a constant of the graph. torch.compile cannot make a Constant, nor need it: see compiled.py."""
    return value if compiling() else Constant(value)


class Recorded:
    """The result of an operation: `index` in the graph of `recorder`."""

    __slots__ = ("index", "recorder")

    def __init__(self, recorder: Recorder, index: int) -> None:
        self.recorder, self.index = recorder, index


class Recorder:
    """Append operations on symbols, numbers and elements of arrays to a graph."""

    in_graph = False  # whether torch.compile traces the tracer; compiled.py has that recorder, with these two methods
    call: Any
    array: Any

    def __init__(self, sizes: Sizes | None = None) -> None:
        self._build = SharedBuilder()
        self._step, self.dtype = self._build.step, self._build.dtype
        self.sizes = sizes
        self.parameters: list[float] = []
        self.tables: list[Any] = []
        self.literals: set[tuple[str, Any]] = set()  # numbers written in the functions: constants of the graph
        self._known: dict[Any, int] = {}
        self._table_numbers: dict[int, int] = {}  # id of a table, which `tables` keeps alive -> its number

    def index(self, value: Any) -> int:
        """The index of the operation whose result is `value`."""
        if isinstance(value, Recorded):
            if value.recorder is not self:
                raise TypeError(
                    f"score: a value of another call was used; a score function must not store its arguments{line()}"
                )
            return value.index
        if type(value) is float:
            return self._number(value, FLOAT)
        if isinstance(value, (bool, np.bool_)):
            return self._step("constant", bool(value), BOOL)
        if isinstance(value, Constant):
            return self._step("constant", int(value), INT)
        if isinstance(value, (int, np.integer)):
            return self._number(int(value), INT)
        if isinstance(value, (float, np.floating)) or (isinstance(value, np.generic) and kind_of(value) == FLOAT):
            return self._number(float(value), FLOAT)
        if is_array(value):
            if value.ndim == 0:
                return self.look_up(value, ())
            raise TypeError(f"score: an array of shape {tuple(value.shape)} was used as a number; index it{line()}")
        if is_symbolic(value):
            self.parameters.append(value)
            return self._step("parameter", len(self.parameters) - 1, _OF_SIZES[type(value).__name__])
        raise TypeError(f"score: unsupported operand of type {type(value).__name__}{line()}")

    def _number(self, value: float, dtype: str) -> int:
        """A literal of the function is a constant; other numbers are parameters, which calls may change.

        Literals are recognized by value. A captured number that happens to equal a literal becomes a constant of this
        graph; once it changes, the next trace gives another graph.
        """
        if dtype == INT and not -(2**31) <= value < 2**31:
            raise ValueError(f"score: integers have 32 bits, got {value}{line()}")
        if (dtype, value) in self.literals:
            return self._step("constant", value, dtype)
        key = dtype, repr(value)  # 0.0 == -0.0
        if key not in self._known:
            self._known[key] = len(self.parameters)
            self.parameters.append(value)
        return self._step("parameter", self._known[key], dtype)

    def look_up(self, table: Any, indices: Sequence[Any]) -> int:
        """An element of a captured array."""
        dtype = kind_of(table)
        if dtype is None:
            raise TypeError(f"score: expected arrays of floats, integers or bools, got {dtype_name(table)}{line()}")
        for index in indices:
            if index is None or index is ... or isinstance(index, slice):
                raise TypeError(f"score: None, ... and slices cannot index an array with symbols{line()}")
        if len(indices) != table.ndim:
            raise TypeError(
                f"score: expected one index for each of {table.ndim} axes, got {len(indices)}; a score function gives "
                f"one number per pair{line()}"
            )
        found = [self.index(x) for x in indices]
        if any(self.dtype(x) != INT for x in found):
            raise TypeError(f"score: expected integer indices{line()}")
        number = self._table_numbers.setdefault(id(table), len(self.tables))
        if number == len(self.tables):
            self.tables.append(table)
        return self._step("look_up", number, dtype, tuple(found))

    def input(self, name: str) -> int:
        """An input of score functions."""
        return self._step("input", name)

    def apply(self, name: str, *operands: Any) -> int:
        """Append the operation `name` on operands; a few names append several operations to the graph."""
        if name in _DERIVED:
            return _DERIVED[name](self, *operands)
        if name in _SWAPPED:
            name, operands = _SWAPPED[name], operands[::-1]
        indices = [self.index(x) for x in operands]
        if name in _BITWISE:
            if any(self.dtype(x) != BOOL for x in indices):
                raise TypeError(f"score: & | ^ and ~ need bools; there are no operations on bits{line()}")
            name = _BITWISE[name]
        if name == "pow" and (power := _small_power(operands[1])) is not None:
            return self._power(indices[0], power)
        return self._apply(name, *indices)

    def _apply(self, name: str, *indices: int) -> int:
        return self._step("apply", name, *indices)

    def _power(self, base: int, power: int) -> int:
        if power < 0:
            return self._apply("div", self._step("constant", 1.0, FLOAT), self._power(base, -power))
        if power == 0:
            return self._step("constant", *((1.0, FLOAT) if self.dtype(base) == FLOAT else (1, INT)))
        if power == 1:
            return base
        half = self._power(base, power // 2)
        squared = self._apply("mul", half, half)
        return self._apply("mul", squared, base) if power % 2 else squared

    def result(self, value: Recorded) -> tuple[Graph, tuple[float, ...], tuple[Any, ...]]:
        """The graph of a value, converted to float, and its parameters and tables."""
        graph, parameters, tables = self._build.result(self._step("to_float", value.index))
        return graph, tuple([self.parameters[x] for x in parameters]), tuple([self.tables[x] for x in tables])

    # Functions of NumPy and torch that take several operations of the graph.
    def _square(self, x: Any) -> int:
        index = self.index(x)
        return self._apply("mul", index, index)

    def _exp2(self, x: Any) -> int:
        return self._apply("exp", self._apply("mul", self.index(x), self._step("constant", _LN2, FLOAT)))

    def _reciprocal(self, x: Any) -> int:
        return self._apply("div", self._step("constant", 1.0, FLOAT), self.index(x))

    def _rsqrt(self, x: Any) -> int:
        return self._apply("div", self._step("constant", 1.0, FLOAT), self._apply("sqrt", self.index(x)))

    def _relu(self, x: Any) -> int:
        index, zero = self.index(x), self._step("constant", 0, INT)
        return self._apply("where", self._apply("lt", zero, index), index, zero)

    def _clip(self, x: Any, low: Any = None, high: Any = None) -> int:
        index = self.index(x)
        for name, bound in (("maximum", low), ("minimum", high)):
            index = index if bound is None else self._apply(name, index, self.index(bound))
        return index

    def _to_float(self, x: Any) -> int:
        return self._step("to_float", self.index(x))

    def _to_int(self, x: Any) -> int:
        index = self.index(x)
        return index if self.dtype(index) == INT else self._apply("to_int", index)

    def _to_bool(self, x: Any) -> int:
        index = self.index(x)
        return index if self.dtype(index) == BOOL else self._apply("ne", index, self._step("constant", 0, INT))


_DERIVED: dict[str, Any] = {
    "square": Recorder._square,
    "exp2": Recorder._exp2,
    "reciprocal": Recorder._reciprocal,
    "rsqrt": Recorder._rsqrt,
    "relu": Recorder._relu,
    "clip": Recorder._clip,
    "to_float": Recorder._to_float,
    "to_int": Recorder._to_int,
    "to_bool": Recorder._to_bool,
}


CURRENT: ContextVar[Recorder | None] = ContextVar("recorder", default=None)  # set while a function is traced


def _small_power(value: Any) -> int | None:
    whole = isinstance(value, (int, float)) and not isinstance(value, (bool, Constant)) and float(value).is_integer()
    return int(value) if whole and abs(value) <= 8 else None


def kind_of(x: Any) -> str | None:
    name = dtype_name(x)
    return FLOAT if name == "bfloat16" else _KINDS.get(np.dtype(name).kind)


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy, PyTorch, CuPy or JAX, not a NumPy scalar."""
    return not isinstance(value, (Recorded, np.generic)) and namespace_of(value) is not None


def is_symbolic(value: Any) -> bool:
    """Whether a value is a number that depends on the sizes of tensors in a graph of PyTorch."""
    return type(value).__name__ in _OF_SIZES and type(value).__module__ == "torch"


def is_float(array: Any) -> bool:
    """Whether an array may have a gradient."""
    of_tensor = getattr(array, "is_floating_point", None)  # torch.compile can trace this
    return kind_of(array) == FLOAT if of_tensor is None else bool(of_tensor())


def line(error: TracebackType | None = None) -> str:
    """The line of the score function that is being executed, or that raised an error."""
    if compiling():  # torch.compile names the line itself
        return ""
    frames = _stack() if error is None else reversed(list(traceback.walk_tb(error)))
    for frame, number in frames:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _FOREIGN:
            return f" ({frame.f_code.co_filename}, line {number})"
    return ""


def _stack() -> Iterator[tuple[FrameType, int]]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back
