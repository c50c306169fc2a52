from cpython.object cimport PyObject
from libc.stdint cimport int64_t


cdef extern from "kernels/growing.h" namespace "spattn" nogil:
    cdef struct Memory:
        void* holder
        char* (*more)(void* holder, int64_t bytes) noexcept
        int64_t usual


cdef class Held:
    cdef PyObject* _bytes
    cdef str _of
    cdef Memory memory(self)
    cdef object array(self, dtype, shape)
