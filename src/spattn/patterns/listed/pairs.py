"""Explicitly listed pairs: compressed sparse rows (CSR), or runs of keys (RowRuns)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._util.cached import cached_property
from ..._util.imports import whole_imports
from ..._util.index_checks import LONGEST, check_csr, q_offset
from ..._util.ragged import offsets, ramp
from ...index_set import AffineRows, Runs
from ..base.check import assign, integer
from ..base.class_registry import register
from ..base.composition import And
from ..base.content import ArrayPattern, Bound, ByContent, frozen_array
from ..base.pattern import Ordered, Part, Pattern, whole_part
from ..hints.table import BlockTable, SortedCells

__all__ = ["CSR", "RowRuns"]

_COARSE_CELLS = 1 << 22  # maximum cells of the tables in which rectangles are looked up


def _scattered(tokens: int, modulus: int) -> tuple[tuple[Any, ...], int]:
    i, j = np.ogrid[:tokens, :tokens]
    return _rows_of((i * i * i + 3 * j * j) % modulus == 0), tokens


def _rows_of(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    return offsets(mask.sum(axis=1)), np.nonzero(mask)[1], mask.shape[1]


@register("csr", example=lambda: _scattered(32, 7), typical=lambda: _scattered(1024, 61))
@dataclass(frozen=True, eq=False, repr=False)
class CSR(ByContent, Pattern):
    """Explicit pairs in compressed sparse row (CSR) format.

    For unstructured pairs, from a graph or a sparse matrix. ``CSR(...) & other`` evaluates `other` on the CSR pairs
    only.

    Parameters
    ----------
    indptr : (q_len + 1,) int array
        Row i has the keys ``indices[indptr[i]:indptr[i + 1]]``; non-decreasing from 0 to nnz; copied.
    indices : (nnz,) int array
        Keys by row, sorted and without repeats in each row; copied.
    kv_len : int
        Number of keys.

    Notes
    -----
    Plans and index sets take O(nnz) time and memory. A plan has a bitmask for each partial tile with several pairs;
    tiles with one pair share bitmasks. The planner treats complements, and CSR patterns inside :class:`QueriesAt`, as
    general predicates.

    Examples
    --------
    >>> CSR([0, 2, 2, 3], [0, 3, 1], 4).index_set(3, 4).to_dense().astype(int)
    array([[1, 0, 0, 1],
           [0, 0, 0, 0],
           [0, 1, 0, 0]])
    """

    indptr: np.ndarray
    indices: np.ndarray
    kv_len: int

    _has_order = True

    def __post_init__(self) -> None:
        assign(
            self,
            indptr=frozen_array("indptr", self.indptr, np.int64, (1,)),
            indices=frozen_array("indices", self.indices, np.int32, (1,)),
            kv_len=integer("kv_len", self.kv_len, 0, LONGEST),
        )
        check_csr(self.indptr, self.indices, self.kv_len)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        for name, own, length in (("q_len", len(self.indptr) - 1, q_len), ("kv_len", self.kv_len, kv_len)):
            if own != length:
                raise ValueError(f"{name}: expected {own}, the length of the listed pairs, got {length}")
        return _BoundCSR(self, q_offset(q_len, kv_len))

    def allows(self, q: Any, k: Any) -> Any:
        raise ValueError("CSR: its rows depend on the lengths; use .bind(q_len, kv_len)")

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        return cls(*_rows_of(draw.flags((sizes.q_len, sizes.kv_len)))), sizes


def _every(tokens: int, most: int) -> tuple[tuple[Any, ...], int]:
    """Return the arguments of an example with one run per row, whose step varies by row."""
    step = 1 + np.arange(tokens)[:, None] % most
    return (step - 1, step, (tokens - step) // step + 1), tokens


@register("row_runs", example=lambda: _every(32, 5), typical=lambda: _every(1024, 9))
@dataclass(frozen=True, eq=False, repr=False)
class RowRuns(ArrayPattern):
    """Runs of evenly spaced keys per query; a run has `count` keys ``start, start + step, ...``.

    For masks given as slices per row; memory is linear in the number of runs.

    Parameters
    ----------
    start, step, count : int arrays (q_len, runs), (heads, q_len, runs) or (batch, heads, q_len, runs)
        For each run r, row i attends to the keys ``start[i, r] + step[i, r] * t, 0 <= t < count[i, r]``; copied. The
        runs of a row must be disjoint and have step >= 1; runs with count 0 are ignored.

    Notes
    -----
    The planner converts the runs to :class:`CSR`. For large steps, :func:`discover` finds denser views.

    Examples
    --------
    >>> RowRuns([[0], [1], [0]], [[2], [1], [3]], [[3], [2], [2]]).index_set(3, 6).to_dense().astype(int)
    array([[1, 0, 1, 0, 1, 0],
           [0, 1, 1, 0, 0, 0],
           [1, 0, 0, 1, 0, 0]])
    """

    start: np.ndarray
    step: np.ndarray
    count: np.ndarray

    _has_order = True

    def __post_init__(self) -> None:
        self._freeze(np.int64, "start", "step", "count")

    @classmethod
    def from_index_set(cls, index_set: AffineRows) -> RowRuns:
        """Create a pattern from an index set.

        Parameters
        ----------
        index_set : AffineRows
            From :meth:`Pattern.index_set`.

        Returns
        -------
        RowRuns
        """
        row, *runs = index_set.flat_runs(np.arange(index_set.q_len))
        per_row = np.bincount(row, minlength=index_set.q_len)
        fields = np.zeros((3, index_set.q_len, int(per_row.max(initial=0))), np.int64)
        fields[:, row, ramp(per_row)] = runs
        return cls(*fields)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if self.start.shape[-2] != q_len:
            raise ValueError(f"start: expected shape (..., {q_len}, runs), got {self.start.shape}")
        runs = Runs(*(self._only(each) for each in (self.start, self.step, self.count)))
        indptr, keys = AffineRows.from_runs(runs, kv_len).to_csr()
        return CSR(indptr, keys, kv_len).bind(q_len, kv_len)

    def allows(self, q: Any, k: Any) -> Any:
        raise ValueError("RowRuns: its rows depend on the lengths; use .bind(q_len, kv_len)")

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        rows = AffineRows.from_dense(draw.flags((sizes.q_len, sizes.kv_len)))
        return cls.from_index_set(rows), sizes


@dataclass(frozen=True, repr=False)
class _BoundCSR(Bound):
    given: CSR
    _lists_pairs = True
    _has_order = True

    def _in_order(self, also: Pattern | None = None) -> Ordered | None:
        with whole_imports:  # late: few plans need them
            from ..hints.order import InOrder, cluster_pairs

        orders = cluster_pairs(self.given.indptr, self.given.indices, self.given.kv_len)
        if orders is None:
            return None
        return Ordered(InOrder(self if also is None else And.of(self, also), *orders, self.first), *orders)

    @cached_property
    def _table(self) -> _PairTable:
        return _PairTable(self.given.indptr, self.given.indices, self.given.kv_len)

    def allows(self, q: Any, k: Any) -> Any:
        return self._table.contains(q - self.first, k)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return whole_part(self, q_len, kv_len)

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        row, indptr = q - self.first, self.given.indptr
        start = indptr[np.clip(row, 0, len(indptr) - 1)]
        count = indptr[np.clip(row + 1, 0, len(indptr) - 1)] - start
        entry = np.repeat(start - (np.cumsum(count) - count), count)
        entry += np.arange(len(entry))
        keys = self.given.indices[entry].astype(np.int64)  # the dtype of positions
        return np.repeat(np.arange(len(q)), count), keys


class _PairTable(SortedCells):
    """A CSR boolean table with the interface of :class:`BlockTable` for cells and rectangles."""

    def __init__(self, indptr: np.ndarray, indices: np.ndarray, columns: int):
        rows = len(indptr) - 1
        super().__init__(np.repeat(np.arange(rows) * columns, np.diff(indptr)) + indices, (rows, columns))
        self._indptr, self._indices = indptr, indices

    def any_in(self, *rectangle: np.ndarray) -> np.ndarray:
        """Return True where an inclusive rectangle ``[a_lo, a_hi] × [b_lo, b_hi]`` may contain a pair."""
        coarse, some, _ = self._coarse
        return some.any_in(*(side // coarse for side in rectangle))

    def all_in(self, *rectangle: np.ndarray) -> np.ndarray:
        """Return True where an inclusive rectangle is known to be full."""
        coarse, _, every = self._coarse
        rows, columns = self._shape
        a_lo, a_hi, b_lo, b_hi = np.broadcast_arrays(*rectangle)
        inside = (0 <= a_lo) & (a_hi < rows) & (0 <= b_lo) & (b_hi < columns)
        return inside & every.all_in(*(side // coarse for side in rectangle))

    @cached_property
    def _coarse(self) -> tuple[int, BlockTable, BlockTable]:
        """Return (block size, non-empty blocks, full blocks), at the finest resolution within _COARSE_CELLS."""
        rows, columns = self._shape
        coarse = 1
        while -(-rows // coarse) * -(-columns // coarse) > _COARSE_CELLS:
            coarse *= 2
        shape = -(-rows // coarse), -(-columns // coarse)
        row = np.repeat(np.arange(rows) // coarse, np.diff(self._indptr))
        count = np.bincount(row * shape[1] + self._indices // coarse, minlength=shape[0] * shape[1]).reshape(shape)
        height, width = (np.minimum(coarse, n - coarse * np.arange(m)) for n, m in zip(self._shape, shape, strict=True))
        return coarse, BlockTable(count > 0), BlockTable(count == height[:, None] * width)
