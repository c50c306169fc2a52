"""Recipes: registered functions that compose patterns."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec

import numpy as np

from ...index_set import Runs
from ..hints.closed_forms import Ends, Program
from .check import assign
from .class_registry import Instance, register
from .pattern import Part, Pattern

if TYPE_CHECKING:
    from .rows import AskedRows

__all__ = ["Recipe", "recipe"]

_P = ParamSpec("_P")
_RESERVED = ("function", "made", "public")


class Recipe(Pattern):
    """Base class of named compositions: repr and JSON show the recipe's call, bind() returns the composition.

    Only the decorator :func:`recipe` derives classes from it.
    """

    function: ClassVar[Callable[..., Pattern]]
    public: ClassVar[Callable[..., Pattern]]
    made: ClassVar[Pattern]  # set per instance; not a dataclass field

    def __post_init__(self) -> None:
        super().__post_init__()
        made = type(self).function(*self._values())
        if not isinstance(made, Pattern):
            raise TypeError(f"{type(self).__name__}: a recipe returns a pattern, got {type(made).__name__}")
        assign(self, made=made, _depth=made._depth, _terms=made._terms)

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).public, self._values()

    @property
    def translation_invariant(self) -> bool:  # type: ignore[override]  # per instance
        return self.made.translation_invariant

    def allows(self, q: Any, k: Any) -> Any:
        return self.made.allows(q, k)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        return self.made.runs(q, kv_len)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return self.made.parts(q_len, kv_len)

    def ends(self, q_len: int) -> Ends | None:
        return self.made.ends(q_len)

    def sizes(self) -> tuple[int, int]:
        return self.made.sizes()

    def grids(self) -> frozenset[tuple[int, ...]]:
        return self.made.grids()

    def at(self, batch: int, head: int) -> Pattern:
        return self.made.at(batch, head)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        return self.made.bind(q_len, kv_len)

    def _row_program(self) -> Program | None:
        return self.made._row_program()

    def _rows(self, asked: AskedRows) -> np.ndarray:
        return asked.of(self.made)

    def _for_heads(self, heads: int) -> Pattern:
        return self.made._for_heads(heads)


def recipe(
    name: str,
    example: Instance,
    typical: Instance | None = None,
    *,
    random: Callable[[Any, Any], tuple[tuple[Any, ...], Any]] | None = None,
    fixes_lengths: bool = False,
) -> Callable[[Callable[_P, Pattern]], Callable[_P, Pattern]]:
    """Decorate a function that returns a composition, and register it under `name`.

    The function's annotations declare the parameters, as the fields of a pattern do. A call returns a :class:`Recipe`,
    whose repr and JSON are the call, ``longformer(window=256, ...)``.

    Parameters
    ----------
    name : str
        The registered name.
    example, typical : (tuple, int)
        Arguments and a length in tokens, for :meth:`Pattern.example` and :meth:`Pattern.typical`.
    random : callable, optional
        Draws arguments and sizes as :meth:`Pattern.random` does; needed if parameters depend on each other.
    fixes_lengths : bool, optional
        Whether the parameters restrict the lengths.

    Returns
    -------
    callable
        The decorator.
    """

    def decorate(function: Callable[_P, Pattern]) -> Callable[_P, Pattern]:
        @functools.wraps(function)
        def make(*args: _P.args, **kwargs: _P.kwargs) -> Pattern:
            return cls(*args, **kwargs)

        body: dict[str, Any] = {
            "__doc__": function.__doc__,
            "function": staticmethod(function),
            "public": staticmethod(make),
            "fixes_lengths": fixes_lengths,
        }
        if random is not None:

            def drawn(cls: type[Recipe], draw: Any, sizes: Any) -> tuple[Pattern, Any]:
                values, sizes = random(draw, sizes)
                return cls(*values), sizes

            body["random"] = classmethod(drawn)
        fields = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                raise TypeError(
                    f"{parameter.name}: a recipe takes parameters by position or name, got {parameter.kind}"
                )
            if parameter.name.startswith("_") or hasattr(Recipe, parameter.name) or parameter.name in _RESERVED:
                raise ValueError(f"{parameter.name}: a recipe cannot have a parameter of this name; patterns use it")
            default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
            fields.append((parameter.name, parameter.annotation, dataclasses.field(default=default)))
        made = dataclasses.make_dataclass(function.__name__, fields, bases=(Recipe,), namespace=body, frozen=True)
        made.__module__ = function.__module__  # annotations are evaluated in this module
        cls: type[Recipe] = register(name, example, typical)(made)
        return make

    return decorate
