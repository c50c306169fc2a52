"""Draw integers, arrays and annotated pattern parameters with Hypothesis."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from ..patterns import Pattern
from ..patterns.base.check import Range, alternatives, limits, parameters
from ..patterns.base.class_registry import names, pattern_class

__all__ = ["Draw", "Sizes"]

Choice = TypeVar("Choice")

_FAR = st.sampled_from([2**31, 2**40 - 1, 2**40 + 1, 2**62, sys.maxsize, 2**64, 10**30])
_SMALL = 8  # the first values of an integer range are drawn as often as all others together


class Sizes(NamedTuple):
    """Sizes of a call.

    Parameters
    ----------
    batch, heads_q, heads_kv : int
        Batch entries, query heads, and key and value heads.
    q_len, kv_len : int
        Numbers of queries and keys, in tokens.
    """

    batch: int
    heads_q: int
    heads_kv: int
    q_len: int
    kv_len: int


class Draw:
    """Source of random values for :meth:`spattn.patterns.Pattern.random`.

    Parameters
    ----------
    draw : callable
        Hypothesis' ``draw``.
    min_len : int, optional
        Minimum number of queries.
    """

    def __init__(self, draw: st.DrawFn, min_len: int = 1) -> None:
        self._draw, self._min_len = draw, min_len

    def integer(self, least: int, most: int) -> int:
        """Draw an integer from `least` to ``max(least, most)``.

        Parameters
        ----------
        least, most : int
            Bounds, both inclusive.

        Returns
        -------
        int
        """
        return self._draw(st.integers(least, max(least, most)))

    def size(self, least: int, most: int) -> int:
        """Draw like :meth:`integer`, but occasionally a value larger than any sequence, or than 64 bits.

        Parameters
        ----------
        least, most : int
            The minimum, and the largest value with a distinct effect.

        Returns
        -------
        int
        """
        return self._draw(_FAR) if self._draw(st.integers(0, 15)) == 15 else self.integer(least, most)

    def flag(self) -> bool:
        """Draw True or False.

        Returns
        -------
        bool
        """
        return self._draw(st.booleans())

    def choice(self, options: Sequence[Choice]) -> Choice:
        """Draw one of several options.

        Parameters
        ----------
        options : sequence
            Not empty.

        Returns
        -------
        object
        """
        return self._draw(st.sampled_from(options))

    def positions(self, below: int, most: int = 6) -> tuple[int, ...]:
        """Draw positions in any order, possibly with repeats or larger than any sequence.

        Parameters
        ----------
        below : int
            Exclusive upper bound of positions in the sequence.
        most : int, optional
            Maximum number of positions.

        Returns
        -------
        tuple of int
        """
        return tuple(self._draw(st.lists(st.integers(0, max(below - 1, 0)) | _FAR, max_size=most)))

    def one_or_each(self, values: list[Choice]) -> Choice | tuple[Choice, ...]:
        """Return the values as a tuple, or possibly as a single value if all are equal.

        Parameters
        ----------
        values : list
            One value per axis.

        Returns
        -------
        tuple or object
        """
        return values[0] if len(set(values)) == 1 and self.flag() else tuple(values)

    def flags(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a boolean array with a random density, which may be 0 or 1.

        Parameters
        ----------
        shape : tuple of int
            Shape of the array.

        Returns
        -------
        bool array
        """
        share = self.choice([0.0, 0.03, 0.3, 0.7, 1.0])
        return self._rng().random(shape) < share

    def integers(self, shape: tuple[int, ...], least: int, most: int) -> np.ndarray:
        """Draw an array of integers from `least` to `most`.

        Parameters
        ----------
        shape : tuple of int
            Shape of the array.
        least, most : int
            Bounds, both inclusive.

        Returns
        -------
        int64 array
        """
        return self._rng().integers(least, most, size=shape, endpoint=True)

    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(self.integer(0, 2**32 - 1))

    def fitted(self, sizes: Sizes, kv_len: int) -> Sizes:
        """Replace kv_len, and draw a q_len that often equals kv_len.

        Parameters
        ----------
        sizes : Sizes
            Sizes to modify.
        kv_len : int
            Number of keys.

        Returns
        -------
        Sizes
        """
        q_len = self.choice([kv_len, self.integer(1, kv_len), self.integer(self._min_len, kv_len + 4)])
        return sizes._replace(q_len=q_len, kv_len=kv_len)

    def pattern(self, sizes: Sizes) -> Pattern:
        """Draw a registered pattern for these sizes.

        Parameters
        ----------
        sizes : Sizes
            Sizes that the pattern must support.

        Returns
        -------
        Pattern
        """
        name = self.choice([name for name in names() if not pattern_class(name).fixes_lengths])
        pattern, fitted = pattern_class(name).random(self, sizes)
        return pattern if fitted == sizes else reject()

    # -- drawing by annotations ---------------------------------------------------------------------------------------

    def instance(self, cls: type[Pattern], sizes: Sizes) -> tuple[Pattern, Sizes]:
        """Draw a pattern: each parameter by its annotation, or the example's value if the annotation has no range.

        An ``int`` without a range is drawn between 1 and the example's value. If the pattern rejects the lengths, the
        returned sizes have the lengths of the example.

        Parameters
        ----------
        cls : class of Pattern
            Class with an :meth:`~spattn.patterns.Pattern.example`.
        sizes : Sizes
            Preferred sizes.

        Returns
        -------
        pattern : Pattern
        sizes : Sizes
        """
        example, length = cls.example()
        owner: type = cls
        try:
            pattern = cls(**{name: self.value(cls, name, sizes, example) for name in parameters(owner)})
        except ValueError:  # incompatible parameters
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
        """Draw one parameter by its annotation.

        Parameters
        ----------
        cls : class of Pattern
            Class with the parameter.
        name : str
            Name of the parameter.
        sizes : Sizes
            Sizes that bound the value.
        example : Pattern, optional
            Instance with values for parameters whose annotations have no range.

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
        """Draw an integer in a range, often one of the first; in an unbounded range, it may exceed the sequence."""
        least = within.least if within.least is not None else -sizes.kv_len - 3
        if within.most is None:
            return self.choice([self.integer(least, least + _SMALL), self.size(least, max(least, sizes.kv_len + 3))])
        return self.integer(least, min(least + _SMALL, within.most) if self.flag() else within.most)

    def _several(self, within: Range, sizes: Sizes) -> tuple[int, ...]:
        """Draw a tuple of integers in a range, in any order or evenly spaced."""
        if self.flag():
            return tuple(self._one(within, sizes) for _ in range(self.integer(0, 6)))
        first, step = self._one(within, sizes), self.integer(2, 9)
        most = within.most if within.most is not None else first + 8 * step
        return tuple(range(first, most + 1, step))[: self.integer(0, 8)]
