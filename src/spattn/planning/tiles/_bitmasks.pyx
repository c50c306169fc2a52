# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Cython bindings of ``bitmasks.h`` for :mod:`spattn.planning.tiles.masks`."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp.vector cimport vector

import numpy as np


cdef extern from "kernels/bitmasks.h" namespace "spattn" nogil:
    vector[Part] parts_of(const uint8_t* rows, int64_t count, int64_t words) except +
    uint64_t hash_of(const uint64_t* mask, const vector[Part]& parts)


def hashes(const uint64_t[:, ::1] masks):
    """Return the 64-bit hash of each bitmask; only tests call this."""
    found = np.empty(masks.shape[0], np.uint64)
    cdef uint64_t[::1] own = found
    cdef vector[Part] parts
    parts.push_back(Part(0, masks.shape[1]))
    for n in range(masks.shape[0]):
        own[n] = hash_of(&masks[n, 0], parts)
    return found


@cython.final
cdef class Bitmasks:
    """A table of distinct bitmasks, indexed in order of insertion; it stops growing at `most` + 1 bitmasks."""

    def __cinit__(self, int64_t rows, int64_t row_words, int64_t most):
        self.rows, self.row_words, self._held = rows, row_words, Held("masks")
        self.own = new CBitmasks(self._held.memory(), rows, row_words, most)

    def __dealloc__(self):
        del self.own

    def __len__(self):
        return self.own.size()

    def add(self, const uint64_t[:, ::1] masks, const uint8_t[::1] rows=None):
        """Insert each row of `masks` and return its index; if `rows` is given, compare bitmasks only in these rows."""
        if masks.shape[1] != self.own.words() or rows is not None and rows.shape[0] != self.rows:
            raise ValueError(f"masks: expected {self.rows} rows of {self.row_words} words each")
        numbers = np.zeros(masks.shape[0], np.int32)
        cdef int32_t[::1] number = numbers
        cdef vector[Part] parts
        cdef const vector[Part]* compared = NULL
        if rows is not None:
            parts = parts_of(&rows[0], self.rows, self.row_words)
            compared = &parts
        if masks.shape[0]:
            with nogil:
                self.own.add(&masks[0, 0], masks.shape[0], compared, &number[0])
        return numbers

    def array(self):
        """Return all bitmasks as an (n, rows, row_words) uint64 array that owns its memory."""
        self.own.fit()
        return self._held.array(np.uint64, (self.own.size(), self.rows, self.row_words))
