"""Evaluate a graph with NumPy: the reference implementation of score functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .graph import BOOL, FLOAT, INPUTS, INT, Graph
from .operations import FUNCTIONS

__all__ = ["evaluate"]


def _look_up(table: np.ndarray, indices: Sequence[np.ndarray], kind: str, dtype: Any) -> np.ndarray:
    """Elements of a table; NaN, the least int32 or False where an index is out of range."""
    outside = False
    for index, size in zip(indices, table.shape, strict=True):
        outside = outside | (index < -size) | (index >= size)
    absent = {FLOAT: np.nan, INT: -(2**31), BOOL: False}[kind]
    of = {FLOAT: dtype, INT: np.int64, BOOL: bool}[kind]
    if table.size == 0:
        return np.full(np.shape(outside), absent, of)
    value = table[tuple(np.where(outside, 0, index) for index in indices)]
    return np.where(outside, absent, np.asarray(value).astype(of))  # converted first, as int8 cannot hold `absent`


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Any],
    parameters: Sequence[Any],
    tables: Sequence[np.ndarray],
    dtype: Any = np.float64,
) -> list[np.ndarray]:
    """Return the results of a graph for inputs that broadcast against each other.

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
                value = _look_up(tables[int(number)], [found[x] for x in operands], kind, dtype)
            else:
                value = np.asarray(FUNCTIONS[name](*(found[x] for x in operands)))
                value = value.astype(dtype) if kind == FLOAT else value
            found.append(value)
    return [found[x] for x in graph.results]
