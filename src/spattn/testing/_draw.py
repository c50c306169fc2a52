"""What random patterns are drawn with: numbers, choices, arrays, and parameters as their annotations declare them."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from ..patterns import Pattern
from ..patterns.base.parameters import Range, alternatives, limits, parameters
from ..patterns.base.registry import names, pattern_class

__all__ = ["Draw", "Sizes"]

Choice = TypeVar("Choice")

_FAR = st.sampled_from([2**31, 2**40 - 1, 2**40 + 1, 2**62, sys.maxsize, 2**64, 10**30])
_SMALL = 8  # numbers that a range begins with are drawn as often as all others


class Sizes(NamedTuple):
    """Batch entries, query heads, key heads, and the lengths in tokens."""

    batch: int
    heads_q: int
    heads_kv: int
    q_len: int
    kv_len: int


class Draw:
    """Draws for :meth:`spattn.patterns.Pattern.random`.

    Parameters
    ----------
    draw : callable
        Hypothesis' ``draw``.
    min_len : int, optional
        Smallest number of queries.
    """

    def __init__(self, draw: st.DrawFn, min_len: int = 1) -> None:
        self._draw, self._min_len = draw, min_len

    def integer(self, least: int, most: int) -> int:
        """An integer from `least` to `most`, which is no less.

        Parameters
        ----------
        least, most : int
            The smallest and the largest one.

        Returns
        -------
        int
        """
        return self._draw(st.integers(least, max(least, most)))

    def size(self, least: int, most: int) -> int:
        """As :meth:`integer`, but now and then a number that reaches beyond every sequence, and beyond 64 bits.

        Parameters
        ----------
        least, most : int
            The smallest one, and the largest one that matters.

        Returns
        -------
        int
        """
        return self._draw(_FAR) if self._draw(st.integers(0, 15)) == 15 else self.integer(least, most)

    def flag(self) -> bool:
        """True or False.

        Returns
        -------
        bool
        """
        return self._draw(st.booleans())

    def choice(self, options: Sequence[Choice]) -> Choice:
        """One of several.

        Parameters
        ----------
        options : sequence
            At least one.

        Returns
        -------
        object
        """
        return self._draw(st.sampled_from(options))

    def positions(self, below: int, most: int = 6) -> tuple[int, ...]:
        """Positions in any order, perhaps repeated; some lie beyond every sequence.

        Parameters
        ----------
        below : int
            The positions that matter are less than this.
        most : int, optional
            How many at most.

        Returns
        -------
        tuple of int
        """
        return tuple(self._draw(st.lists(st.integers(0, max(below - 1, 0)) | _FAR, max_size=most)))

    def one_or_each(self, values: list[Choice]) -> Choice | tuple[Choice, ...]:
        """The values as a tuple, or a single one where all are equal.

        Parameters
        ----------
        values : list
            One for each axis.

        Returns
        -------
        tuple or object
        """
        return values[0] if len(set(values)) == 1 and self.flag() else tuple(values)

    def flags(self, shape: tuple[int, ...]) -> np.ndarray:
        """A random boolean array; the share of True is drawn too, none and all included.

        Parameters
        ----------
        shape : tuple of int
            Of the array.

        Returns
        -------
        bool array
        """
        share = self.choice([0.0, 0.03, 0.3, 0.7, 1.0])
        return self._rng().random(shape) < share

    def integers(self, shape: tuple[int, ...], least: int, most: int) -> np.ndarray:
        """A random array of integers from `least` to `most`.

        Parameters
        ----------
        shape : tuple of int
            Of the array.
        least, most : int
            The smallest and the largest one.

        Returns
        -------
        int64 array
        """
        return self._rng().integers(least, most, size=shape, endpoint=True)

    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(self.integer(0, 2**32 - 1))

    def fitted(self, sizes: Sizes, kv_len: int) -> Sizes:
        """The sizes with another number of keys, and mostly as many queries.

        Parameters
        ----------
        sizes : Sizes
            What was at hand.
        kv_len : int
            Keys in tokens.

        Returns
        -------
        Sizes
        """
        q_len = self.choice([kv_len, self.integer(1, kv_len), self.integer(self._min_len, kv_len + 4)])
        return sizes._replace(q_len=q_len, kv_len=kv_len)

    def pattern(self, sizes: Sizes) -> Pattern:
        """A registered pattern that suits these sizes.

        Parameters
        ----------
        sizes : Sizes
            What is at hand.

        Returns
        -------
        Pattern
        """
        name = self.choice([name for name in names() if not pattern_class(name).fixes_lengths])
        pattern, fitted = pattern_class(name).random(self, sizes)
        return pattern if fitted == sizes else reject()

    # -- as annotations declare ---------------------------------------------------------------------------------------

    def instance(self, cls: type[Pattern], sizes: Sizes) -> tuple[Pattern, Sizes]:
        """A pattern with each parameter drawn as its annotation declares; what tells nothing is as in its example.

        An ``int`` without a range lies between 1 and its example's value. Where a pattern refuses the lengths at hand,
        it comes with those of its example.

        Parameters
        ----------
        cls : class of Pattern
            With an :meth:`~spattn.patterns.Pattern.example`.
        sizes : Sizes
            What is at hand.

        Returns
        -------
        pattern : Pattern
        sizes : Sizes
        """
        example, length = cls.example()
        owner: type = cls
        try:
            pattern = cls(**{name: self.value(cls, name, sizes, example) for name in parameters(owner)})
        except ValueError:  # parameters that do not suit each other
            reject()
        batch, heads = pattern.sizes()
        sizes = sizes._replace(batch=batch or sizes.batch) if batch != 1 else sizes
        sizes = sizes._replace(heads_q=heads, heads_kv=1) if heads > 1 else sizes
        try:
            pattern.at(0, 0).bind(sizes.q_len, sizes.kv_len)
        except ValueError:
            sizes = sizes._replace(q_len=length, kv_len=length)
        return pattern, sizes

    def value(self, cls: type[Pattern], name: str, sizes: Sizes, example: Pattern | None = None) -> Any:
        """One parameter, drawn as its annotation declares.

        Parameters
        ----------
        cls : class of Pattern
            Whose parameter it is.
        name : str
            Of the parameter.
        sizes : Sizes
            What is at hand.
        example : Pattern, optional
            An instance that has values for parameters whose annotations tell nothing.

        Returns
        -------
        object
        """
        owner: type = cls
        usual = getattr(example, name, None)
        kind = self.choice(alternatives(parameters(owner)[name]))
        if kind is types.NoneType:
            return None
        if kind is bool:
            return self.flag()
        if get_origin(kind) is Literal:
            return self.choice(get_args(kind))
        several = get_origin(kind) is tuple and get_args(kind)[1:] == (...,)
        one = get_args(kind)[0] if several else kind
        if one is int and isinstance(usual, int):
            return self.integer(min(1, usual), usual)
        within = limits(one)
        if within is None:
            return usual
        return self._several(within, sizes) if several else self._one(within, sizes)

    def _one(self, within: Range, sizes: Sizes) -> int:
        """An integer of a range: often one of its first, and as far as its end or beyond the sequence."""
        least = within.least if within.least is not None else -sizes.kv_len - 3
        if within.most is None:
            return self.choice([self.integer(least, least + _SMALL), self.size(least, max(least, sizes.kv_len + 3))])
        return self.integer(least, min(least + _SMALL, within.most) if self.flag() else within.most)

    def _several(self, within: Range, sizes: Sizes) -> tuple[int, ...]:
        """Integers of a range, in any order or evenly spaced."""
        if self.flag():
            return tuple(self._one(within, sizes) for _ in range(self.integer(0, 6)))
        first, step = self._one(within, sizes), self.integer(2, 9)
        most = within.most if within.most is not None else first + 8 * step
        return tuple(range(first, most + 1, step))[: self.integer(0, 8)]
