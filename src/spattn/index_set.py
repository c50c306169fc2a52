"""Index sets, stored as affine runs of keys for each query row (ACSR of SPLAT, arXiv:2407.16847)."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ._util.index_checks import check_csr, check_disjoint, check_runs, integer_array, plain_array
from ._util.ragged import offsets, ramp

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["AffineRows", "Runs"]


@dataclass(frozen=True, eq=False)
class Runs:
    """Affine runs of keys: row i has the keys ``start[i, r] + step[i, r] * t`` for ``0 <= t < count[i, r]``.

    Parameters
    ----------
    start, step, count : (rows, runs) int64 arrays
        Runs with count 0 are empty; the runs of a row must be disjoint.
    """

    start: np.ndarray
    step: np.ndarray
    count: np.ndarray

    @classmethod
    def span(cls, start: npt.ArrayLike, stop: npt.ArrayLike, kv_len: int) -> Runs:
        """Make one run of consecutive keys for each row, ``[start, stop)`` clipped to ``[0, kv_len)``.

        Parameters
        ----------
        start, stop : int or int array
            First key and exclusive end; broadcast together to (rows,).
        kv_len : int
            Number of keys.

        Returns
        -------
        Runs

        Raises
        ------
        TypeError
            If `start` or `stop` is not an integer array.
        ValueError
            If a value does not fit int64.
        """
        return cls.stepped(start, stop, 1, kv_len)

    @classmethod
    def stepped(cls, start: npt.ArrayLike, stop: npt.ArrayLike, step: int, kv_len: int) -> Runs:
        """Make one run for each row: the keys ``start, start + step, ...`` below `stop`, clipped to ``[0, kv_len)``.

        Parameters
        ----------
        start, stop : int or int array
            First key, which may be negative, and exclusive end; broadcast together to (rows,).
        step : int
            Distance between consecutive keys, at least 1.
        kv_len : int
            Number of keys.

        Returns
        -------
        Runs

        Raises
        ------
        TypeError
            If `start` or `stop` is not an integer array.
        ValueError
            If a value does not fit int64.
        """
        start = integer_array("start", start)
        # Clip `stop` before the subtraction, which could overflow otherwise.
        end: np.ndarray = np.minimum(np.maximum(integer_array("stop", stop), 0), kv_len)
        if step == 1:  # avoids slow integer division
            first = np.maximum(start, 0)
            count = np.maximum(end - first, 0)
        else:
            first = np.where(start < 0, start % step, start)
            count = np.maximum(-((first - end) // step), 0)
        column = count.shape[0], 1
        first = first if first.shape == count.shape else np.broadcast_to(first, count.shape)
        return cls(first.reshape(column), np.full(column, step), count.reshape(column))

    @classmethod
    def single(cls, row: np.ndarray, key: np.ndarray, rows: int) -> Runs:
        """Make one run with a single key for each pair.

        Parameters
        ----------
        row, key : (pairs,) int arrays
            Row and key of each pair; pairs are distinct and sorted by row.
        rows : int
            Number of rows.

        Returns
        -------
        Runs
        """
        per_row = np.bincount(row, minlength=rows)
        start, count = np.zeros((2, rows, int(per_row.max(initial=0))), dtype=np.int64)
        slot = ramp(per_row)
        start[row, slot], count[row, slot] = key, 1
        return cls(start, np.ones_like(start), count)

    def __or__(self, other: Runs) -> Runs:
        """Return the union of runs, row by row; the runs must be disjoint, which is not checked."""
        return Runs(*(np.concatenate(pair, axis=1) for pair in zip(self._fields(), other._fields(), strict=True)))

    def _fields(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.start, self.step, self.count


@dataclass(frozen=True, eq=False)
class AffineRows:
    """An index set of ``q_len × kv_len`` pairs, in affine-compressed rows.

    A row has a base (its first key) and a class (runs relative to the base). Rows that differ only in their base share
    a class, as all interior rows of a sliding window do. Memory is O(q_len) for a regular pattern, and O(nnz) only for
    an irregular one.

    Parameters
    ----------
    q_len, kv_len : int
        Number of queries and keys.
    row_base : (q_len,) int64 array
        First key of each row; 0 for an empty row.
    row_class : (q_len,) int32 array
        Class index of each row.
    class_indptr : (classes + 1,) int64 array
        Runs of class c are ``class_indptr[c]:class_indptr[c + 1]``.
    start, step, count : (runs,) int64 arrays
        Runs relative to the base, sorted by start, disjoint.
    """

    q_len: int
    kv_len: int
    row_base: np.ndarray
    row_class: np.ndarray
    class_indptr: np.ndarray
    start: np.ndarray
    step: np.ndarray
    count: np.ndarray

    # -- construction ------------------------------------------------------------------------------------------------

    @classmethod
    def from_runs(cls, runs: Runs, kv_len: int) -> AffineRows:
        """Build from :class:`Runs`.

        Parameters
        ----------
        runs : Runs
            One row for each query.
        kv_len : int
            Number of keys.

        Returns
        -------
        AffineRows

        Raises
        ------
        TypeError
            If a field of `runs` is not an integer array.
        ValueError
            If shapes differ, a value does not fit int64, a count is negative, a step is below 1, a key is outside
            ``[0, kv_len)``, or two runs of a row share a key.
        """
        fields = dict(zip(("start", "step", "count"), runs._fields(), strict=True))
        for name, array in fields.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name}: expected an array of integers, got {type(array).__name__}")
            fields[name] = integer_array(name, array)  # sums of int8 or uint64 would overflow
        check_runs(**fields, kv_len=kv_len)
        present = fields["count"] > 0
        row = np.nonzero(present)[0]
        start, step, count = (array[present] for array in fields.values())
        made = cls._from_flat(len(present), kv_len, row, start, np.where(count == 1, 1, step), count)
        check_disjoint(made.class_indptr, made.start, made.step, made.count)
        return made

    @classmethod
    def from_csr(cls, indptr: npt.ArrayLike, indices: npt.ArrayLike, kv_len: int) -> AffineRows:
        """Build from CSR rows with sorted, unique column indices, and detect runs.

        Parameters
        ----------
        indptr : (q_len + 1,) int array
            Row pointers.
        indices : (nnz,) int array
            Keys of all rows, concatenated.
        kv_len : int
            Number of keys.

        Returns
        -------
        AffineRows

        Raises
        ------
        TypeError
            If `indptr` or `indices` is not an integer array, or is a masked array.
        ValueError
            If `indptr` is not non-decreasing from 0 to ``len(indices)``, a value does not fit int64, or a row is
            unsorted, has duplicates or leaves ``[0, kv_len)``.
        """
        indptr, indices = integer_array("indptr", indptr), integer_array("indices", indices)
        check_csr(indptr, indices, kv_len)
        rows = len(indptr) - 1
        row = np.repeat(np.arange(rows), np.diff(indptr))
        row, start, count = _consecutive(row, indices)
        return cls._from_flat(rows, kv_len, *_join_singles(row, start, count))

    @classmethod
    def from_dense(cls, mask: npt.ArrayLike) -> AffineRows:
        """Build from a boolean array.

        Parameters
        ----------
        mask : (q_len, kv_len) bool array
            True where a query may attend to a key.

        Returns
        -------
        AffineRows

        Raises
        ------
        TypeError
            If `mask` is a masked array.
        ValueError
            If `mask` is not a 2-D bool array.
        """
        mask = plain_array("mask", mask)
        if mask.ndim != 2 or mask.dtype != bool:
            raise ValueError(f"mask: expected a 2-D bool array, got {mask.ndim}-D {mask.dtype}")
        row, column = np.nonzero(mask)
        return cls.from_csr(offsets(np.bincount(row, minlength=mask.shape[0])), column, mask.shape[1])

    @classmethod
    def _from_flat(
        cls, rows: int, kv_len: int, row: np.ndarray, start: np.ndarray, step: np.ndarray, count: np.ndarray
    ) -> AffineRows:
        """Build from flat runs in any order; `row` is the row of each run."""
        order = np.lexsort((start, row))
        row, start, step, count = row[order], start[order], step[order], count[order]
        per_row = np.bincount(row, minlength=rows)
        first = offsets(per_row)
        base = np.zeros(rows, dtype=np.int64)
        base[per_row > 0] = start[first[:-1][per_row > 0]]
        row_class, chosen = _classes(per_row, first, start - base[row], step, count)
        lengths = per_row[chosen]
        pick = np.repeat(first[chosen], lengths) + ramp(lengths)
        return cls(
            rows,
            int(kv_len),
            base,
            row_class.astype(np.int32),
            offsets(lengths),
            (start - base[row])[pick],
            step[pick],
            count[pick],
        )

    # -- queries and conversions --------------------------------------------------------------------------------------

    @property
    def nnz(self) -> int:
        """Number of allowed pairs."""
        before = offsets(self.count)
        return int(np.diff(before[self.class_indptr])[self.row_class].sum())

    @property
    def density(self) -> float:
        """``nnz / (q_len × kv_len)``."""
        return self.nnz / (self.q_len * self.kv_len) if self.q_len and self.kv_len else 0.0

    @property
    def nbytes(self) -> int:
        """Total bytes of the arrays."""
        return sum(a.nbytes for a in self.__dict__.values() if isinstance(a, np.ndarray))

    def row(self, i: int) -> np.ndarray:
        """Return the sorted keys of query row `i`.

        Parameters
        ----------
        i : int
            Query row.

        Returns
        -------
        (n,) int64 array
        """
        _, start, step, count = self.flat_runs(np.array([i]))
        return np.sort(np.repeat(start, count) + np.repeat(step, count) * ramp(count))

    def runs(self, i: int) -> list[tuple[int, int, int]]:
        """Return the runs ``(start, step, count)`` of query row `i`, with absolute starts.

        Parameters
        ----------
        i : int
            Query row.

        Returns
        -------
        list of (int, int, int)
        """
        _, *fields = self.flat_runs(np.array([i]))
        return list(zip(*(field.tolist() for field in fields), strict=True))

    def to_csr(self) -> tuple[np.ndarray, np.ndarray]:
        """Convert to CSR with sorted columns, in O(nnz) memory.

        Returns
        -------
        indptr : (q_len + 1,) int64 array
        indices : (nnz,) int64 array

        Raises
        ------
        MemoryError
            If the machine has too little memory. The error is raised before any allocation.
        """
        self._check_memory(7 * 8 * self.nnz)
        run_row, start, step, count = self.flat_runs(np.arange(self.q_len))
        row = np.repeat(run_row, count)
        column = np.repeat(start, count) + np.repeat(step, count) * ramp(count)
        order = np.lexsort((column, row))
        return offsets(np.bincount(row, minlength=self.q_len)), column[order]

    def flat_runs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Concatenate the runs of several rows, with absolute starts.

        Parameters
        ----------
        rows : (n,) int array
            Query rows.

        Returns
        -------
        row, start, step, count : (runs,) int64 arrays
        """
        first = self.class_indptr[self.row_class[rows]]
        lengths = self.class_indptr[self.row_class[rows] + 1] - first
        row, run = np.repeat(rows, lengths), np.repeat(first, lengths) + ramp(lengths)
        return row, self.row_base[row] + self.start[run], self.step[run], self.count[run]

    def to_dense(self) -> np.ndarray:
        """Convert to a boolean array.

        Returns
        -------
        (q_len, kv_len) bool array

        Raises
        ------
        MemoryError
            If the machine has too little memory. The error is raised before any allocation.
        """
        self._check_memory(self.q_len * self.kv_len)
        indptr, indices = self.to_csr()
        mask = np.zeros((self.q_len, self.kv_len), dtype=bool)
        mask[np.repeat(np.arange(self.q_len), np.diff(indptr)), indices] = True
        return mask

    def _check_memory(self, needed: int) -> None:
        """Raise MemoryError before the allocation: Linux overcommits memory, and would kill the process later."""
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else sys.maxsize
        if needed > available:
            raise MemoryError(f"{self!r} needs {needed} bytes as an array, but this machine has {available}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AffineRows):
            return NotImplemented
        if (self.q_len, self.kv_len, self.nnz) != (other.q_len, other.kv_len, other.nnz):
            return False
        return all(np.array_equal(a, b) for a, b in zip(self.to_csr(), other.to_csr(), strict=True))

    __hash__ = None  # type: ignore[assignment]  # unhashable, as for any class with __eq__

    def __repr__(self) -> str:
        return (
            f"AffineRows({self.q_len} × {self.kv_len}, nnz={self.nnz}, density={self.density:.4g}, "
            f"{len(self.class_indptr) - 1} row classes, {self.nbytes} bytes)"
        )


def _consecutive(row: np.ndarray, column: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge consecutive columns into maximal runs; return (row, start, count)."""
    if not len(row):
        return row, column, column
    new = np.concatenate([[True], (np.diff(column) != 1) | (np.diff(row) != 0)])
    first = np.nonzero(new)[0]
    return row[first], column[first], np.diff(np.concatenate([first, [len(row)]]))


def _join_singles(
    row: np.ndarray, start: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Merge isolated, evenly spaced keys into strided runs; return (row, start, step, count)."""
    single = np.nonzero(count == 1)[0]
    step = np.ones_like(start)
    if len(single) < 3:
        return row, start, step, count
    r, s = row[single], start[single]
    same_row = np.diff(r) == 0
    distance = np.where(same_row, np.diff(s), -1)
    # A key joins the run of the previous key if it is the second of its row, or if the last two distances are equal.
    # Otherwise it starts a run, so that each key is in exactly one.
    new = np.concatenate([[True], ~same_row])
    new[2:] |= same_row[1:] & (distance[1:] != distance[:-1]) & same_row[:-1]
    first = np.nonzero(new)[0]
    length = np.diff(np.concatenate([first, [len(single)]]))
    joined_step = np.where(length > 1, np.append(distance, 1)[np.minimum(first, len(distance))], 1)
    wide = np.nonzero(count > 1)[0]
    return (
        np.concatenate([row[wide], r[first]]),
        np.concatenate([start[wide], s[first]]),
        np.concatenate([step[wide], joined_step]),
        np.concatenate([count[wide], length]),
    )


def _classes(
    per_row: np.ndarray, first: np.ndarray, start: np.ndarray, step: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Deduplicate rows with equal runs; return (class of each row, a representative row of each class)."""
    row_class = np.zeros(len(per_row), dtype=np.int64)
    chosen: list[np.ndarray] = []
    classes = 0
    for n in np.unique(per_row):
        rows = np.nonzero(per_row == n)[0]
        at = first[rows][:, None] + np.arange(n)
        shape = np.concatenate([start[at], step[at], count[at]], axis=1)
        if shape.shape[1] == 0:
            representative, inverse = np.zeros(1, dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
        else:
            _, representative, inverse = np.unique(_as_bytes(shape), return_index=True, return_inverse=True)
        row_class[rows] = classes + inverse.reshape(-1)
        chosen.append(rows[representative])
        classes += len(representative)
    return row_class, np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    """View rows as void scalars, so that np.unique compares whole rows."""
    rows = np.ascontiguousarray(rows)
    return rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
