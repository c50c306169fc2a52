"""Functions of symbols, numbers and arrays, for use in score functions."""

from __future__ import annotations

import sys
from typing import Any

from ..arrays import compiling
from .captures import CapturedArray, look_up
from .operations import FUNCTIONS
from .recorder import Recorded, is_array
from .symbol import record

__all__ = ["clip", "exp", "log", "maximum", "minimum", "sigmoid", "sqrt", "take", "tanh", "where"]


def _apply(name: str, *operands: Any) -> Any:
    if any(isinstance(x, Recorded) for x in operands):
        return record(name, *operands)
    torch = sys.modules.get("torch")
    if torch is not None and (compiling() or any(isinstance(x, torch.Tensor) for x in operands)):
        return getattr(torch, name)(*(_tensor(torch, x) for x in operands))
    return FUNCTIONS[name](*operands)


def _tensor(torch: Any, x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x
    return torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else torch.as_tensor(x)


def where(condition: Any, x: Any, y: Any) -> Any:
    """`x` where the condition holds, else `y`; the value that is not chosen gets a gradient of exactly 0.

    Parameters
    ----------
    condition : bool or array of bool
    x, y : number or array

    Returns
    -------
    number or array

    Examples
    --------
    >>> from spattn.score import where
    >>> function = lambda score, b, h, q, k: where(k > q, score - 100.0, score)
    >>> function(1.0, 0, 0, q=5, k=6)
    array(-99.)
    """
    return _apply("where", condition, x, y)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two numbers; where they are equal, each gets half of the gradient.

    Parameters
    ----------
    x, y : number or array

    Returns
    -------
    number or array
    """
    return _apply("minimum", x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger of two numbers; where they are equal, each gets half of the gradient.

    Parameters
    ----------
    x, y : number or array

    Returns
    -------
    number or array
    """
    return _apply("maximum", x, y)


def clip(x: Any, low: Any, high: Any) -> Any:
    """`x`, limited to the range from `low` to `high`.

    Parameters
    ----------
    x, low, high : number or array

    Returns
    -------
    number or array
    """
    return minimum(maximum(x, low), high)


def exp(x: Any) -> Any:
    """Exponential.

    Parameters
    ----------
    x : number or array

    Returns
    -------
    number or array
    """
    return _apply("exp", x)


def log(x: Any) -> Any:
    """Natural logarithm.

    Parameters
    ----------
    x : number or array

    Returns
    -------
    number or array
    """
    return _apply("log", x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent.

    Parameters
    ----------
    x : number or array

    Returns
    -------
    number or array
    """
    return _apply("tanh", x)


def sigmoid(x: Any) -> Any:
    """Logistic function, ``1 / (1 + exp(-x))``.

    Parameters
    ----------
    x : number or array

    Returns
    -------
    number or array
    """
    return _apply("sigmoid", x)


def sqrt(x: Any) -> Any:
    """Square root.

    Parameters
    ----------
    x : number or array

    Returns
    -------
    number or array
    """
    return _apply("sqrt", x)


def take(table: Any, *indices: Any) -> Any:
    """``table[indices]``, an element of an array of any library.

    A score function can index the arrays of its own variables as usual. `take` also reads arrays that the tracer does
    not find, such as those in nested lists and dictionaries.

    Parameters
    ----------
    table : array of float32 | float64 | float16 | bfloat16 | integers | bool
    *indices : int or integer expression of b, h, q and k
        One per axis. Negative ones count from the end. An index out of range gives NaN for floats, the least int32 for
        integers, False for bools.

    Returns
    -------
    number per pair

    Raises
    ------
    TypeError
        If there is not one integer index per axis.

    Examples
    --------
    >>> import numpy as np
    >>> from spattn.score import take
    >>> tables = {"layer0": np.zeros((8, 64), np.float32)}
    >>> function = lambda score, b, h, q, k: score + take(tables["layer0"], h, q % 64)
    """
    if isinstance(table, CapturedArray):
        return table[indices]
    if not is_array(table):
        raise TypeError(f"take: table: expected an array, got {type(table).__name__}")
    if len(indices) != table.ndim:
        raise TypeError(f"take: expected one index for each of {table.ndim} axes, got {len(indices)}")
    return look_up(table, indices)
