# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Growable ``bytes`` buffers that native code fills and a plan's arrays expose without a copy."""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t
from libc.string cimport memcpy

import numpy as np


cdef extern from "Python.h":
    PyObject* PyBytes_FromStringAndSize(const char* string, Py_ssize_t size)
    char* PyBytes_AS_STRING(PyObject* string)
    Py_ssize_t PyBytes_GET_SIZE(PyObject* string)
    int _PyBytes_Resize(PyObject** string, Py_ssize_t size) except -1
    Py_ssize_t Py_REFCNT(PyObject* own)
    void Py_XDECREF(PyObject* own)
    void Py_DECREF(PyObject* own)


# Recent final sizes of buffers, by purpose. Reserving this much at once avoids copies while a buffer grows, and lets
# the C library reuse the memory of earlier plans: faulting in new pages takes a third of the time of a large plan.
cdef dict _usual = {}

cdef enum:
    MOST = 1 << 24  # largest reservation in advance, in bytes


@cython.final
cdef class Held:
    """The memory of an array in ``growing.h``; it starts with the recent final size of arrays for the same purpose."""

    def __cinit__(self, str of):
        self._of = of

    def __dealloc__(self):
        Py_XDECREF(self._bytes)

    cdef Memory memory(self):
        """Return the allocator interface, which must not outlive this object."""
        cdef Memory found
        found.holder, found.more, found.usual = <void*>self, more, _usual.get(self._of, 0)
        return found

    cdef object array(self, dtype, shape):
        """Return an array that is backed by the whole buffer."""
        found = np.ndarray(shape, dtype, <object>self._bytes if self._bytes else b"")
        _usual[self._of] = min(max(found.nbytes, _usual.get(self._of, 0) * 63 // 64), MOST)
        return found


cdef char* more(void* holder, int64_t count) noexcept with gil:
    """Resize the buffer of `holder` to `count` bytes; return its address, or NULL if out of memory."""
    try:
        return resized(<Held>holder, count)
    except MemoryError:
        return NULL


cdef char* resized(Held own, int64_t count) except NULL:
    cdef PyObject* before = own._bytes
    if before and Py_REFCNT(before) == 1:
        own._bytes = NULL  # on failure _PyBytes_Resize frees the buffer
        _PyBytes_Resize(&before, count)
        own._bytes = before
    else:  # an array shares the buffer
        own._bytes = PyBytes_FromStringAndSize(NULL, count)
        if not own._bytes:
            own._bytes = before
            raise MemoryError
        if before:
            memcpy(PyBytes_AS_STRING(own._bytes), PyBytes_AS_STRING(before), min(count, PyBytes_GET_SIZE(before)))
            Py_DECREF(before)
    return PyBytes_AS_STRING(own._bytes)
