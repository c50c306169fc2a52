# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Bytes that compiled code fills, and that a plan's array lies on without a copy."""

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


# Bytes that recent plans took, by what they hold. Where as many are asked for at once, nothing is copied as they grow,
# and the C library finds them where earlier plans were: new pages take a third of the time of a large plan.
cdef dict _usual = {}

cdef enum:
    MOST = 1 << 24  # that are asked for before they are needed


@cython.final
cdef class Held:
    """What ``growing.h`` grows in.

    Parameters
    ----------
    of : str
        What it is for: it starts as large as those for the same became of late.
    """

    def __cinit__(self, str of):
        self._of = of

    def __dealloc__(self):
        Py_XDECREF(self._bytes)

    cdef Memory memory(self):
        """Of which no more may be asked when this object is gone."""
        cdef Memory found
        found.holder, found.more, found.usual = <void*>self, more, _usual.get(self._of, 0)
        return found

    cdef object array(self, dtype, shape):
        """An array on the bytes, which has all of them."""
        found = np.ndarray(shape, dtype, <object>self._bytes if self._bytes else b"")
        _usual[self._of] = min(max(found.nbytes, _usual.get(self._of, 0) * 63 // 64), MOST)
        return found


cdef char* more(void* holder, int64_t count) noexcept with gil:
    """Makes the bytes that `holder` has so many; NULL where there is not the memory."""
    try:
        return resized(<Held>holder, count)
    except MemoryError:
        return NULL


cdef char* resized(Held own, int64_t count) except NULL:
    cdef PyObject* before = own._bytes
    if before and Py_REFCNT(before) == 1:
        own._bytes = NULL  # which is lost where it cannot be resized
        _PyBytes_Resize(&before, count)
        own._bytes = before
    else:  # an array lies on those that there are
        own._bytes = PyBytes_FromStringAndSize(NULL, count)
        if not own._bytes:
            own._bytes = before
            raise MemoryError
        if before:
            memcpy(PyBytes_AS_STRING(own._bytes), PyBytes_AS_STRING(before), min(count, PyBytes_GET_SIZE(before)))
            Py_DECREF(before)
    return PyBytes_AS_STRING(own._bytes)
