"""Check and read the numbers and arrays of library functions."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ...arrays import dtype_name
from ..functions import take
from ..recorder import Recorded, is_array, is_float

__all__ = ["check_size", "check_table", "constants", "number", "per_head", "rows", "sizes_of"]


def check_table(name: str, table: Any, ndim: int | None = None) -> None:
    """Check that an argument is an array of floats with `ndim` axes."""
    if not is_array(table):
        raise TypeError(f"{name}: expected an array, got {type(table).__name__}")
    if not is_float(table):
        raise TypeError(f"{name}: expected an array of floats, got {dtype_name(table)}")
    if ndim is not None and table.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} axes, got shape {tuple(table.shape)}")


def number(name: str, value: Any) -> None:
    """Check that an argument is a number, or an array of floats with at most one axis."""
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        return
    check_table(name, value)
    if value.ndim > 1:
        raise ValueError(f"{name}: expected a number or one per head, got shape {tuple(value.shape)}")


def per_head(value: Any, h: Any) -> Any:
    """The number itself, or that of the head."""
    return take(value, h) if is_array(value) and value.ndim else value


def check_size(name: str, table: Any, axis: int, score: Any, size: str = "heads") -> None:
    """Raise ValueError unless an axis of an array has an entry for each query head (batch entry, query) of the call."""
    sizes = sizes_of(score)
    if sizes is not None and is_array(table) and table.ndim and table.shape[axis] != getattr(sizes, size):
        what = {"heads": "query heads", "batch": "batch entries", "q_len": "queries"}[size]
        raise ValueError(
            f"{name}: expected an entry for each of {getattr(sizes, size)} {what}, got {table.shape[axis]}"
        )


def rows(score: Any, q: Any) -> Any:
    """The index of the query in ``q``, from 0; score functions get its position, ``index + kv_len - q_len``."""
    if not isinstance(score, Recorded):
        raise TypeError("score: the row of a query depends on the lengths of a call; pass this function to attention()")
    recorder = score.recorder
    return q - type(score)(recorder, recorder.input("offset"))


def sizes_of(score: Any) -> Any:
    """The sizes of the call that traces the function, or None. A call that differs in a size read here traces again."""
    return score.recorder.sizes if isinstance(score, Recorded) else None


def constants(score: Any, module: str, function: str, *numbers: int) -> Any:
    """The array that a function of numbers gives, named so that torch.compile need not trace it."""
    if isinstance(score, Recorded) and score.recorder.in_graph:
        return score.recorder.array(module, function, *numbers)
    return getattr(sys.modules[module], function)(*numbers)
