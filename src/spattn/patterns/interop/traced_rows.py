"""Bound traces: booleans of query rows and keys, evaluated on tiles by symbols, and on cells by programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._util.cached import cached_property
from ..._util.imports import whole_imports
from ..._util.index_checks import q_offset
from ..base.pattern import Pattern
from ..base.predicate import apply
from ..hints.table import BlockTable, NumberTable

if TYPE_CHECKING:
    from ...trace.program import Program, Recorded
    from ...trace.trace import Constant, Ref, Step, Trace

__all__ = ["KEY", "QUERY", "SIDES", "Rows", "is_of_distance"]

QUERY, KEY = 2, 3  # arguments of a mask_mod, after batch entry and head
SIDES = {QUERY, KEY}
_OF_DIFFERENCES = {f"aten.{name}.Tensor" for name in ("sub", "eq", "ne", "lt", "le", "gt", "ge")}
_MOST_ELEMENTS = 1 << 24  # of a temporary tensor
_MOST_NUMBERS = 1 << 20  # larger tables of numbers with two axes have no minima and maxima

Leaf = Callable[["Ref", int, tuple[int, ...]], Any]


@dataclass(frozen=True, repr=False)
class Rows(Pattern):
    """A boolean of a trace for bound lengths."""

    trace: Trace
    q_len: int
    kv_len: int
    tables: dict[Any, Any] = field(default_factory=dict, compare=False)
    """Look-up tables of captured tensors, and the values of operands for all rows or all keys."""

    @property
    def translation_invariant(self) -> bool:  # type: ignore[override]  # per instance
        return is_of_distance(self.trace)

    def allows(self, q: Any, k: Any) -> Any:
        with whole_imports:
            from ...trace.trace import Ref

        result, first = self.trace.result, q_offset(self.q_len, self.kv_len)
        if not isinstance(result, Ref):
            return result.array[()]
        if hasattr(q, "map"):
            return self._on_tiles(q - first, k)
        sides = {QUERY: np.asarray(q) - first, KEY: np.asarray(k)}
        if self._program is None:
            return self._by_torch(sides)
        program, inputs = self._program
        return program.run([self._element(*each, sides[each[1]]) for each in inputs])

    def _element(self, wanted: Ref, side: int, at: tuple[int, ...], positions: np.ndarray) -> np.ndarray:
        """Evaluate an element of an operand of one side; once for all its positions, if none is out of range."""
        if wanted.number == side:
            return positions
        positions, length = np.asarray(positions), (self.q_len, self.kv_len)[side == KEY]
        inside = positions.size and positions.min() >= 0 and positions.max() < length
        if inside and wanted.number not in self.tables:
            try:
                self.tables[wanted.number] = self._evaluated(wanted, side, np.arange(length))
            except ValueError:  # an index out of range, maybe at another position
                inside = False
        if not inside:
            return self._evaluated(wanted, side, positions)[at]
        return self.tables[wanted.number][at].take(positions)

    def _evaluated(self, wanted: Ref, side: int, positions: np.ndarray) -> np.ndarray:
        """Evaluate an operand of one side with PyTorch; its own axes come first."""
        found = self.trace.evaluate(wanted, {side: positions})
        found = found.astype(np.int64) if found.dtype.kind in "iu" else found
        axes = range(positions.ndim, found.ndim)
        return np.ascontiguousarray(np.moveaxis(found, axes, range(len(axes))))

    @cached_property
    def _program(self) -> tuple[Program, list[tuple[Ref, int, tuple[int, ...]]]] | None:
        """The program that evaluates the trace on cells, and its inputs; None if a step has no rule."""
        with whole_imports:
            from ...trace.native import LookUp
            from ...trace.program import Program
            from ...trace.rules import by_rule

        program, inputs = Program(), []

        def leaf(wanted: Ref, side: int, at: tuple[int, ...]) -> Any:
            dtype = _dtype(wanted)
            if dtype is None:
                return NotImplemented
            inputs.append((wanted, side, at))
            return program.input(dtype)

        def read(constant: Constant, indices: Sequence[Any]) -> Recorded:
            recorded = next(x for x in indices if hasattr(x, "record"))
            dtype = np.int64 if constant.array.dtype.kind in "iu" else constant.array.dtype
            found: Recorded = recorded.record(LookUp(constant.array), *indices, dtype=dtype)
            return found

        value = _Values(self.trace, leaf)
        try:
            for step in self.trace.steps:
                if is_two_sided(self.trace, step.result):
                    value.known[step.result.number] = by_rule(step, value, read)
        except (TypeError, OverflowError):  # operands outside the rules
            return None
        result = value(self.trace.result)
        if result is NotImplemented or not hasattr(result, "record"):
            return None
        program.finish(result)
        return program, inputs

    def _by_torch(self, sides: dict[int, np.ndarray]) -> np.ndarray:
        """Evaluate the trace by PyTorch, in parts whose temporary tensors fit into memory."""
        trace, shape = self.trace, np.broadcast_shapes(*(x.shape for x in sides.values()))
        largest = max((math.prod(step.result.shape) for step in trace.steps), default=1)
        count = min(-(-math.prod(shape) * largest // _MOST_ELEMENTS), shape[0] if shape else 1)
        if count < 2:
            return trace.evaluate(trace.result, sides)
        parts = zip(*(_split(x, shape, count) for x in sides.values()), strict=True)
        return np.concatenate([trace.evaluate(trace.result, dict(zip(sides, part, strict=True))) for part in parts])

    def _on_tiles(self, q: Any, k: Any) -> Any:
        """Evaluate the trace for the planner's symbolic positions."""
        with whole_imports:
            from ...trace.rules import by_rule

        trace, sides = self.trace, {QUERY: q, KEY: k}

        def leaf(wanted: Ref, side: int, at: tuple[int, ...]) -> Any:
            return apply(lambda x: self._element(wanted, side, at, x), sides[side])

        value = _Values(trace, leaf)
        for step in trace.steps:
            if not is_two_sided(trace, step.result):
                continue
            q.pairs.source[:] = [trace.lines.get(step.result.number, "")]
            try:
                found = by_rule(step, value, self._from_table)
            except (TypeError, OverflowError):  # operands outside the planner's rules
                found = NotImplemented
            dtype = _dtype(step.result)
            if found is NotImplemented and dtype is not None and not step.result.shape:
                found = q.unknown(value.operands_of(step), dtype, f"{step.name} in an expression of query and key")
            value.known[step.result.number] = found
        return value(trace.result)

    def _from_table(self, constant: Constant, indices: Sequence[Any]) -> Any:
        """Look elements of a captured tensor up; symbolic indices may be negative, as in PyTorch."""
        fixed = tuple(slice(None) if hasattr(x, "read") else int(x) for x in indices)
        symbols = [x for x in indices if hasattr(x, "read")]
        key = constant, str(fixed)
        if key not in self.tables:
            self.tables[key] = _table_of(constant.array[fixed])
        table = self.tables[key]
        if table is not None and len(symbols) == 1:
            symbols = [symbols[0] + table.shape[0] // 2]
        return NotImplemented if table is None else symbols[0].read(table, symbols)

    def __repr__(self) -> str:
        return f"<{self.trace.name}>"


class _Values:
    """The values of a trace's operands; NotImplemented for those without a value.

    `leaf` returns the value of an element of an operand that depends on the query or on the key alone.
    """

    def __init__(self, trace: Trace, leaf: Leaf):
        self.trace, self.leaf = trace, leaf
        self.known: dict[int, Any] = {}

    def __call__(self, operand: Any) -> Any:
        with whole_imports:
            from ...trace.rules import constant_value, each_element
            from ...trace.trace import Ref

        if not isinstance(operand, Ref):
            return constant_value(operand)
        if operand.number not in self.known:
            found: Any = NotImplemented
            if not is_two_sided(self.trace, operand):
                (side,) = self.trace.depends[operand.number]
                found = each_element(operand.shape, lambda at: self.leaf(operand, side, at))
            self.known[operand.number] = found
        return self.known[operand.number]

    def operands_of(self, step: Step) -> list[Any]:
        """Return the known values on which a step depends."""
        with whole_imports:
            from ...trace.trace import refs

        found: list[Any] = []
        for x in refs(step[2:]):
            own = self(x)
            if own is not NotImplemented:
                found += own.flat if isinstance(own, np.ndarray) else [own]
            elif x.number in self.trace.made:
                found += self.operands_of(self.trace.made[x.number])
        return found


def is_two_sided(trace: Trace, x: Ref) -> bool:
    """Return whether a value depends on query and key."""
    return trace.depends[x.number] >= SIDES


def is_of_distance(trace: Trace) -> bool:
    """Return whether the result is known to depend on the difference of row and key alone."""
    with whole_imports:
        from ...trace.trace import refs

    known: set[int] = set()
    for step in trace.steps:
        numbers = {x.number for x in refs(step[2:])}
        if (numbers == SIDES and step.name in _OF_DIFFERENCES and not step.options) or (numbers and numbers <= known):
            known.add(step.result.number)
    return getattr(trace.result, "number", -1) in known


def _dtype(x: Ref) -> np.dtype | None:
    """Return NumPy's dtype of a value, int64 for all integers; None for other types."""
    if x.dtype in ("int8", "int16", "int32", "int64", "uint8"):
        return np.dtype(np.int64)
    return np.dtype(x.dtype) if x.dtype in ("bool", "float16", "float32", "float64") else None


def _split(x: np.ndarray, shape: tuple[int, ...], count: int) -> list[np.ndarray]:
    """Split an array that broadcasts to `shape` along the first axis of `shape`."""
    if x.ndim < len(shape) or x.shape[0] == 1:
        return [x] * count
    return np.array_split(x, count)


def _table_of(array: np.ndarray) -> BlockTable | NumberTable | None:
    """Return the table with the extremes of boxes of an array; with one axis twice in a row, for negative indices."""
    if not (array.dtype.kind == "f" or np.can_cast(array.dtype, np.int64)) or not array.size or array.ndim > 2:
        return None
    if array.dtype.kind in "iu":
        array = array.astype(np.int64)
    if array.ndim == 1:
        return NumberTable(np.concatenate([array, array]))
    if array.dtype == bool:
        return BlockTable(array)
    return NumberTable(array) if array.size <= _MOST_NUMBERS else None
