"""Packed documents and prefixes; both may differ by batch entry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..index_set import Runs
from ._base import Pattern, apply, register
from ._check import assign, integer, integers

__all__ = ["Documents", "PrefixLM"]


def check_batch(batch: int, entries: int) -> int:
    """The number of a batch entry, ValueError if there is none of that number."""
    return integer("batch", batch, 0, entries - 1) if entries > 1 else 0


@register("documents")
@dataclass(frozen=True)
class Documents(Pattern):
    """Keys of the query's own document, for documents packed one after another.

    Parameters
    ----------
    lengths : tuple of int, or tuple of tuples of int
        Tokens of each document; a tuple of tuples has one entry for each batch entry.

    Raises
    ------
    TypeError
        If `lengths` is not a sequence of integers, or of sequences of them.
    ValueError
        If a length is negative; from :meth:`allows`, if :meth:`at` has not chosen among several batch entries.

    Notes
    -----
    Keys past the last document are allowed to nobody.
    """

    lengths: tuple[int, ...] | tuple[tuple[int, ...], ...]

    def __post_init__(self):
        if not hasattr(self.lengths, "__iter__"):
            raise TypeError(f"lengths: expected a sequence of integers, got {self.lengths!r}")
        lengths = tuple(self.lengths)
        if any(hasattr(entry, "__iter__") for entry in lengths):
            assign(self, lengths=tuple(integers("lengths", entry, 0) for entry in lengths))
        else:
            assign(self, lengths=integers("lengths", lengths, 0))

    @property
    def _per_batch(self) -> bool:
        return any(isinstance(entry, tuple) for entry in self.lengths)

    def sizes(self):
        return (len(self.lengths) if self._per_batch else 1), 1

    def at(self, batch, head):
        if not self._per_batch:
            return self
        return Documents(self.lengths[check_batch(batch, len(self.lengths))])

    def _ends(self) -> np.ndarray:
        lengths = self.lengths
        if self._per_batch:
            if len(lengths) > 1:
                raise ValueError(f"lengths: expected one batch entry, got {len(lengths)}; use .at(batch, head)")
            lengths = lengths[0]
        return np.cumsum(lengths, dtype=np.int64)

    def allows(self, q, k):
        ends = self._ends()

        def document(positions):
            return np.where(positions < 0, -1, np.searchsorted(ends, positions, side="right"))

        return (apply(document, q) == apply(document, k)) & (k < (ends[-1] if len(ends) else 0))

    def runs(self, q, kv_len):
        ends = self._ends()
        number = np.searchsorted(ends, q, side="right")
        present = (q >= 0) & (number < len(ends))
        bounds = np.concatenate([[0], ends, [0]])
        return Runs.span(np.where(present, bounds[number], 0), np.where(present, bounds[number + 1], 0), kv_len)

    @classmethod
    def example(cls):
        return cls((10, 4, 14)), 32


@register("prefix_lm")
@dataclass(frozen=True)
class PrefixLM(Pattern):
    """A prefix that everybody sees, then causal: ``j < prefix or j <= p``.

    Parameters
    ----------
    prefix : int or tuple of int
        Tokens of the prefix; a tuple has one for each batch entry.

    Raises
    ------
    TypeError
        If `prefix` is neither an integer nor a sequence of integers.
    ValueError
        If a prefix is negative or the sequence empty; from :meth:`allows`, if :meth:`at` has not chosen among several
        batch entries.

    References
    ----------
    Raffel et al. T5. arXiv:1910.10683, §3.2.1.
    """

    prefix: int | tuple[int, ...]

    def __post_init__(self):
        per_batch = hasattr(self.prefix, "__iter__")
        prefix = integers("prefix", self.prefix, 0) if per_batch else integer("prefix", self.prefix, 0)
        if prefix == ():
            raise ValueError("prefix: expected at least one batch entry, got ()")
        assign(self, prefix=prefix)

    def sizes(self):
        return (len(self.prefix) if isinstance(self.prefix, tuple) else 1), 1

    def at(self, batch, head):
        if not isinstance(self.prefix, tuple):
            return self
        return PrefixLM(self.prefix[check_batch(batch, len(self.prefix))])

    def _length(self) -> int:
        if not isinstance(self.prefix, tuple):
            return self.prefix
        if len(self.prefix) > 1:
            raise ValueError(f"prefix: expected one batch entry, got {len(self.prefix)}; use .at(batch, head)")
        return self.prefix[0]

    def allows(self, q, k):
        return (k < self._length()) | (k <= q)

    def runs(self, q, kv_len):
        return Runs.span(np.zeros_like(q), np.maximum(self._length(), q + 1), kv_len)

    @classmethod
    def example(cls):
        return cls(8), 32
