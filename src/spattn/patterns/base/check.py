"""Checks of parameters; every message has the form ``name: expected ..., got ...``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["REACH", "assign", "choice", "flag", "integer", "integers", "per_axis", "reach"]

REACH = 1 << 40  # further than two positions of any sequence lie apart, and far from the end of int64


def reach(tokens: int) -> int:
    """`tokens`, or REACH where it is more: the same to every position, and NumPy can add and multiply it.

    Fields keep the value that they were given. Products of parameters are made of Python integers and cut afterwards.
    """
    return min(tokens, REACH)


def assign(pattern: Any, **fields: Any) -> None:
    """Sets the fields of a frozen dataclass from within its ``__post_init__``."""
    for name, value in fields.items():
        object.__setattr__(pattern, name, value)


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int in ``[least, most]``.

    Raises
    ------
    TypeError
        If `value` is not an integer; a bool is not one.
    ValueError
        If it is out of range.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if (least is not None and value < least) or (most is not None and value > most):
        limits = f">= {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name}: expected an integer {limits}, got {value}")
    return int(value)


def integers(name: str, value: Any, least: int | None = None, most: int | None = None) -> tuple[int, ...]:
    """`value` as a tuple of ints, each in ``[least, most]``."""
    if isinstance(value, (str, bytes, dict, set)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name}: expected a sequence of integers, got {value!r}")
    return tuple(integer(name, v, least, most) for v in value)


def flag(name: str, value: Any) -> bool:
    """`value` as a bool, TypeError if it is something else."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """`value`, ValueError unless it is one of `allowed`."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {value!r}")
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def per_axis(name: str, value: Any, axes: int, check: Callable[..., Any] = integer, **limits: int) -> tuple[Any, ...]:
    """`value`, a scalar or one per axis, as a tuple with one entry per axis."""
    if isinstance(value, (tuple, list, np.ndarray)):
        if len(value) != axes:
            raise ValueError(f"{name}: expected one value or {axes} (one per axis), got {len(value)}")
        return tuple(check(name, v, **limits) for v in value)
    return (check(name, value, **limits),) * axes
