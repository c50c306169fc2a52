# The proof of kernels/proof.h, and the plan's views that it reads.

from libc.stdint cimport int32_t, int64_t


cdef extern from "records.h" namespace "spattn" nogil:
    cdef struct View:
        int64_t offset
        int64_t stride[3]
        int32_t extent[3]
        int32_t box[3]
        int32_t grid[3]
        int32_t tiles


cdef extern from "kernels/proof.h" namespace "spattn" nogil:
    cdef cppclass Column[T]:
        const char* data
        Py_ssize_t stride

    cdef struct Writers:
        const View* views
        int64_t views_count
        const int32_t* query_view
        int64_t owners
        Column[int32_t] owner, tile
        Column[int64_t] slot
        const int32_t* rows
        const int32_t* indptr
        const int32_t* sources
        int64_t merges, sources_count, length, block, together, slots

    cdef struct Finding:
        int fault
        int64_t at

    cdef cppclass RowProof:
        RowProof(const Writers& writers) except +
        Finding check(
            int64_t first, int64_t last, int64_t first_merge, int64_t last_merge, const int32_t* order,
        ) except +
