from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from spattn.planning.tiles._held cimport Held, Memory


cdef extern from "kernels/bitmasks.h" namespace "spattn" nogil:
    cdef struct Part:
        int64_t first, stop

    cdef cppclass CBitmasks "spattn::Bitmasks":
        CBitmasks(const Memory& memory, int64_t rows, int64_t words, int64_t most) except +
        void add(const uint64_t* masks, int64_t count, const vector[Part]* parts, int32_t* numbers) except +
        void fit() except +
        int64_t size() const
        int64_t words() const


cdef class Bitmasks:
    cdef CBitmasks* own
    cdef Held _held
    cdef readonly int64_t rows, row_words
