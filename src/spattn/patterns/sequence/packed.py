"""Windows in packed sequences that differ in their numbers of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._util.cached import cached_property
from ..._util.index_checks import LONGEST, q_offset
from ...index_set import Runs
from ..base.check import REACH, assign, flag, integer, reach
from ..base.class_registry import register
from ..base.content import Bound, ByContent, frozen_array
from ..base.pattern import Pattern, deferrable
from ..base.predicate import apply
from ..hints.closed_forms import NO_RANGES, Bands, nearby
from .documents import check_cu_seqlens

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["PackedWindows"]


@register(
    "packed_windows",
    example=(((10, 4, 18), (0, 10, 16), (10, 6, 16), 32, 7, 0), 32),
    typical=(((1500, 700, 1200, 696), (0, 1500, 2200, 3400), (1500, 700, 1200, 696), 4096, 256, 0), 4096),
)
@dataclass(frozen=True, eq=False, repr=False)
class PackedWindows(ByContent, Pattern):
    """Packed sequences, each with its own numbers of queries and keys, and a window around each query.

    For the arguments of variable-length attention functions. Memory is proportional to the number of sequences.

    Parameters
    ----------
    queries : int array (sequences,)
        Queries of each sequence, which follow each other. Their sum is q_len.
    start, keys : int arrays (sequences,)
        First key and number of keys of each sequence.
    kv_len : int
        Number of keys in all.
    left, right : int, optional
        Number of keys before and after the query's position; -1 = unbounded.
    at_end : bool, optional
        Whether the last query of a sequence is at its last key; otherwise, the first query is at the first key.

    Examples
    --------
    >>> PackedWindows([1, 2], [0, 3], [3, 2], 5, right=0).index_set(3, 5).to_dense().astype(int)
    array([[1, 1, 1, 0, 0],
           [0, 0, 0, 1, 0],
           [0, 0, 0, 1, 1]])
    """

    queries: np.ndarray
    start: np.ndarray
    keys: np.ndarray
    kv_len: int
    left: int = -1
    right: int = -1
    at_end: bool = True

    def __post_init__(self) -> None:
        sides = {name: integer(name, getattr(self, name), -1) for name in ("left", "right")}
        assign(self, **sides, kv_len=integer("kv_len", self.kv_len, 0, LONGEST), at_end=flag("at_end", self.at_end))
        for name in ("queries", "start", "keys"):
            array = frozen_array(name, getattr(self, name), np.int64, (1,))
            if name != "queries" and array.shape != self.queries.shape:
                raise ValueError(f"{name}: expected shape {self.queries.shape}, got {array.shape}")
            integer(name, array.min(initial=0), 0)
            integer(name, array.max(initial=0), 0, LONGEST)
            assign(self, **{name: array})
        if (end := (self.start + self.keys).max(initial=0)) > self.kv_len:
            raise ValueError(f"keys: expected sequences that end by {self.kv_len} (kv_len), got {end}")

    @classmethod
    @deferrable
    def from_cu_seqlens(
        cls,
        queries: npt.ArrayLike,
        keys: npt.ArrayLike | None = None,
        left: int = -1,
        right: int = -1,
        *,
        name: str = "cu_seqlens_q",
    ) -> PackedWindows:
        """Create windows from cumulative lengths.

        Parameters
        ----------
        queries, keys : (sequences + 1,) int arrays
            Cumulative lengths of queries and keys; those of the keys default to those of the queries.
        left, right : int, optional
            As for the class.
        name : str, optional
            Name of `queries` in error messages.

        Returns
        -------
        PackedWindows

        Raises
        ------
        ValueError
            If an array does not start with 0, decreases or exceeds the maximum sequence length, or the arrays differ
            in length.
        """
        ends = check_cu_seqlens(name, queries)
        starts = ends if keys is None else check_cu_seqlens("cu_seqlens_k", keys)
        if len(starts) != len(ends):
            raise ValueError(f"cu_seqlens_k: expected {len(ends)} numbers, got {len(starts)}")
        return cls(np.diff(ends), starts[:-1], np.diff(starts), int(starts[-1]), left, right)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if (own := int(self.queries.sum())) != q_len:
            raise ValueError(f"queries: expected {q_len} in all (q_len), got {own}; cu_seqlens_q must end with q_len")
        if self.kv_len != kv_len:
            raise ValueError(f"kv_len: expected {self.kv_len}, got {kv_len}; cu_seqlens_k must end with kv_len")
        return _BoundWindows(self, q_offset(q_len, kv_len))

    def allows(self, q: Any, k: Any) -> Any:
        raise ValueError("PackedWindows: its rows depend on the lengths; use .bind(q_len, kv_len)")

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        count = draw.integer(1, 5)
        cuts = np.sort(draw.integers((count - 1,), 0, sizes.q_len))
        queries = np.diff(np.concatenate([[0], cuts, [sizes.q_len]]))
        start = draw.integers((count,), 0, sizes.kv_len)
        keys = np.minimum(draw.choice([queries, draw.integers((count,), 0, sizes.kv_len)]), sizes.kv_len - start)
        left, right = draw.integers((2,), -1, sizes.kv_len)
        return cls(queries, start, keys, sizes.kv_len, int(left), int(right), draw.flag()), sizes


@dataclass(frozen=True)
class _BoundWindows(Bound):
    given: PackedWindows

    @cached_property
    def _ends(self) -> np.ndarray:
        """The end of each sequence's rows, as positions."""
        return self.first + np.cumsum(self.given.queries)

    @cached_property
    def _shift(self) -> np.ndarray:
        """The position of a query in its sequence's keys, relative to its own position."""
        own = self.given
        return own.start + (own.keys - own.queries if own.at_end else 0) - (self._ends - own.queries)

    def _bounds(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of each query position as half-open intervals; positions out of range have none."""
        own, count = self.given, len(self._ends)
        number = np.searchsorted(self._ends, q, side="right")
        number[q < self.first] = count
        start, stop, shift = (np.append(x, 0)[number] for x in (own.start, own.start + own.keys, self._shift))
        if own.left >= 0:
            start = np.maximum(start, q + shift - reach(own.left))
        if own.right >= 0:
            stop = np.minimum(stop, q + shift + reach(own.right) + 1)
        return start, np.where(number == count, start, stop)

    def allows(self, q: Any, k: Any) -> Any:
        return (apply(lambda q: self._bounds(q)[0], q) <= k) & (k < apply(lambda q: self._bounds(q)[1], q))

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        return Runs.span(*self._bounds(q), kv_len)

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...] | None:
        own = self.given
        some = (own.queries > 0) & (own.keys > 0)
        stops = np.append(self.first, self._ends)
        own_keys = Bands(stops, np.arange(len(stops)), own.start, own.start + own.keys, NO_RANGES)
        if own.left < 0 and own.right < 0 or not some.any():
            return (own_keys,)
        shift = self._shift[some]
        if (shift != shift[0]).any():  # each sequence has a diagonal of its own
            return None
        before, after = (REACH if side < 0 else reach(side) for side in (own.left, own.right))
        return own_keys, nearby([-after - shift[0], before + 1 - shift[0]])
