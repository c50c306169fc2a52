"""Compile programs of NumPy functions to native code, which evaluates them on cells with the same bits.

A program is not compiled if one of its functions has no native operation, or none for its dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _cells

__all__ = ["Converted", "LookUp", "NativeProgram", "compiled"]

Step = tuple[Callable[..., Any] | None, tuple[Any, ...]]

_LETTERS = {"bool": "i", "int64": "i", "float32": "f", "float64": "d"}
_STORED = {"i": np.int64, "f": np.float32, "d": np.float64}
_MOST_REGISTERS = 4096
_AXES = 3
_BOOL, _INT64 = np.dtype(bool), np.dtype(np.int64)
_SWAPPED = {np.greater: np.less, np.greater_equal: np.less_equal}
_NAMES: dict[np.ufunc, str] = {
    np.add: "add",
    np.subtract: "sub",
    np.multiply: "mul",
    np.true_divide: "div",
    np.negative: "neg",
    np.absolute: "abs",
    np.minimum: "min",
    np.maximum: "max",
    np.sign: "sign",
    np.sqrt: "sqrt",
    np.floor: "floor",
    np.ceil: "ceil",
    np.trunc: "trunc",
    np.rint: "rint",
    np.bitwise_and: "and",
    np.bitwise_or: "or",
    np.bitwise_xor: "xor",
    np.invert: "not",
    np.equal: "eq",
    np.not_equal: "ne",
    np.less: "lt",
    np.less_equal: "le",
    np.left_shift: "shl",
    np.right_shift: "shr",
    np.remainder: "mod",
    np.floor_divide: "div",
}
_OF_TRUTH: dict[np.ufunc, str] = {  # operations of booleans
    np.add: "or",
    np.maximum: "or",
    np.logical_or: "or",
    np.multiply: "and",
    np.minimum: "and",
    np.logical_and: "and",
    np.logical_xor: "xor",
}
_NEGATIONS = (np.invert, np.logical_not)


class _NoOperation(Exception):
    """A function without a native operation."""


@dataclass(frozen=True)
class Converted:
    """The function ``x.astype(dtype)``."""

    dtype: Any

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x.astype(self.dtype)


@dataclass(frozen=True, eq=False)
class LookUp:
    """Elements of an array at indices, which may be negative; raises ValueError for an index out of range."""

    array: np.ndarray

    def __call__(self, *indices: np.ndarray) -> np.ndarray:
        code: Any = np.int64(0)
        for axis, (index, length) in enumerate(zip(indices, self.array.shape, strict=True)):
            least, most = np.min(index, initial=0), np.max(index, initial=-1)
            if least < -length or most >= length:
                wrong = least if least < -length else most
                raise ValueError(
                    f"mask_mod: index out of range: index {wrong} is out of bounds for dimension {axis} with size "
                    f"{length}"
                )
            code = code * length + (np.where(index < 0, index + length, index) if least < 0 else index)
        values = self.array.reshape(-1).take(code)
        return values.astype(np.int64) if values.dtype.kind in "iu" else values


@dataclass(frozen=True, eq=False)
class NativeProgram:
    """Steps on registers: _cells.pyx."""

    steps: np.ndarray
    result: int
    tables: tuple[np.ndarray, ...]
    inputs: tuple[tuple[int, np.dtype], ...]
    constants: dict[int, np.ndarray]
    registers: int

    def run(self, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
        """Evaluate on arrays that broadcast; None if an index is out of range, or for arrays that it does not take."""
        shape = np.broadcast_shapes(*(x.shape for x in inputs))
        if len(shape) > _AXES or any(x.dtype != dtype for x, (_, dtype) in zip(inputs, self.inputs, strict=True)):
            return None
        found = np.empty((1,) * (_AXES - len(shape)) + shape, bool)
        if found.size:
            registers = np.empty((self.registers, _cells.LANES), np.int64)
            for number, value in self.constants.items():
                registers[number].view(value.dtype)[: _cells.LANES] = value
            given = [(number, _stored(x)) for x, (number, _) in zip(inputs, self.inputs, strict=True)]
            if not _cells.evaluate(self.steps, self.result, self.tables, given, registers, found.view(np.uint8)):
                return None
        return found.reshape(shape)


def compiled(steps: Sequence[Step], dtypes: Sequence[np.dtype], result: int) -> NativeProgram | None:
    """Compile a program with a boolean result; return None if a function has no native operation.

    `steps` are functions and their operands, None for an input; `dtypes` are those of their values.
    """
    if not steps or dtypes[result] != _BOOL:
        return None
    try:
        return _Compiler(steps, dtypes, result).program()
    except _NoOperation:
        return None


class _Compiler:
    """Registers and native steps of a program."""

    def __init__(self, steps: Sequence[Step], dtypes: Sequence[np.dtype], result: int):
        self.steps, self.dtypes, self.result = steps, dtypes, result
        self.native: list[tuple[int, ...]] = []
        self.tables: list[np.ndarray] = []
        self.constants: dict[int, np.ndarray] = {}
        self.of_constants: dict[tuple[str, bytes], int] = {}
        self.of_values: dict[int, int] = {}
        self.last: dict[int, int] = {}  # the step after which the register of each value is free
        self.free: list[int] = []
        self.kept: list[int] = []  # registers to free after the current step
        self.registers = 0

    def program(self) -> NativeProgram:
        used = {self.result}
        for number in reversed(range(len(self.steps))):
            function, operands = self.steps[number]
            if number in used or function is None:
                for x in map(_number, operands):
                    if x is not None:
                        used.add(x)
                        self.last.setdefault(x, number)
        inputs = [number for number, (function, _) in enumerate(self.steps) if function is None]
        for number in inputs:  # all before the first step, which may reuse no register that is read already
            self.letter(self.dtypes[number])
            self.of_values[number] = self.register()
        for number, (function, operands) in enumerate(self.steps):
            if function is not None and number in used:
                self.of_values[number] = self.step(function, operands, self.dtypes[number])
                gone = {x for x in map(_number, operands) if x is not None and self.last[x] == number}
                self.free += self.kept + [self.of_values[x] for x in gone if x != self.result]
                self.kept = []
        if not self.native or self.registers > _MOST_REGISTERS:
            raise _NoOperation
        return NativeProgram(
            np.array(self.native, np.int64),
            self.of_values[self.result],
            tuple(self.tables),
            tuple((self.of_values[number], self.dtypes[number]) for number in inputs),
            self.constants,
            self.registers,
        )

    def letter(self, dtype: np.dtype) -> str:
        """Return the letter of the operations on a dtype."""
        if dtype.name not in _LETTERS:
            raise _NoOperation
        return _LETTERS[dtype.name]

    def register(self) -> int:
        if self.free:
            return self.free.pop()
        self.registers += 1
        return self.registers - 1

    def emit(self, name: str, a: int, b: int | None = None, c: int | None = None, number: int = 0) -> int:
        """Append a step and return the register of its value."""
        if name not in _cells.OPERATIONS:
            raise _NoOperation
        out = self.register()
        self.native.append((_cells.OPERATIONS[name], out, a, a if b is None else b, a if c is None else c, number))
        return out

    def temporary(self, *step: Any, **more: Any) -> int:
        """Append a step whose value the current step alone uses."""
        self.kept.append(self.emit(*step, **more))
        return self.kept[-1]

    def constant(self, value: Any, dtype: np.dtype) -> int:
        letter = self.letter(dtype)
        try:
            array = np.asarray(value, dtype).astype(_STORED[letter])
        except OverflowError as error:
            raise _NoOperation from error
        key = letter, array.tobytes()
        if key not in self.of_constants:
            self.registers += 1  # never one that other steps have used
            self.of_constants[key] = self.registers - 1
            self.constants[self.registers - 1] = array
        return self.of_constants[key]

    def operand(self, x: Any, dtype: np.dtype) -> int:
        """Return the register of an operand, converted to `dtype`."""
        number = _number(x)
        if number is None:
            if not isinstance(x, (bool, int, float, np.bool_, np.integer, np.floating)):
                raise _NoOperation
            return self.constant(x, dtype)
        own, wanted = self.letter(self.dtypes[number]), self.letter(dtype)
        if own != wanted:
            return self.temporary(f"cast_{own}_{wanted}", self.of_values[number])
        if dtype == _BOOL and self.dtypes[number] != _BOOL:
            raise _NoOperation
        return self.of_values[number]

    def step(self, function: Callable[..., Any], operands: tuple[Any, ...], dtype: np.dtype) -> int:
        if isinstance(function, Converted):
            return self.converted(operands[0], np.dtype(function.dtype))
        if isinstance(function, LookUp):
            return self.look_up(function.array, operands)
        if function is np.where:
            condition, a, b = operands
            own = self.operand(condition, _BOOL)
            letter = self.letter(dtype)
            return self.emit(f"where_{letter}", self.operand(a, dtype), self.operand(b, dtype), own)
        if function is np.isin:
            return self.member(*operands)
        if isinstance(function, np.ufunc) and function.nout == 1 and function.nin == len(operands):
            return self.ufunc(function, operands)
        raise _NoOperation

    def ufunc(self, function: np.ufunc, operands: tuple[Any, ...]) -> int:
        try:
            *inputs, _ = function.resolve_dtypes((*map(self.type_of, operands), None))
        except TypeError as error:
            raise _NoOperation from error
        if function in _SWAPPED:
            function, operands = _SWAPPED[function], operands[::-1]
        letter = self.letter(inputs[0])
        if any(dtype != inputs[0] for dtype in inputs):
            raise _NoOperation
        if inputs[0] == _BOOL and function in _NEGATIONS:
            own = self.operand(operands[0], inputs[0])
            return self.emit("xor_i", own, self.constant(True, inputs[0]))
        name = _NAMES.get(function, "") if inputs[0] != _BOOL else _OF_TRUTH.get(function, _NAMES.get(function, ""))
        if letter == "i" and inputs[0] != _BOOL:
            if function in (np.left_shift, np.right_shift, np.remainder, np.floor_divide):
                return self.by_number(name, *operands)
            if function is np.power:
                return self.power(*operands)
        elif function is np.floor_divide:  # of floats
            raise _NoOperation
        return self.emit(f"{name}_{letter}", *(self.operand(x, inputs[0]) for x in operands))

    def type_of(self, x: Any) -> Any:
        """Return the dtype of an operand, or the type of a Python number, which takes the dtype of the others."""
        number = _number(x)
        if number is not None:
            return self.dtypes[number]
        return type(x) if type(x) in (int, float) else np.asarray(x).dtype

    def by_number(self, name: str, a: Any, number: Any) -> int:
        """Shift or divide by a positive constant."""
        if _number(number) is not None or not 0 <= number < 1 << 63:
            raise _NoOperation
        own, number = self.operand(a, _INT64), int(number)
        if name in ("mod", "div"):
            if number <= 0:
                raise _NoOperation
            if number & (number - 1) == 0:  # rounds down, as a shift does
                if name == "mod":
                    return self.emit("and_i", own, self.constant(number - 1, _INT64))
                name, number = "shr", number.bit_length() - 1
        elif number >= 64:
            if name == "shl":
                return self.emit("and_i", own, self.constant(0, _INT64))
            number = 63
        return self.emit(f"{name}_i", own, number=number)

    def power(self, a: Any, exponent: Any) -> int:
        if _number(exponent) is not None or not 2 <= exponent <= 64:
            raise _NoOperation
        own = found = self.operand(a, _INT64)
        for _ in range(int(exponent) - 2):
            found = self.temporary("mul_i", found, own)
        return self.emit("mul_i", found, own)

    def converted(self, x: Any, dtype: np.dtype) -> int:
        before, letter = self.letter(self.dtypes[x.number]), self.letter(dtype)
        return self.emit(f"cast_{before}_{letter}", self.of_values[x.number])  # there is none for equal letters

    def look_up(self, array: np.ndarray, operands: tuple[Any, ...]) -> int:
        code = self.constant(0, _INT64)
        for index, length in zip(operands, array.shape, strict=True):
            code = self.temporary("index_i", code, self.operand(index, _INT64), number=length)
        stored = _stored(array)
        if stored.dtype.name not in _cells.TYPES:
            raise _NoOperation
        letter = self.letter(array.dtype if array.dtype.kind == "f" else _INT64)
        return self.emit(f"look_up_{letter}", code, number=self.table(np.ascontiguousarray(stored).reshape(-1)))

    def member(self, x: Any, table: Any) -> int:
        if _number(x) is None or not isinstance(table, np.ndarray) or table.dtype != np.int64:
            raise _NoOperation
        own = self.operand(x, _INT64)
        return self.emit("member_i", own, number=self.table(np.unique(table)))

    def table(self, flat: np.ndarray) -> int:
        self.tables.append(flat)
        return len(self.tables) - 1


def _stored(array: np.ndarray) -> np.ndarray:
    """Return an array with booleans as uint8."""
    return array.view(np.uint8) if array.dtype == _BOOL else array


def _number(operand: Any) -> int | None:
    """Return the number of a value of the program; None for other operands."""
    return getattr(operand, "number", None)
