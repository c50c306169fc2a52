"""Trace score functions: call them once with symbols, and record what they do."""

from __future__ import annotations

import dis
import functools
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import dtype_name, namespace_of
from .graph import BOOL, FLOAT, INT, Builder, Graph

__all__ = ["Symbol", "Traced", "apply", "take", "trace"]

_UFUNCS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "true_divide": "div",
    "divide": "div",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "power": "pow",
    "negative": "neg",
    "absolute": "abs",
    "fabs": "abs",
    "minimum": "minimum",
    "maximum": "maximum",
    "exp": "exp",
    "log": "log",
    "tanh": "tanh",
    "sqrt": "sqrt",
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
    "logical_not": "not",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "invert": "not",
    "square": "square",
}
_TORCH = {
    "add": "add",
    "sub": "sub",
    "subtract": "sub",
    "mul": "mul",
    "multiply": "mul",
    "div": "div",
    "divide": "div",
    "true_divide": "div",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "pow": "pow",
    "neg": "neg",
    "negative": "neg",
    "abs": "abs",
    "absolute": "abs",
    "minimum": "minimum",
    "maximum": "maximum",
    "exp": "exp",
    "log": "log",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "sqrt": "sqrt",
    "square": "square",
    "where": "where",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
    "logical_not": "not",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_not": "not",
}
_REVERSED = {"rsub": "sub", "rdiv": "div", "rpow": "pow"}
_SWAPPED = {"gt": "lt", "ge": "le"}


class Traced(NamedTuple):
    """A traced function.

    Attributes
    ----------
    graph : Graph
        Its one result is the modified score.
    parameters : tuple
        Captured numbers, in the order of their indices.
    tables : tuple
        Captured arrays, as they were given.
    """

    graph: Graph
    parameters: tuple[float, ...]
    tables: tuple[Any, ...]


class _Recorder:
    """The operations and captured values of a function that is being traced."""

    def __init__(self, literals: frozenset[Any]) -> None:
        self.build = Builder()
        self.parameters: list[float] = []
        self.tables: list[Any] = []
        self._literals = literals
        self._known: dict[Any, int] = {}

    def index(self, value: Any) -> int:
        """The operation of an operand."""
        if isinstance(value, Symbol):
            if value.recorder is not self:
                raise TypeError(
                    "score: a value of another call was used; a score function must not store its arguments"
                )
            return value.index
        if isinstance(value, (bool, np.bool_)):
            return self.build.constant(bool(value))
        if isinstance(value, (int, np.integer)):
            return self._number(int(value), INT)
        if isinstance(value, (float, np.floating)):
            return self._number(float(value), FLOAT)
        if _is_array(value) and value.ndim == 0:
            return self.look_up(value, ())
        raise TypeError(f"score: unsupported operand of type {type(value).__name__}{_where()}")

    def _number(self, value: float, dtype: str) -> int:
        """A literal of the function is a constant; other numbers are parameters, which calls may change."""
        if (dtype, value) in self._literals:
            return self.build.constant(value)
        key = dtype, value
        if key not in self._known:
            self._known[key] = len(self.parameters)
            self.parameters.append(value)
        return self.build.parameter(self._known[key], dtype)

    def look_up(self, table: Any, indices: Sequence[Any]) -> int:
        """An element of a captured array."""
        kind = np.dtype(dtype_name(table)).kind if dtype_name(table) != "bfloat16" else "f"
        dtype = {"f": FLOAT, "b": BOOL, "i": INT, "u": INT}.get(kind)
        if dtype is None:
            raise TypeError(f"score: expected arrays of floats, integers or bools, got {dtype_name(table)}{_where()}")
        if len(indices) != table.ndim:
            raise TypeError(
                f"score: expected one index for each of {table.ndim} axes, got {len(indices)}; a score function gives "
                f"one number per pair{_where()}"
            )
        found = [self.index(x) for x in indices]
        if any(self.build.dtype(x) != INT for x in found):
            raise TypeError(f"score: expected integer indices{_where()}")
        number = next((at for at, known in enumerate(self.tables) if known is table), len(self.tables))
        if number == len(self.tables):
            self.tables.append(table)
        return self.build.look_up(number, dtype, found)

    def apply(self, name: str, *operands: Any) -> Symbol:
        """The symbol of an operation's result."""
        indices = [self.index(x) for x in operands]
        if name in _SWAPPED:
            name, indices = _SWAPPED[name], indices[::-1]
        if name == "square":
            name, indices = "mul", indices * 2
        if name == "pow" and (power := _small_power(operands[1])) is not None:
            return Symbol(self, self._power(indices[0], power))
        return Symbol(self, self.build.apply(name, *indices))

    def _power(self, base: int, power: int) -> int:
        if power < 0:
            return self.build.apply("div", self.build.constant(1.0), self._power(base, -power))
        if power == 0:
            return self.build.constant(1.0 if self.build.dtype(base) == FLOAT else 1)
        if power == 1:
            return base
        half = self._power(base, power // 2)
        squared = self.build.apply("mul", half, half)
        return self.build.apply("mul", squared, base) if power % 2 else squared


def _small_power(value: Any) -> int | None:
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer()
    return int(value) if whole and abs(value) <= 8 else None


class Symbol:
    """A number per pair, in a score function that is being traced."""

    __slots__ = ("index", "recorder")
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, recorder: _Recorder, index: int) -> None:
        self.recorder, self.index = recorder, index

    @property
    def dtype(self) -> str:
        """``"float"``, ``"int"`` or ``"bool"``."""
        return self.recorder.build.dtype(self.index)

    @property
    def ndim(self) -> int:
        """0: a number."""
        return 0

    def __repr__(self) -> str:
        return f"<{self.dtype} of every pair>"

    def __bool__(self) -> bool:
        raise TypeError(f"score: 'if', 'and', 'or' and 'not' need a number; use where(), & | and ~{_where()}")

    def __index__(self) -> int:
        raise TypeError(
            "score: an array that spattn cannot see was indexed; refer to it by a variable of the function, or write "
            f"spattn.score.take(array, index){_where()}"
        )

    def _number(self) -> float:
        raise TypeError(
            f"score: functions of the module math need a number; use numpy, torch or spattn.score{_where()}"
        )

    __float__ = _number
    __int__ = _number

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"score: a number per pair has no elements{_where()}")

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        name = _UFUNCS.get(ufunc.__name__)
        if name is None or method != "__call__" or options:
            raise TypeError(f"score: numpy.{ufunc.__name__} is not supported{_where()}")
        return self.recorder.apply(name, *operands)

    def __array_function__(self, function: Any, types_: Any, operands: Any, options: Any) -> Any:
        if function is np.where and len(operands) == 3 and not options:
            return self.recorder.apply("where", *operands)
        if function is np.clip:
            return _clamp(self.recorder, *operands, **options)
        raise TypeError(f"score: numpy.{function.__name__} is not supported{_where()}")

    @classmethod
    def __torch_function__(cls, function: Any, types_: Any, operands: Any = (), options: Any = None) -> Any:
        recorder = next(x.recorder for x in (*operands, *(options or {}).values()) if isinstance(x, Symbol))
        return _torch_call(recorder, function, operands, options or {})

    def __neg__(self) -> Symbol:
        return self.recorder.apply("neg", self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return self.recorder.apply("abs", self)

    def __invert__(self) -> Symbol:
        return self.recorder.apply("not", self)

    # The methods of tensors that FlexAttention's functions use.
    def abs(self) -> Symbol:
        """Absolute value."""
        return self.recorder.apply("abs", self)

    def tanh(self) -> Symbol:
        """Hyperbolic tangent."""
        return self.recorder.apply("tanh", self)

    def exp(self) -> Symbol:
        """Exponential."""
        return self.recorder.apply("exp", self)

    def log(self) -> Symbol:
        """Natural logarithm."""
        return self.recorder.apply("log", self)

    def sqrt(self) -> Symbol:
        """Square root."""
        return self.recorder.apply("sqrt", self)

    def sigmoid(self) -> Symbol:
        """Logistic function."""
        return self.recorder.apply("sigmoid", self)

    def clamp(self, min: Any = None, max: Any = None) -> Symbol:
        """Between two numbers."""
        return _clamp(self.recorder, self, min, max)

    def float(self) -> Symbol:
        """As a float."""
        return Symbol(self.recorder, self.recorder.build.to_float(self.index))

    def int(self) -> Symbol:
        """Truncated to an integer."""
        return self if self.dtype == INT else self.recorder.apply("to_int", self)

    long = int


def _operator(name: str, reverse: bool = False) -> Callable[[Symbol, Any], Any]:
    def method(self: Symbol, other: Any) -> Any:
        try:
            return self.recorder.apply(name, other, self) if reverse else self.recorder.apply(name, self, other)
        except TypeError:
            if _is_array(other) or isinstance(other, (Symbol, int, float, np.generic)):
                raise
            return NotImplemented

    return method


for _method, _name in {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "div",
    "floordiv": "floordiv",
    "mod": "mod",
    "pow": "pow",
    "and": "and",
    "or": "or",
    "xor": "xor",
}.items():
    setattr(Symbol, f"__{_method}__", _operator(_name))
    setattr(Symbol, f"__r{_method}__", _operator(_name, reverse=True))
for _method in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Symbol, f"__{_method}__", _operator(_method))


def _clamp(recorder: _Recorder, x: Any, min: Any = None, max: Any = None) -> Symbol:
    x = x if min is None else recorder.apply("maximum", x, min)
    return x if max is None else recorder.apply("minimum", x, max)


def _torch_call(recorder: _Recorder, function: Any, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    name = getattr(function, "__name__", str(function)).strip("_")
    if name == "getitem":
        index = operands[1] if isinstance(operands[1], tuple) else (operands[1],)
        return Symbol(recorder, recorder.look_up(operands[0], index))
    if name == "clamp":
        return _clamp(recorder, *operands, **options)
    if name in ("div", "divide") and options.get("rounding_mode") == "floor":
        return recorder.apply("floordiv", *operands)
    known = _TORCH.get(name) or _REVERSED.get(name) or _TORCH.get(name.removeprefix("r"))
    if known is None or options:
        raise TypeError(f"score: torch.{name} is not supported{_where()}")
    reverse = name not in _TORCH and (name in _REVERSED or name.startswith("r"))
    return recorder.apply(known, *(operands[::-1] if reverse else operands))


def apply(name: str, *operands: Any) -> Any:
    """An operation on numbers or symbols; NumPy's result if no operand is a symbol."""
    symbol = next((x for x in operands if isinstance(x, Symbol)), None)
    if symbol is not None:
        return symbol.recorder.apply(name, *operands)
    from .evaluate import FUNCTIONS

    return FUNCTIONS[name](*operands)


def take(table: Any, *indices: Any) -> Any:
    """``table[indices]`` for any array, with symbols among the indices."""
    symbol = next((x for x in indices if isinstance(x, Symbol)), None)
    if symbol is None:
        return table[indices]
    return Symbol(symbol.recorder, symbol.recorder.look_up(table, indices))


class _Table:
    """A captured array during tracing: records an index with symbols, and forwards all else to the array."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getitem__(self, index: Any) -> Any:
        return take(self.array, *(index if isinstance(index, tuple) else (index,)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array, name)

    def __len__(self) -> int:
        return len(self.array)


def _is_array(value: Any) -> bool:
    return not isinstance(value, (Symbol, np.generic)) and namespace_of(value) is not None


def trace(function: Callable[..., Any]) -> Traced:
    """Trace a score function, ``(score, b, h, q, k) -> score``.

    Raises
    ------
    TypeError
        For an operation that cannot be traced, with the line of the function.
    """
    if not callable(function):
        raise TypeError(f"score: expected a function of (score, b, h, q, k), got {type(function).__name__}")
    recorder = _Recorder(_literals(function))
    symbols = [Symbol(recorder, recorder.build.input(name)) for name in ("score", "b", "h", "q", "k")]
    result = _run(_with_tables(function), symbols, recorder)
    if not isinstance(result, Symbol):
        if result is None or not (isinstance(result, (int, float, np.number)) or _is_array(result)):
            got = type(result).__name__
            raise TypeError(f"score: expected a function that returns the modified score, got {got}")
        result = Symbol(recorder, recorder.index(result))
    graph = Graph(tuple(recorder.build.operations), (recorder.build.to_float(result.index),))
    graph = Graph(tuple(recorder.build.operations), graph.results)
    return _used(graph, recorder)


def _used(graph: Graph, recorder: _Recorder) -> Traced:
    """The operations, parameters and tables that the result depends on."""
    graph = graph.only(graph.results)
    parameters = sorted({int(op.number) for op in graph.operations if op.name == "parameter"})
    tables = sorted({int(op.number) for op in graph.operations if op.name == "look_up"})
    new = {
        "parameter": {old: at for at, old in enumerate(parameters)},
        "look_up": {old: at for at, old in enumerate(tables)},
    }
    operations = tuple(
        op._replace(number=new[op.name][int(op.number)]) if op.name in new else op for op in graph.operations
    )
    return Traced(
        Graph(operations, graph.results),
        tuple(recorder.parameters[x] for x in parameters),
        tuple(recorder.tables[x] for x in tables),
    )


def _run(function: Callable[..., Any], symbols: Sequence[Symbol], recorder: _Recorder) -> Any:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return function(*symbols)
    from torch.overrides import TorchFunctionMode

    class Lookups(TorchFunctionMode):  # type: ignore[misc]
        """Tensors indexed by symbols: torch would ask them for a number."""

        def __torch_function__(self, func: Any, types_: Any, operands: Any = (), options: Any = None) -> Any:
            if func is torch.Tensor.__getitem__:
                index = operands[1] if isinstance(operands[1], tuple) else (operands[1],)
                if any(isinstance(x, Symbol) for x in index):
                    return _torch_call(recorder, func, operands, options or {})
            return func(*operands, **(options or {}))

    with Lookups():
        return function(*symbols)


def _literals(function: Callable[..., Any]) -> frozenset[Any]:
    """(dtype, value) of the numbers that are written in a function."""
    found: set[Any] = set()
    waiting = [_code(function)]
    while waiting:
        code = waiting.pop()
        if code is None:
            continue
        for instruction in dis.get_instructions(code):
            values = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            if instruction.opname.startswith("LOAD_CONST") or instruction.opname == "LOAD_SMALL_INT":
                for value in values:
                    if type(value) in (int, float):
                        found.add((INT if type(value) is int else FLOAT, value))
                    elif isinstance(value, types.CodeType):
                        waiting.append(value)
    return frozenset(found)


def _code(function: Any) -> types.CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        function = type(function).__dict__.get("__call__")
    code = getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _with_tables(function: Any) -> Any:
    """The function with the arrays of its variables replaced by tables that record look-ups."""
    if isinstance(function, functools.partial):
        options = {name: _table(x) for name, x in function.keywords.items()}
        return functools.partial(_with_tables(function.func), *map(_table, function.args), **options)
    if isinstance(function, types.MethodType):
        return types.MethodType(_with_tables(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return function
    code = function.__code__
    names = {name for name in code.co_names if _is_table(function.__globals__.get(name))}
    cells = function.__closure__ or ()
    inside = [_is_table(_contents(cell)) for cell in cells]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not names and not any(inside) and not any(map(_is_table, defaults)):
        return function
    variables = dict(function.__globals__) if names else function.__globals__
    for name in names:
        variables[name] = _Table(variables[name])
    closure = tuple(
        types.CellType(_Table(cell.cell_contents)) if own else cell for cell, own in zip(cells, inside, strict=True)
    )
    made = types.FunctionType(
        code, variables, function.__name__, tuple(map(_table, function.__defaults__ or ())) or None, closure or None
    )
    made.__kwdefaults__ = {name: _table(x) for name, x in (function.__kwdefaults__ or {}).items()} or None
    return made


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_table(value: Any) -> bool:
    """Whether a variable is an array that symbols may index; torch's own are seen anywhere."""
    return _is_array(value) and value.ndim > 0 and namespace_of(value).name != "torch"  # type: ignore[union-attr]


def _table(value: Any) -> Any:
    return _Table(value) if _is_table(value) else value


def _where() -> str:
    """The line of the score function that is being executed."""
    package = __name__.rpartition(".")[0]
    for frame, line in traceback.walk_stack(None):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith((package, "torch", "numpy")):
            return f" ({frame.f_code.co_filename}, line {line})"
    return ""
