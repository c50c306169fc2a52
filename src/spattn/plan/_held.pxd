from cpython.object cimport PyObject
from libc.stdint cimport int64_t


cdef extern from "kernels/growing.h" namespace "spattn" nogil:
    cdef struct Memory:
        void* holder
        char* (*more)(void* holder, int64_t bytes) noexcept


cdef class Held:
    cdef PyObject* _bytes
    cdef Memory memory(self)
    cdef object array(self, dtype, shape)
