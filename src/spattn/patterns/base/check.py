"""Parameter checks; every message reads ``name: expected ..., got ...``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["MOST_RUNS", "REACH", "assign", "choice", "flag", "integer", "integers", "per_axis", "reach"]

MOST_RUNS = 1 << 23  # of one array; index sets then evaluate the predicate strip by strip
REACH = 1 << 40  # exceeds every distance of two positions; sums and products stay far below 2**63


def reach(tokens: int) -> int:
    """Clip `tokens` at REACH for NumPy arithmetic; fields keep the given value.

    Multiply parameters as Python integers first, then clip the product.
    """
    return min(tokens, REACH)


def assign(pattern: Any, **fields: Any) -> None:
    """Set fields of a frozen dataclass from its ``__post_init__``."""
    for name, value in fields.items():
        object.__setattr__(pattern, name, value)


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return `value` as an int in ``[least, most]``; bools raise TypeError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if (least is not None and value < least) or (most is not None and value > most):
        limits = f">= {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name}: expected an integer {limits}, got {value}")
    return int(value)


def integers(name: str, value: Any, least: int | None = None, most: int | None = None) -> tuple[int, ...]:
    """Return `value` as a tuple of ints, each in ``[least, most]``."""
    if isinstance(value, (str, bytes, dict, set)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name}: expected a sequence of integers, got {value!r}")
    return tuple(integer(name, v, least, most) for v in value)


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of `allowed`."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {value!r}")
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def per_axis(name: str, value: Any, axes: int, check: Callable[..., Any] = integer, **limits: int) -> tuple[Any, ...]:
    """Return a scalar, or one value per axis, as a tuple with one value per axis."""
    if isinstance(value, (tuple, list, np.ndarray)):
        if len(value) != axes:
            raise ValueError(f"{name}: expected one value or {axes} (one per axis), got {len(value)}")
        return tuple(check(name, v, **limits) for v in value)
    return (check(name, value, **limits),) * axes
