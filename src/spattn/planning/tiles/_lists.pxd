from libc.stdint cimport int32_t, int64_t

from spattn.planning.tiles._held cimport Held, Memory


cdef extern from "kernels/lists.h" namespace "spattn" nogil:
    cdef cppclass CRunLists "spattn::RunLists":
        CRunLists(
            const Memory& indptr, const Memory& tile_indptr, const Memory& key_tile, const Memory& mask
        ) except +
        void add(
            int64_t lists, const int32_t* list, const int32_t* key_tile, const int32_t* length, const int32_t* mask,
            int64_t count,
        ) except +
        void drop_empty(int64_t lists)
        void fit() except +
        int64_t lists() const
        int64_t runs() const


cdef class RunLists:
    cdef CRunLists* own
    cdef Held _indptr, _tile_indptr, _key_tile, _mask
