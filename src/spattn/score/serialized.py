"""Traced score functions in serialized form, for graphs of PyTorch and programs of JAX."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .graph import BOOL, FLOAT, INPUTS, INT, Builder, Graph, Operation
from .operations import FUNCTIONS
from .recorder import kind_of
from .tracing import Traced

__all__ = ["VERSION", "Serialized", "from_json", "restore", "serialize", "to_json"]

VERSION = 1  # of the form, and of the meaning of the operations
_ARITIES = {name: getattr(function, "nin", 1) for name, function in FUNCTIONS.items()} | {"where": 3, "adjoint": 2}
_KINDS = FLOAT, INT, BOOL


class Serialized(NamedTuple):
    """A traced function as attributes and operands of an operator.

    Attributes
    ----------
    text : str
        The graph as JSON.
    floats, integers : list of float, list of int
        Captured numbers, in the order of their parameters.
    tables : list of arrays
        Captured arrays.
    """

    text: str
    floats: list[Any]
    integers: list[Any]
    tables: list[Any]


class _Read(NamedTuple):
    """A graph, the dtypes of its parameters, and a use of each table."""

    graph: Graph
    parameters: tuple[str, ...]
    tables: tuple[Operation, ...]


def serialize(traced: Traced) -> Serialized:
    """Serialize a traced function."""
    found: dict[str, list[Any]] = {FLOAT: [], INT: []}
    for number, dtype in zip(traced.parameters, _dtypes(traced.graph, "parameter"), strict=True):
        found[dtype].append(number)
    return Serialized(to_json(traced.graph), found[FLOAT], found[INT], list(traced.tables))


def restore(text: str, floats: Sequence[float], integers: Sequence[int], tables: Sequence[Any]) -> Traced:
    """Rebuild a traced function; raise TypeError or ValueError unless it reads these numbers and arrays."""
    graph, parameters, uses = _read(text)
    given = len(floats), len(integers), len(tables)
    expected = parameters.count(FLOAT), parameters.count(INT), len(uses)
    if given != expected:
        raise ValueError(
            "score: expected {} floats, {} integers and {} arrays, got {}, {} and {}".format(*expected, *given)
        )
    for at, (use, table) in enumerate(zip(uses, tables, strict=True)):
        if table.ndim != len(use.operands) or kind_of(table) != use.dtype:
            raise TypeError(
                f"score: captured array {at}: expected {len(use.operands)} axes of {use.dtype}, got {table.dtype} of "
                f"shape {tuple(table.shape)}"
            )
    of = {FLOAT: iter(floats), INT: iter(integers)}
    return Traced(graph, tuple([next(of[dtype]) for dtype in parameters]), tuple(tables))


def to_json(graph: Graph) -> str:
    """Serialize the graph of a function."""
    steps = [[name, operands, dtype, _written(number)] for name, operands, dtype, number in graph.operations]
    (result,) = graph.results
    return json.dumps({"score": VERSION, "operations": steps, "result": result}, separators=(",", ":"))


def from_json(text: str) -> Graph:
    """Rebuild a graph; raise ValueError unless this version of spattn can have written it."""
    return _read(text).graph


@functools.lru_cache(256)
def _read(text: str) -> _Read:
    try:
        given = json.loads(text)
        version = given["score"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError("score: expected a serialized score function, a JSON object with its version") from error
    if version != VERSION:
        raise ValueError(
            f"score: version {version!r} of serialized score functions is not supported, expected {VERSION}; trace "
            "the function again with this version of spattn"
        )
    try:
        graph = _rebuilt(given["operations"], given["result"])
        parameters, tables = _dtypes(graph, "parameter"), _dtypes(graph, "look_up")
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"score: the serialized score function is damaged: {error}") from error
    uses = {int(x.number): x for x in graph.operations if x.name == "look_up"}
    return _Read(graph, parameters, tuple([uses[at] for at in range(len(tables))]))


def _rebuilt(steps: list[Any], result: int) -> Graph:
    """Repeat the operations. Kernels rely on the dtypes, and on the order, that a builder and a trace give them."""
    builder = Builder()
    for at, (name, operands, dtype, written) in enumerate(steps):
        operation = Operation(name, tuple(operands), dtype, _number(written, dtype))
        if not all(type(x) is int and 0 <= x < at for x in operands) or dtype not in _KINDS:
            raise ValueError(f"operation {at} has operands {operands} of {dtype}")
        if (
            _append(builder, operation) != at
            or builder.operations[at] != operation
            or len(builder.operations) != at + 1
        ):
            raise ValueError(f"operation {at} is not {operation}")
    graph = Graph(tuple(builder.operations), (result,))
    if graph.only([result]) != graph or builder.dtype(result) != FLOAT:
        raise ValueError(f"operation {result} is not its result")
    return graph


def _append(builder: Builder, operation: Operation) -> int:
    name, operands, dtype, number = operation
    if name == "look_up":
        if any(builder.dtype(x) != INT for x in operands):
            raise ValueError("an index is not an integer")
        return builder.look_up(int(number), dtype, operands)
    if name in _ARITIES:
        if len(operands) != _ARITIES[name]:
            raise ValueError(f"{name} has {len(operands)} operands")
        return builder.apply(name, *operands)
    if name in INPUTS:
        return builder.input(name)
    if name == "parameter" and dtype != BOOL:
        return builder.parameter(int(number), dtype)
    if name == "constant":
        return builder.constant(number, dtype)
    raise ValueError(f"the operation {name!r} of {dtype} is unknown")


def _dtypes(graph: Graph, name: str) -> tuple[str, ...]:
    """Return the dtypes of parameters or tables in their order; raise ValueError unless they count from 0."""
    found = {(int(x.number), x.dtype) for x in graph.operations if x.name == name}
    if sorted(number for number, _ in found) != list(range(len(found))):
        raise ValueError(f"the numbers of {name} operations are {sorted(found)}")
    return tuple([dtype for _, dtype in sorted(found)])


def _written(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)  # JSON has no infinity


def _number(written: Any, dtype: str) -> float:
    if written == "nan":
        return math.nan  # the object that builders use: tuples compare elements by identity first
    return float(written) if dtype == FLOAT and type(written) in (float, str) else written
