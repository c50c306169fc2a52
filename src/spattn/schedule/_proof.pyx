# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Compiled part of :mod:`spattn.schedule.proof`: run proof.h on NumPy arrays."""

from libc.stdint cimport int32_t, int64_t


cdef extern from "kernels/proof.h" namespace "spattn" nogil:
    cdef cppclass View:
        pass

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


cdef Column[int32_t] _int32(const int32_t[:] column):
    cdef Column[int32_t] found
    found.data, found.stride = <const char*>&column[0] if column.shape[0] else NULL, column.strides[0]
    return found


cdef Column[int64_t] _int64(const int64_t[:] column):
    cdef Column[int64_t] found
    found.data, found.stride = <const char*>&column[0] if column.shape[0] else NULL, column.strides[0]
    return found


def find_fault(
    const unsigned char[::1] views, const int32_t[::1] query_view, const int32_t[:] owner, const int32_t[:] tile,
    const int64_t[:] slot, const int32_t[::1] work_indptr, int64_t slots, const int32_t[::1] rows,
    const int32_t[::1] indptr, const int32_t[::1] sources, const int32_t[::1] variants, int64_t length,
    int64_t block, int64_t together, const int32_t[:, ::1] order,
):
    """Return (number, variant, index) of the first fault, number 0 if there is none; takes the fields of ``Writers``.
    """
    cdef Writers own
    cdef Finding found
    cdef int64_t n, variant, count = owner.shape[0], merges = rows.shape[0], of = work_indptr.shape[0] - 1
    cdef const int32_t* at = NULL
    cdef bint sound = of >= 0 and variants.shape[0] == of + 1 and indptr.shape[0] == merges + 1
    sound = sound and views.shape[0] % sizeof(View) == 0 and tile.shape[0] == slot.shape[0] == count
    sound = sound and work_indptr[0] == 0 and work_indptr[of] == count and variants[0] == 0 and variants[of] == merges
    sound = sound and block > 0 and together > 0 and length >= 0
    sound = sound and (order.shape[0] == 0 or (order.shape[0] == of and order.shape[1] == length))
    for n in range(of if sound else 0):
        sound = sound and work_indptr[n] <= work_indptr[n + 1] and variants[n] <= variants[n + 1]
    if not sound:
        raise ValueError("work: arrays of the plan have inconsistent shapes or offsets")
    own.views, own.views_count = <const View*>&views[0] if views.shape[0] else NULL, views.shape[0] // sizeof(View)
    own.query_view, own.owners = &query_view[0] if query_view.shape[0] else NULL, query_view.shape[0]
    own.owner, own.tile, own.slot = _int32(owner), _int32(tile), _int64(slot)
    own.rows, own.indptr = &rows[0] if merges else NULL, &indptr[0]
    own.sources, own.merges = &sources[0] if sources.shape[0] else NULL, merges
    own.sources_count, own.length, own.block = sources.shape[0], length, block
    own.together, own.slots = together, slots
    cdef RowProof* proof = new RowProof(own)
    try:
        for variant in range(of):
            if order.shape[0] and length:
                at = &order[variant, 0]
            with nogil:
                found = proof.check(
                    work_indptr[variant], work_indptr[variant + 1], variants[variant], variants[variant + 1], at
                )
            if found.fault:
                return found.fault, variant, found.at
    finally:
        del proof
    return 0, 0, 0
