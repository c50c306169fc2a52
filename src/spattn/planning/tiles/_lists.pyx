# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Cython bindings of ``lists.h``: growable lists of key tile runs."""

cimport cython
from libc.stdint cimport int32_t, int64_t

import numpy as np


@cython.final
cdef class RunLists:
    """The key tile lists of consecutive query tiles, stored as runs of consecutive key tiles with one bitmask."""

    def __cinit__(self):
        self._indptr, self._tile_indptr, self._key_tile, self._mask = (
            Held(name) for name in ("indptr", "tile_indptr", "key_tile", "mask")
        )
        self.own = new CRunLists(
            self._indptr.memory(), self._tile_indptr.memory(), self._key_tile.memory(), self._mask.memory()
        )

    def __dealloc__(self):
        del self.own

    @property
    def runs(self):
        """Number of runs."""
        return self.own.runs()

    def add(
        self,
        int64_t lists,
        const int32_t[::1] number,
        const int32_t[::1] key_tile,
        const int32_t[::1] length,
        const int32_t[::1] mask,
    ):
        """Append `lists` lists.

        Run n belongs to list ``number[n]`` (ascending from 0) and has ``length[n]`` key tiles from ``key_tile[n]`` on,
        with bitmask ``mask[n]``.
        """
        cdef int64_t count = number.shape[0], before = self.own.runs()
        if not count == key_tile.shape[0] == length.shape[0] == mask.shape[0]:
            raise ValueError(f"number: expected four arrays of {count} runs")
        if not count:
            number = key_tile = length = mask = np.zeros(1, np.int32)
        with nogil:
            self.own.add(lists, &number[0], &key_tile[0], &length[0], &mask[0], count)
        if self.own.runs() != before + count:
            raise ValueError(f"number: expected non-decreasing numbers below {lists}")

    def drop_empty(self, int64_t lists):
        """Remove the last `lists` lists, which must be empty."""
        self.own.drop_empty(lists)

    def arrays(self):
        """Return (indptr, tile_indptr, key_tile, mask) as arrays of a plan that own their memory."""
        self.own.fit()
        cdef int64_t runs = self.own.runs()
        return (
            self._indptr.array(np.int32, self.own.lists() + 1),
            self._tile_indptr.array(np.int64, runs + 1),
            self._key_tile.array(np.int32, runs),
            self._mask.array(np.int32, runs),
        )
