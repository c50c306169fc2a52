# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The compiled part of :mod:`spattn.plan._masks`: what ``bitmasks.h`` does, on NumPy's arrays."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp.vector cimport vector

import numpy as np


cdef extern from "kernels/bitmasks.h" namespace "spattn" nogil:
    cdef struct Part:
        int64_t first, stop

    vector[Part] parts_of(const uint8_t* rows, int64_t count, int64_t words) except +
    uint64_t hash_of(const uint64_t* mask, const vector[Part]& parts)

    void find_first_alike(
        const uint64_t* hashes, const uint64_t* stored, int64_t known, const uint64_t* masks, int64_t count,
        int64_t words, const vector[Part]& parts, int64_t* found,
    ) except +

    cdef cppclass BitmaskNumbers:
        int64_t number(
            const uint64_t* hashes, const uint64_t* masks, int64_t count, int64_t words, const uint64_t* stored,
            int32_t* numbers, int64_t* fresh,
        ) except +
        int64_t known() const


def hashes(const uint64_t[:, ::1] masks, const uint8_t[::1] rows):
    """A number of 64 bits for each bitmask, of the words of those of its rows that are true."""
    found = np.empty(masks.shape[0], np.uint64)
    cdef uint64_t[::1] own = found
    cdef vector[Part] parts = parts_of(&rows[0], rows.shape[0], masks.shape[1] // rows.shape[0])
    cdef int64_t n
    with nogil:
        for n in range(masks.shape[0]):
            own[n] = hash_of(&masks[n, 0], parts)
    return found


def first_alike(
    const uint64_t[::1] hashes, const uint64_t[:, ::1] stored, const uint64_t[:, ::1] masks, const uint8_t[::1] rows
):
    """For each of `masks` the first bitmask that has the same words in the rows that are true.

    Parameters
    ----------
    hashes : (known + n,) uint64 array
        Of these rows of `stored` and `masks`.
    stored : (known, words) uint64 array
    masks : (n, words) uint64 array
    rows : (rows,) uint8 array

    Returns
    -------
    (n,) int64 array
        Numbers of `stored`, and those of `masks` themselves from `known` on.
    """
    cdef int64_t known = stored.shape[0], count = masks.shape[0]
    if hashes.shape[0] != known + count or stored.shape[1] != masks.shape[1]:
        raise ValueError(f"hashes: expected those of {known} and {count} bitmasks of {masks.shape[1]} words")
    found = np.empty(count, np.int64)
    if not count:
        return found
    cdef int64_t[::1] own = found
    cdef const uint64_t* first = &stored[0, 0] if known else NULL
    cdef vector[Part] parts = parts_of(&rows[0], rows.shape[0], masks.shape[1] // rows.shape[0])
    with nogil:
        find_first_alike(&hashes[0], first, known, &masks[0, 0], count, masks.shape[1], parts, &own[0])
    return found


@cython.final
cdef class Numbers:
    """The numbers of rows of words, in the order in which they first came."""

    cdef BitmaskNumbers _own

    def number(self, const uint64_t[::1] hashes, const uint64_t[:, ::1] masks, const uint64_t[:, ::1] stored):
        """The number of each row of `masks`, and which of them are new.

        Parameters
        ----------
        hashes : (n,) uint64 array
            Of the rows.
        masks : (n, words) uint64 array
        stored : (known, words) uint64 array
            The rows that were new so far.
        """
        cdef int64_t count = masks.shape[0], fresh
        if hashes.shape[0] != count or stored.shape[0] != self._own.known() or stored.shape[1] != masks.shape[1]:
            raise ValueError(f"stored: expected {self._own.known()} rows of {masks.shape[1]} words, and as many hashes")
        numbers, new = np.empty(count, np.int32), np.empty(count, np.int64)
        cdef int32_t[::1] number = numbers
        cdef int64_t[::1] first = new
        cdef const uint64_t* known = &stored[0, 0] if stored.shape[0] else NULL
        if not count:
            return numbers, new
        with nogil:
            fresh = self._own.number(
                &hashes[0], &masks[0, 0], count, masks.shape[1], known, &number[0], &first[0]
            )
        return numbers, new[:fresh]
