# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Compiled part of :mod:`spattn.schedule.items`: find tile lists and split them into items."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t
from libcpp.vector cimport vector

import numpy as np


cdef packed struct Component:
    int32_t query_view, key_view, first_row, query_tiles, variant

cdef packed struct Work:
    int32_t component, query_tile
    int64_t begin, end, slot


cdef enum:
    DIGIT = 0xFFFF


def lists_of(const Component[::1] components, const int32_t[::1] indptr, const int64_t[::1] tile_indptr):
    """Return the non-empty lists as a (4, lists) int64 array: component, query tile, first tile and end."""
    cdef int64_t most = 0, row, n, tile, found = 0
    for n in range(components.shape[0]):
        row = components[n].first_row + components[n].query_tiles
        if components[n].first_row < 0 or components[n].query_tiles < 0 or row >= indptr.shape[0]:
            raise ValueError(f"components: rows must be among {indptr.shape[0] - 1} lists")
        most += components[n].query_tiles
    columns = np.empty((4, max(most, 1)), np.int64)
    cdef int64_t[:, ::1] column = columns
    cdef int64_t begin, end
    with nogil:
        for n in range(components.shape[0]):
            for tile in range(components[n].query_tiles):
                row = components[n].first_row + tile
                begin, end = tile_indptr[indptr[row]], tile_indptr[indptr[row + 1]]
                if begin < end:
                    column[0, found], column[1, found] = n, tile
                    column[2, found], column[3, found] = begin, end
                    found += 1
    return columns[:, :found]


def cut(lists, int64_t longest, const int64_t[::1] least, const uint8_t[::1] meeting, dtype):
    """Split lists into items; return (work, number of items of each list, number of slots).

    `lists` are int64 arrays (component, query tile, first tile, end), `work` an array of `dtype` (WORK), stably sorted
    by descending length. An item has at most `longest` tiles; list n has at least ``least[n]`` items, if it has that
    many tiles. The items of split lists, and of lists where `meeting` is true, write a split-KV partial.
    """
    cdef const int64_t[:] component = lists[0], query_tile = lists[1], begin = lists[2], end = lists[3]
    cdef int64_t n, piece, count = component.shape[0], items = 0, slot = 0, length, most = 0
    cdef int64_t last = longest
    cdef bint sound = query_tile.shape[0] == begin.shape[0] == end.shape[0] == count and longest > 0
    cdef bint shared, rises = False
    cdef Work own
    sound = sound and (least is None or least.shape[0] == count)
    if not sound or not (meeting is None or meeting.shape[0] == count):
        raise ValueError(f"lists: all arrays must have length {count}, and longest must be positive")
    found = np.empty(count, np.int64)
    cdef int64_t[::1] pieces = found
    for n in range(count):
        length = end[n] - begin[n]
        if length < 1:
            raise ValueError(f"lists: a list must have at least one tile, got {length}")
        pieces[n] = 1 if length <= longest else (length + longest - 1) // longest  # rarely needs the division
        if least is not None:
            pieces[n] = max(pieces[n], min(least[n], length))
        items += pieces[n]
    whole = PyBytes_FromStringAndSize(NULL, items * sizeof(Work))  # becomes the plan's array without a copy
    work = np.ndarray(items, dtype, whole)
    cdef Work* to = <Work*>PyBytes_AS_STRING(whole)
    items = 0
    with nogil:
        for n in range(count):
            length = end[n] - begin[n]
            shared = pieces[n] > 1 or meeting is not None and meeting[n]
            own.component, own.query_tile = <int32_t>component[n], <int32_t>query_tile[n]
            own.end = begin[n]
            for piece in range(1, pieces[n] + 1):
                own.begin = own.end
                own.end = end[n] if piece == pieces[n] else begin[n] + length * piece // pieces[n]
                own.slot = slot if shared else -1
                slot += shared
                rises |= own.end - own.begin > last
                last = own.end - own.begin
                most = max(most, last)
                to[items] = own
                items += 1
        if rises:
            sort_by_length(to, items, most)
    return work, found, slot


def fill(
    int32_t[::1] sources, int32_t[:, :, :, :] at, const int32_t[:, :, :, :] count, const int32_t[:, :, :, :] first,
    int64_t step,
):
    """Write the sources ``first, first + step, ...`` of each row, and advance `at`, the index of its next source."""
    cdef int64_t a, b, c, d, to, piece
    cdef bint sound = True
    for a in range(4):
        sound = sound and at.shape[a] == count.shape[a] == first.shape[a]
    if sound:
        with nogil:
            for a in range(at.shape[0]):
                for b in range(at.shape[1]):
                    for c in range(at.shape[2]):
                        for d in range(at.shape[3]):
                            to = at[a, b, c, d]
                            if to < 0 or count[a, b, c, d] < 0 or to + count[a, b, c, d] > sources.shape[0]:
                                sound = False
                                continue
                            for piece in range(count[a, b, c, d]):
                                sources[to + piece] = <int32_t>(first[a, b, c, d] + piece * step)
                            at[a, b, c, d] += count[a, b, c, d]
    if not sound:
        raise ValueError(f"sources: rows' sources exceed the {sources.shape[0]} entries")


cdef int sort_by_length(Work* items, int64_t count, int64_t most) except -1 nogil:
    """Sort items by descending length with a stable radix sort; `most` is the maximum length."""
    cdef vector[Work] before
    cdef vector[int64_t] place
    cdef int64_t n, key
    cdef int shift = 0
    while most >> shift:
        before.assign(items, items + count)
        place.assign(min(most >> shift, DIGIT) + 2, 0)  # counts by digit, then the index of each digit's next item
        for n in range(count):
            key = most - (before[n].end - before[n].begin)
            place[(key >> shift & DIGIT) + 1] += 1
        for n in range(1, <int64_t>place.size()):
            place[n] += place[n - 1]
        for n in range(count):
            key = most - (before[n].end - before[n].begin) >> shift & DIGIT
            items[place[key]] = before[n]
            place[key] += 1
        shift += 16
    return 0
