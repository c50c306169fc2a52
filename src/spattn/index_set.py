"""The canonical index set: for each query row a few affine runs of keys (the ACSR of SPLAT, arXiv:2407.16847)."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ._util.index_checks import check_csr, check_disjoint, check_runs, integer_array, plain_array
from ._util.ragged import ramp

__all__ = ["AffineRows", "Runs"]


@dataclass(frozen=True, eq=False)
class Runs:
    """Affine runs of keys of many rows: row i has the keys ``start[i, r] + step[i, r] * t, 0 <= t < count[i, r]``.

    Parameters
    ----------
    start, step, count : (rows, runs) int64 arrays
        Runs with count 0 are absent; the runs of a row are disjoint.
    """

    start: np.ndarray
    step: np.ndarray
    count: np.ndarray

    @classmethod
    def empty(cls, rows: int) -> Runs:
        """No keys at all.

        Parameters
        ----------
        rows : int
            Number of rows.

        Returns
        -------
        Runs
        """
        nothing = np.zeros((rows, 0), dtype=np.int64)
        return cls(nothing, nothing, nothing)

    @classmethod
    def span(cls, start: npt.ArrayLike, stop: npt.ArrayLike, kv_len: int) -> Runs:
        """One run of consecutive keys a row, ``[start, stop)`` cut to ``[0, kv_len)``.

        Parameters
        ----------
        start, stop : int or int array
            First key, and the one after the last; broadcast together to (rows,).
        kv_len : int
            Keys of the sequence.

        Returns
        -------
        Runs

        Raises
        ------
        TypeError
            If `start` or `stop` is not of integers.
        ValueError
            If one of them does not fit into int64.
        """
        return cls.stepped(start, stop, 1, kv_len)

    @classmethod
    def stepped(cls, start: npt.ArrayLike, stop: npt.ArrayLike, step: int, kv_len: int) -> Runs:
        """The keys ``start, start + step, ...`` below `stop` that lie in ``[0, kv_len)``, one run a row.

        Parameters
        ----------
        start, stop : int or int array
            First key, and an end that is not reached; broadcast together to (rows,). `start` may be negative.
        step : int
            Distance of neighbouring keys, at least 1.
        kv_len : int
            Keys of the sequence.

        Returns
        -------
        Runs

        Raises
        ------
        TypeError
            If `start` or `stop` is not of integers.
        ValueError
            If one of them does not fit into int64.
        """
        start = integer_array("start", start)
        # Cut on both sides before it is subtracted: a stop far below 0 would wrap.
        end: np.ndarray = np.minimum(np.maximum(integer_array("stop", stop), 0), kv_len)
        if step == 1:  # divisions take longer than all else
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
        """A run for each of some pairs, which are distinct and sorted by row.

        Parameters
        ----------
        row, key : (pairs,) int arrays
            Row and key of each pair.
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
        """Both sets of runs; the caller knows that they are disjoint."""
        return Runs(*(np.concatenate(pair, axis=1) for pair in zip(self._fields(), other._fields(), strict=True)))

    def _fields(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.start, self.step, self.count


@dataclass(frozen=True, eq=False)
class AffineRows:
    """An index set of ``q_len × kv_len`` pairs in affine-compressed rows.

    A row is a base (its first key) and a class (a list of runs relative to the base); rows of one shape share a class,
    so a window of any length has one class for its interior. Memory is O(rows) at worst for a regular pattern and never
    O(pairs) unless the set is irregular.

    Parameters
    ----------
    q_len, kv_len : int
        Lengths in tokens.
    row_base : (q_len,) int64 array
        First key of each row; 0 for an empty row.
    row_class : (q_len,) int32 array
        Number of each row's class.
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
        """Index set from one :class:`Runs` row per query.

        Parameters
        ----------
        runs : Runs
            One row for each query.
        kv_len : int
            Keys of the sequence.

        Returns
        -------
        AffineRows

        Raises
        ------
        TypeError
            If an array of `runs` is not one of integers.
        ValueError
            If shapes differ, a number does not fit into int64, a count is negative, a step is below 1, a key lies
            outside ``[0, kv_len)``, or a row has a key in two runs.
        """
        fields = dict(zip(("start", "step", "count"), runs._fields(), strict=True))
        for name, array in fields.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name}: expected an array of integers, got {type(array).__name__}")
            fields[name] = integer_array(name, array)  # int8 and uint64 would wrap in the sums to come
        check_runs(**fields, kv_len=kv_len)
        present = fields["count"] > 0
        row = np.nonzero(present)[0]
        start, step, count = (array[present] for array in fields.values())
        made = cls._from_flat(len(present), kv_len, row, start, np.where(count == 1, 1, step), count)
        check_disjoint(made.class_indptr, made.start, made.step, made.count)
        return made

    @classmethod
    def from_csr(cls, indptr: npt.ArrayLike, indices: npt.ArrayLike, kv_len: int) -> AffineRows:
        """Index set from CSR rows with sorted, distinct column numbers; discovers their affine structure.

        Parameters
        ----------
        indptr : (q_len + 1,) int array
            Where the keys of each row start.
        indices : (nnz,) int array
            Keys, row by row.
        kv_len : int
            Keys of the sequence.

        Returns
        -------
        AffineRows

        Raises
        ------
        TypeError
            If `indptr` or `indices` is not of integers, or a masked array.
        ValueError
            If `indptr` does not rise from 0 to ``len(indices)``, a number does not fit into int64, or a row is
            unsorted, repeats a key or leaves ``[0, kv_len)``.
        """
        indptr, indices = integer_array("indptr", indptr), integer_array("indices", indices)
        check_csr(indptr, indices, kv_len)
        rows = len(indptr) - 1
        row = np.repeat(np.arange(rows), np.diff(indptr))
        row, start, count = _consecutive(row, indices)
        return cls._from_flat(rows, kv_len, *_join_singles(row, start, count))

    @classmethod
    def from_dense(cls, mask: npt.ArrayLike) -> AffineRows:
        """Index set of a boolean array (q_len, kv_len).

        Parameters
        ----------
        mask : (q_len, kv_len) bool array
            True where a query row may attend to a key.

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
        indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=mask.shape[0]))])
        return cls.from_csr(indptr, column, mask.shape[1])

    @classmethod
    def _from_flat(
        cls, rows: int, kv_len: int, row: np.ndarray, start: np.ndarray, step: np.ndarray, count: np.ndarray
    ) -> AffineRows:
        """From runs in any order, `row` naming each one's row."""
        order = np.lexsort((start, row))
        row, start, step, count = row[order], start[order], step[order], count[order]
        per_row = np.bincount(row, minlength=rows)
        first = np.concatenate([[0], np.cumsum(per_row)])
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
            np.concatenate([[0], np.cumsum(lengths)]),
            (start - base[row])[pick],
            step[pick],
            count[pick],
        )

    # -- what it offers ----------------------------------------------------------------------------------------------

    @property
    def nnz(self) -> int:
        """Number of allowed pairs."""
        return int(self._class_nnz()[self.row_class].sum()) if self.q_len else 0

    @property
    def density(self) -> float:
        """nnz / (q_len × kv_len)."""
        return self.nnz / (self.q_len * self.kv_len) if self.q_len and self.kv_len else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.__dict__.values() if isinstance(a, np.ndarray))

    def row(self, i: int) -> np.ndarray:
        """Sorted keys of query row `i`.

        Parameters
        ----------
        i : int
            Query row.

        Returns
        -------
        (n,) int64 array
        """
        runs = range(*self.class_indptr[self.row_class[i] :][:2])
        keys = [self.row_base[i] + self.start[r] + self.step[r] * np.arange(self.count[r]) for r in runs]
        return np.sort(np.concatenate(keys)) if keys else np.zeros(0, dtype=np.int64)

    def runs(self, i: int) -> list[tuple[int, int, int]]:
        """Runs ``(start, step, count)`` of query row `i`, absolute.

        Parameters
        ----------
        i : int
            Query row.

        Returns
        -------
        list of (int, int, int)
        """
        first, last = self.class_indptr[self.row_class[i] :][:2]
        return [
            (int(self.row_base[i] + self.start[r]), int(self.step[r]), int(self.count[r])) for r in range(first, last)
        ]

    def to_csr(self) -> tuple[np.ndarray, np.ndarray]:
        """``(indptr, indices)``, both int64, columns sorted in each row. O(nnz) memory.

        Returns
        -------
        indptr : (q_len + 1,) int64 array
        indices : (nnz,) int64 array

        Raises
        ------
        MemoryError
            At once, when the machine has not that much memory.
        """
        self._check_memory(7 * 8 * self.nnz)
        lengths = np.diff(self.class_indptr)[self.row_class]
        run = np.repeat(self.class_indptr[self.row_class], lengths) + ramp(lengths)
        run_row = np.repeat(np.arange(self.q_len), lengths)
        count = self.count[run]
        row = np.repeat(run_row, count)
        start = np.repeat(self.row_base[run_row] + self.start[run], count)
        column = start + np.repeat(self.step[run], count) * ramp(count)
        order = np.lexsort((column, row))
        indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=self.q_len))]).astype(np.int64)
        return indptr, column[order]

    def to_dense(self) -> np.ndarray:
        """Boolean array (q_len, kv_len).

        Returns
        -------
        (q_len, kv_len) bool array

        Raises
        ------
        MemoryError
            At once, when the machine has not the memory.
        """
        self._check_memory(self.q_len * self.kv_len)
        indptr, indices = self.to_csr()
        mask = np.zeros((self.q_len, self.kv_len), dtype=bool)
        mask[np.repeat(np.arange(self.q_len), np.diff(indptr)), indices] = True
        return mask

    def _check_memory(self, needed: int) -> None:
        """The system may hand out any amount and end the process when it is used."""
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else sys.maxsize
        if needed > available:
            raise MemoryError(f"{self!r} needs {needed} bytes as an array, this machine has {available}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AffineRows):
            return NotImplemented
        if (self.q_len, self.kv_len, self.nnz) != (other.q_len, other.kv_len, other.nnz):
            return False
        return all(np.array_equal(a, b) for a, b in zip(self.to_csr(), other.to_csr(), strict=True))

    __hash__ = None  # type: ignore[assignment]  # as Python itself does it

    def __repr__(self) -> str:
        return (
            f"AffineRows({self.q_len} × {self.kv_len}, nnz={self.nnz}, density={self.density:.4g}, "
            f"{len(self.class_indptr) - 1} row classes, {self.nbytes} bytes)"
        )

    def _class_nnz(self) -> np.ndarray:
        total = np.concatenate([[0], np.cumsum(self.count)])
        return total[self.class_indptr[1:]] - total[self.class_indptr[:-1]]


def _consecutive(row: np.ndarray, column: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximal runs of consecutive columns: (row, start, count)."""
    if not len(row):
        return row, column, column
    new = np.concatenate([[True], (np.diff(column) != 1) | (np.diff(row) != 0)])
    first = np.nonzero(new)[0]
    return row[first], column[first], np.diff(np.concatenate([first, [len(row)]]))


def _join_singles(
    row: np.ndarray, start: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Joins isolated keys at equal distances into strided runs; returns (row, start, step, count)."""
    single = np.nonzero(count == 1)[0]
    step = np.ones_like(start)
    if len(single) < 3:
        return row, start, step, count
    r, s = row[single], start[single]
    same_row = np.diff(r) == 0
    distance = np.where(same_row, np.diff(s), -1)
    # A key continues the run of the key before it when both its distances so far are equal; the first distance of a
    # group belongs to the group that ends there, so neighbouring groups never share a key.
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
    """Shares rows of equal shape: (class of each row, one row of each class)."""
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
    """Rows as opaque scalars, so that np.unique compares whole rows fast."""
    rows = np.ascontiguousarray(rows)
    return rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
