"""Let a score function index its captured arrays by symbols.

The ``__getitem__`` of NumPy, CuPy and JAX would ask a symbol for an integer. The tracer therefore replaces the arrays
in the function's global variables, closures, defaults and attributes by objects that record look-ups. For PyTorch,
tracing.py intercepts ``Tensor.__getitem__`` instead.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from ..arrays import compiling, namespace_of
from .graph import FLOAT, INT
from .recorder import CURRENT, Recorded, is_array, is_float, line
from .symbol import Symbol

__all__ = ["CapturedArray", "look_up", "visible"]


_WRITING = {"fill", "itemset", "partition", "put", "resize", "setfield", "sort"}  # methods of NumPy arrays
_INTEGERS = (int, np.integer)
_LONGEST = 64  # longer lists are not searched for arrays


class _Code(NamedTuple):
    """The names and numbers in a function's code, including the functions defined inside it."""

    names: frozenset[str]  # of global variables and attributes
    literals: frozenset[tuple[str, Any]]  # (dtype, value) of the numbers written in it
    assigned: tuple[str, ...]  # outer variables that it assigns


@functools.lru_cache(1024)
def _read(code: types.CodeType) -> _Code:
    names, literals, assigned = set(code.co_names), set(), []
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            instruction.opname == "STORE_DEREF" and value in code.co_freevars
        ):
            assigned.append(value)
        elif "CONST" in instruction.opname or instruction.opname == "LOAD_SMALL_INT":
            for number in value if isinstance(value, tuple) else (value,):
                if type(number) in (int, float):
                    literals.add((INT if type(number) is int else FLOAT, number))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inside = _read(constant)
            names |= inside.names
            literals |= inside.literals
            assigned += [name for name in inside.assigned if name not in code.co_varnames + code.co_cellvars]
    return _Code(frozenset(names), frozenset(literals), tuple(assigned))


class CapturedArray:
    """A captured array. It records look-ups by symbols, and forwards everything else to the array.

    Attributes
    ----------
    array : array
    indices : tuple
        Indices of the first axes, if the function gives them one by one: ``table[h][q]``.
    """

    __slots__ = ("array", "indices")

    def __init__(self, array: Any, indices: tuple[Any, ...] = ()) -> None:
        self.array, self.indices = array, indices

    def __getitem__(self, index: Any) -> Any:
        return look_up(self.array, (*self.indices, *(index if isinstance(index, tuple) else (index,))))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(f"score: a score function must not change arrays{line()}")

    def __getattr__(self, name: str) -> Any:
        if name in CapturedArray.__slots__:  # torch.compile asks before it has set them
            raise AttributeError(name)
        value = getattr(self._whole(), name)
        if name in _WRITING and isinstance(self.array, np.ndarray):
            raise TypeError(f"score: a score function must not change arrays{line()}")
        return _returns_seen(value) if callable(value) and not is_array(value) else _seen(value)

    def __len__(self) -> int:
        return len(self._whole())

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        if method == "at":
            raise TypeError(f"score: a score function must not change arrays{line()}")
        return _seen(getattr(ufunc, method)(*map(_plain, operands), **_plain_options(options)))

    def _whole(self) -> Any:
        if self.indices:
            shape = tuple(self.array.shape[len(self.indices) :])
            raise TypeError(f"score: an array of shape {shape} was used as a number; index it{line()}")
        return self.array


def _returns_seen(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands, **options: _seen(method(*map(_plain, operands), **_plain_options(options)))


def _plain(value: Any) -> Any:
    if isinstance(value, Recorded):
        raise TypeError(f"score: an array was used as a number; index it{line()}")
    return value._whole() if isinstance(value, CapturedArray) else value


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("out") is not None:
        raise TypeError(f"score: a score function must not change arrays{line()}")
    return {key: _plain(value) for key, value in options.items()}


def _forward(name: str) -> Callable[..., Any]:
    def method(self: CapturedArray, *others: Any) -> Any:
        return _seen(getattr(self._whole(), name)(*map(_plain, others)))

    return method


for _operation in "add sub mul truediv floordiv mod pow matmul and or xor".split():
    setattr(CapturedArray, f"__{_operation}__", _forward(f"__{_operation}__"))
    setattr(CapturedArray, f"__r{_operation}__", _forward(f"__r{_operation}__"))
for _operation in "neg abs invert eq ne lt le gt ge".split():
    setattr(CapturedArray, f"__{_operation}__", _forward(f"__{_operation}__"))


def look_up(array: Any, indices: tuple[Any, ...]) -> Any:
    """``array[indices]``, recorded if an index is a symbol, or if the result is an element that may have a gradient."""
    symbol = next((x for x in indices if isinstance(x, Recorded)), None)
    symbolic = symbol is not None
    if not symbolic and compiling():
        return array[indices]
    if not symbolic and not (
        CURRENT.get() and _lacks_gradients(array) and all(isinstance(x, _INTEGERS) for x in indices)
    ):
        return _seen(array[indices])
    if len(indices) < array.ndim and not any(x is None or x is ... or isinstance(x, slice) for x in indices):
        return CapturedArray(array, indices) if symbolic else _seen(array[indices])
    recorder = symbol.recorder if symbol is not None and symbol.recorder.in_graph else CURRENT.get()
    if recorder is None:
        raise TypeError("score: a score function must not store its arguments")
    return Symbol(recorder, recorder.look_up(array, indices))


class _Attributes:
    """Stands for an object or module during tracing, and replaces the arrays among its attributes."""

    def __init__(self, thing: Any, search: _Search) -> None:
        object.__setattr__(self, "_thing", thing)
        object.__setattr__(self, "_search", search)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance() and super()
        return type(self._thing)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._thing, name)
        if isinstance(value, types.MethodType) and value.__self__ is self._thing:
            return types.MethodType(self._search.function(value.__func__), self)
        return self._search.value(value, frozenset())

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(f"score: a score function must not set attributes, here .{name}{line()}")

    def __call__(self, *operands: Any) -> Any:
        return self._search.function(type(self._thing).__call__)(self, *operands)


def visible(function: Callable[..., Any], literals: set[tuple[str, Any]]) -> Callable[..., Any]:
    """The function with its captured arrays replaced by objects that record look-ups.

    Parameters
    ----------
    function : callable
    literals : set
        Receives the numbers that are written in the function and in the functions that it refers to.
    """
    search = _Search(literals)
    found = search.value(function, frozenset())
    if found is function and not isinstance(function, (types.FunctionType, types.BuiltinFunctionType)):
        call = type(function).__call__
        if isinstance(call, types.FunctionType):  # a callable object without arrays of its own
            return types.MethodType(search.function(call), function)
    return found


class _Search:
    """Replaces the arrays in everything that a function refers to."""

    def __init__(self, literals: set[tuple[str, Any]]) -> None:
        self._literals = literals
        self._made: dict[int, Any] = {}

    def value(self, value: Any, names: frozenset[str]) -> Any:
        """The value of a variable with its arrays replaced. `names` include the attributes that the function uses."""
        if value is None or isinstance(value, (bool, int, float, str, type)):
            return value
        if is_array(value):
            return _seen(value)
        if isinstance(value, types.FunctionType):
            return self.function(value) if _is_users(value.__module__) else value
        if isinstance(value, types.MethodType):
            owner = self.value(value.__self__, names)
            made = self.value(value.__func__, names)
            return value if owner is value.__self__ and made is value.__func__ else types.MethodType(made, owner)
        if isinstance(value, functools.partial):
            options = {name: self.value(x, names) for name, x in value.keywords.items()}
            return functools.partial(
                self.value(value.func, names), *(self.value(x, names) for x in value.args), **options
            )
        if type(value) in (list, tuple, dict):
            if not _holds_table(value):
                return value
            if isinstance(value, dict):
                return {key: _seen(x) for key, x in value.items()}
            return type(value)(map(_seen, value))
        if isinstance(value, types.ModuleType):
            return _Attributes(value, self) if any(_is_table(vars(value).get(name)) for name in names) else value
        if _is_users(type(value).__module__) and any(map(_holds_table, _attributes(value))):
            return _Attributes(value, self)
        return value

    def function(self, function: Any) -> Any:
        """A copy of a function in which arrays are replaced; the function itself if it refers to no array."""
        if not isinstance(function, types.FunctionType):
            return function
        if id(function) in self._made:
            return self._made[id(function)]
        self._made[id(function)] = function  # during the search, as it may call itself
        code = _read(function.__code__)
        if code.assigned:
            raise TypeError(
                f"score: a score function must not assign outer variables, here {code.assigned[0]} "
                f"({function.__code__.co_filename}, line {function.__code__.co_firstlineno})"
            )
        self._literals |= code.literals
        outer = function.__globals__
        changed = {}
        for name in code.names:
            if name in outer and (not isinstance(outer[name], types.FunctionType) or outer[name].__globals__ is outer):
                made = self.value(outer[name], code.names)
                if made is not outer[name]:
                    changed[name] = made
        closure, given, named = function.__closure__ or (), function.__defaults__ or (), function.__kwdefaults__ or {}
        cells = tuple([self._cell(cell, code.names) for cell in closure])
        defaults = tuple([self.value(x, code.names) for x in given])
        options = {name: self.value(x, code.names) for name, x in named.items()}
        if not changed and all(map(is_, (*cells, *defaults, *options.values()), (*closure, *given, *named.values()))):
            return function
        itself = [name for name in code.names if changed and outer.get(name) is function]
        made = types.FunctionType(
            function.__code__, outer | changed if changed else outer, function.__name__, defaults or None, cells or None
        )
        made.__kwdefaults__ = options or None
        made.__globals__.update(dict.fromkeys(itself, made))
        self._made[id(function)] = made
        return made

    def _cell(self, cell: types.CellType, names: frozenset[str]) -> types.CellType:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return cell
        made = self.value(value, names)
        return cell if made is value else types.CellType(made)


def _attributes(thing: Any) -> Iterator[Any]:
    """The values of an object's attributes: its own, those in slots, and those of its classes."""
    yield from getattr(thing, "__dict__", {}).values()
    for cls in type(thing).__mro__:
        if _is_users(cls.__module__) and cls.__module__ != "builtins":
            for name, value in vars(cls).items():
                yield getattr(thing, name, None) if isinstance(value, types.MemberDescriptorType) else value


def _is_users(module: str | None) -> bool:
    """Whether a module is the user's. Array libraries need no replaced arrays, and spattn's own code uses take()."""
    return (module or "").partition(".")[0] not in ("numpy", "torch", "jax", "cupy", "spattn")


def _lacks_gradients(array: Any) -> bool:
    """Whether an array has floats and its library has no autograd; spattn then records single elements, too."""
    return namespace_of(array).name in ("numpy", "cupy") and is_float(array)  # type: ignore[union-attr]


def _is_table(value: Any) -> bool:
    """Whether a value is an array to replace. PyTorch tensors are not: tracing.py intercepts their indexing."""
    if not is_array(value):
        return False
    return namespace_of(value).name != "torch" if value.ndim else _lacks_gradients(value)  # type: ignore[union-attr]


def _holds_table(value: Any) -> bool:
    if type(value) in (list, tuple, dict) and len(value) <= _LONGEST:
        return any(map(_is_table, value.values() if isinstance(value, dict) else value))
    return _is_table(value)


def _seen(value: Any) -> Any:
    """The replacement of an array: an object that records look-ups, or a symbol if the array has no axes."""
    if not _is_table(value):
        return value
    recorder = CURRENT.get()
    if value.ndim or recorder is None:
        return CapturedArray(value)
    return Symbol(recorder, recorder.look_up(value, ()))
