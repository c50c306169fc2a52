"""Expression graphs of score functions: operations in topological order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .operations import FUNCTIONS

__all__ = ["BOOL", "COMPARISONS", "FLOAT", "INPUTS", "INT", "Builder", "Graph", "Operation"]

FLOAT, INT, BOOL = "float", "int", "bool"

# The inputs of score functions, with their dtypes.
INPUTS = {"score": FLOAT, "b": INT, "h": INT, "q": INT, "k": INT, "offset": INT}  # offset: kv_len - q_len
COMPARISONS = ("eq", "ne", "lt", "le")
_OF_TRUTH = frozenset(("and", "or", "xor", "not"))
_OF_FLOATS = frozenset(("exp", "log", "tanh", "sigmoid", "sqrt", "div", "pow"))
_COMMUTE = frozenset(("add", "mul", "minimum", "maximum", "eq", "ne", "and", "or", "xor"))


class Operation(NamedTuple):
    """An operation on earlier ones.

    Attributes
    ----------
    name : str
        Of the operation; ``"parameter"``, ``"constant"`` and those of INPUTS have no operands.
    operands : tuple of int
        Indices of earlier operations.
    dtype : str
        FLOAT, INT or BOOL.
    number : int or float or bool
        Value of a constant; index of a parameter or table; else 0.
    """

    name: str
    operands: tuple[int, ...]
    dtype: str
    number: float = 0


class Graph(NamedTuple):
    """A score function without its captured values: equal graphs share compiled code.

    Attributes
    ----------
    operations : tuple of Operation
        In topological order; the last ones need not be the results.
    results : tuple of int
        Indices of the results.
    """

    operations: tuple[Operation, ...]
    results: tuple[int, ...]

    def inputs(self, of: int) -> frozenset[str]:
        """Names of the inputs that an operation depends on."""
        return self.dependence()[of]

    def dependence(self) -> list[frozenset[str]]:
        """Names of the inputs that each operation depends on."""
        found: list[frozenset[str]] = []
        for name, operands, _, _ in self.operations:
            own = frozenset([name]) if name in INPUTS else frozenset()
            found.append(own.union(*(found[x] for x in operands)))
        return found

    def only(self, results: Iterable[int]) -> Graph:
        """The operations that some results need, renumbered."""
        wanted = list(results)
        needed = set(wanted)
        for index in range(len(self.operations) - 1, -1, -1):
            if index in needed:
                needed.update(self.operations[index].operands)
        order = sorted(needed)
        new = {old: at for at, old in enumerate(order)}
        kept = (self.operations[old] for old in order)
        operations = tuple(op._replace(operands=tuple(new[x] for x in op.operands)) for op in kept)
        return Graph(operations, tuple(new[x] for x in wanted))


class Builder:
    """Appends operations to a graph. Shares equal ones, folds constants, and drops neutral ones such as ``x + 0``."""

    def __init__(self, start: Sequence[Operation] = ()) -> None:
        self.operations = list(start)
        self._known: dict[tuple[Any, ...], int] = {operation: index for index, operation in enumerate(start)}
        self._constants = {at: operation.number for at, operation in enumerate(start) if operation.name == "constant"}

    def dtype(self, index: int) -> str:
        """Dtype of an operation."""
        return self.operations[index].dtype

    def input(self, name: str) -> int:
        """An input of the function."""
        return self._append(name, (), INPUTS[name])

    def constant(self, value: float, dtype: str | None = None) -> int:
        """A number, by default of its own dtype; kernels compute with integers of 32 bits."""
        if isinstance(value, int) and not -(2**31) <= value < 2**31:
            raise ValueError(f"score: integers have 32 bits, got {value}")
        dtype = dtype or (BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT)
        if dtype == FLOAT:
            # Store -0.0 as 0.0, which is equal, and use one object for NaN: tuples compare elements by identity first.
            value = 0.0 if value == 0 else math.nan if value != value else value
        index = self._append("constant", (), dtype, value)
        self._constants[index] = value
        return index

    def parameter(self, number: int, dtype: str) -> int:
        """A captured number, which is read at each call."""
        return self._append("parameter", (), dtype, number)

    def look_up(self, table: int, dtype: str, indices: Sequence[int]) -> int:
        """An element of a captured array; negative indices count from the end, as in Python."""
        return self._append("look_up", tuple(indices), dtype, table)

    def apply(self, name: str, *operands: int) -> int:
        """The result of an operation, with operands converted to one dtype."""
        operands = self._converted(name, operands)
        known = self._folded(name, operands)
        if known is not None:
            return known
        if name in _COMMUTE and operands[0] > operands[1]:
            operands = operands[::-1]
        if name in COMPARISONS or name in _OF_TRUTH:
            dtype = BOOL
        elif name in ("to_float", "to_int"):
            dtype = FLOAT if name == "to_float" else INT
        else:
            dtype = self.dtype(operands[-1])
        return self._append(name, operands, dtype)

    def _append(self, name: str, operands: tuple[int, ...], dtype: str, number: float = 0) -> int:
        key = name, operands, dtype, number  # with the dtype, as 1 == 1.0 == True
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.operations)
            self.operations.append(Operation._make(key))
        return found

    def _converted(self, name: str, operands: Sequence[int]) -> tuple[int, ...]:
        if name in ("to_float", "to_int"):
            return tuple(operands)
        if name == "where":
            test, *values = operands
            return (self._truth(test), *self._common(values))
        if name in _OF_TRUTH:
            return tuple(self._truth(x) for x in operands)
        if name in _OF_FLOATS:
            return tuple(self.to_float(x) for x in operands)
        return self._common(operands)

    def _common(self, operands: Sequence[int]) -> tuple[int, ...]:
        dtypes = [self.operations[x].dtype for x in operands]
        if FLOAT in dtypes:
            return tuple(operands) if dtypes.count(FLOAT) == len(dtypes) else tuple(map(self.to_float, operands))
        return tuple(map(self._to_int, operands)) if BOOL in dtypes else tuple(operands)

    def _truth(self, x: int) -> int:
        return x if self.dtype(x) == BOOL else self.apply("ne", x, self.constant(0))

    def to_float(self, x: int) -> int:
        """The operation as a float."""
        return x if self.dtype(x) == FLOAT else self.apply("to_float", x)

    def _to_int(self, x: int) -> int:
        return self.apply("to_int", x) if self.dtype(x) == BOOL else x

    def value(self, index: int) -> Any:
        """The number that a constant holds, or None."""
        return self._constants.get(index)

    def _folded(self, name: str, operands: tuple[int, ...]) -> int | None:
        values = list(map(self._constants.get, operands))
        if None not in values:
            return self._computed(name, operands, values)
        if name in ("add", "mul", "sub", "div"):
            a, b = operands
            zero, one = 0, 1
            if name == "add" and zero in values:
                return b if values[0] == zero else a
            if name == "mul" and one in values:
                return b if values[0] == one else a
            if name == "sub" and values[1] == zero:
                return a
            if name == "div" and values[1] == one:
                return a
        elif name == "where":
            if values[0] is not None:
                return operands[1] if values[0] else operands[2]
            return operands[1] if operands[1] == operands[2] else None
        elif name in ("minimum", "maximum", "and", "or") and operands[0] == operands[1]:
            return operands[0]
        return None

    def _computed(self, name: str, operands: tuple[int, ...], values: Sequence[Any]) -> int | None:
        dtype = self.dtype(operands[0]) if name != "where" else self.dtype(operands[1])
        if name in ("floordiv", "mod") and values[1] == 0:
            return None
        numbers = (np.float64(x) if isinstance(x, float) else x for x in values)
        with np.errstate(all="ignore"):
            found = FUNCTIONS[name](*numbers)
        if name in COMPARISONS or name in _OF_TRUTH:
            return self.constant(bool(found))
        kind = FLOAT if name == "to_float" or (dtype == FLOAT and name != "to_int") else INT
        return self.constant(float(found) if kind == FLOAT else int(found))
