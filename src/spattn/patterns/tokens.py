"""Global tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._index_checks import q_offset
from ..index_set import AffineRows, Runs
from ._check import REACH, assign, reach
from ._lattice import Ends, Lattice, Part
from ._parameters import Count
from ._pattern import Pattern
from ._predicate import member
from ._registry import register
from .basic import always

__all__ = ["GlobalTokens"]


def token_set(tokens: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """A count (the first so many positions) as it is; positions sorted and without repeats."""
    return tokens if isinstance(tokens, int) else tuple(sorted(set(tokens)))


def position_table(positions: tuple[int, ...]) -> np.ndarray:
    """Sorted positions, or distances of positions, as an array, without those that no sequence reaches."""
    return np.array([p for p in positions if p < REACH], dtype=np.int64)


def token_groups(tokens: int | tuple[int, ...], kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Maximal groups of consecutive tokens below `kv_len`: (starts, stops)."""
    if isinstance(tokens, int):
        stop = np.arange(min(tokens, 1)) + min(tokens, kv_len)
        return np.zeros_like(stop), stop
    position = np.array([t for t in tokens if t < kv_len], dtype=np.int64)
    new = np.diff(position, prepend=-2) > 1
    return position[new], position[np.append(new[1:], True)[: len(position)]] + 1


@register("global_tokens")
@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """Tokens that attend to every key and that every query attends to.

    For classification or question tokens that gather from a long sequence and inform all of it.

    Parameters
    ----------
    tokens : int or tuple of int
        How many of the first tokens are global, or the positions of the global tokens.
    queries : bool, optional
        Whether the global tokens attend to every key.
    keys : bool, optional
        Whether every query attends to the global tokens.

    Raises
    ------
    TypeError
        If `tokens` is neither an integer nor a sequence of integers, or a switch not a bool.
    ValueError
        If the number or a position is negative.

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
        """Whether each position is a global token."""
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
        before = max(0, -((first - q_offset(q_len, kv_len)) // step))  # global tokens that stand before the first query
        if self.queries and before < count:
            rows = Lattice(first + before * step, (step,), (count - before,))
            parts.append(Part(queries - keys if self.keys else queries, rows, None))
        return tuple(parts)

    def ends(self, q_len: int) -> Ends | None:
        tokens = self.tokens if isinstance(self.tokens, int) else max(self.tokens, default=-1) + 1
        return None if self._spacing(tokens) else Ends(tokens, q_len)  # its own parts have denser views

    def _spacing(self, kv_len: int) -> tuple[int, int, int] | None:
        """(first, step, count) when the tokens stand at equal distances of more than one token."""
        if isinstance(self.tokens, int):
            return None
        inside = np.array([t for t in self.tokens if t < kv_len], dtype=np.int64)
        step = np.unique(np.diff(inside))
        return (int(inside[0]), int(step[0]), len(inside)) if len(step) == 1 and step[0] > 1 else None

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls((0, 1, 12)), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls(64), 4096
