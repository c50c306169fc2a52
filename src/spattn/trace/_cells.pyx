# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Cython bindings of ``cells.h`` for :mod:`spattn.trace.native`."""

from libc.stdint cimport int64_t, uint8_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

import numpy as np


cdef extern from "kernels/cells.h" namespace "spattn" nogil:
    enum: kCellLanes, kCellOperations

    const char* kCellOperationNames[]

    cdef struct CellStep:
        int64_t operation, out, a, b, c, number

    cdef struct CellTable:
        const char* data
        int64_t size, type

    cdef struct CellInput:
        const char* data
        int64_t out, type
        int64_t stride[3]

    cdef struct CellProgram:
        const CellStep* steps
        int64_t count
        const CellTable* tables
        const CellInput* inputs
        int64_t input_count, result

    cbool evaluate_cells(const CellProgram& program, const int64_t (&shape)[3], char* registers, uint8_t* out)


OPERATIONS = {kCellOperationNames[i].decode(): i for i in range(kCellOperations)}
TYPES = {name: n for n, name in enumerate(("int64", "float32", "float64", "uint8", "int8", "int16", "int32"))}
LANES = kCellLanes


def evaluate(const int64_t[:, ::1] steps, int64_t result, tables, inputs, registers, found):
    """Evaluate a program on cells; return False if an index is out of range.

    `steps` are rows of operation, result, three operands and a number: the caller checks that they are valid registers
    and tables. `inputs` are pairs of a register and an array that broadcasts to the three axes of `found`. `registers`,
    (count, LANES) int64, hold the constants.
    """
    cdef CellProgram program
    cdef vector[CellTable] table
    cdef vector[CellInput] given
    cdef CellTable one
    cdef CellInput own
    cdef int64_t shape[3]
    cdef cbool inside
    cdef int64_t[:, ::1] register = registers
    cdef uint8_t[:, :, ::1] out = found
    for array in tables:
        one.data, one.size, one.type = <const char*><size_t>array.ctypes.data, array.size, TYPES[array.dtype.name]
        table.push_back(one)
    for number, array in inputs:
        whole = np.broadcast_to(array, found.shape)
        own.data, own.out, own.type = <const char*><size_t>whole.ctypes.data, number, TYPES[array.dtype.name]
        for axis in range(3):
            own.stride[axis] = whole.strides[axis]
        given.push_back(own)
    program.steps, program.count = <const CellStep*>&steps[0, 0], steps.shape[0]
    program.tables, program.inputs, program.input_count = table.data(), given.data(), given.size()
    program.result = result
    for axis in range(3):
        shape[axis] = out.shape[axis]
    with nogil:
        inside = evaluate_cells(program, shape, <char*>&register[0, 0], &out[0, 0, 0])
    return inside
