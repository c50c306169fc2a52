# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The compiled part of :mod:`spattn.plan._banded`: what ``sweep.h`` does, on NumPy's arrays."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

import numpy as np


cdef extern from "kernels/sweep.h" namespace "spattn" nogil:
    cdef struct ClauseArrays:
        const int64_t* start
        const int64_t* indptr
        const int64_t* first
        const int64_t* stop
        const int64_t* near
        int64_t bands, ranges

    cdef struct Side:
        int64_t offset, cells, block

    cdef cppclass CSweep "spattn::Sweep":
        CSweep(const Side& queries, const Side& keys, const vector[ClauseArrays]& clauses) except +
        void run(int64_t most) except +
        int64_t shapes() const
        int64_t whole_shapes() const
        int64_t runs() const
        void write_masks(int64_t begin, int64_t end, uint64_t* masks, int32_t* kinds) except +
        int64_t settle(
            const int32_t* numbers, int32_t* query_tile, int32_t* key_tile, int32_t* length, int32_t* mask,
            int64_t* pairs,
        ) const


cdef ClauseArrays _arrays(object clause):
    """Pointers into a clause's arrays, which have to outlive them; ValueError where they do not fit each other."""
    cdef const int64_t[::1] start = clause.start, indptr = clause.indptr, first = clause.first, stop = clause.stop
    cdef const int64_t[:, ::1] near = clause.near
    cdef int64_t bands = indptr.shape[0] - 1, n
    cdef cbool sound = bands >= 0 and start.shape[0] == indptr.shape[0] and near.shape[1] == 2
    sound = sound and first.shape[0] == stop.shape[0]
    sound = sound and indptr[0] == 0 and indptr[bands] == first.shape[0]
    for n in range(bands if sound else 0):
        sound = sound and indptr[n] <= indptr[n + 1] and start[n] <= start[n + 1]
    if not sound:
        raise ValueError(f"bands: expected arrays that fit each other, got {clause}")
    cdef ClauseArrays found
    found.start, found.indptr = &start[0], &indptr[0]
    found.first = &first[0] if first.shape[0] else NULL
    found.stop = &stop[0] if stop.shape[0] else NULL
    found.near = &near[0, 0] if near.shape[0] else NULL
    found.bands, found.ranges = bands, near.shape[0]
    return found


@cython.final
cdef class Sweep:
    """Tiles that hold a pair which all clauses allow.

    Parameters
    ----------
    queries, keys : (int, int, int)
        First position, positions and block of either side.
    clauses : sequence of Bands
    """

    cdef CSweep* _own
    cdef int64_t _block_q, _words

    def __cinit__(self, tuple queries, tuple keys, clauses):
        cdef vector[ClauseArrays] arrays
        cdef Side sides[2]
        for clause in clauses:
            arrays.push_back(_arrays(clause))
        sides[0].offset, sides[0].cells, sides[0].block = queries
        sides[1].offset, sides[1].cells, sides[1].block = keys
        self._block_q, self._words = sides[0].block, sides[1].block // 64
        with nogil:
            self._own = new CSweep(sides[0], sides[1], arrays)

    def __dealloc__(self):
        del self._own

    def run(self, int64_t most):
        """Finds the runs of tiles; returns how many there are, at least, where they are more than `most`."""
        with nogil:
            self._own.run(most)
        return self._own.runs()

    def shapes(self):
        """How many shapes partial tiles have."""
        return self._own.shapes()

    def whole_shapes(self):
        """How many of them, the first ones, are of query tiles without padding."""
        return self._own.whole_shapes()

    def masks(self, int64_t begin, uint64_t[:, :, ::1] bits, int32_t[::1] kinds):
        """Writes the bitmasks of the shapes from `begin` on, and of each -1 where it is full, -2 where it is empty,
        otherwise 0."""
        cdef int64_t end = begin + kinds.shape[0]
        if bits.shape[0] < kinds.shape[0] or bits.shape[1] != self._block_q or bits.shape[2] != self._words:
            raise ValueError(f"bits: expected {kinds.shape[0]} bitmasks of a tile's shape")
        if not 0 <= begin < end <= self._own.shapes():
            raise ValueError(f"begin: expected {kinds.shape[0]} of {self._own.shapes()} shapes, got {begin}")
        with nogil:
            self._own.write_masks(begin, end, &bits[0, 0, 0], &kinds[0])

    def settle(self, const int32_t[::1] numbers):
        """(query tile, key tile, length, bitmask) of all runs, and the allowed pairs; `numbers` has the bitmask of each
        shape, -1 for full tiles, -2 for those without a pair."""
        if numbers.shape[0] != self._own.shapes():
            raise ValueError(f"numbers: expected {self._own.shapes()}, got {numbers.shape[0]}")
        cdef const int32_t* number = &numbers[0] if numbers.shape[0] else NULL
        columns = np.empty((4, max(self._own.runs(), 1)), np.int32)
        cdef int32_t[:, ::1] column = columns
        cdef int64_t pairs, runs
        with nogil:
            runs = self._own.settle(number, &column[0, 0], &column[1, 0], &column[2, 0], &column[3, 0], &pairs)
        return columns[:, :runs], pairs
