# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The compiled core: executes a plan's work items, then its merges, on all threads.

The arithmetic is in ``kernels/``, compiled once per instruction set. This module fills in what a kernel needs to know,
spreads the items over the threads, and answers Ctrl-C.
"""

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from cython.parallel cimport prange, threadid
from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.atomic cimport atomic

import numpy as np

cnp.import_array()


cdef extern from "kernels/kernels.h" namespace "spattn" nogil:
    enum: kMaxTables

    cdef struct View:
        int32_t tiles

    cdef struct Component:
        int32_t variant

    cdef struct Work:
        int32_t slot

    cdef struct Plan:
        const View* views
        const Component* components
        const int32_t* indices
        const int32_t* key_view
        const int32_t* mask
        const uint64_t* masks
        const Work* work
        const int32_t* merge_rows
        const int32_t* merge_indptr
        const int32_t* merge_sources
        int64_t block_q, block_kv, slots

    cdef struct Array:
        char* data
        int64_t stride[4]

    cdef struct Call:
        Plan plan
        Array q, k, v, out, lse
        int64_t heads_q, group, head_dim, head_dim_v
        double scale
        char* slots

    ctypedef size_t (*ScratchFunction)(const Call&) noexcept nogil
    ctypedef void (*ItemFunction)(const Call&, int64_t, int64_t, const Work&, char*) noexcept nogil
    ctypedef void (*MergeFunction)(const Call&, int64_t, int64_t, int64_t, int64_t, char*) noexcept nogil

    cdef struct KernelTable:
        const char* name
        ScratchFunction scratch_bytes[4]
        ItemFunction forward[4]
        MergeFunction merge[4]

    int usable_tables(const KernelTable** tables) noexcept


cdef extern from "kernels/threads.h" namespace "spattn" nogil:
    int max_threads() noexcept
    cbool built_with_openmp() noexcept
    int64_t monotonic_ns() noexcept


DTYPES = ("float32", "float64", "float16", "bfloat16")  # in the order of kernels.h
OPENMP = built_with_openmp()

cdef int64_t kMergesAtOnce = 64
cdef int64_t kSignalPeriod = 50_000_000  # ns between looks at pending signals


def table_names():
    """Names of the instruction sets that this build has and this machine can run, best first."""
    cdef const KernelTable* tables[kMaxTables]
    return tuple([tables[i].name.decode() for i in range(usable_tables(tables))])


def openmp_threads():
    """Threads that a parallel region started here would get; 1 inside of one."""
    return max_threads()


cdef const KernelTable* find_table(str name) except NULL:
    cdef const KernelTable* tables[kMaxTables]
    for i in range(usable_tables(tables)):
        if tables[i].name.decode() == name:
            return tables[i]
    raise ValueError(f"isa: expected one of {', '.join(table_names())}, got {name!r}")


cdef Array describe(cnp.ndarray array):
    cdef Array found
    found.data = <char*>cnp.PyArray_DATA(array)
    for axis in range(4):
        found.stride[axis] = array.strides[axis] if axis < array.ndim else 0
    return found


@cython.final
cdef class Run:
    """One call: what the kernels read, and the tasks of the pass under way."""

    cdef const KernelTable* table
    cdef Call call
    cdef int dtype
    cdef int64_t heads, pairs            # query heads; batch * heads
    cdef const int32_t* variant          # of each (batch, head)
    cdef const int32_t* work_indptr
    cdef const int32_t* merge_variants
    cdef int64_t* first_task             # of each (batch, head), and the number of tasks
    cdef char* scratch
    cdef size_t scratch_bytes
    cdef int64_t next_look
    cdef atomic[int] stopped
    cdef object error, owners

    def __cinit__(self, str isa, int dtype, arrays, plan, double scale):
        q, k, v, out, lse = arrays
        self.table = find_table(isa)
        self.dtype = dtype
        self.heads, self.pairs = q.shape[1], q.shape[0] * q.shape[1]
        variant = np.ascontiguousarray(np.broadcast_to(plan.variant, q.shape[:2]), dtype=np.int32)
        first_task = np.empty(self.pairs + 1, np.int64)
        self.owners = [arrays, plan, variant, first_task]
        self.variant = <const int32_t*>cnp.PyArray_DATA(variant)
        self.first_task = <int64_t*>cnp.PyArray_DATA(first_task)
        self.work_indptr = <const int32_t*>cnp.PyArray_DATA(plan.work_indptr)
        self.merge_variants = <const int32_t*>cnp.PyArray_DATA(plan.merge_variants)
        self._describe(q, k, v, out, lse, plan)
        self.call.scale = scale
        self.next_look = monotonic_ns() + kSignalPeriod

    cdef _describe(self, q, k, v, out, lse, plan):
        cdef Call* call = &self.call
        call.q, call.k, call.v, call.out, call.lse = describe(q), describe(k), describe(v), describe(out), describe(lse)
        call.heads_q, call.group = q.shape[1], q.shape[1] // k.shape[1]
        call.head_dim, call.head_dim_v = q.shape[3], v.shape[3]
        call.plan.block_q, call.plan.block_kv, call.plan.slots = plan.block_q, plan.block_kv, plan.slots
        call.plan.views = <const View*>cnp.PyArray_DATA(plan.views)
        call.plan.components = <const Component*>cnp.PyArray_DATA(plan.components)
        call.plan.indices = <const int32_t*>cnp.PyArray_DATA(plan.indices)
        call.plan.key_view = <const int32_t*>cnp.PyArray_DATA(plan.key_view)
        call.plan.mask = <const int32_t*>cnp.PyArray_DATA(plan.mask)
        call.plan.masks = <const uint64_t*>cnp.PyArray_DATA(plan.masks)
        call.plan.work = <const Work*>cnp.PyArray_DATA(plan.work)
        call.plan.merge_rows = <const int32_t*>cnp.PyArray_DATA(plan.merge_rows)
        call.plan.merge_indptr = <const int32_t*>cnp.PyArray_DATA(plan.merge_indptr)
        call.plan.merge_sources = <const int32_t*>cnp.PyArray_DATA(plan.merge_sources)

    cdef allocate(self, int threads):
        """The threads' scratch and the workspace of partial results; MemoryError when there is no room."""
        cdef Call* call = &self.call
        self.scratch_bytes = (self.table.scratch_bytes[self.dtype](call[0]) + 4095) // 4096 * 4096 + 64
        scratch = np.empty(threads * self.scratch_bytes + 64, np.uint8)
        value_bytes = 8 if self.dtype == 1 else 4
        rows = self.pairs * call.plan.slots * call.plan.block_q
        slots = np.empty(rows * (call.head_dim_v + 1) * value_bytes, np.uint8)
        self.owners += [scratch, slots]
        self.scratch = <char*>((<uintptr_t>cnp.PyArray_DATA(scratch) + 63) // 64 * 64)
        call.slots = <char*>cnp.PyArray_DATA(slots)

    cdef int64_t count_tasks(self, const int32_t* ends, int64_t at_once) noexcept nogil:
        """Numbers the tasks of a pass over the variants' ranges `ends`, `at_once` elements each, head after head."""
        cdef int64_t pair, count, total = 0
        for pair in range(self.pairs):
            self.first_task[pair] = total
            count = ends[self.variant[pair] + 1] - ends[self.variant[pair]]
            total += (count + at_once - 1) // at_once
        self.first_task[self.pairs] = total
        return total

    cdef int64_t pair_of(self, int64_t task) noexcept nogil:
        """The (batch, head) that a task belongs to: the last one whose first task is not after it."""
        cdef int64_t low = 0, high = self.pairs, middle
        while high - low > 1:
            middle = (low + high) // 2
            if self.first_task[middle] <= task:
                low = middle
            else:
                high = middle
        return low

    cdef void forward(self, int64_t task, int thread) noexcept nogil:
        cdef int64_t pair = self.pair_of(task)
        cdef int64_t item = self.work_indptr[self.variant[pair]] + task - self.first_task[pair]
        self.table.forward[self.dtype](self.call, pair // self.heads, pair % self.heads, self.call.plan.work[item],
                                       self.scratch + thread * self.scratch_bytes)

    cdef void merge(self, int64_t task, int thread) noexcept nogil:
        cdef int64_t pair = self.pair_of(task)
        cdef int64_t begin = self.merge_variants[self.variant[pair]] + (task - self.first_task[pair]) * kMergesAtOnce
        cdef int64_t end = min(begin + kMergesAtOnce, <int64_t>self.merge_variants[self.variant[pair] + 1])
        self.table.merge[self.dtype](self.call, pair // self.heads, pair % self.heads, begin, end,
                                     self.scratch + thread * self.scratch_bytes)

    cdef bint proceed(self, int thread) noexcept nogil:
        """False once the call has been interrupted. The calling thread, number 0, looks for signals now and then."""
        cdef int64_t now
        if self.stopped.load():
            return False
        if thread == 0:
            now = monotonic_ns()
            if now >= self.next_look:
                self.next_look = now + kSignalPeriod
                with gil:
                    self.look_for_signals()
        return not self.stopped.load()

    cdef void look_for_signals(self) noexcept:
        try:
            PyErr_CheckSignals()
        except BaseException as error:  # whatever a signal handler raises is raised by forward()
            self.error = error
            self.stopped.store(1)

    cdef execute(self, int threads):
        cdef int64_t task, tasks
        with nogil:
            tasks = self.count_tasks(self.work_indptr, 1)
            for task in prange(tasks, schedule="dynamic", chunksize=1, num_threads=threads):
                if self.proceed(threadid()):
                    self.forward(task, threadid())
            tasks = self.count_tasks(self.merge_variants, kMergesAtOnce)
            for task in prange(tasks, schedule="dynamic", chunksize=1, num_threads=threads):
                if self.proceed(threadid()):
                    self.merge(task, threadid())
        if self.error is not None:
            raise self.error


def forward(q, k, v, out, lse, plan, double scale, str isa, int threads):
    """Writes the attention of checked arrays of equal dtype to `out` and `lse`, on at most `threads` threads."""
    run = Run(isa, DTYPES.index(q.dtype.name), (q, k, v, out, lse), plan, scale)
    run.allocate(threads)
    run.execute(threads)
