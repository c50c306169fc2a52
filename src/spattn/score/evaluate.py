"""Evaluate a graph with NumPy: the reference of every kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .graph import BOOL, FLOAT, INPUTS, Graph

__all__ = ["FUNCTIONS", "evaluate"]


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


# Names of operations and their NumPy equivalents; floor division and remainder are Python's.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "neg": np.negative,
    "abs": np.absolute,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "sqrt": np.sqrt,
    "sign": np.sign,
    "where": np.where,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
    # The product of an adjoint and a derivative: nothing comes from where nothing goes to, whatever the derivative is.
    "adjoint": lambda a, b: np.where(a == 0, 0, a * np.where(a == 0, 0, b)),
    "to_float": lambda x: np.asarray(x, np.float64)[()],
    "to_int": lambda x: (
        np.trunc(x).astype(np.int64) if np.asarray(x).dtype.kind == "f" else np.asarray(x, np.int64)[()]
    ),
}


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Any],
    parameters: Sequence[Any],
    tables: Sequence[np.ndarray],
    dtype: Any = np.float64,
) -> list[np.ndarray]:
    """Results of a graph for inputs that broadcast against each other.

    Parameters
    ----------
    graph : Graph
    inputs : mapping
        Arrays for score, b, h, q and k.
    parameters, tables : sequence
        Captured numbers and arrays.
    dtype : dtype, optional
        Of the floats.

    Returns
    -------
    list of ndarray
        One array per result.
    """
    found: list[Any] = []
    with np.errstate(all="ignore"):
        for name, operands, kind, number in graph.operations:
            if name in INPUTS:
                value = np.asarray(inputs[name], dtype if name == "score" else np.int64)
            elif name == "constant":
                value = np.asarray(number, {FLOAT: dtype, BOOL: bool}.get(kind, np.int64))
            elif name == "parameter":
                value = np.asarray(parameters[int(number)], dtype if kind == FLOAT else np.int64)
            elif name == "look_up":
                table = tables[int(number)]
                value = table[tuple(found[x] for x in operands)]
                value = np.asarray(value, dtype if kind == FLOAT else bool if kind == BOOL else np.int64)
            else:
                value = np.asarray(FUNCTIONS[name](*(found[x] for x in operands)))
                value = value.astype(dtype) if kind == FLOAT else value
            found.append(value)
    return [found[x] for x in graph.results]
