"""Operations of graphs as functions of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["FUNCTIONS"]


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
    # The product of an adjoint and a derivative: 0 where the adjoint is 0, even if the derivative is not finite.
    "adjoint": lambda a, b: np.where(a == 0, 0, a * np.where(a == 0, 0, b)),
    "to_float": lambda x: np.asarray(x, np.float64)[()],
    "to_int": lambda x: (
        np.trunc(x).astype(np.int64) if np.asarray(x).dtype.kind == "f" else np.asarray(x, np.int64)[()]
    ),
}
