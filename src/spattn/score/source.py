"""C++ of a graph: the body of a kernel's ``Score``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .graph import BOOL, FLOAT, INPUTS, INT, Graph, Operation

__all__ = ["statements"]

_TYPES = {FLOAT: "T", INT: "int", BOOL: "bool"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "xor": "!="}
_INFIX |= {"and": "&&", "or": "||"}


def statements(graph: Graph, tables: Sequence[int] = ()) -> list[str]:
    """Return the C++ statements that compute a graph, one per operation; operation ``n`` defines the variable ``xn``.

    The surrounding C++ function must define ``score`` (of type ``T``), the ints ``b``, ``h``, ``q`` and ``k``,
    ``parameters`` with the methods ``real(n)`` and ``whole(n)``, and ``tables`` with ``real(n, index...)``,
    ``whole(n, index...)`` and ``truth(n, index...)``. ``score_exp(T)``, ``score_tanh(T)`` etc. must exist, one function
    for each operation that C++ has no operator for.
    """
    return [
        f"const {_TYPES[operation.dtype]} x{number} = {_expression(graph, operation)};"
        for number, operation in enumerate(graph.operations)
    ]


def _expression(graph: Graph, operation: Operation) -> str:
    name, operands, dtype, number = operation
    given = [f"x{operand}" for operand in operands]
    if name in INPUTS:
        return name
    if name == "constant":
        return _literal(number, dtype)
    reader = {FLOAT: "real", INT: "whole", BOOL: "truth"}[dtype]
    if name == "parameter":
        return f"parameters.{reader}({int(number)})"
    if name == "look_up":
        return f"tables.{reader}({', '.join([str(int(number)), *given])})"
    if name in _INFIX:
        return f"{given[0]} {_INFIX[name]} {given[1]}"
    if name == "neg":
        return f"-{given[0]}"
    if name == "not":
        return f"!{given[0]}"
    if name == "to_float":
        return f"T({given[0]})"
    if name == "to_int":
        return f"int({given[0]})"
    if name == "where":
        return f"{given[0]} ? {given[1]} : {given[2]}"
    if name == "adjoint":
        return f"{given[0]} == T(0) ? T(0) : {given[0]} * {given[1]}"
    return f"score_{name}({', '.join(given)})"


def _literal(value: float, dtype: str) -> str:
    if dtype == BOOL:
        return "true" if value else "false"
    if dtype == INT:
        return str(int(value))
    if math.isnan(value):
        return 'T(__builtin_nan(""))'
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}T(__builtin_huge_val())"
    return f"T({value!r})"
