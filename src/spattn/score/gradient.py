"""Differentiate score functions in reverse mode, with respect to the score and all captured floats."""

from __future__ import annotations

from typing import NamedTuple

from .graph import FLOAT, Builder, Graph

__all__ = ["Captured", "Derivatives", "derivatives"]


class Captured(NamedTuple):
    """The derivative with respect to a captured value at one of its uses.

    Attributes
    ----------
    name : str
        ``"parameter"`` or ``"look_up"``.
    number : int
        Index of the parameter or table.
    indices : tuple of int
        Operations that index the table.
    derivative : int
        The operation of d result / d value.
    """

    name: str
    number: int
    indices: tuple[int, ...]
    derivative: int


class Derivatives(NamedTuple):
    """A graph that computes a score function and its derivatives.

    Attributes
    ----------
    graph : Graph
        Its results are the function's value and d value / d score.
    captured : tuple of Captured
        One for each use of a captured float that the value depends on.
    """

    graph: Graph
    captured: tuple[Captured, ...]


def derivatives(graph: Graph) -> Derivatives:
    """Differentiate a graph of one float result.

    Branches that are not taken contribute exactly 0, ties of minimum and maximum are split evenly, and the derivative
    of the absolute value at 0 is 0.
    """
    build = Builder(graph.operations)
    (result,) = graph.results
    adjoint: dict[int, int] = {result: build.constant(1.0)}
    captured = []
    for index in range(len(graph.operations) - 1, -1, -1):
        own, operation = adjoint.get(index), graph.operations[index]
        if own is None or operation.dtype != FLOAT:
            continue
        if operation.name in ("parameter", "look_up"):
            captured.append(Captured(operation.name, int(operation.number), operation.operands, own))
            continue
        for operand, derivative in zip(operation.operands, _rules(build, index, own), strict=True):
            if derivative is None or build.dtype(operand) != FLOAT:
                continue
            before = adjoint.get(operand)
            adjoint[operand] = derivative if before is None else build.apply("add", before, derivative)
    score = next((at for at, op in enumerate(graph.operations) if op.name == "score"), None)
    of_score = build.constant(0.0) if score is None else adjoint.get(score, build.constant(0.0))
    return Derivatives(Graph(tuple(build.operations), (result, of_score)), tuple(captured))


def _rules(build: Builder, index: int, own: int) -> list[int | None]:
    """The adjoint of each operand; None for operands without one."""
    name, operands, _, _ = build.operations[index]
    apply, number = build.apply, build.constant

    def times(factor: int) -> int:
        """The adjoint times a derivative; 0 where the adjoint is 0, whatever the derivative is."""
        known = build.value(own)
        if known == 1:
            return factor
        return apply("mul" if known else "adjoint", own, factor)

    if name == "add":
        return [own, own]
    if name == "sub":
        return [own, apply("neg", own)]
    if name == "neg":
        return [apply("neg", own)]
    if name == "mul":
        a, b = operands
        return [times(b), times(a)]
    if name == "div":
        a, b = operands
        first = times(apply("div", number(1.0), b))
        return [first, times(apply("neg", apply("div", index, b)))]
    if name == "pow":
        a, b = operands
        # 0 where the exponent or the power is 0, also if the other factor is infinite there.
        first = times(apply("adjoint", b, apply("pow", a, apply("sub", b, number(1.0)))))
        return [first, times(apply("adjoint", index, apply("log", a)))]
    if name == "mod":
        a, b = operands
        return [own, times(apply("neg", apply("floordiv", a, b)))]
    if name == "exp":
        return [times(index)]
    if name == "log":
        return [times(apply("div", number(1.0), operands[0]))]
    if name == "sqrt":
        return [times(apply("div", number(0.5), index))]
    if name == "tanh":
        return [times(apply("sub", number(1.0), apply("mul", index, index)))]
    if name == "sigmoid":
        return [times(apply("mul", index, apply("sub", number(1.0), index)))]
    if name == "abs":
        return [times(apply("sign", operands[0]))]
    if name in ("minimum", "maximum"):
        a, b = operands if name == "minimum" else operands[::-1]
        half = apply("where", apply("eq", a, b), number(0.5), number(0.0))
        first = apply("where", apply("lt", a, b), number(1.0), half)
        return [times(first), times(apply("sub", number(1.0), first))]
    if name == "where":
        test = operands[0]
        return [None, apply("where", test, own, number(0.0)), apply("where", test, number(0.0), own)]
    if name == "adjoint":
        raise ValueError("score: the derivative of a derivative is not supported")
    return [None] * len(operands)  # piecewise constant: floor division, casts, comparisons, sign
