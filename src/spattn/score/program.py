"""Programs of score functions: the value, its derivatives, and which inputs each operation depends on."""

from __future__ import annotations

import functools
from typing import NamedTuple

from .gradient import Captured, derivatives
from .graph import COMPARISONS, FLOAT, Graph

__all__ = ["CALL", "DIAGONAL", "HEAD", "KEY", "PAIR", "QUERY", "Program", "is_summed", "joined", "program_of", "scopes"]

# Scopes: the inputs on which an operation depends. A kernel computes it once per call, per (batch entry, head), per
# query, per key, per diagonal (query - key), or per pair. CALL < HEAD < the others. An operation that depends on two of
# QUERY, KEY and DIAGONAL has scope PAIR.
CALL, HEAD, QUERY, KEY, DIAGONAL, PAIR = "call", "head", "query", "key", "diagonal", "pair"
_OF_INPUT = {"score": PAIR, "b": HEAD, "h": HEAD, "q": QUERY, "k": KEY, "offset": CALL}


class Program(NamedTuple):
    """A score function without captured values. Equal programs share kernels.

    Attributes
    ----------
    graph : Graph
        Its results are the value, d value / d score, and one derivative for each of `captured`.
    captured : tuple of Captured
        The uses of captured floats that the value depends on.
    """

    graph: Graph
    captured: tuple[Captured, ...]

    @property
    def forward(self) -> Graph:
        """The graph of the value alone."""
        return self.graph.only(self.graph.results[:1])

    @property
    def backward(self) -> Graph:
        """The graph of the value and d value / d score."""
        return self.graph.only(self.graph.results[:2])


@functools.lru_cache(1024)
def program_of(graph: Graph) -> Program:
    """Differentiate a traced graph."""
    found = derivatives(graph)
    wanted = [*found.graph.results, *(use.derivative for use in found.captured)]
    indices = [index for use in found.captured for index in use.indices]
    whole = found.graph.only([*wanted, *indices])
    results, rest = whole.results[: len(wanted)], iter(whole.results[len(wanted) :])
    captured = tuple(
        use._replace(indices=tuple(next(rest) for _ in use.indices), derivative=at)
        for use, at in zip(found.captured, results[2:], strict=True)
    )
    return Program(Graph(whole.operations, results), captured)


def scopes(graph: Graph) -> tuple[str, ...]:
    """The scope of each operation."""
    found: list[str] = []
    slopes: list[tuple[int, int] | None] = []  # (d/dq, d/dk) of integers that are affine in q and k; else None
    for name, operands, dtype, _ in graph.operations:
        slope = None if dtype == FLOAT else _slope(name, operands, slopes, graph)
        # Comparisons depend only on the difference of their operands.
        relation = _slope("sub", operands, slopes, graph) if name in COMPARISONS else slope
        scope = _OF_INPUT.get(name, CALL)
        for operand in operands:
            scope = joined(scope, found[operand])
        if relation is not None and relation[0] == -relation[1] and scope == PAIR:
            scope = DIAGONAL if relation[0] else HEAD
        found.append(scope)
        slopes.append(slope)
    return tuple(found)


def is_summed(program: Program, use: Captured) -> bool:
    """Whether a kernel may sum gradients with respect to the score along a diagonal, then compute one term of a use.

    The pairs of a diagonal must use the same element. In addition, the derivative of the use must equal the derivative
    with respect to the score, as for an array that is added to the score; or the latter must be 1, and the former the
    same for all pairs of a diagonal.
    """
    graph = program.graph
    found = scopes(graph)
    by_distance = CALL, HEAD, DIAGONAL
    if any(found[index] not in by_distance for index in use.indices):
        return False
    slope = graph.operations[graph.results[1]]
    one = slope.name == "constant" and slope.number == 1
    return use.derivative == graph.results[1] or (one and found[use.derivative] in by_distance)


def joined(a: str, b: str) -> str:
    """The scope of an operation on operands of two scopes."""
    for smaller in (CALL, HEAD):
        if smaller in (a, b):
            return b if a == smaller else a
    return a if a == b else PAIR


def _slope(
    name: str, operands: tuple[int, ...], slopes: list[tuple[int, int] | None], graph: Graph
) -> tuple[int, int] | None:
    known = {"q": (1, 0), "k": (0, 1)}.get(name)
    if known is not None:
        return known
    given = [slopes[x] for x in operands]
    if any(x is None for x in given) or name == "score":
        return None
    if all(x == (0, 0) for x in given):
        return 0, 0
    if name in ("add", "sub"):
        (a, b), (c, d) = given  # type: ignore[misc]
        return (a + c, b + d) if name == "add" else (a - c, b - d)
    if name == "neg":
        ((a, b),) = given  # type: ignore[misc]
        return -a, -b
    if name == "mul":
        for one, other in (operands, operands[::-1]):
            operation, slope = graph.operations[one], slopes[other]
            if operation.name == "constant" and slope is not None:
                return slope[0] * int(operation.number), slope[1] * int(operation.number)
    return None
