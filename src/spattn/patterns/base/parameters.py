"""What the annotations of a pattern's fields declare: the checks of its parameters, and values to try it with."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from .check import assign, choice, flag, integer, integers

__all__ = [
    "Count",
    "Positive",
    "Range",
    "Word",
    "alternatives",
    "check_parameters",
    "default_value",
    "limits",
    "parameters",
]

Check = Callable[[str, Any], Any]
_USUAL = 4  # what an integer is in an example, where its range allows it


class Range(NamedTuple):
    """The integers that a parameter may be: ``left: Annotated[int, Range(0)]``.

    Parameters
    ----------
    least, most : int or None, optional
        The smallest and the largest one; None = there is no such limit.
    """

    least: int | None = None
    most: int | None = None

    def __repr__(self) -> str:
        return f"Range({self.least})" if self.most is None else f"Range({self.least}, {self.most})"


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Word = Annotated[int, Range(0, 2**64 - 1)]


@functools.cache
def parameters(cls: type) -> dict[str, Any]:
    """What a dataclass is made with: by name each annotation, None for one whose names mean nothing at run time."""
    return {field.name: _annotation(cls, field) for field in dataclasses.fields(cls) if field.init}


def _annotation(cls: type, field: dataclasses.Field[Any]) -> Any:
    if not isinstance(field.type, str):
        return field.type
    owner = next(c for c in cls.__mro__ if field.name in inspect.get_annotations(c))
    holder = types.FunctionType((lambda: None).__code__, vars(sys.modules[owner.__module__]))
    holder.__annotations__ = {field.name: field.type}  # alone, because another one may name what is not there
    try:
        return inspect.get_annotations(holder, eval_str=True)[field.name]
    except NameError:  # of a class in a function, or imported for type checkers only
        return None


def alternatives(kind: Any) -> tuple[Any, ...]:
    """What a union joins; anything else alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def check_parameters(pattern: object) -> None:
    """Replaces each parameter by what its annotation makes of it; TypeError or ValueError where that is nothing.

    TypeError also for a parameter that cannot be hashed, unless the pattern can: plans are found by their pattern.
    """
    cls: type = type(pattern)
    for name, check in _checks(cls):
        value = getattr(pattern, name)
        if check is None:
            _check_hash(pattern, name, value)
        elif (checked := check(name, value)) is not value:
            assign(pattern, **{name: checked})


@functools.cache
def _checks(cls: type) -> tuple[tuple[str, Check | None], ...]:
    return tuple((name, _check(kind)) for name, kind in parameters(cls).items())


def _check_hash(pattern: Any, name: str, value: Any) -> None:
    if type(value).__hash__ is not None:
        return
    try:
        hash(pattern)
    except TypeError as error:
        raise TypeError(
            f"{name}: expected a parameter that can be hashed, such as a tuple, got {type(value).__name__}; for an "
            "array derive from ByContent and Pattern, with @dataclass(frozen=True, eq=False, repr=False)"
        ) from error


def _check(kind: Any) -> Check | None:
    """The check that an annotation declares, None where it declares none."""
    kinds = alternatives(kind)
    if len(kinds) > 1:
        return _check_union(kinds)
    origin, args = get_origin(kind), get_args(kind)
    if kind is bool:
        return flag
    if origin is Literal:
        return lambda name, value: choice(name, value, args)
    within = limits(kind)
    if within is not None:
        least, most = within
        return lambda name, value: integer(name, value, least, most)
    of_each = limits(args[0]) if origin is tuple and args[1:] == (...,) else None
    if of_each is None:
        return None
    lowest, highest = of_each
    return lambda name, value: integers(name, value, lowest, highest)


def _check_union(kinds: tuple[Any, ...]) -> Check | None:
    """None, a word and a sequence are told apart from the rest, which is checked as the first of its alternatives."""
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    several: list[Any] = [_check(kind) for kind in kinds if get_origin(kind) is tuple]
    others = [kind for kind in kinds if get_origin(kind) not in (Literal, tuple) and kind is not types.NoneType]
    single: list[Any] = [_check(kind) for kind in others]
    if None in (*several, *single):
        return None

    def check(name: str, value: Any) -> Any:
        if (value is None and types.NoneType in kinds) or (isinstance(value, str) and value in words):
            return value
        sequence = several and hasattr(value, "__iter__") and not isinstance(value, str)
        return (several if sequence or not single else single)[0](name, value)

    return check


def limits(kind: Any) -> Range | None:
    """The range that an annotation declares."""
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Range)), None)


def default_value(cls: type, name: str) -> Any:
    """A plain value for a parameter without a default; TypeError where its annotation does not tell one."""
    kind = alternatives(parameters(cls)[name])[0]
    if kind is bool:
        return False
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    one = kind if get_origin(kind) is not tuple else get_args(kind)[0]
    within = Range() if one is int else limits(one)
    if within is None:
        raise TypeError(
            f"{name}: expected a default, or an annotation that tells a value for it; or define "
            f"{cls.__name__}.example(), got {kind}"
        )
    value = _USUAL if within.least is None else max(_USUAL, within.least)
    value = value if within.most is None else min(value, within.most)
    return value if one is kind else (value,)
