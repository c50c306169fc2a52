# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Cython bindings of ``sweep.h`` for :mod:`spattn.planning.tiles.banded`."""

from libc.stdint cimport int64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from spattn.planning.tiles._bitmasks cimport Bitmasks, CBitmasks
from spattn.planning.tiles._lists cimport CRunLists, RunLists


cdef extern from "kernels/sweep.h" namespace "spattn" nogil:
    cdef struct ConjunctArrays:
        const int64_t* start
        const int64_t* indptr
        const int64_t* first
        const int64_t* stop
        const int64_t* near
        int64_t bands, ranges

    cdef struct Side:
        int64_t offset, cells, block

    int64_t find_tiles(
        const Side& queries, const Side& keys, const vector[ConjunctArrays]& conjuncts, int64_t most, CBitmasks& masks,
        CRunLists& lists,
    ) except +


cdef ConjunctArrays _arrays(object conjunct):
    """Return pointers into a conjunct's arrays, which must outlive them; raise ValueError for inconsistent arrays."""
    cdef const int64_t[::1] start = conjunct.start, indptr = conjunct.indptr
    cdef const int64_t[::1] first = conjunct.first, stop = conjunct.stop
    cdef const int64_t[:, ::1] near = conjunct.near
    cdef int64_t bands = indptr.shape[0] - 1, n
    cdef cbool sound = bands >= 0 and start.shape[0] == indptr.shape[0] and near.shape[1] == 2
    sound = sound and first.shape[0] == stop.shape[0]
    sound = sound and indptr[0] == 0 and indptr[bands] == first.shape[0]
    for n in range(bands if sound else 0):
        sound = sound and indptr[n] <= indptr[n + 1] and start[n] <= start[n + 1]
    if not sound:
        raise ValueError(f"bands: expected consistent arrays, got {conjunct}")
    cdef ConjunctArrays found
    found.start, found.indptr = &start[0], &indptr[0]
    found.first = &first[0] if first.shape[0] else NULL
    found.stop = &stop[0] if stop.shape[0] else NULL
    found.near = &near[0, 0] if near.shape[0] else NULL
    found.bands, found.ranges = bands, near.shape[0]
    return found


def sweep(tuple queries, tuple keys, conjuncts, Bitmasks masks, RunLists lists, int64_t most):
    """Append the key tile lists of the pairs that all conjuncts allow; return the number of pairs.

    `queries` and `keys` are (first position, number of positions). The function stops early after more than `most`
    runs, or if `masks` is full.
    """
    cdef vector[ConjunctArrays] arrays
    cdef Side q, k
    cdef int64_t pairs
    for conjunct in conjuncts:
        arrays.push_back(_arrays(conjunct))
    q.offset, q.cells = queries
    k.offset, k.cells = keys
    q.block, k.block = masks.rows, 64 * masks.row_words
    with nogil:
        pairs = find_tiles(q, k, arrays, most, masks.own[0], lists.own[0])
    return pairs
