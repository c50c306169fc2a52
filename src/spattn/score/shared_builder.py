"""A graph builder that computes a step once for all graphs that begin with the same steps."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from .._util.cached import BoundedCache
from .graph import INPUTS, Builder, Graph, Operation

__all__ = ["ARGUMENTS", "Result", "SharedBuilder"]

ARGUMENTS = ("score", "b", "h", "q", "k")  # the first operations of every graph
_FIRST = tuple(Operation(name, (), INPUTS[name]) for name in ARGUMENTS)
_DTYPES = {at: operation.dtype for at, operation in enumerate(_FIRST)}

# Each graph that a builder has had gets a number; a graph and a step determine the next graph. The caches are bounded,
# because a function may differ at every call.
_numbers = itertools.count(1)
_steps = BoundedCache(1 << 14)  # (number of a graph, step) -> (number of the next graph, index, dtype)
_results = BoundedCache(1 << 10)  # (number of a graph, index) -> Result


class Result(NamedTuple):
    """The graph of one result of a builder, with only the operations that the result needs.

    Attributes
    ----------
    graph : Graph
        Its parameters and tables are numbered in the order in which it uses them.
    parameters, tables : tuple of int
        Their numbers in the builder, in that order.
    """

    graph: Graph
    parameters: tuple[int, ...]
    tables: tuple[int, ...]


class SharedBuilder:
    """A :class:`Builder` for traced functions. Equal steps give equal graphs, so it looks their results up."""

    def __init__(self) -> None:
        self._graph = 0
        self._dtypes = _DTYPES.copy()
        self._steps: list[tuple[Any, ...]] = []
        self._builder: Builder | None = None
        self._executed = 0  # how many of the steps the builder has executed

    def step(self, *step: Any) -> int:
        """Return the result of a method of Builder; `step` is its name, then its operands."""
        found = _steps.get((self._graph, step))
        if found is None:
            builder = self._build()
            index = getattr(builder, step[0])(*step[1:])
            found = _steps.keep((self._graph, step), (next(_numbers), index, builder.dtype(index)))
        self._steps.append(step)
        self._graph, index, self._dtypes[index] = found
        return index

    def dtype(self, index: int) -> str:
        """Dtype of an operation."""
        return self._dtypes[index]

    def result(self, index: int) -> Result:
        """The graph of an operation."""
        found: Result | None = _results.get((self._graph, index))
        return found or _results.keep((self._graph, index), _result(self._build(), index))

    def _build(self) -> Builder:
        """Return a Builder that has executed all steps."""
        if self._builder is None:
            self._builder = Builder(_FIRST)
        for name, *operands in self._steps[self._executed :]:
            getattr(self._builder, name)(*operands)
        self._executed = len(self._steps)
        return self._builder


def _result(builder: Builder, result: int) -> Result:
    graph = Graph(tuple(builder.operations), (result,)).only([result])
    first: dict[int, int] = {}  # operation -> first operation that uses it
    for at, operation in enumerate(graph.operations):
        for operand in operation.operands:
            first.setdefault(operand, at)
    used = sorted(range(len(graph.operations)), key=lambda at: (first.get(at, at), at))
    new: dict[str, dict[int, int]] = {"parameter": {}, "look_up": {}}
    for operation in map(graph.operations.__getitem__, used):
        if operation.name in new:
            numbers = new[operation.name]
            numbers.setdefault(int(operation.number), len(numbers))
    operations = tuple(
        op._replace(number=new[op.name][int(op.number)]) if op.name in new else op for op in graph.operations
    )
    return Result(Graph(operations, graph.results), tuple(new["parameter"]), tuple(new["look_up"]))
