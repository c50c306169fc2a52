"""Parameter checks, called directly or derived from field annotations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import numpy as np

from ..._util.frozen import writeable

__all__ = [
    "MOST_RUNS",
    "REACH",
    "WRITEABLE",
    "Count",
    "Positive",
    "Range",
    "Word",
    "alternatives",
    "assign",
    "check_mask_mod",
    "check_parameters",
    "choice",
    "default_value",
    "flag",
    "integer",
    "integers",
    "limits",
    "listed",
    "parameters",
    "per_axis",
    "reach",
]

MOST_RUNS = 1 << 23  # limit on rows × runs of a Runs; beyond it, the predicate is evaluated in strips of rows
REACH = 1 << 40  # exceeds any distance between positions; arithmetic on it stays far below 2**63
WRITEABLE = "_writeable_"  # prefix of the attributes that torch.compile reads in place of read-only arrays
Check = Callable[[str, Any], Any]
_USUAL = 4  # example value of an integer parameter, clipped to its range


def reach(tokens: int) -> int:
    """Clip `tokens` to REACH, so that NumPy arithmetic does not overflow; fields of patterns are not clipped.

    Multiply parameters as Python integers, then clip the product.
    """
    return min(tokens, REACH)


def assign(pattern: Any, **fields: Any) -> None:
    """Set fields of a frozen dataclass from its ``__post_init__``."""
    for name, value in fields.items():
        object.__setattr__(pattern, name, value)
        if type(value) is np.ndarray:
            object.__setattr__(pattern, WRITEABLE + name, writeable(value))


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Check that `value` is an integer in ``[least, most]`` and return it as an int; bools raise TypeError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if (least is not None and value < least) or (most is not None and value > most):
        limits = f">= {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name}: expected an integer {limits}, got {value}")
    return int(value)


def listed(value: Any) -> Any:
    """Convert an array of any library to nested lists of Python scalars; return other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def integers(name: str, value: Any, least: int | None = None, most: int | None = None) -> tuple[int, ...]:
    """Check that `value` is a sequence of integers in ``[least, most]`` and return it as a tuple of ints."""
    value = listed(value)
    if isinstance(value, (str, bytes, dict, set)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name}: expected a sequence of integers, got {value!r}")
    numbers = tuple(value)
    if numbers and set(map(type, numbers)) == {int}:  # checks long sequences in C
        if (least is None or least <= min(numbers)) and (most is None or max(numbers) <= most):
            return numbers
    return tuple(integer(name, v, least, most) for v in numbers)


def flag(name: str, value: Any) -> bool:
    """Check that `value` is a Python or NumPy bool and return it as a Python bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Check that `value` is one of `allowed` and return it."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {value!r}")
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def per_axis(name: str, value: Any, axes: int, check: Callable[..., Any] = integer, **limits: int) -> tuple[Any, ...]:
    """Check a scalar, or a sequence with one value per axis, and return a tuple with one value per axis."""
    if isinstance(value, (tuple, list, np.ndarray)):
        if len(value) != axes:
            raise ValueError(f"{name}: expected one value or {axes} (one per axis), got {len(value)}")
        return tuple(check(name, v, **limits) for v in value)
    return (check(name, value, **limits),) * axes


class Range(NamedTuple):
    """Valid range of an integer parameter: ``left: Annotated[int, Range(0)]``.

    Parameters
    ----------
    least, most : int or None, optional
        Inclusive bounds; None = unbounded.
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
    """Map each init field of a dataclass to its annotation, or to None if that cannot be evaluated."""
    return {field.name: _annotation(cls, field) for field in dataclasses.fields(cls) if field.init}


def _annotation(cls: type, field: dataclasses.Field[Any]) -> Any:
    if not isinstance(field.type, str):
        return field.type
    owner = next(c for c in cls.__mro__ if field.name in inspect.get_annotations(c))
    holder = types.FunctionType((lambda: None).__code__, vars(sys.modules[owner.__module__]))
    holder.__annotations__ = {field.name: field.type}  # evaluating the other annotations may fail
    try:
        return inspect.get_annotations(holder, eval_str=True)[field.name]
    except NameError:  # a local class, or a name imported under TYPE_CHECKING
        return None


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def check_parameters(pattern: object) -> None:
    """Check and convert each field by its annotation; if that declares no check, the field must be hashable.

    Patterns are cache keys.
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
    return tuple((name, _check(annotation)) for name, annotation in parameters(cls).items())


def _check_hash(pattern: Any, name: str, value: Any) -> None:
    if type(value).__hash__ is not None:
        return
    try:
        hash(pattern)
    except TypeError as error:
        raise TypeError(
            f"{name}: expected a hashable value, such as a tuple, got {type(value).__name__}; for array fields derive "
            "from ByContent and Pattern, with @dataclass(frozen=True, eq=False, repr=False)"
        ) from error


def _check(annotation: Any) -> Check | None:
    """Return the check that an annotation declares, or None."""
    members = alternatives(annotation)
    if len(members) > 1:
        return _check_union(members)
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is bool:
        return flag
    if origin is Literal:
        return lambda name, value: choice(name, value, args)
    within = limits(annotation)
    if within is not None:
        least, most = within
        return lambda name, value: integer(name, value, least, most)
    of_each = limits(args[0]) if origin is tuple and args[1:] == (...,) else None
    if of_each is None:
        return None
    lowest, highest = of_each
    return lambda name, value: integers(name, value, lowest, highest)


def _check_union(members: tuple[Any, ...]) -> Check | None:
    """Return the check of a union, or None if a member has no check.

    It accepts None and the literals of the union. It passes a sequence to the check of the first tuple member, and any
    other value to that of the first remaining member.
    """
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    several: list[Any] = [_check(member) for member in members if get_origin(member) is tuple]
    others = (m for m in members if get_origin(m) not in (Literal, tuple) and m is not types.NoneType)
    single: list[Any] = [_check(member) for member in others]
    if None in (*several, *single):
        return None

    def check(name: str, value: Any) -> Any:
        if (value is None and types.NoneType in members) or (isinstance(value, str) and value in words):
            return value
        sequence = several and hasattr(value, "__iter__") and not isinstance(value, str)
        return (several if sequence or not single else single)[0](name, value)

    return check


def limits(annotation: Any) -> Range | None:
    """Return the Range in an annotation, or None."""
    return next((each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Range)), None)


def default_value(cls: type, name: str) -> Any:
    """Return an example value for a parameter without a default."""
    annotation = alternatives(parameters(cls)[name])[0]
    if annotation is bool:
        return False
    if get_origin(annotation) is Literal:
        return get_args(annotation)[0]
    one = annotation if get_origin(annotation) is not tuple else get_args(annotation)[0]
    within = Range() if one is int else limits(one)
    if within is None:
        raise TypeError(
            f"{name}: expected a default or an annotated range, got {annotation}; or define {cls.__name__}.example()"
        )
    value = _USUAL if within.least is None else max(_USUAL, within.least)
    value = value if within.most is None else min(value, within.most)
    return value if one is annotation else (value,)


def check_mask_mod(name: str, value: Any) -> None:
    """Raise TypeError for a function that does not take the four arguments of a mask_mod."""
    count = _argument_count(value)
    if count == 5:
        raise TypeError(
            f"{name}: got a function of five arguments; if it is a score_mod, write score=spattn.score.from_score_mod("
            "function)"
        )
    if count == 2:
        raise TypeError(
            f"{name}: got a function of two arguments; write lambda b, h, q_idx, kv_idx: function(q_idx, kv_idx)"
        )
    if count not in (None, 4):
        raise TypeError(f"{name}: got a function of {count} arguments; a mask_mod takes b, h, q_idx and kv_idx")


def _argument_count(function: Any) -> int | None:
    """Return the number of arguments that a function requires; None if 4 fit anyway, or if it is unknown."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C without a signature
        return None
    try:
        found.bind(*range(4))
    except TypeError:
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        return sum(p.kind in kinds for p in found.parameters.values())
    return None
