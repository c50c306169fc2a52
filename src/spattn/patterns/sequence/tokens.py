"""Global tokens, inside a sequence (GlobalTokens) or prepended to it (Prefix)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..._util.index_checks import q_offset
from ...index_set import AffineRows, Runs
from ..base.check import REACH, Count, assign, reach
from ..base.class_registry import pattern_class, register
from ..base.composition import nesting
from ..base.pattern import Part, Pattern
from ..base.predicate import allowed, member
from ..hints.closed_forms import Ends, Lattice, Place, Program, run, union, whole
from .basic import Full, always

__all__ = ["GlobalTokens", "Prefix"]


def token_set(tokens: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """Return a count unchanged, or positions sorted and without repeats."""
    return tokens if isinstance(tokens, int) else tuple(sorted(set(tokens)))


def position_table(positions: tuple[int, ...]) -> np.ndarray:
    """Return sorted positions or distances below REACH as an array."""
    return np.array([p for p in positions if p < REACH], dtype=np.int64)


@register("global_tokens", example=(((0, 1, 12),), 32), typical=((64,), 4096))
@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """Global tokens, which attend to every key and to which every query attends.

    For classification or question tokens that exchange information with all tokens of a long sequence.

    Parameters
    ----------
    tokens : int or tuple of int
        Number of leading global tokens, or the positions of the global tokens.
    queries, keys : bool, optional
        Whether the global tokens attend to every key, and whether every query attends to the global tokens.

    References
    ----------
    Ainslie et al. ETC. arXiv:2004.08483. Beltagy, Peters, Cohan. Longformer. arXiv:2004.05150, §3.1.
    """

    tokens: Count | tuple[Count, ...]
    queries: bool = True
    keys: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        assign(self, tokens=token_set(self.tokens))

    def among(self, positions: Any) -> Any:
        """Return True where a position is a global token."""
        if isinstance(self.tokens, int):
            return (0 <= positions) & (positions < reach(self.tokens))
        return member(position_table(self.tokens), positions)

    def allows(self, q: Any, k: Any) -> Any:
        if self.queries and self.keys:
            return self.among(q) | self.among(k)
        if not self.queries and not self.keys:
            return (0 * q == 1) & always(k)
        return self.among(q) & always(k) if self.queries else always(q) & self.among(k)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        everything = self.among(q) & self.queries
        rows = Runs.span(np.zeros_like(q), np.where(everything, kv_len, 0), kv_len)
        if not self.keys:
            return rows
        start, step, count = np.array(self._key_runs(kv_len), dtype=np.int64).reshape(-1, 3).T
        count = np.where(everything[:, None], 0, count)
        return rows | Runs(np.broadcast_to(start, count.shape), np.broadcast_to(step, count.shape), count)

    def _row_program(self) -> Program:
        tokens = ((0, self.tokens),) if isinstance(self.tokens, int) else ((t, t + 1) for t in self.tokens)
        ranges = [(reach(first), reach(stop)) for first, stop in tokens]
        queries = (whole(*own) for own in ranges if self.queries)
        return union(*queries, *(run(Place(first), Place(stop)) for first, stop in ranges if self.keys))

    def _key_runs(self, kv_len: int) -> list[tuple[int, int, int]]:
        if isinstance(self.tokens, int):
            return [(0, 1, min(self.tokens, kv_len))]
        inside = [t for t in self.tokens if t < kv_len]
        return AffineRows.from_csr([0, len(inside)], inside, kv_len).runs(0)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        spaced = self._spacing(kv_len)
        if spaced is None:
            return (Part(self),)
        first, step, count = spaced
        keys = GlobalTokens(self.tokens, queries=False)
        queries = GlobalTokens(self.tokens, keys=False)
        parts = []
        if self.keys:
            parts.append(Part(keys, None, Lattice(first, (step,), (count,))))
        before = max(0, -((first - q_offset(q_len, kv_len)) // step))  # global tokens before the first query
        if self.queries and before < count:
            rows = Lattice(first + before * step, (step,), (count - before,))
            parts.append(Part(queries - keys if self.keys else queries, rows, None))
        return tuple(parts)

    def ends(self, q_len: int) -> Ends | None:
        tokens = self.tokens if isinstance(self.tokens, int) else max(self.tokens, default=-1) + 1
        if tokens > REACH or self._spacing(tokens):
            return None  # tokens beyond any sequence, or evenly spaced tokens, whose parts have dense views
        return Ends(tokens, q_len)

    def _spacing(self, kv_len: int) -> tuple[int, int, int] | None:
        """Return (first, step, count) of evenly spaced tokens with a step above 1, or None."""
        if isinstance(self.tokens, int):
            return None
        inside = np.array([t for t in self.tokens if t < kv_len], dtype=np.int64)
        step = np.unique(np.diff(inside))
        return (int(inside[0]), int(step[0]), len(inside)) if len(step) == 1 and step[0] > 1 else None


@register(
    "prefix",
    example=lambda: ((pattern_class("neighborhood")((5, 6), 3), 2), 32),
    typical=lambda: ((pattern_class("neighborhood")((128, 128), 13), 5), 16389),
)
@dataclass(frozen=True)
class Prefix(Pattern):
    """Another pattern with global tokens prepended to its tokens.

    For class and register tokens in front of a grid of image or volume patches.

    Parameters
    ----------
    inner : Pattern
        The pattern of the other tokens; its position 0 is the first token after the prefix.
    tokens : int
        Number of global tokens, which attend to every key and to which every query attends.

    Notes
    -----
    A plan has the views of `inner`, shifted by the prefix, and adds one tile of prefix keys per query tile and one row
    of tiles for the prefix queries. If positions of `inner` include the global tokens, use
    ``inner | GlobalTokens(tokens)``.

    References
    ----------
    Dosovitskiy et al. An Image Is Worth 16x16 Words. arXiv:2010.11929. Darcet et al. Vision Transformers Need
    Registers. arXiv:2309.16588.

    Examples
    --------
    >>> from spattn.patterns import Neighborhood
    >>> Prefix(Neighborhood(4, 3), 1).index_set(5, 5).to_dense().astype(int)
    array([[1, 1, 1, 1, 1],
           [1, 1, 1, 1, 0],
           [1, 1, 1, 1, 0],
           [1, 0, 1, 1, 1],
           [1, 0, 1, 1, 1]])
    """

    inner: Pattern
    tokens: Count
    fixes_lengths = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Pattern):
            raise TypeError(f"inner: expected a Pattern, got {self.inner!r}")
        super().__post_init__()
        assign(self, **nesting((self.inner,)))

    def sizes(self) -> tuple[int, int]:
        return self.inner.sizes()

    def at(self, batch: int, head: int) -> Pattern:
        return replace(self, inner=self.inner.at(batch, head))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if self.tokens > kv_len:
            raise ValueError(f"tokens: expected at most {kv_len} (kv_len), got {self.tokens}")
        rows, keys = self._after_prefix(q_len, kv_len)
        try:
            inner = self.inner.bind(rows, keys)
        except ValueError as error:
            raise ValueError(f"{error} (after a prefix of {self.tokens} tokens)") from error
        return replace(self, inner=inner if keys else Full())  # any pattern will do if only the prefix has keys

    def _after_prefix(self, q_len: int, kv_len: int) -> tuple[int, int]:
        """Return the number of queries and of keys after the prefix."""
        keys = kv_len - self.tokens
        return min(q_len, keys), keys

    def allows(self, q: Any, k: Any) -> Any:
        n = reach(self.tokens)
        inside = allowed(self.inner, np.maximum(q - n, 0), np.maximum(k - n, 0))
        return (0 <= q) & ((q < n) | (k < n) | inside)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        rest = self.inner.runs(np.maximum(q - self.tokens, 0), kv_len - self.tokens)
        return None if rest is None else self._prefix_runs(q, kv_len) | self._moved_runs(q, rest)

    def _candidates(self, q: np.ndarray, kv_len: int) -> list[Runs] | None:
        rest = self.inner._candidates(np.maximum(q - self.tokens, 0), kv_len - self.tokens)
        if rest is None:
            return None
        return [self._prefix_runs(q, kv_len), *(self._moved_runs(q, runs) for runs in rest)]

    def _prefix_runs(self, q: np.ndarray, kv_len: int) -> Runs:
        """Return all keys for prefix queries, and the prefix keys for other queries."""
        stop = np.where(q < self.tokens, kv_len, self.tokens)
        return Runs.span(np.zeros_like(q), np.where(q < 0, 0, stop), kv_len)

    def _moved_runs(self, q: np.ndarray, runs: Runs) -> Runs:
        """Shift runs of `inner` by the prefix."""
        return Runs(runs.start + self.tokens, runs.step, np.where((q >= self.tokens)[:, None], runs.count, 0))

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        rows, keys = self._after_prefix(q_len, kv_len)
        whole, first = Lattice(kv_len - rows, (1,), (rows,)), max(q_offset(q_len, kv_len), 0)
        own = Lattice(first, (1,), (max(self.tokens - first, 0),))
        rest: list[Part] = []
        views: list[tuple[Lattice, tuple[int, ...]]] = []
        for part in self.inner.parts(rows, keys) if rows else ():
            query = whole if part.query is None else part.query.moved(self.tokens)
            key = (part.key or Lattice(0, (1,), (keys,))).moved(self.tokens)
            rest.append(Part(_Moved(part.pattern, self.tokens), query, key, part.shifts))
            view = query, tuple(dq for dq, _ in part.shifts)
            views += [view] if view not in views else []
        # In the views of `inner`, the prefix adds one tile per key list and needs no combine of partial rows.
        of_queries = views if _are_all(views, rows) else [(whole, (0,))]
        keys_of_prefix = Lattice(0, (1,), (self.tokens,))
        seen = (Part(Full(), query, keys_of_prefix, tuple((dq, 0) for dq in moves)) for query, moves in of_queries)
        return Part(Full(), own), *seen, *rest

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        grid = draw.choice([None, None, "axial", "neighborhood", "windowed"])
        inner, own = (None, sizes) if grid is None else pattern_class(grid).random(draw, sizes)
        tokens = draw.integer(0, 6)
        sizes = draw.fitted(sizes, own.kv_len + tokens)
        if inner is None:
            inner = draw.pattern(sizes._replace(q_len=min(sizes.q_len, own.kv_len), kv_len=own.kv_len))
        return cls(inner, tokens), sizes


@dataclass(frozen=True)
class _Moved(Pattern):
    """Another pattern, shifted by `by` positions."""

    inner: Pattern
    by: int

    def allows(self, q: Any, k: Any) -> Any:
        return allowed(self.inner, q - self.by, k - self.by)


def _are_all(views: list[tuple[Lattice, tuple[int, ...]]], rows: int) -> bool:
    """Return True if the shifted lattices visit each of `rows` positions once."""
    if sum(math.prod(lattice.extents) * len(moves) for lattice, moves in views) != rows:
        return False
    found = [np.zeros(0, np.int64)]
    for lattice, moves in views:
        points = np.array(moves, dtype=np.int64) + lattice.offset
        for stride, extent in zip(lattice.strides, lattice.extents, strict=True):
            points = np.add.outer(points, stride * np.arange(extent)).ravel()
        found.append(points)
    return len(np.unique(np.concatenate(found))) == rows
