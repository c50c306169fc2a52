"""Score functions as objects that compose with ``|``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .recorder import is_array
from .tracing import call

__all__ = ["ScoreFunction", "compose"]


class ScoreFunction:
    """Base class of the library's functions: callable objects, ``(score, b, h, q, k) -> score``.

    A subclass is a frozen dataclass with ``__call__``. ``f | g`` applies `f`, then `g`; one of the two may be a plain
    function.

    Examples
    --------
    >>> from spattn.score import alibi, alibi_slopes, softcap
    >>> cap_then_bias = softcap(50.0) | alibi(alibi_slopes(8))
    >>> bias_then_cap = alibi(alibi_slopes(8)) | softcap(50.0)
    >>> doubled = softcap(50.0) | (lambda score, b, h, q, k: 2 * score)
    """

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        """Return the modified score of a pair."""
        raise NotImplementedError

    def __or__(self, other: Any) -> ScoreFunction:
        return compose(self, other) if callable(other) else NotImplemented

    def __ror__(self, other: Any) -> ScoreFunction:
        return compose(other, self) if callable(other) else NotImplemented

    def __repr__(self) -> str:
        fields: Any = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        given = [(field, getattr(self, field.name)) for field in fields]
        shown = (f"{field.name}={_short(value)}" for field, value in given if is_array(value) or value != field.default)
        return f"{type(self).__name__}({', '.join(shown)})"


def _short(value: Any) -> str:
    return f"<{value.dtype} array of shape {tuple(value.shape)}>" if is_array(value) else repr(value)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Composition(ScoreFunction):
    """The result of :func:`compose` and of ``f | g``."""

    functions: tuple[Callable[..., Any], ...]

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for function in self.functions:
            score = call(function, score, b, h, q, k)
        return score

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.functions))


def compose(*functions: Callable[..., Any]) -> ScoreFunction:
    """Return a score function that applies functions in the order in which they are written.

    Parameters
    ----------
    *functions : callable
        Score functions, at least one.

    Returns
    -------
    ScoreFunction

    Raises
    ------
    TypeError
        If an argument is not callable.

    Examples
    --------
    >>> from spattn.score import compose
    >>> function = compose(lambda score, b, h, q, k: score + 1.0, lambda score, b, h, q, k: score * 2.0)
    >>> function(3.0, 0, 0, 0, 0)
    8.0
    """
    for function in functions:
        if not callable(function):
            raise TypeError(f"compose: expected functions of (score, b, h, q, k), got {type(function).__name__}")
    if not functions:
        raise TypeError("compose: expected at least one function")
    flat = (f.functions if isinstance(f, Composition) else (f,) for f in functions)
    return Composition(tuple(function for part in flat for function in part))
