# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Cython bindings of ``listed.h`` for :mod:`spattn.planning.tiles.listed`."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

import numpy as np


cdef extern from "kernels/listed.h" namespace "spattn" nogil:
    cdef cppclass CPairs "spattn::ListedPairs":
        CPairs(int64_t block_q, int64_t block_kv, int64_t first_key, int64_t keys) except +
        int64_t group(
            const int64_t* row, const int64_t* key, int64_t pairs, int64_t number, int32_t* query_tile,
            int32_t* key_tile, int64_t* first, int32_t* cell,
        )

    cdef cppclass CGathered "spattn::GatheredKeys":
        CGathered(int64_t block_q, int64_t block_kv, int64_t keys) except +
        vector[int32_t] gather(
            const int64_t* row, const int64_t* key, int64_t pairs, int64_t most, int64_t* place,
        ) except +

    void write_cells(
        const int64_t* first, const int32_t* cell, const int64_t* tiles, int64_t count, int64_t words, uint64_t* masks,
    )


cdef void check_sorted(const int64_t[::1] row, const int64_t[::1] key) except *:
    cdef int64_t pairs = row.shape[0], n
    if key.shape[0] != pairs:
        raise ValueError(f"key: expected {pairs} keys, one for each row, got {key.shape[0]}")
    for n in range(pairs):
        if row[n] < 0 or n and (row[n] < row[n - 1] or row[n] == row[n - 1] and key[n] <= key[n - 1]):
            raise ValueError(f"row: expected sorted pairs of rows from 0 on, got ({row[n]}, {key[n]}) at {n}")


@cython.final
cdef class Pairs:
    """Groups pairs by tile, ignoring keys outside [first_key, first_key + keys); first_key starts a tile."""

    cdef CPairs* _own

    def __cinit__(self, tuple tile, int64_t first_key, int64_t keys):
        cdef int64_t block_q = tile[0], block_kv = tile[1]
        self._own = new CPairs(block_q, block_kv, first_key, keys)

    def __dealloc__(self):
        del self._own

    def group(self, const int64_t[::1] row, const int64_t[::1] key, int64_t number):
        """Group sorted pairs and return (query tiles, key tiles, indptr, cells); rows are relative to tile `number`."""
        cdef int64_t pairs = row.shape[0], tiles
        check_sorted(row, key)
        query_tiles, key_tiles, cells = np.empty((3, max(pairs, 1)), np.int32)
        firsts = np.empty(pairs + 1, np.int64)
        cdef int32_t[::1] query_tile = query_tiles, key_tile = key_tiles, cell = cells
        cdef int64_t[::1] first = firsts
        cdef const int64_t* rows = &row[0] if pairs else NULL
        cdef const int64_t* keys = &key[0] if pairs else NULL
        with nogil:
            tiles = self._own.group(rows, keys, pairs, number, &query_tile[0], &key_tile[0], &first[0], &cell[0])
        return query_tiles[:tiles].copy(), key_tiles[:tiles].copy(), firsts[:tiles + 1], cells[:first[tiles]]


@cython.final
cdef class Gathered:
    """Gathers the keys of each query tile into contiguous key tiles that only it uses."""

    cdef CGathered* _own
    cdef int64_t _keys

    def __cinit__(self, tuple tile, int64_t keys):
        cdef int64_t block_q = tile[0], block_kv = tile[1]
        self._own, self._keys = new CGathered(block_q, block_kv, keys), keys

    def __dealloc__(self):
        del self._own

    def gather(self, const int64_t[::1] row, const int64_t[::1] key, int64_t most):
        """Gather the keys of sorted pairs and return (key at each index, index of each pair).

        Rows are relative to a query tile's first. After more than `most` keys, stop and return an incomplete result.
        """
        cdef int64_t pairs = row.shape[0], n
        cdef vector[int32_t] found
        check_sorted(row, key)
        for n in range(pairs):
            if not 0 <= key[n] < self._keys:
                raise ValueError(f"key: expected numbers below {self._keys}, got {key[n]} at {n}")
        if not pairs:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        places = np.empty(pairs, np.int64)
        cdef int64_t[::1] place = places
        with nogil:
            found = self._own.gather(&row[0], &key[0], pairs, most, &place[0])
        keys = np.empty(found.size(), np.int32)
        cdef int32_t[::1] own = keys
        memcpy(&own[0], found.data(), keys.nbytes)
        return keys, places


def bitmasks(const int64_t[::1] first, const int32_t[::1] cell, const int64_t[::1] tiles, int64_t words):
    """Return the bitmasks, (n, words) uint64, of `tiles`; tile t has the cells ``cell[first[t]:first[t + 1]]``."""
    masks = np.empty((tiles.shape[0], words), np.uint64)
    cdef uint64_t[:, ::1] mask = masks
    cdef int64_t n
    for n in range(tiles.shape[0]):
        if not 0 <= tiles[n] < first.shape[0] - 1:
            raise ValueError(f"tiles: expected numbers below {first.shape[0] - 1}, got {tiles[n]}")
    if tiles.shape[0] and words and cell.shape[0]:
        with nogil:
            write_cells(&first[0], &cell[0], &tiles[0], tiles.shape[0], words, &mask[0, 0])
    return masks
