"""Encode score programs for the kernels' interpreter, softmax/score.h."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._util.frozen import frozen
from ..arrays import dtype_name
from ..request.call import Call
from ..request.score import Portion, ScoreOperands
from ..score.evaluate import evaluate
from ..score.graph import BOOL, FLOAT, INT, Graph
from ..score.program import CALL, DIAGONAL, HEAD, KEY, PAIR, QUERY, Program, scopes
from . import _core

__all__ = ["INSTRUCTION", "USE", "VARIANT", "Bound", "Encoded", "bind", "clear", "encode", "gradients"]

# Spaces of registers, in the order of kernels.h.
_SCALARS, _QUERIES, _KEYS, _DIAGONALS, _PAIRS, _TILES, _PRODUCTS = range(7)
_OF_SCOPE = {CALL: _SCALARS, HEAD: _SCALARS, QUERY: _QUERIES, KEY: _KEYS, DIAGONAL: _DIAGONALS, PAIR: _PAIRS}
_SPACE_SHIFT = 24

_MOST_ELEMENTS = (64 << 20) // (8 * _core.SUM_WORDS)  # maximum table elements per pass: 64 MiB of accumulators
_MOST_TERMS = 1 << 31  # maximum terms of an element: each changes a 64-bit word by less than 2^32
_SUFFIX = {FLOAT: "f", INT: "i", BOOL: "b"}
TABLE_DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)
"""Dtypes of tables that kernels read in place, in the order of kernels.h."""

INSTRUCTION = np.dtype([("operation", "i4"), ("out", "i4"), ("operands", "i4", (3,)), ("number", "i4")])
"""An operation on registers ``space << 24 | index``. The operand of a look-up in table `number` is the offset of its
index registers in `Encoded.indices`. For constants and parameters, `number` is an index in `Bound.numbers`."""

VARIANT = np.dtype(
    [
        ("lines", "i4"),
        ("diagonals", "i4", (2,)),
        ("pairs", "i4", (2,)),
        ("value", "i4"),
        ("derivative", "i4"),
        ("uses", "i4", (2,)),
    ]
)
"""The program for one kind of tiles. `lines` is the end of the instructions of queries and keys. `diagonals` and
`pairs` are ranges of further instructions, `uses` a range of uses, `value` and `derivative` registers of results."""

USE = np.dtype([("table", "i4"), ("derivative", "i4"), ("indices", "i4"), ("space", "i4")])
"""A look-up whose table needs a gradient. `derivative` is the register of the derivative, `indices` the offset of the
index registers in `Encoded.indices`. `space`, the common space of the indices, tells which terms of a tile share an
element."""


class Encoded(NamedTuple):
    """A program as read-only arrays, without captured values.

    Attributes
    ----------
    instructions : (n,) INSTRUCTION
        [0, scalars) compute scalars. From there to a variant's `lines`, they compute its registers of queries and
        keys. The `diagonals` and `pairs` of the variants follow.
    indices : (n,) int32
        Registers of look-up indices.
    variants : (3,) VARIANT
        For tiles whose rows and columns are evenly spaced by the same step, for other tiles, and for single pairs.
    uses : (n,) USE
    scalars : int
    registers : (8,) int32
        Number of registers in each space; the last counts the scalars of the variant for single pairs.
    constants : (n,) float64
        The first of `Bound.numbers`; the parameters follow.
    direct : tuple of bool
        For each table, whether an element of its gradient has at most one term, which kernels store directly.
    shifts : tuple of tuple of (str, Graph) or None
        For each axis of each table, the input "b", "h" or "q" from which its index differs by a constant of the call,
        and the graph of the index; None for other axes.
    """

    instructions: np.ndarray
    indices: np.ndarray
    variants: np.ndarray
    uses: np.ndarray
    scalars: int
    registers: np.ndarray
    constants: np.ndarray
    direct: tuple[bool, ...]
    shifts: tuple[tuple[tuple[str, Graph] | None, ...], ...]


def encode(operands: ScoreOperands, call: Call, *, backward: bool) -> Encoded | None:
    """Return the program of a call for the kernels, or None for the identity.

    Parameters
    ----------
    operands : ScoreOperands
    call : Call
        Its sizes determine which gradients of tables have at most one term per element.
    backward : bool
        Whether to compute derivatives.
    """
    program = operands.program
    if program is None:
        return None
    for number, of in enumerate(operands.types):
        if len(of.shape) > _core.MOST_AXES:
            raise ValueError(
                f"score: expected arrays of at most {_core.MOST_AXES} axes, array {number} has {len(of.shape)}"
            )
    return _Encoder(program, operands, call, backward).encoded()


class _Encoder:
    def __init__(self, program: Program, operands: ScoreOperands, call: Call, backward: bool) -> None:
        self.operands, self.call = operands, call
        wanted = operands.wanted or (False,) * len(operands.types)
        uses = [use for use in program.captured if backward and use.name == "look_up" and wanted[use.number]]
        results = [*program.graph.results[: 2 if backward else 1], *(use.derivative for use in uses)]
        graph = program.graph.only([*results, *(index for use in uses for index in use.indices)])
        rest = iter(graph.results[2 if backward else 1 :])
        derivatives = [next(rest) for _ in uses]
        self.uses = [
            use._replace(derivative=at, indices=tuple(next(rest) for _ in use.indices))
            for use, at in zip(uses, derivatives, strict=True)
        ]
        self.graph, self.scopes = graph, scopes(graph)
        self.value = graph.results[0]
        self.derivative = graph.results[1] if backward else None
        self.read = Counter(x for op in graph.operations for x in op.operands) + Counter(graph.results)
        self.instructions: list[tuple[int, int, tuple[int, ...], int]] = []
        self.indices: list[int] = []
        self.constants: list[float] = []
        self.registers = [0] * 8
        self.listed_uses: list[tuple[int, int, int, int]] = []

    def encoded(self) -> Encoded:
        shared = _Registers(self, {_SCALARS, _QUERIES, _KEYS})
        for index, scope in enumerate(self.scopes):
            if _OF_SCOPE[scope] in (_SCALARS, _QUERIES, _KEYS):
                shared.find(index, _OF_SCOPE[scope])
        shared.scale()
        variants = [_Registers(self, {_DIAGONALS, _PAIRS}, shared, diagonals=x) for x in (True, False)]
        single = _Registers(self, {_SCALARS}, single=True)
        for own in (*variants, single):
            own.whole()
        scalars, of_lines = (shared.emitted(spaces) for spaces in ({_SCALARS}, {_QUERIES, _KEYS}))
        needed = variants[0].lines_read()
        of_lines.sort(key=lambda instruction: instruction[1] not in needed)
        found = [*scalars, *of_lines]
        ends = [len(scalars) + sum(instruction[1] in needed for instruction in of_lines), len(found), 0]
        records = []
        for own, end in zip((*variants, single), ends, strict=True):
            own.allocate()
            first = own.emitted({_DIAGONALS})
            second = own.emitted({_SCALARS} if own.single else {_PAIRS, _TILES})
            begin = len(found)
            found += [*first, *second]
            middle = begin + len(first)
            begin_uses = len(self.listed_uses)
            self.listed_uses += own.uses()
            derivative = -1 if self.derivative is None else own.of(self.derivative)
            records.append(
                (
                    end,
                    (begin, middle),
                    (middle, len(found)),
                    own.of(self.value),
                    derivative,
                    (begin_uses, len(self.listed_uses)),
                )
            )
        for space in (_SCALARS, _QUERIES, _KEYS):
            self.registers[space] = shared.count[space]
        for space in (_DIAGONALS, _PAIRS, _TILES):
            self.registers[space] = max(own.count[space] for own in variants)
        self.registers[7] = single.count[_SCALARS]
        return Encoded(
            frozen(np.array(found, INSTRUCTION)),
            frozen(np.array(self.indices, np.int32)),
            frozen(np.array(records, VARIANT)),
            frozen(np.array(self.listed_uses, USE)),
            len(scalars),
            frozen(np.array(self.registers, np.int32)),
            frozen(np.array(self.constants, np.float64)),
            tuple(self._direct(number) for number in range(len(self.operands.types))),
            tuple(self._shifts(number) for number in range(len(self.operands.types))),
        )

    def _shifts(self, table: int) -> tuple[tuple[str, Graph] | None, ...]:
        """The entry of Encoded.shifts for a table; None for an axis whose index differs between uses."""
        uses = [use for use in self.uses if use.number == table]
        found: list[tuple[str, Graph] | None] = []
        for axis in range(len(self.operands.types[table].shape)):
            indices = {use.indices[axis] for use in uses}
            name = _shifted_input(self.graph, self.scopes, min(indices)) if len(indices) == 1 else None
            graph = self.graph.only(indices)
            simple = all(operation.name != "look_up" for operation in graph.operations)
            found.append((name, graph) if name is not None and name != "k" and simple else None)
        return tuple(found)

    def _direct(self, table: int) -> bool:
        """Whether every element of a table's gradient comes from at most one pair of one head."""
        uses = [use for use in self.uses if use.number == table]
        if len(uses) != 1:
            return False
        call, lengths = self.call, {}
        for axis, index in enumerate(uses[0].indices):
            name = _shifted_input(self.graph, self.scopes, index)
            if name is not None:
                lengths[name] = self.operands.types[table].shape[axis]
        sizes = {"b": call.batch, "h": call.heads_q, "q": call.q_len, "k": call.kv_len}
        # Consecutive indices wrap to different elements if there are no more of them than the axis is long.
        return all(size <= lengths.get(name, 1) for name, size in sizes.items())


def _shifted_input(graph: Graph, scope: Sequence[str], index: int) -> str | None:
    """The input (b, h, q or k) from which an index differs by a constant of the call, or None."""
    operation = graph.operations[index]
    if operation.name in ("b", "h", "q", "k"):
        return operation.name
    if operation.name not in ("add", "sub"):
        return None
    a, b = operation.operands
    if scope[b] == CALL:
        return _shifted_input(graph, scope, a)
    return _shifted_input(graph, scope, b) if scope[a] == CALL and operation.name == "add" else None


class _Registers:
    """The instructions that compute the registers of some spaces, in execution order.

    An operation of the graph runs in the space of its scope, and reads operands of smaller scopes from their spaces. An
    operation of scope DIAGONAL or HEAD may have operands of larger scopes. The encoder computes these again: on the
    diagonals, or at query and key 0.
    """

    def __init__(
        self,
        encoder: _Encoder,
        spaces: set[int],
        shared: _Registers | None = None,
        *,
        diagonals: bool = True,
        single: bool = False,
    ) -> None:
        self.encoder, self.spaces, self.shared = encoder, spaces, shared
        self.diagonals, self.single = diagonals, single
        self.known: dict[tuple[Any, int], int] = {}
        self.made: list[tuple[int, int, tuple[int, ...], int]] = []
        self.count = [0] * 7

    def space(self, index: int) -> int:
        """The space of an operation."""
        if self.single:
            return _SCALARS
        own = _OF_SCOPE[self.encoder.scopes[index]]
        return _PAIRS if own == _DIAGONALS and not self.diagonals else own

    def whole(self) -> None:
        """Compute all operations of these spaces, except products that are part of a multiply-add."""
        encoder = self.encoder
        for index in range(len(encoder.graph.operations)):
            if self.space(index) in self.spaces and not self._fused_into_other(index):
                self.find(index, self.space(index))

    def of(self, index: int) -> int:
        """The register of an operation."""
        return self.find(index, self.space(index))

    def scale(self) -> int:
        return self._input("scale", _SCALARS)

    def find(self, index: int, space: int) -> int:
        """The register that holds an operation in a space."""
        if self.shared is not None and space not in self.spaces:
            return self.shared.find(index, space)
        known = self.known.get((index, space))
        if known is None:
            known = self.known[index, space] = self._computed(index, space)
        return known

    def _operand(self, index: int, space: int) -> int:
        own = self.space(index)
        return self.find(index, own if own in (_SCALARS, space) or space == _PAIRS else space)

    def _computed(self, index: int, space: int) -> int:
        encoder = self.encoder
        name, operands, dtype, number = encoder.graph.operations[index]
        if name == "score":
            product = self._input("product", _SCALARS) if self.single else _PRODUCTS << _SPACE_SHIFT
            return self._append("mul_f", space, (product, self._shared_scale()))
        if name in ("q", "k", "b", "h", "offset"):
            return self._append(f"input_{name}", space, ())
        if name == "constant":
            encoder.constants.append(float(number))
            return self._append(f"number_{_SUFFIX[dtype]}", space, (), len(encoder.constants) - 1)
        if name == "parameter":
            return self._append(f"number_{_SUFFIX[dtype]}", space, (), -1 - int(number))
        if name == "look_up":
            registers = [self._operand(x, space) for x in operands]
            at = len(encoder.indices)
            encoder.indices += registers
            return self._append("look_up", space, (at,), int(number))
        fused = self._factors(index)
        if fused is not None:
            return self._append("multiply_add_f", space, [self._factor(x, space) for x in fused])
        of = encoder.graph.operations[operands[-1]].dtype
        return self._append(f"{name}_{_SUFFIX[of]}", space, [self._operand(x, space) for x in operands])

    def _shared_scale(self) -> int:
        return self._input("scale", _SCALARS) if self.shared is None else self.shared.scale()

    def _factor(self, x: int, space: int) -> int:
        """An operand of a multiply-add; -1 and -2 are the unscaled score and the scale."""
        if x >= 0:
            return self._operand(x, space)
        return _PRODUCTS << _SPACE_SHIFT if x == -1 else self._shared_scale()

    def _factors(self, index: int) -> tuple[int, int, int] | None:
        """(a, b, c) of an operation a * b + c on pairs, if no other operation reads a * b; None for others."""
        encoder, operation = self.encoder, self.encoder.graph.operations[index]
        if self.single or operation.name != "add" or operation.dtype != FLOAT or self.space(index) != _PAIRS:
            return None
        for one, other in (operation.operands, operation.operands[::-1]):
            product = encoder.graph.operations[one]
            if product.name in ("mul", "score") and self.space(one) == _PAIRS and encoder.read[one] == 1:
                return (-1, -2, other) if product.name == "score" else (*product.operands, other)  # type: ignore[return-value]
        return None

    def _fused_into_other(self, index: int) -> bool:
        encoder = self.encoder
        if encoder.graph.operations[index].name not in ("mul", "score") or encoder.read[index] != 1:
            return False
        for at, operation in enumerate(encoder.graph.operations):
            if index in operation.operands:
                fused = self._factors(at)
                return fused is not None and index not in fused
        return False

    def _input(self, name: str, space: int) -> int:
        key = name, space
        if key not in self.known:
            self.known[key] = self._append(f"input_{name}", space, ())
        return self.known[key]

    def _append(self, name: str, space: int, operands: Iterable[int], number: int = 0) -> int:
        register = space << _SPACE_SHIFT | self.count[space]
        self.count[space] += 1
        self.made.append((_core.OPERATIONS[name], register, (*operands, 0, 0, 0)[:3], number))
        return register

    def emitted(self, spaces: set[int]) -> list[tuple[int, int, tuple[int, ...], int]]:
        """The instructions of some spaces."""
        constants = len(self.encoder.constants)
        is_number = {_core.OPERATIONS[f"number_{x}"] for x in "fib"}
        return [
            (code, out, operands, constants - 1 - number if code in is_number and number < 0 else number)
            for code, out, operands, number in self.made
            if out >> _SPACE_SHIFT in spaces
        ]

    def _operands(self, code: int, operands: tuple[int, ...], number: int) -> list[int]:
        """The registers that an instruction reads."""
        if code != _core.OPERATIONS["look_up"]:
            return list(operands)
        axes = len(self.encoder.operands.types[number].shape)
        return self.encoder.indices[operands[0] : operands[0] + axes]

    def _results(self) -> list[int]:
        """The operations whose registers kernels read after the last instruction, except the value."""
        encoder = self.encoder
        derivative = [] if encoder.derivative is None else [encoder.derivative]
        return [*derivative, *(x for use in encoder.uses for x in (use.derivative, *use.indices))]

    def lines_read(self) -> set[int]:
        """The registers of queries and keys that these instructions and results need."""
        shared = self.shared
        assert shared is not None
        made = {out: self._operands(code, operands, number) for code, out, operands, number in shared.made}
        waiting = [x for code, _, operands, number in self.made for x in self._operands(code, operands, number)]
        waiting += [self.of(x) for x in (self.encoder.value, *self._results())]
        found: set[int] = set()
        while waiting:
            register = waiting.pop()
            if register >> _SPACE_SHIFT in (_QUERIES, _KEYS) and register not in found:
                found.add(register)
                waiting += made[register]
        return found

    def uses(self) -> list[tuple[int, int, int, int]]:
        """Return the encoder's uses, encoded with the registers of this variant."""
        encoder, listed = self.encoder, []
        for use in encoder.uses:
            at = len(encoder.indices)
            encoder.indices += [self.of(x) for x in use.indices]
            spaces = {self.space(x) for x in use.indices} - {_SCALARS}
            space = _PAIRS if len(spaces) > 1 else next(iter(spaces), _SCALARS)
            listed.append((use.number, self.of(use.derivative), at, space))
        return listed

    def allocate(self) -> None:
        """Reuse registers of pairs by lifetime; results that outlive a strip of rows get registers of whole tiles."""
        encoder, look_up = self.encoder, _core.OPERATIONS["look_up"]
        new: dict[int, int] = {}
        for index in self._results():
            register = self.of(index)
            if register >> _SPACE_SHIFT == _PAIRS and register not in new:
                new[register] = _TILES << _SPACE_SHIFT | self.count[_TILES]
                self.count[_TILES] += 1

        last: dict[int, int] = {}
        for at, (code, _, operands, number) in enumerate(self.made):
            last.update(dict.fromkeys(self._operands(code, operands, number), at))
        last[self.of(encoder.value)] = len(self.made)
        free: list[int] = []
        total = 0
        for at, (code, out, operands, number) in enumerate(self.made):
            for register in {x for x in self._operands(code, operands, number) if last.get(x) == at}:
                if register >> _SPACE_SHIFT == _PAIRS and new[register] >> _SPACE_SHIFT == _PAIRS:
                    free.append(new[register])
            if out >> _SPACE_SHIFT == _PAIRS and out not in new:
                new[out] = free.pop() if free else _PAIRS << _SPACE_SHIFT | total
                total = max(total, (new[out] & (1 << _SPACE_SHIFT) - 1) + 1)
        self.count[_PAIRS] = total
        renamed: Callable[[int], int] = lambda x: new.get(x, x)  # noqa: E731
        look_ups = [(operands[0], number) for code, _, operands, number in self.made if code == look_up]
        for at, number in look_ups:
            axes = len(encoder.operands.types[number].shape)
            encoder.indices[at : at + axes] = map(renamed, encoder.indices[at : at + axes])
        self.made = [
            (code, renamed(out), operands if code == look_up else tuple(map(renamed, operands)), number)
            for code, out, operands, number in self.made
        ]
        self.known = {key: renamed(register) for key, register in self.known.items()}


class Bound(NamedTuple):
    """The values of a call for an encoded program.

    Attributes
    ----------
    numbers : (n,) float64 array
        Constants, then parameters.
    tables : tuple of ndarray
    dtypes : tuple of int
        Indices in TABLE_DTYPES.
    items : ((int, int, int), (int, int, int))
        First batch entry, query head and query that the backward covers, and their ends.
    sums : tuple of (table, begin, end, words)
        Exact accumulators, (end - begin, 10) int64, for elements [begin, end) of the gradient of a table.
    direct : tuple of (table, gradient)
        Gradients with at most one term per element: contiguous, in the kernels' compute type.
    items_of_tables : (items,) bool array or None
        Work items that add to the gradients of tables; None means all.
    """

    numbers: np.ndarray
    tables: tuple[np.ndarray, ...]
    dtypes: tuple[int, ...]
    items: tuple[tuple[int, int, int], tuple[int, int, int]]
    sums: tuple[tuple[int, int, int, np.ndarray], ...] = ()
    direct: tuple[tuple[int, np.ndarray], ...] = ()
    items_of_tables: np.ndarray | None = None


def bind(encoded: Encoded, call: Call, prepared: ScoreOperands, operands: ScoreOperands | None) -> Bound:
    """Check the values of a call against the prepared operands, and return them for the kernels."""
    if operands is None:
        raise ValueError("score: expected the operands of the prepared call, got None")
    if len(operands.parameters) != len(prepared.parameters) or len(operands.tables) != len(prepared.types):
        expected = f"{len(prepared.parameters)} parameters and {len(prepared.types)} tables of the prepared call"
        raise ValueError(f"score: expected {expected}, got {len(operands.parameters)} and {len(operands.tables)}")
    numbers = np.concatenate([encoded.constants, np.asarray(operands.parameters, np.float64)])
    tables, dtypes = [], []
    for number, (table, of) in enumerate(zip(operands.tables, prepared.types, strict=True)):
        name = dtype_name(table)
        if tuple(table.shape) != tuple(of.shape) or name != of.dtype:
            raise ValueError(
                f"score: expected array {number} of shape {tuple(of.shape)} and dtype {of.dtype}, "
                f"got {tuple(table.shape)} and {name}"
            )
        if name not in TABLE_DTYPES:  # such as longdouble
            table, name = table.astype(np.float64), "float64"
        if not table.dtype.isnative:
            table = table.astype(table.dtype.newbyteorder("="))
        tables.append(table)
        dtypes.append(TABLE_DTYPES.index(name))
    whole = (0, 0, 0), (call.batch, call.heads_q, call.q_len)
    items = None if operands.portion is None else operands.portion.items
    return Bound(numbers, tuple(tables), tuple(dtypes), whole, items_of_tables=items)


def gradients(
    encoded: Encoded,
    operands: ScoreOperands,
    call: Call,
    bound: Bound,
    compute: Callable[[Bound, bool], None],
    portion: Portion | None = None,
) -> tuple[np.ndarray | None, ...]:
    """Run the backward, several times if its accumulators would exceed 64 MiB; return the tables' gradients.

    ``compute(bound, whole)`` runs it. The first run covers all work items. Each later run sums other elements of tables
    and covers only the items that may have terms of them, so its dQ, dK and dV are incomplete.
    """
    dtype = np.dtype(call.lse_dtype)
    wanted = operands.wanted or (False,) * len(operands.types)
    found = [np.zeros(of.shape, dtype) if own else None for of, own in zip(operands.types, wanted, strict=True)]
    direct = tuple((number, x) for number, x in enumerate(found) if x is not None and encoded.direct[number])
    for number_of_pass, ranges in enumerate(_passes(encoded, operands, call)):
        words = tuple((*own, np.zeros((own[2] - own[1], _core.SUM_WORDS), np.int64)) for own in ranges)
        if number_of_pass:
            items = _items(encoded, operands, call, bound, ranges)
            compute(bound._replace(sums=words, items=items), False)
        else:
            compute(bound._replace(sums=words, direct=direct), True)
        for number, begin, end, summed in words:
            found[number].reshape(-1)[begin:end] = sums(summed, portion)  # type: ignore[union-attr]
    if portion is not None:
        for _, gradient in direct:
            # One rank at most has a term of an element; the others have +0.
            bits = gradient.reshape(-1, 1).view(f"i{gradient.itemsize}")
            at, own = _over_ranks(bits, portion)
            bits[...] = 0
            bits[at] = own
    return tuple(found)


def _items(
    encoded: Encoded, operands: ScoreOperands, call: Call, bound: Bound, ranges: Sequence[tuple[int, int, int]]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return (begins, ends) of the batch entries, heads and queries that may have terms of the elements in `ranges`."""
    whole = bound.items
    if len(ranges) != 1:
        return whole
    number, begin, end = ranges[0]
    shape = operands.types[number].shape
    first, last = (np.unravel_index(x, shape) for x in (begin, end - 1))
    begins, ends = map(list, whole)
    parameters = bound.numbers[len(encoded.constants) :].tolist()
    start = {"score": 0, "b": 0, "h": 0, "q": call.q_offset, "k": 0, "offset": call.q_offset}
    for axis, length in enumerate(shape):
        own = encoded.shifts[number][axis]
        if own is not None:
            at, (shift,) = "bhq".index(own[0]), evaluate(own[1], start, parameters, ())
            if shift >= 0 and shift + whole[1][at] <= length:  # no index wraps
                begins[at] = max(begins[at], int(first[axis] - shift))
                ends[at] = min(ends[at], int(last[axis] + 1 - shift))
        if first[axis] != last[axis]:
            break
    return tuple(begins), tuple(ends)  # type: ignore[return-value]


def clear(bound: Bound) -> None:
    """Set the gradients of all tables to zero."""
    for *_, words in bound.sums:
        words[...] = 0
    for _, gradient in bound.direct:
        gradient[...] = 0


def _passes(encoded: Encoded, operands: ScoreOperands, call: Call) -> list[list[tuple[int, int, int]]]:
    """Return, for each run of the backward, (table, begin, end) of the gradient elements that it sums."""
    found: list[list[tuple[int, int, int]]] = [[]]
    left = _MOST_ELEMENTS
    for number in sorted({int(use) for use in encoded.uses["table"]}):
        if encoded.direct[number]:
            continue
        if call.batch * call.heads_q * call.q_len * call.kv_len * len(encoded.uses) >= _MOST_TERMS:
            _check_terms(encoded, call, number)
        at, size = 0, math.prod(operands.types[number].shape)
        while at < size:
            if not left:
                found.append([])
                left = _MOST_ELEMENTS
            count = min(left, size - at)
            found[-1].append((number, at, at + count))
            at, left = at + count, left - count
    return found


def _check_terms(encoded: Encoded, call: Call, table: int) -> None:
    """Raise ValueError if an element might have too many terms: uses indexed by pairs add one term per pair."""
    of_pairs = (encoded.uses["table"] == table) & (encoded.uses["space"] == _PAIRS)
    first, last = encoded.variants["uses"][0]
    if of_pairs[first:last].any():
        raise ValueError(
            f"score: the gradient of array {table} could sum more than 2^31 terms for one element; "
            f"got {call.batch * call.heads_q} heads of {call.q_len} x {call.kv_len} pairs"
        )


def sums(words: np.ndarray, portion: Portion | None) -> np.ndarray:
    """Return the float64 sums that exact accumulators hold, over all ranks; 0 for those that other ranks return."""
    at, own = (slice(None), words) if portion is None else _over_ranks(words, portion)
    found, rounded = np.zeros(len(words)), np.empty(len(own))
    _core.exact_sums(own, rounded)
    found[at] = rounded
    return found


def added(words: np.ndarray) -> np.ndarray:
    """Return the sums of exact accumulators, (parts, n, words): the last word has flags."""
    found: np.ndarray = words.sum(axis=0, dtype=words.dtype)
    found[:, -1] = np.bitwise_or.reduce(words[:, :, -1], axis=0)
    return found


def _over_ranks(words: np.ndarray, portion: Portion) -> tuple[slice, np.ndarray]:
    at, parts = portion.exchange(words)
    return at, added(parts)
