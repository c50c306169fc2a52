"""Show what a score function captures and computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..arrays import dtype_name
from ..arrays.operand import row_major
from .graph import Graph
from .program import CALL, DIAGONAL, HEAD, KEY, PAIR, QUERY, Program, program_of, scopes
from .recorder import Sizes, is_float
from .source import Array, source
from .tracing import Traced, trace

__all__ = ["captured", "show"]

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_INFIX |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "and": "&", "or": "|", "xor": "^"}
_ONCE = {CALL: "call", HEAD: "head", QUERY: "query", KEY: "key", DIAGONAL: "diagonal", PAIR: "pair"}


def captured(function: Callable[..., Any], sizes: Sequence[int] | None = None) -> tuple[Any, ...]:
    """Return the floating-point arrays that a score function captures, in the order of their gradients.

    Parameters
    ----------
    function : callable
        A score function, ``(score, b, h, q, k) -> score``.
    sizes : (batch, heads_q, q_len, kv_len), optional
        Of a call, for functions that depend on them.

    Returns
    -------
    tuple of arrays
        The arrays themselves, in the order in which the function reads them. Arrays that the result does not depend on
        are left out, as are integers and bools. If the function computes an array from others, as in
        ``np.exp(table)``, the computed array is listed.

    Raises
    ------
    TypeError
        If the function cannot be traced.

    Examples
    --------
    >>> import numpy as np
    >>> from spattn.score import alibi, captured, softcap
    >>> slopes, cap = np.ones(8, np.float32), np.array(50.0)
    >>> [x is y for x, y in zip(captured(softcap(cap) | alibi(slopes)), (cap, slopes))]
    [True, True]
    """
    tables = trace(function, None if sizes is None else Sizes(*sizes)).tables
    return tuple(x for x in tables if is_float(x))


def show(function: Callable[..., Any], sizes: Sequence[int] | None = None, file: Any = None) -> None:
    """Print the trace of a score function: captured values, operations, derivatives and C++.

    Operations are grouped by how often kernels compute them: once per call, head, query, key, diagonal (q - k), or for
    each pair.

    Parameters
    ----------
    function : callable
        A score function, ``(score, b, h, q, k) -> score``.
    sizes : (batch, heads_q, q_len, kv_len), optional
        Of a call, for functions that depend on them.
    file : text file, optional
        ``sys.stdout`` by default.

    Raises
    ------
    TypeError
        If the function cannot be traced.

    Examples
    --------
    >>> import numpy as np
    >>> from spattn.score import alibi, show
    >>> show(alibi(np.ones(8, np.float32)))
    table 0: float32, shape (8,), with gradient
    <BLANKLINE>
    value = x8
    d value / d score = 1.0
    d value / d table0[x1] = x6
    <BLANKLINE>
    once per head
      x1 = h
      x4 = table0[x1]
    <BLANKLINE>
    once per query
      x2 = q
    <BLANKLINE>
    once per key
      x3 = k
    <BLANKLINE>
    once per diagonal
      x5 = x3 - x2
      x6 = to_float(x5)
      x7 = x4 * x6
    <BLANKLINE>
    for each pair
      x0 = score
      x8 = x0 + x7
    ...
    """
    traced = trace(function, None if sizes is None else Sizes(*sizes))
    print("\n".join(_lines(traced, program_of(traced.graph))), file=file)


def _lines(traced: Traced, program: Program) -> Iterator[str]:
    for at, number in enumerate(traced.parameters):
        yield f"parameter {at}: {number!r}"
    for at, table in enumerate(traced.tables):
        yield f"table {at}: {dtype_name(table)}, shape {tuple(table.shape)}{', with gradient' * is_float(table)}"
    graph = program.graph
    yield from ("", f"value = {_name(graph, graph.results[0])}")
    yield f"d value / d score = {_name(graph, graph.results[1])}"
    for use in program.captured:
        if use.name == "look_up":
            indices = ", ".join(_name(graph, x) for x in use.indices)
            yield f"d value / d table{use.number}[{indices}] = {_name(graph, use.derivative)}"
    found = scopes(graph)
    for scope, once in _ONCE.items():
        own = [at for at, of in enumerate(found) if of == scope and graph.operations[at].name != "constant"]
        if own:
            yield from ("", f"once per {once}" if scope != PAIR else "for each pair")
            yield from (f"  x{at} = {_expression(graph, at)}" for at in own)
    yield from ("", "C++ of GPU kernels")
    arrays = [Array.of(dtype_name(x), tuple(x.shape), row_major(tuple(x.shape))) for x in traced.tables]
    yield from (f"  {line}" if line else "" for line in source(program, arrays).splitlines())


def _name(graph: Graph, at: int) -> str:
    operation = graph.operations[at]
    return repr(operation.number) if operation.name == "constant" else f"x{at}"


def _expression(graph: Graph, at: int) -> str:
    name, operands, _, number = graph.operations[at]
    given = [_name(graph, x) for x in operands]
    if name == "parameter":
        return f"parameter{int(number)}"
    if name == "look_up":
        return f"table{int(number)}[{', '.join(given)}]"
    if name in _INFIX:
        return f"{given[0]} {_INFIX[name]} {given[1]}"
    return f"{name}({', '.join(given)})" if operands else name
