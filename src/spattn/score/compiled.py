"""Trace score functions for graphs of PyTorch, in which tensors have no values.

Under torch.compile, Dynamo executes this module symbolically: it inlines the score function and the methods of symbols,
and finds captured tensors and numbers as it finds all others. Only the steps of the graph are constants for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar, has_static_value
from torch.overrides import TorchFunctionMode

from .captures import look_up
from .graph import BOOL, FLOAT, INPUTS, INT
from .recorder import Constant, Recorded, Recorder, Sizes
from .serialized import Serialized, serialize, to_json
from .shared_builder import ARGUMENTS, SharedBuilder
from .symbol import Symbol, check_unchanged, torch_call, torch_name
from .tracing import trace

__all__ = ["tensor_in_graph", "trace_in_graph"]

_Steps = tuple[tuple[Any, ...], ...]


def trace_in_graph(function: Callable[..., Any], sizes: Sizes, device: torch.device) -> Serialized:
    """Trace a score function; its arrays become tensors of the graph.

    Under torch.compile, integers are constants of the graph unless they depend on sizes of tensors.
    """
    if not torch.compiler.is_dynamo_compiling():  # another tracer, or torch.compile could not trace the function
        return _trace(function, sizes, device)
    recorder = _GraphRecorder(sizes, device)
    symbols = [Symbol(recorder, at) for at in range(len(ARGUMENTS))]
    with _LookUps():
        result = recorder.call(function, *symbols)
    text, numbers, tables = _result(recorder.steps, result.index)
    floats = [recorder.parameters[at] for at, dtype in numbers if dtype == FLOAT]
    integers = [recorder.parameters[at] for at, dtype in numbers if dtype == INT]
    return Serialized(text, floats, integers, [recorder.tables[at] for at in tables])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _trace(function: Callable[..., Any], sizes: Sizes, device: torch.device) -> Serialized:
    found = serialize(trace(function, sizes))
    tables = [tensor_in_graph(f"score: captured array {at}", x, device) for at, x in enumerate(found.tables)]
    return found._replace(tables=tables)


def tensor_in_graph(name: str, x: Any, device: torch.device) -> torch.Tensor:
    """A captured array as a tensor. Except under torch.compile, those of NumPy are constants of the graph."""
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, np.ndarray):
        return torch.as_tensor(x if torch.compiler.is_dynamo_compiling() else x.copy(), device=device)
    raise TypeError(f"{name}: expected a tensor or a NumPy array in a graph of PyTorch, got {type(x).__name__}")


class _GraphRecorder(Recorder):
    """A recorder whose state Dynamo can follow: plain numbers, tuples and tensors."""

    in_graph = True

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.parameters: list[Any] = []
        self.tables: list[Any] = []
        self.steps: _Steps = ()
        self._dtypes = {at: INPUTS[name] for at, name in enumerate(ARGUMENTS)}

    def dtype(self, index: int) -> str:
        return self._dtypes[index]

    def _step(self, *step: Any) -> int:
        index, dtype = _next(self.steps, step)
        self.steps = (*self.steps, step)
        self._dtypes[index] = dtype
        return index

    def index(self, value: Any) -> int:
        if isinstance(value, Recorded):
            if value.recorder is not self:
                raise TypeError(
                    "score: a value of another call was used; a score function must not store its arguments"
                )
            return value.index
        if isinstance(value, bool):
            return self._step("constant", value, BOOL)
        if isinstance(value, Constant):
            return self._step("constant", int(value), INT)
        if isinstance(value, (int, float)):
            if isinstance(value, int) and has_static_value(value):
                return self._step("constant", value, INT)
            self.parameters.append(value)
            dtype = INT if isinstance(value, int) else FLOAT
            return self._step("parameter", len(self.parameters) - 1, dtype)
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return self.look_up(value, ())
        raise TypeError(f"score: unsupported operand of type {type(value).__name__}")

    def look_up(self, table: Any, indices: Sequence[Any]) -> int:
        table = tensor_in_graph("score: captured array", table, self.device)
        if len(indices) != table.ndim:
            raise TypeError(f"score: expected one index for each of {table.ndim} axes, got {len(indices)}")
        found = tuple([self.index(x) for x in indices])
        if any(self.dtype(x) != INT for x in found):
            raise TypeError("score: expected integer indices")
        number = len(self.tables)
        for at, known in enumerate(self.tables):
            if known is table:
                number = at
        if number == len(self.tables):
            self.tables.append(table)
        dtype = FLOAT if table.is_floating_point() else BOOL if table.dtype == torch.bool else INT
        return self._step("look_up", number, dtype, found)

    def array(self, module: str, function: str, *numbers: int) -> torch.Tensor:
        """An array that depends on numbers alone, as a constant of the program."""
        # As numbers: PyTorch does not support two constant tensors that the same function returns.
        elements, dtype = _array(module, function, tuple([guard_scalar(x) for x in numbers]))
        return torch.tensor(elements, dtype=getattr(torch, dtype), device=self.device)

    def call(self, function: Callable[..., Any], *symbols: Any) -> Any:
        """Call a score function; the mode of :func:`trace_in_graph` sees the look-ups in its tensors."""
        result = function(*symbols)
        return result if isinstance(result, Recorded) else Symbol(self, self.index(result))


class _LookUps(TorchFunctionMode):  # type: ignore[misc]
    """Records operations on symbols, and look-ups by symbols."""

    def __torch_function__(self, func: Any, types_: Any, operands: Any = (), options: Any = None) -> Any:
        options = options or {}
        name = _name(func)
        if name in ("__getitem__", "getitem"):
            index = operands[1] if isinstance(operands[1], tuple) else (operands[1],)
            if any(isinstance(x, Recorded) for x in index):
                return _element(operands[0], index)
        check_unchanged(name, options)
        if any(isinstance(x, Recorded) for x in (*operands, *options.values())):
            return torch_call(func, operands, options, name)
        return func(*operands, **options)


class _Row:
    """A tensor of which a function has indexed the first axes, as in ``table[h][q]``."""

    def __init__(self, table: torch.Tensor, indices: tuple[Any, ...]) -> None:
        self.table, self.indices = table, indices

    def __getitem__(self, index: Any) -> Any:
        return _element(self.table, (*self.indices, *(index if isinstance(index, tuple) else (index,))))


def _element(table: torch.Tensor, indices: tuple[Any, ...]) -> Any:
    if len(indices) < table.ndim and all(isinstance(x, (Recorded, int)) for x in indices):
        return _Row(table, indices)
    return look_up(table, indices)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _array(module: str, function: str, numbers: tuple[int, ...]) -> tuple[tuple[Any, ...], str]:
    """Return the elements of an array with one axis, and its dtype."""
    found = getattr(sys.modules[module], function)(*numbers)
    return tuple(found.tolist()), found.dtype.name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name(function: Any) -> str:
    return torch_name(function)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _next(steps: _Steps, step: tuple[Any, ...]) -> tuple[int, str]:
    """Return the index and the dtype of the operation that a step appends to a graph."""
    builder = _after(steps)
    index = builder.step(*step)
    return index, builder.dtype(index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _result(steps: _Steps, index: int) -> tuple[str, tuple[tuple[int, str], ...], tuple[int, ...]]:
    """Return the serialized graph, and its parameters and tables by their numbers in the steps."""
    builder = _after(steps)
    graph, parameters, tables = builder.result(builder.step("to_float", index))
    dtypes = {step[1]: step[2] for step in steps if step[0] == "parameter"}
    return to_json(graph), tuple([(at, dtypes[at]) for at in parameters]), tables


def _after(steps: _Steps) -> SharedBuilder:
    builder = SharedBuilder()
    for step in steps:
        builder.step(*step)
    return builder
