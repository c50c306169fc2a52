"""Generate the C++ of a score function: the ``Score`` struct of kernels, and the arguments that it reads.

The code compiles with g++ and nvcc, for float and double. ``Score::open`` computes the operations of scope CALL and
HEAD once per head. Other functions compute the rest for a pair; once they are inlined, the compiler moves operations
that depend on the query or the key alone out of the loops over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from .._util.records import declaration
from .gradient import Captured
from .graph import BOOL, FLOAT, INPUTS, INT
from .program import CALL, DIAGONAL, HEAD, KEY, QUERY, Program, is_summed, joined, scopes

__all__ = ["Array", "arguments", "source"]

_TYPES = {FLOAT: "T", INT: "int", BOOL: "bool"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "xor": "!="}
_INFIX |= {"and": "&&", "or": "||"}
_WRAPS = ("add", "sub", "mul")  # wrap modulo 2^32 on int
_INPUT_NAMES = {"score": "score", "b": "batch", "h": "query_head", "q": "query", "k": "key", "offset": "offset"}
_ELEMENTS = {
    "float16": "Float16",
    "bfloat16": "BFloat16",
    "float32": "float",
    "float64": "double",
    "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_SMALL = 24  # maximum operations of Score::kPositions; nvcc takes a minute to compile two copies of a large function
_NARROW = 1 << 31  # offsets of elements below this fit an int
_DROPOUT = [  # fields of open_dropout() in dropout.cuh
    ("dropout_rows", "u8"),
    ("dropout_words", "u8"),
    ("dropout_factor", "f8"),
    ("dropout_q_len", "i8"),
    ("dropout_kv_len", "i8"),
    ("dropout_heads", "i4"),
    ("dropout_threshold", "u4"),
]


class Array(NamedTuple):
    """The properties of a captured array that the generated code depends on. Its sizes are not among them.

    Attributes
    ----------
    dtype : str
    steps : tuple of int or None
        Stride of each axis, in elements, if it is 0 or 1; else None, as the code reads it at run time.
    wide : bool
        True if offsets of elements need 64 bits.
    """

    dtype: str
    steps: tuple[int | None, ...]
    wide: bool

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Array:
        """Describe an array of this dtype, shape and strides."""
        extent = sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True) if size)
        wide = max(extent, math.prod(shape)) >= _NARROW
        return cls(dtype, tuple(stride if stride in (0, 1) else None for stride in strides), wide)


def arguments(program: Program, arrays: Sequence[Array], drops: bool = False) -> np.dtype:
    """Return the dtype of ``ScoreArgs``: captured numbers, each array's address, strides and shape, dropout."""
    numbers = {int(op.number): op.dtype for op in program.graph.operations if op.name == "parameter"}
    fields: list[tuple[str, str] | tuple[str, str, int]] = [
        (f"parameter{number}", "f8" if dtype == FLOAT else "i8") for number, dtype in sorted(numbers.items())
    ]
    for number, array in enumerate(arrays):
        fields.append((f"table{number}", "u8"))
        if array.steps:
            fields += [(f"stride{number}", "i8", len(array.steps)), (f"shape{number}", "i4", len(array.steps))]
    return np.dtype([*fields, *(_DROPOUT if drops else [])] or [("unused", "i8")], align=True)


def source(
    program: Program, arrays: Sequence[Array], direct: Mapping[int, bool] | None = None, drops: bool = False
) -> str:
    """Return the definitions of ``ScoreArgs`` and ``Score``; with `drops` for a call with dropout.

    `direct` has the numbers of the arrays that need a gradient, which ``Score::Uses`` lists. It maps them to whether
    each element of the gradient gets a term from at most one pair.
    """
    return _Writer(program, arrays, drops).text(direct or {})


class _Place(NamedTuple):
    """The part of an array at fixed indices along some axes."""

    table: int
    fixed: tuple[int | None, ...]  # per axis: the operation of an index of scope CALL or HEAD, else None

    @property
    def name(self) -> str:
        return f"{self.table}" + "".join(f"_{'' if x is None else x}" for x in self.fixed)


class _Writer:
    def __init__(self, program: Program, arrays: Sequence[Array], drops: bool) -> None:
        self.program, self.graph, self.arrays, self.drops = program, program.graph, arrays, drops
        self._scopes = scopes(program.graph)
        self._members: dict[str, tuple[str, str]] = {}  # of struct Head: name -> (type, value)
        self._opened_first: set[int] = set()  # operations that the values of members refer to

    def text(self, direct: Mapping[int, bool]) -> str:
        value, derivative, *_ = self.graph.results
        functions = [
            self._function("value", value, "value of a pair"),
            self._function("derivative", derivative, "derivative with respect to the score"),
            self._inside(value),
            self._of_diagonal(value),
        ]
        uses = [use for use in self.program.captured if use.name == "look_up" and use.number in direct]
        functions += [self._use(number, use, direct[use.number]) for number, use in enumerate(uses)]
        functions.append(f"  using Uses = ScoreUses<{', '.join(f'Use{number}' for number in range(len(uses)))}>;")
        record = arguments(self.program, self.arrays, self.drops)
        return "\n".join(
            [
                "#define SPATTN_SCORED 1",
                '#include "common/score_functions.cuh"',
                "namespace spattn {",
                declaration("ScoreArgs", record),
                "struct Score {",
                "  // Values that depend on the call, the batch entry and the query head alone.",
                "  template <class T>",
                "  struct Head {",
                *(f"    {ctype} {name};" for name, (ctype, _) in self._members.items()),
                "    Dropout<T> dropout;" if self.drops else "    NoDropout<T> dropout;",
                "  };",
                f"  static constexpr bool kDrops = {_truth(self.drops)};",
                f"  static constexpr bool kIdentity = {_truth(self.graph.operations[value].name == 'score')};",
                "",
                "  template <class T>",
                "  static SPATTN_SCORE Head<T> open(const ScoreArgs& args, int offset, int batch, int query_head) {",
                "    Head<T> head;",
                *self._opened(),
                *(["    head.dropout = open_dropout<T>(args, offset, batch, query_head);"] if self.drops else []),
                "    return head;",
                "  }",
                "",
                *functions,
                "};",
                "}  // namespace spattn",
                "",
            ]
        )

    def _small(self, x: int) -> bool:
        """Whether an operation is the same for all pairs of a head."""
        return self._scopes[x] in (CALL, HEAD)

    def _name(self, x: int) -> str:
        """The C++ name of an operand in the code for a pair."""
        operation = self.graph.operations[x]
        if operation.name == "constant":
            return _literal(operation.number, operation.dtype)
        if operation.name in INPUTS and not self._small(x):
            return _INPUT_NAMES[operation.name]
        return self._member(f"x{x}", _TYPES[operation.dtype], f"x{x}", x) if self._small(x) else f"x{x}"

    def _local(self, x: int) -> str:
        """The C++ name of an operand in ``open``."""
        operation = self.graph.operations[x]
        return _literal(operation.number, operation.dtype) if operation.name == "constant" else f"x{x}"

    def _member(self, name: str, ctype: str, value: str, *operations: int) -> str:
        self._members.setdefault(name, (ctype, value))
        self._opened_first.update(operations)
        return f"head.{name}"

    def _opened(self) -> list[str]:
        """Statements of ``open``: the operations that members need, and their assignments."""
        needed = set(self._opened_first)
        for place in self._places():
            needed |= {x for x in place.fixed if x is not None}
        lines = self._statements(needed, self._local, self._whole_look_up)
        for place in self._places():
            lines += self._start_of(place)
        lines += [f"    head.{name} = {value};" for name, (_, value) in self._members.items()]
        return lines

    def _places(self) -> list[_Place]:
        """Places of the array elements that are looked up for each pair."""
        found: dict[_Place, None] = {}
        for n, operation in enumerate(self.graph.operations):
            if operation.name == "look_up" and not self._small(n):
                place = self._place(n)
                if f"at{place.name}" in self._members:
                    found[place] = None
        return list(found)

    @staticmethod
    def _size_of(place: _Place, axis: int) -> str:
        """The size of an axis in ``open``; 0 if a fixed index is out of range."""
        return f"in{place.name} ? score_read(args.shape{place.table}[{axis}]) : 0"

    def _place(self, n: int) -> _Place:
        operation = self.graph.operations[n]
        fixed = tuple(x if self._small(x) else None for x in operation.operands)
        return _Place(int(operation.number), fixed)

    def _function(self, name: str, result: int, what: str) -> str:
        lines = self._statements([result], self._name, self._look_up)
        return "\n".join(
            [
                f"  // The {what}; kInside: inside() is true.",
                "  template <bool kInside = false, class T>",
                f"  static SPATTN_SCORE T {name}(T score, int query, int key, const Head<T>& head) {{",
                *lines,
                f"    return {self._name(result)};",
                "  }",
                "",
            ]
        )

    def _inside(self, value: int) -> str:
        """The function ``inside``, which checks by interval arithmetic whether all look-ups of a tile are in range."""
        lines: list[str] = []
        intervals: dict[int, bool] = {}
        checks = []
        for n in self._needed([value]):
            operation = self.graph.operations[n]
            if operation.name == "look_up" and not self._small(n):
                place = self._place(n)
                for axis, x in enumerate(operation.operands):
                    if not self._small(x):
                        size = self._member(f"size{place.name}_at{axis}", "int", self._size_of(place, axis))
                        known = self._interval(x, lines, intervals)
                        checks.append(f"low{x} >= 0 && high{x} < {size}" if known else "false")
        needed = self._needed([value])
        positions = any(self.graph.operations[n].name in ("q", "k") for n in needed) and len(needed) <= _SMALL
        fits = [f"score_fits(low{x}, high{x})" for x, known in intervals.items() if known]
        tests = "\n           && ".join([*fits, *checks])
        if "false" in checks:
            lines, tests = [], "false"
        return "\n".join(
            [
                "  // Whether value() depends on positions, and is small: kernels have another copy for simple tiles.",
                f"  static constexpr bool kPositions = {_truth(positions)};",
                "  // Whether value() looks up elements inside arrays only, for positions in these ranges; false if",
                "  // that is not known.",
                "  template <class T>",
                "  static SPATTN_SCORE bool inside(int query_low, int query_high, int key_low, int key_high,",
                "                                  const Head<T>& head) {",
                *lines,
                f"    return {tests or 'true'};",
                "  }",
                "",
            ]
        )

    def _distances(self, *results: int) -> set[int] | None:
        """The DIAGONAL operations through which results depend on positions; None if they also depend in other ways."""
        found, seen, waiting = set(), set(), list(results)
        while waiting:
            x = waiting.pop()
            if self._scopes[x] in (QUERY, KEY):
                return None
            if self._scopes[x] == DIAGONAL:
                found.add(x)
            elif x not in seen:
                seen.add(x)
                waiting += self.graph.operations[x].operands
        return found

    def _of_diagonal(self, value: int) -> str:
        """The functions ``diagonal`` and ``value_on``, if the value depends on positions by one number per diagonal."""
        found, relative = self._distances(value), self._distances(*self.graph.results[:2]) is not None
        (shared,) = found if found is not None and len(found) == 1 else (None,)
        lines = ["  // Whether value() and derivative() depend on positions by key - query alone."]
        lines.append(f"  static constexpr bool kRelative = {_truth(relative)};")
        lines.append("  // Whether value() does by one number, which diagonal() computes.")
        lines.append(f"  static constexpr bool kDiagonal = {'false' if shared is None else 'true'};")
        if shared is None:
            return "\n".join([*lines, "  template <class T>", "  using Diagonal = int;", ""])

        def name(x: int) -> str:
            return "diagonal" if x == shared else self._name(x)

        return "\n".join(
            [
                *lines,
                "  template <class T>",
                f"  using Diagonal = {_TYPES[self.graph.operations[shared].dtype]};",
                "  template <bool kInside, class T>",
                "  static SPATTN_SCORE Diagonal<T> diagonal(int query, int key, const Head<T>& head) {",
                *self._statements([shared], self._name, self._look_up),
                f"    return {self._name(shared)};",
                "  }",
                "  template <class T>",
                "  static SPATTN_SCORE T value_on(T score, Diagonal<T> diagonal, const Head<T>& head) {",
                *self._statements([value], name, self._look_up, {shared}),
                f"    return {name(value)};",
                "  }",
                "",
            ]
        )

    def _interval(self, x: int, lines: list[str], known: dict[int, bool]) -> bool:
        """Append statements that find the least and the largest value of an integer; return False if unknown."""
        if x in known:
            return known[x]
        name, operands, dtype, _ = self.graph.operations[x]
        found: tuple[str, str] | None = None
        if self._small(x) and dtype == INT:
            found = self._name(x), self._name(x)
        elif name in ("q", "k"):
            found = (f"{_INPUT_NAMES[name]}_low", f"{_INPUT_NAMES[name]}_high")
        elif dtype == INT and name != "look_up" and all(self._interval(y, lines, known) for y in operands):
            found = self._interval_of(name, operands)
        known[x] = found is not None
        if found is not None:
            lines.append(f"    const long long low{x} = {found[0]}, high{x} = {found[1]};")
        return known[x]

    def _interval_of(self, name: str, operands: Sequence[int]) -> tuple[str, str] | None:
        a, *rest = operands
        low, high = f"low{a}", f"high{a}"
        if name == "neg":
            return f"-{high}", f"-{low}"
        if name == "abs":
            return f"score_least({low}, {high})", f"score_larger(-{low}, {high})"
        if not rest or name == "where":
            return None
        b = rest[0]
        other_low, other_high = f"low{b}", f"high{b}"
        if name in ("add", "minimum", "maximum"):
            function = {"add": "score_sum", "minimum": "score_smaller", "maximum": "score_larger"}[name]
            return f"{function}({low}, {other_low})", f"{function}({high}, {other_high})"
        if name == "sub":
            return f"{low} - {other_high}", f"{high} - {other_low}"
        divisor = self.graph.operations[b]
        if name in ("floordiv", "mod") and divisor.name == "constant" and divisor.number > 0:
            if name == "mod":
                return "0", f"{int(divisor.number) - 1}"
            return f"score_down({low}, {int(divisor.number)})", f"score_down({high}, {int(divisor.number)})"
        return None

    def _use(self, number: int, use: Captured, direct: bool) -> str:
        """The struct of one use of an array: the term of a pair in the array's gradient, and the element's index."""
        gradient = f"score_adjoint(gradient, {self._name(use.derivative)})"
        lines = self._statements(use.indices, self._name, self._look_up)
        indices, sizes = [], []
        for axis, x in enumerate(use.indices):
            sizes.append(
                self._member(f"shape{use.number}_{axis}", "int", f"score_read(args.shape{use.number}[{axis}])")
            )
            indices.append(f"i{axis}")
            lines.append(f"    const int i{axis} = {self._index(self._name(x), x, sizes[-1])};")
        flat = "(long long)i0" if indices else "0ll"
        for index, size in zip(indices[1:], sizes[1:], strict=True):
            flat = f"({flat}) * {size} + {index}"
        scope = CALL
        for x in use.indices:
            scope = joined(scope, self._scopes[x])
        pair = "int query, int key, const Head<T>& head"
        return "\n".join(
            [
                f"  struct Use{number} {{",
                f"    static constexpr int kNumber = {number}, kTable = {use.number};",
                f"    static constexpr ScoreScope kScope = ScoreScope::{'head' if scope == CALL else scope};",
                f"    static constexpr bool kDirect = {_truth(direct)};  // one pair per element",
                "",
                "    // `gradient` is that with respect to the value.",
                "    template <class T>",
                f"    static SPATTN_SCORE T contribution(T score, {pair}, T gradient) {{",
                "      constexpr bool kInside = false;",
                *self._statements([use.derivative], self._name, self._look_up),
                f"    return {gradient};",
                "    }",
                *self._of_sum(use),
                "    // The row-major index of the element; -1 outside the array.",
                "    template <class T>",
                f"    static SPATTN_SCORE long long index({pair}) {{",
                "      constexpr bool kInside = false;",
                *lines,
                f"    return {_tests(indices, sizes)} ? {flat} : -1ll;",
                "    }",
                "  };",
            ]
        )

    def _of_sum(self, use: Captured) -> list[str]:
        """The member function ``of_sum``: the term of a whole diagonal, from the sum of its gradients with respect to
        the score."""
        summed = is_summed(self.program, use)
        lines = [f"    static constexpr bool kSummed = {_truth(summed)};"]
        if not summed:
            return lines
        same = use.derivative == self.graph.results[1]
        value = "sum" if same else f"score_adjoint(sum, {self._name(use.derivative)})"
        return [
            *lines,
            "    // `sum` is that of a diagonal's gradients with respect to the score.",
            "    template <class T>",
            "    static SPATTN_SCORE T of_sum(T sum, int query, int key, const Head<T>& head) {",
            "      constexpr bool kInside = false;",
            *([] if same else self._statements([use.derivative], self._name, self._look_up)),
            f"      return {value};",
            "    }",
        ]

    def _statements(
        self,
        results: Iterable[int],
        name: Callable[[int], str],
        look_up: Callable[[int], list[str]],
        given: Set[int] = frozenset(),
    ) -> list[str]:
        """Statements that compute `results` and the operations they need, in the code for a pair or in ``open``."""
        whole, lines = name == self._local, []
        for x in self._needed(results, whole, given):
            operation = self.graph.operations[x]
            if operation.name == "look_up":
                lines += look_up(x)
            elif operation.name not in INPUTS or whole:
                lines.append(f"    const {_TYPES[operation.dtype]} x{x} = {self._expression(x, name)};")
        return lines

    def _needed(self, results: Iterable[int], whole: bool = False, given: Set[int] = frozenset()) -> list[int]:
        """The operations that compute `results` from `given`: those in ``open`` if `whole`, else those for a pair."""
        needed: set[int] = set()
        waiting = list(results)
        while waiting:
            x = waiting.pop()
            operation = self.graph.operations[x]
            if x in needed or x in given or operation.name == "constant" or (not whole and self._small(x)):
                continue
            needed.add(x)
            waiting += operation.operands
        return sorted(needed)

    def _expression(self, x: int, name: Callable[[int], str]) -> str:
        operation, operands, dtype, number = self.graph.operations[x]
        if operation in INPUTS:  # in open(), q and k occur only where they cancel, as in q - q
            return "0" if operation in ("q", "k") else _INPUT_NAMES[operation]
        if operation == "parameter":
            return f"{_TYPES[dtype]}(score_read(args.parameter{int(number)}))"
        if operation == "tanh":
            return f"score_tanh({self._tanh_argument(operands[0], name)})"
        if operation == "mul" and name != self._local:
            for one, other in (operands, operands[::-1]):
                if self._small(one) and self.graph.operations[other].name == "tanh":
                    argument = self._tanh_argument(self.graph.operations[other].operands[0], name)
                    return f"score_tanh({argument}, {name(one)})"
        given = [name(operand) for operand in operands]
        if operation in _WRAPS and dtype == INT:
            return f"int(unsigned({given[0]}) {_INFIX[operation]} unsigned({given[1]}))"
        if operation == "div" and name != self._local and self._small(operands[1]):
            return f"score_divide({given[0]}, {given[1]}, {self._inverse(operands[1])})"
        if operation in _INFIX:
            return f"{given[0]} {_INFIX[operation]} {given[1]}"
        if operation == "neg":
            return f"-{given[0]}" if dtype == FLOAT else f"int(0u - unsigned({given[0]}))"
        if operation == "not":
            return f"!{given[0]}"
        if operation == "to_float":
            return f"T({given[0]})"
        if operation == "to_int":
            return f"int({given[0]})"
        if operation == "where":
            return f"{given[0]} ? {given[1]} : {given[2]}"
        return f"score_{operation}({', '.join(given)})"

    def _tanh_argument(self, x: int, name: Callable[[int], str]) -> str:
        """x times 2 log2(e). If ``open`` computes a factor of x, it multiplies the constant into that factor."""
        scale = "T(2.885390081777926815)"
        operation, operands, *_ = self.graph.operations[x]
        small = [self._small(operand) for operand in operands]
        if name != self._local and operation in ("mul", "div") and any(small) and not (operation == "div" and small[0]):
            at = small.index(True)
            factor = self._local(operands[at])
            value = f"{scale} / {factor}" if operation == "div" else f"{scale} * {factor}"
            return f"{name(operands[1 - at])} * {self._member(f'factor_x{x}', 'T', value, operands[at])}"
        return f"{name(x)} * {scale}"

    def _inverse(self, x: int) -> str:
        """The reciprocal of an operation of scope CALL or HEAD."""
        operation = self.graph.operations[x]
        if operation.name == "constant":
            return f"T(1) / {_literal(operation.number, operation.dtype)}"
        return self._member(f"inverse_x{x}", "T", f"T(1) / x{x}", x)

    def _index(self, given: str, x: int, size: str) -> str:
        """The C++ expression of an index, in which negative indices count from the end."""
        return given if self._counts_from_start(x) else f"score_index({given}, {size})"

    def _counts_from_start(self, x: int) -> bool:
        """Whether an index is never negative for an allowed pair."""
        operation, operands, _, number = self.graph.operations[x]
        if operation == "constant":
            return number >= 0
        if operation == "maximum":
            return any(map(self._counts_from_start, operands))
        if operation == "minimum":
            return all(map(self._counts_from_start, operands))
        return operation in ("k", "b", "h", "abs")

    def _start_of(self, place: _Place) -> list[str]:
        """Statements of ``open`` that find the first element of a place."""
        table, name = place.table, place.name
        element = _ELEMENTS[self.arrays[table].dtype]
        lines = [f"    const {element}* at{name} = score_start<{element}>(args.table{table}, &args);"]
        axes = [axis for axis, x in enumerate(place.fixed) if x is not None]
        sizes = [f"score_read(args.shape{table}[{axis}])" for axis in axes]
        indices = [f"i{name}_at{axis}" for axis in axes]
        for axis, index, size in zip(axes, indices, sizes, strict=True):
            x = place.fixed[axis]
            assert x is not None
            lines.append(f"    const int {index} = {self._index(self._local(x), x, size)};")
        lines.append(f"    const bool in{name} = {_tests(indices, sizes)};")
        if axes:
            steps = [f"{index} * {self._step(table, axis)}" for axis, index in zip(axes, indices, strict=True)]
            lines.append(f"    if (in{name}) at{name} += {' + '.join(steps)};")
        return lines

    def _step(self, table: int, axis: int) -> str:
        step = self.arrays[table].steps[axis]
        return f"score_read(args.stride{table}[{axis}])" if step is None else f"{step}ll"

    def _whole_look_up(self, n: int) -> list[str]:
        """Statements of ``open`` that read an element."""
        operation = self.graph.operations[n]
        place = _Place(int(operation.number), operation.operands)
        lines = self._start_of(place)
        read = f"score_load<{_TYPES[operation.dtype]}>(at{place.name})"
        lines.append(
            f"    const {_TYPES[operation.dtype]} x{n} = in{place.name} ? {read} : {_missing(operation.dtype)};"
        )
        return lines

    def _look_up(self, n: int) -> list[str]:
        """Statements that read an element for a pair. They always load from inside the array, without a branch, so that
        the compiler can share the load."""
        operation, place = self.graph.operations[n], self._place(n)
        table, name = place.table, place.name
        array = self.arrays[table]
        at = self._member(f"at{name}", f"const {_ELEMENTS[array.dtype]}*", f"at{name}")
        axes = [axis for axis, x in enumerate(place.fixed) if x is None]
        lines, indices, sizes, steps = [], [], [], []
        for axis in axes:
            size = self._member(f"size{name}_at{axis}", "int", self._size_of(place, axis))
            x = operation.operands[axis]
            index = self._index(self._name(x), x, size)
            lines.append(f"    const int i{n}_{axis} = kInside ? {self._name(x)} : {index};")
            indices.append(f"i{n}_{axis}")
            sizes.append(size)
            step = array.steps[axis]
            if step is None:
                ctype = "long long" if array.wide else "int"
                own = self._member(f"step{table}_at{axis}", ctype, f"{ctype}(score_read(args.stride{table}[{axis}]))")
                steps.append(f"i{n}_{axis} * {own}")
            elif step:
                steps.append(f"(long long)i{n}_{axis}" if array.wide else f"i{n}_{axis}")
        ctype = _TYPES[operation.dtype]
        lines.append(f"    const bool in{n} = kInside || ({_tests(indices, sizes)});")
        read = f"score_load<{ctype}>({at} + (in{n} ? {' + '.join(steps) or '0'} : 0))"
        lines.append(f"    const {ctype} x{n} = score_select(in{n}, {read}, {_missing(operation.dtype)});")
        return lines


def _tests(indices: Sequence[str], sizes: Sequence[str]) -> str:
    """The C++ condition that indices are inside an array."""
    tests = [f"unsigned({index}) < unsigned({size})" for index, size in zip(indices, sizes, strict=True)]
    return " & ".join(f"({test})" for test in tests) or "true"


def _missing(dtype: str) -> str:
    """The C++ value that stands for an element out of range."""
    return {FLOAT: "score_nan<T>()", INT: "INT32_MIN", BOOL: "false"}[dtype]


def _truth(value: object) -> str:
    return "true" if value else "false"


def _literal(value: float, dtype: str) -> str:
    if dtype == BOOL:
        return _truth(value)
    if dtype == INT:
        return f"int({(int(value) + (1 << 31)) % (1 << 32) - (1 << 31)}ll)"
    if math.isnan(value):
        return "score_nan<T>()"
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}T(__builtin_huge_val())"
    return f"T({value!r})"
