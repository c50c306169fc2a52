"""Iterate over the operands of a pattern, and over patterns that differ in one parameter or operand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .composition import Composite, Not
from .pattern import Pattern
from .recipe import Recipe

__all__ = ["altered", "leaves"]


def leaves(pattern: Pattern) -> Iterator[Pattern]:
    """Yield the patterns within a composition that have no operands; a plain pattern yields itself."""
    inner = [p for _, value in _fields(pattern) for p in _patterns(value)]
    if not inner:
        yield pattern
    for each in inner:
        yield from leaves(each)


def altered(pattern: Pattern) -> Iterator[tuple[str, Pattern]]:
    """Yield (change, pattern): without one operand, with one integer ±1, with one bool negated; each if it is valid."""
    if isinstance(pattern, Composite) and not isinstance(pattern, Not):
        for n, operand in enumerate(pattern.operands):
            yield f"{operand!r} is missing", pattern.of(*pattern.operands[:n], *pattern.operands[n + 1 :])
    if isinstance(pattern, Recipe):
        yield from altered(pattern.made)
    for name, value in _fields(pattern):
        for change, other in _alternatives(name, value):
            try:
                yield change, _replaced(pattern, name, other)
            except ValueError:
                continue  # out of the parameter's range


def _fields(pattern: Pattern) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the parameters; a user's class may not be a dataclass."""
    if dataclasses.is_dataclass(pattern):
        for field in dataclasses.fields(pattern):
            if field.init:
                yield field.name, getattr(pattern, field.name)


def _patterns(value: Any) -> list[Pattern]:
    return [p for p in (value if type(value) is tuple else (value,)) if isinstance(p, Pattern)]


def _alternatives(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool):
        yield f"{name} is {not value}", not value
    elif isinstance(value, int):
        yield from (("off by one", value + 1), ("off by one", value - 1))
    elif isinstance(value, Pattern):
        yield from altered(value)
    elif type(value) is tuple and value and all(isinstance(p, Pattern) for p in value):
        for n, each in enumerate(value):
            for change, other in altered(each):
                yield change, (*value[:n], other, *value[n + 1 :])


def _replaced(pattern: Pattern, name: str, value: Any) -> Pattern:
    if isinstance(pattern, Composite):
        return pattern.of(*value)
    changed: Any = dataclasses.replace(pattern, **{name: value})
    return changed
