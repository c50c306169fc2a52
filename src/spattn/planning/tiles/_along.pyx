# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Tiles along one axis, if the keys of every query are an interval on it."""

from cython.operator cimport dereference
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint16_t
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

import numpy as np


cdef enum:
    NOTHING = -1
    WHOLE = 0

cdef int64_t FAR = 1 << 40  # exceeds any sequence length


cdef struct MaskClass:
    # First and last key of the first query, relative to the tile. `first` is INT64_MIN if the keys of all queries start
    # at or before the tile's first key; `last` is INT64_MAX if the keys of all queries reach its last key.
    int64_t first, last
    # Kind of the tile, and number of consecutive tiles of this kind.
    int64_t kind, length


cdef class TilesAlong:
    """The tiles along an axis that intersect the key intervals of the queries.

    Two tiles are of one *kind* if each query has the same keys in both, relative to the tile. In tiles of kind 0 every
    query has all keys. `pairs` is the number of keys, summed over all queries.
    """

    cdef int64_t box_q, box_k, query_box
    cdef readonly int64_t pairs
    cdef vector[int64_t] found  # (query box, key box, number of key boxes, kind) per run
    cdef vector[uint16_t] bounds  # per kind
    cdef unordered_map[string, int64_t] kinds
    cdef vector[MaskClass] before, now  # partial tiles of the previous and of the current query box
    cdef vector[uint16_t] own  # bounds of the current tile

    def __init__(self, int64_t box_q, int64_t box_k):
        self.box_q, self.box_k, self.query_box, self.pairs = box_q, box_k, 0, 0
        for _ in range(box_q):
            self.own.push_back(0)
            self.own.push_back(<uint16_t>box_k)
        self.kind_of_own()

    def __len__(self):
        return self.found.size() // 4

    def add(self, const int64_t[::1] first, const int64_t[::1] last):
        """Append queries with the keys `first` to `last`, or none if last < first; only the last call may pass an
        incomplete query box."""
        cdef int64_t at = 0, count, queries = min(len(first), len(last))
        cdef bint moved
        with nogil:
            while at < queries:
                count = min(self.box_q, queries - at)
                moved = at > 0 and count == self.box_q
                moved = moved and all_moved(&first[at - count], &first[at], count)
                moved = moved and all_moved(&last[at - count], &last[at], count)
                self.add_box(&first[at], &last[at], count, moved)
                at += count

    def runs(self):
        """Return (query box, first key box, number of key boxes, kind) of the sorted runs: (4, runs) int64."""
        made = np.empty((self.found.size() // 4, 4), np.int64)
        cdef int64_t[:, ::1] view = made
        if len(made):
            memcpy(&view[0, 0], self.found.data(), 8 * self.found.size())
        return np.ascontiguousarray(made.T)

    def bounds_of_kinds(self):
        """Return each query's first key and end relative to a tile, (kinds, box_q, 2) uint16; padding queries repeat
        the last query."""
        made = np.empty((self.bounds.size() // (2 * self.box_q), self.box_q, 2), np.uint16)
        cdef uint16_t[:, :, ::1] view = made
        if len(made):
            memcpy(&view[0, 0, 0], self.bounds.data(), 2 * self.bounds.size())
        return made

    cdef int add_box(
        self, const int64_t* first, const int64_t* last, int64_t count, bint moved
    ) except -1 nogil:
        """Find the tiles of the next query box; if `moved`, its intervals are the previous box's plus a constant."""
        cdef int64_t low = INT64_MAX, high = -1, begin = 0, end = INT64_MAX, i, at
        cdef MaskClass look
        for i in range(count):
            low, high = min(low, first[i]), max(high, last[i])
            begin, end = max(begin, first[i]), min(end, last[i] + 1)  # keys common to all queries
            self.pairs += max(last[i] + 1 - first[i], 0)
        if not moved:
            self.before.clear()
        self.now.clear()
        at = low // self.box_k * self.box_k
        while at <= high:
            look.first = INT64_MIN if begin <= at else first[0] - at
            look.last = INT64_MAX if end >= at + self.box_k else last[0] - at
            if look.first == INT64_MIN and look.last == INT64_MAX:
                look.kind, look.length = WHOLE, (end - at) // self.box_k
            else:
                self.look_closer(&look, first, last, count, at)
            if look.kind != NOTHING:
                self.emit(at // self.box_k, look.length, look.kind)
            at += look.length * self.box_k
        self.before.swap(self.now)
        self.query_box += 1
        return 0

    cdef int look_closer(
        self, MaskClass* look, const int64_t* first, const int64_t* last, int64_t count, int64_t at
    ) except -1 nogil:
        """Set the kind and length of a partial tile, usually those of its counterpart in the previous query box."""
        cdef size_t place = self.now.size()
        if (
            place < self.before.size()
            and self.before[place].first == look.first
            and self.before[place].last == look.last
            and self.before[place].length == 1  # the length of a longer run depends on all intervals
        ):
            look.kind, look.length = self.before[place].kind, 1
        else:
            self.cut(look, first, last, count, at)
            if look.kind != NOTHING:
                look.kind = self.kind_of_own()
        self.now.push_back(look[0])
        return 0

    cdef void cut(
        self, MaskClass* look, const int64_t* first, const int64_t* last, int64_t count, int64_t at
    ) noexcept nogil:
        """Set a tile's bounds (`own`), its kind if it is empty (NOTHING), and the number of equal tiles from it on."""
        cdef int64_t i, begin = 0, end = 0, following = FAR
        cdef bint some = False, within = False
        for i in range(self.box_q):
            if i < count:
                begin, end = first[i] - at, last[i] + 1 - at
                if begin >= self.box_k:
                    following = min(following, begin)
                if end >= self.box_k:
                    following = min(following, end)
                begin, end = min(max(begin, 0), self.box_k), min(max(end, 0), self.box_k)
                if begin >= end:
                    begin = end = 0
                some = some or begin < end
                within = within or 0 < begin or 0 < end < self.box_k
            self.own[2 * i], self.own[2 * i + 1] = <uint16_t>begin, <uint16_t>end
        look.kind = WHOLE if some else NOTHING
        look.length = 1 if within else following // self.box_k

    cdef int64_t kind_of_own(self) except -3 nogil:
        """Return the kind of the current tile, determined by its bounds."""
        cdef string key = string(<const char*>self.own.data(), 2 * self.own.size())
        cdef unordered_map[string, int64_t].iterator known = self.kinds.find(key)
        cdef int64_t number = self.kinds.size()
        if known != self.kinds.end():
            return dereference(known).second
        self.kinds[key] = number
        self.bounds.insert(self.bounds.end(), self.own.begin(), self.own.end())
        return number

    cdef int emit(self, int64_t key_box, int64_t length, int64_t kind) except -1 nogil:
        self.found.push_back(self.query_box)
        self.found.push_back(key_box)
        self.found.push_back(length)
        self.found.push_back(kind)
        return 0


cdef bint all_moved(const int64_t* before, const int64_t* now, int64_t count) noexcept nogil:
    """Return whether all values changed by the same amount."""
    cdef int64_t i, by = now[0] - before[0], differ = 0
    for i in range(count):
        differ |= (now[i] - before[i]) ^ by
    return differ == 0
