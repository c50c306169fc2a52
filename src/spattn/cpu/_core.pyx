# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The compiled core: runs the work items of a plan on all threads and combines their partials, forward and backward.

This module fills in the kernel parameters, schedules the items on the threads, and handles Ctrl-C. The kernels are in
``kernels/``.
"""

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from cython.parallel cimport parallel, threadid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from libcpp cimport bool as cbool
from libcpp.atomic cimport atomic

import numpy as np

from . import _workspace

cnp.import_array()


cdef extern from "kernels/kernels.h" namespace "spattn" nogil:
    enum: kMaxTables
    enum: kZeroedScratch, kFewQueries
    enum: kMostAxes, kSumWords, kOperations

    const char* kOperationNames[]

    cdef struct Instruction:
        int32_t operation

    cdef struct Variant:
        int32_t value

    cdef struct Use:
        int32_t table

    cdef struct ScoreTable:
        const char* data
        int64_t shape[8]
        int64_t stride[8]
        int32_t dtype, axes
        int64_t* sums
        char* direct
        int64_t begin, end

    cdef struct ScoreProgram:
        const Instruction* instructions
        const int32_t* indices
        const Variant* variants
        const Use* uses
        int32_t scalars
        int32_t registers[8]
        const double* numbers
        const ScoreTable* tables
        int64_t most_axes
        int64_t batches[2]
        int64_t heads[2]
        int64_t queries[2]
        cbool shared

    cdef struct DropoutWords:
        uint32_t threshold
        double factor
        const uint32_t* offset
        const uint32_t* multiplier
        const uint32_t* key

    cdef struct View:
        int64_t offset
        int32_t tiles

    cdef struct Component:
        int32_t variant

    cdef struct Work:
        int64_t slot

    cdef struct Unit:
        int64_t batch, head_kv, first, last, begin, end, offset

    cdef struct Plan:
        const View* views
        const Component* components
        const int32_t* indptr
        const int64_t* tile_indptr
        const int32_t* indices
        const int32_t* key_view
        const int32_t* mask
        const uint64_t* masks
        const Work* work
        const int32_t* q_order
        const int32_t* kv_order
        const int32_t* merge_rows
        const int32_t* merge_indptr
        const int32_t* merge_sources
        int64_t block_q, block_kv, slots

    cdef struct Array:
        char* data
        int64_t stride[4]

    cdef struct Normaliser:
        double largest, total, product

    cdef struct Call:
        Plan plan
        Array q, k, v, out, lse, dout, dlse, dq, dk, dv, exact_k, exact_v
        const uint8_t* marked
        int* nonfinite
        double far_lse
        Normaliser* normalisers
        int64_t q_len, kv_len, heads_q, group, together, head_dim, head_dim_v
        double scale
        const double* sinks
        int64_t* dsinks
        const uint8_t* sink_rows
        const ScoreProgram* score
        const DropoutWords* dropout
        char* slots

    cdef struct Sums:
        char* dk
        char* dv
        int64_t ld_dk, ld_dv, begin, end

    ctypedef size_t (*ScratchFunction)(const Call&) noexcept nogil
    ctypedef void (*ItemsFunction)(const Call&, int64_t, int64_t, const Work*, int64_t, char*) noexcept nogil
    ctypedef void (*ItemFunction)(const Call&, int64_t, int64_t, const Work&, char*) noexcept nogil
    ctypedef void (*MergeFunction)(const Call&, int64_t, int64_t, int64_t, int64_t, char*) noexcept nogil
    ctypedef void (*BackwardFunction)(const Call&, int64_t, int64_t, const Work&, const Sums&, char*) noexcept nogil
    ctypedef void (*AddFunction)(const Call&, int64_t, int64_t, const Sums*, int64_t, int64_t, int64_t,
                                 char*) noexcept nogil

    ctypedef void (*HeadFunction)(const Call&, int64_t, int64_t, char*) noexcept nogil

    cdef struct ForwardKernels:
        ScratchFunction scratch_bytes
        ItemsFunction run
        MergeFunction merge

    cdef struct BackwardKernels:
        ScratchFunction scratch_bytes
        ItemFunction normalise
        BackwardFunction run
        MergeFunction merge_dq
        AddFunction add_units
        HeadFunction sink_gradient

    cdef struct KernelTable:
        const char* name
        const ForwardKernels* forward[4]
        const BackwardKernels* backward[4]

    int usable_tables(const KernelTable** tables) noexcept
    double exact_sum(const int64_t* words) noexcept


cdef extern from "kernels/threads.h" namespace "spattn" nogil:
    int max_threads() noexcept
    cbool built_with_openmp() noexcept
    cbool in_parallel_region() noexcept
    int64_t monotonic_ns() noexcept
    int64_t thread_cpu_ns() noexcept
    int limited_team(int threads) noexcept
    void observe_team(int threads, int64_t region, int64_t worked, int64_t lost) noexcept


DTYPES = ("float32", "float64", "float16", "bfloat16")  # in the order of kernels.h
OPENMP = built_with_openmp()
FEW_QUERIES = kFewQueries                # maximum q_len for which a task computes all heads of a group
OPERATIONS = {kOperationNames[i].decode(): i for i in range(kOperations)}  # of score programs, by name
SUM_WORDS = kSumWords                    # words of an exact accumulator
MOST_AXES = kMostAxes                    # maximum axes of a table of a score program
FAR_LSE = {4: 2.0**14, 8: 2.0**43}       # by lse.itemsize: see is_far() in kernels/backward/exact.h

cdef size_t kLine = 64                   # cache line in bytes, the alignment of workspaces
cdef int64_t kMergesAtOnce = 64          # rows per task that combines partials
cdef int64_t kRowsAtOnce = 16            # minimum rows per forward task
cdef int64_t kKeysAtOnce = 64            # rows of dK and dV per task that sums units
cdef int64_t kSignalPeriod = 50_000_000  # ns between checks for pending signals


def table_names():
    """Return the instruction sets that this build includes and this machine supports, best first."""
    cdef const KernelTable* tables[kMaxTables]
    return tuple([tables[i].name.decode() for i in range(usable_tables(tables))])


if not table_names():
    raise ImportError("spattn: this build has only the kernels of another machine (-Disa=native); build it on this one")


def openmp_threads():
    """Return the OpenMP thread count of a new parallel region; 1 inside another region."""
    return max_threads()


def in_parallel():
    """Return whether the calling thread is in an OpenMP parallel region."""
    return in_parallel_region()


def team_size(int threads):
    """Return `threads`, or fewer while other processes occupy the cores."""
    return limited_team(threads)


def observe(int threads, int64_t region, int64_t worked, int64_t lost):
    """Update the limit of team_size() from the times of a parallel region: TeamLimit::observe() in threads.h."""
    observe_team(threads, region, worked, lost)


cdef const KernelTable* find_table(str name) except NULL:
    cdef const KernelTable* tables[kMaxTables]
    for i in range(usable_tables(tables)):
        if tables[i].name.decode() == name:
            return tables[i]
    raise ValueError(f"isa: expected one of {', '.join(table_names())}, got {name!r}")


cdef broadcast_variant(const int32_t[:, :] variant, int64_t batch, int64_t heads):
    """Return the variant of each batch entry and head, (batch, heads) int32; np.broadcast_to is slower."""
    cdef cnp.npy_intp[2] shape = [batch, heads]
    cdef int64_t entry, head, rows = variant.shape[0], columns = variant.shape[1]
    found = cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT32, 0)
    cdef int32_t* to = <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>found)
    if rows not in (1, batch) or columns not in (1, heads):
        raise ValueError(f"plan: expected {batch} batch entries and {heads} heads, got {rows} and {columns}")
    for entry in range(batch):
        for head in range(heads):
            to[entry * heads + head] = variant[entry if rows > 1 else 0, head if columns > 1 else 0]
    return found


cdef struct Shape:
    int axes
    int64_t size[4]


cdef class Prepared:
    """Cached dispatch: the kernel table, plan and shapes of a call."""

    cdef const KernelTable* table
    cdef Call call
    cdef ScoreProgram program      # without the values of a call
    cdef Shape of_q, of_k, of_v, of_out, of_lse
    cdef int element, lse_element  # NumPy's type numbers
    cdef int dtype, value_bytes    # index in DTYPES; bytes of the kernels' compute type
    cdef int64_t heads, all_heads  # query heads; batch * query heads
    cdef int64_t views, least      # number of views; minimum kv_len to bind at run time (0: fixed)
    cdef const int32_t* variant    # (batch, heads)
    cdef const int32_t* work_indptr
    cdef const int32_t* merge_variants
    cdef object owners
    cdef readonly object score     # a _score.Encoded or None

    def __init__(self, call, plan, work, int64_t together, str isa, int64_t least=0, score=None):
        """Prepare a validated `call`, whose kv_len is the plan's. `work` holds the plan's items in execution order, and
        a task computes `together` query heads. Calls with `kv_len` >= `least` bind it at run time; with 0, it is fixed.
        `score` is the call's encoded score program.
        """
        self.table = find_table(isa)
        self.dtype = DTYPES.index(call.dtype)
        self.value_bytes = 8 if call.dtype == "float64" else 4
        self.heads, self.all_heads = call.heads_q, call.batch * call.heads_q
        self.views, self.least = len(plan.views), least
        self.call.together = together
        self.call.q_len, self.call.kv_len = plan.q_len, plan.kv_len
        self.call.heads_q, self.call.group = call.heads_q, call.group
        self.call.head_dim, self.call.head_dim_v = call.head_dim, call.head_dim_v
        variant = broadcast_variant(plan.variant, call.batch, call.heads_q)
        self.owners = plan, work, variant
        self.score = score
        if score is not None:
            self.describe_score(score)
        self.variant = <const int32_t*>cnp.PyArray_DATA(<cnp.ndarray>variant)
        self.work_indptr = <const int32_t*>cnp.PyArray_DATA(plan.work_indptr)
        self.merge_variants = <const int32_t*>cnp.PyArray_DATA(plan.merge_variants)
        self.describe_plan(&self.call.plan, plan, work)
        self.element = np.dtype(call.kind.to_numpy(call.q).dtype).num
        self.lse_element = np.dtype(call.lse_dtype).num
        self.of_q = Shape(4, [call.batch, call.heads_q, call.q_len, call.head_dim])
        self.of_k = Shape(4, [call.batch, call.heads_kv, plan.kv_len, call.head_dim])
        self.of_v = Shape(4, [call.batch, call.heads_kv, plan.kv_len, call.head_dim_v])
        self.of_out = Shape(4, [call.batch, call.heads_q, call.q_len, call.head_dim_v])
        self.of_lse = Shape(3, [call.batch, call.heads_q, call.q_len, 0])

    cdef Array describe(self, str name, cnp.ndarray array, const Shape& shape) except *:
        """Return the data pointer and strides. Raise ValueError if the shape or dtype differs from the cached one, as
        the kernels would then access memory out of bounds.
        """
        cdef Array found
        cdef int axis
        cdef int element = self.lse_element if shape.axes == 3 else self.element
        cdef bint fits = (array.ndim == shape.axes and cnp.PyArray_TYPE(array) == element
                          and cnp.PyArray_ISNOTSWAPPED(array))
        for axis in range(4):
            if not fits or axis >= shape.axes:
                found.stride[axis] = 0
            else:
                found.stride[axis] = array.strides[axis]
                fits = array.shape[axis] == shape.size[axis]
        if not fits:
            expected = tuple([shape.size[axis] for axis in range(shape.axes)])
            raise ValueError(f"{name}: expected shape {expected} and the dtype of the prepared call, "
                             f"got {(<object>array).shape} of {array.dtype}")
        found.data = <char*>cnp.PyArray_DATA(array)
        return found

    cdef describe_score(self, score):
        cdef ScoreProgram* to = &self.program
        cdef int i
        to.instructions = <const Instruction*>cnp.PyArray_DATA(score.instructions)
        to.indices = <const int32_t*>cnp.PyArray_DATA(score.indices)
        to.variants = <const Variant*>cnp.PyArray_DATA(score.variants)
        to.uses = <const Use*>cnp.PyArray_DATA(score.uses)
        to.scalars = score.scalars
        for i in range(8):
            to.registers[i] = score.registers[i]
        to.most_axes = kMostAxes
        self.call.score = to  # for scratch sizes; Run sets the values of each call

    cdef describe_plan(self, Plan* to, plan, work):
        to.block_q, to.block_kv, to.slots = plan.block_q, plan.block_kv, plan.slots
        to.views = <const View*>cnp.PyArray_DATA(plan.views)
        to.components = <const Component*>cnp.PyArray_DATA(plan.components)
        to.indptr = <const int32_t*>cnp.PyArray_DATA(plan.indptr)
        to.tile_indptr = <const int64_t*>cnp.PyArray_DATA(plan.tile_indptr)
        to.indices = <const int32_t*>cnp.PyArray_DATA(plan.indices)
        to.key_view = <const int32_t*>cnp.PyArray_DATA(plan.key_view)
        to.mask = <const int32_t*>cnp.PyArray_DATA(plan.mask)
        to.masks = <const uint64_t*>cnp.PyArray_DATA(plan.masks)
        to.work = <const Work*>cnp.PyArray_DATA(work)
        to.q_order = <const int32_t*>cnp.PyArray_DATA(plan.q_order) if len(plan.q_order) else NULL
        to.kv_order = <const int32_t*>cnp.PyArray_DATA(plan.kv_order) if len(plan.kv_order) else NULL
        to.merge_rows = <const int32_t*>cnp.PyArray_DATA(plan.merge_rows)
        to.merge_indptr = <const int32_t*>cnp.PyArray_DATA(plan.merge_indptr)
        to.merge_sources = <const int32_t*>cnp.PyArray_DATA(plan.merge_sources)


cdef class Run(Prepared):
    """A call in progress: its kernel parameters and its passes; the threads share the independent tasks of a pass."""

    cdef int64_t* first_task  # (all_heads + 1): first task of each (batch, head), then the number of tasks
    cdef char* scratch
    cdef size_t scratch_bytes
    cdef int first_step
    cdef int nonfinite                 # whether an output row is, or might be, non-finite
    cdef int64_t next_look
    cdef atomic[int] stopped
    cdef atomic[int64_t] next_task
    cdef int64_t started               # start of the parallel region in ns
    cdef atomic[int64_t] worked, lost  # ns: total CPU time of the team; longest time that a thread waited for a core
    cdef object error, workspaces
    cdef Prepared prepared
    cdef ScoreProgram program
    cdef DropoutWords dropout

    cdef begin(self, Prepared prepared, arrays, double scale, score, sinks, dropout, int threads):
        """Fill in the kernel parameters, except the workspace."""
        cdef Call* call = &self.call
        q, k, v, out, lse = arrays
        self.table, self.dtype, self.value_bytes = prepared.table, prepared.dtype, prepared.value_bytes
        self.heads, self.all_heads, self.variant = prepared.heads, prepared.all_heads, prepared.variant
        self.work_indptr, self.merge_variants = prepared.work_indptr, prepared.merge_variants
        self.prepared, self.owners, self.workspaces = prepared, [arrays], []
        call[0] = prepared.call
        self.of_k, self.of_v = prepared.of_k, prepared.of_v
        self.move(prepared, k)
        call.q, call.k = prepared.describe("q", q, prepared.of_q), prepared.describe("k", k, self.of_k)
        call.v = prepared.describe("v", v, self.of_v)
        call.out = prepared.describe("out", out, prepared.of_out)
        call.lse = prepared.describe("lse", lse, prepared.of_lse)
        call.exact_k, call.exact_v, call.nonfinite = call.k, call.v, &self.nonfinite
        call.scale = scale
        if prepared.score is not None:
            self.bind_score(score, threads)
        if sinks is not None:
            call.sinks = self.bind_sinks(sinks)
        if dropout is not None:
            self.bind_dropout(dropout)
        self.next_look = monotonic_ns() + kSignalPeriod

    cdef const double* bind_sinks(self, cnp.ndarray sinks) except NULL:
        """Return the sinks as float64. Raise ValueError unless they have shape (heads_q,) and the dtype of lse."""
        expected, dtype = (self.heads,), np.dtype(self.owners[0][4].dtype)
        if (<object>sinks).shape != expected or sinks.dtype != dtype:
            raise ValueError(f"sinks: expected shape {expected} and dtype {dtype}, "
                             f"got {(<object>sinks).shape} of {sinks.dtype}")
        cdef cnp.ndarray wide = np.ascontiguousarray(sinks, np.float64)
        self.owners.append(wide)
        return <const double*>cnp.PyArray_DATA(wide)

    cdef bind_dropout(self, dropout):
        """Set the numbers of a DropoutWords. Raise ValueError unless their shapes and dtypes are those of the call."""
        cdef Call* call = &self.call
        cdef cnp.ndarray query = dropout.query, key = dropout.key
        shape = self.all_heads // self.heads if self.heads else 0, self.heads
        for name, array, expected in (("query", query, (2, *shape, call.q_len)), ("key", key, (*shape, call.kv_len))):
            if array.shape != expected or array.dtype != np.uint32 or not array.flags.c_contiguous:
                raise ValueError(f"dropout: expected contiguous uint32 numbers of shape {expected} for each {name}, "
                                 f"got {array.dtype} of {array.shape}")
        self.owners.append(dropout)
        self.dropout.threshold, self.dropout.factor = dropout.threshold, dropout.factor
        self.dropout.offset = <const uint32_t*>cnp.PyArray_DATA(query)
        self.dropout.multiplier = self.dropout.offset + self.all_heads * call.q_len
        self.dropout.key = <const uint32_t*>cnp.PyArray_DATA(key)
        call.dropout = &self.dropout

    cdef move(self, Prepared prepared, cnp.ndarray k):
        """Bind kv_len to the length of `k` if the plan is length-polymorphic; moved() in
        planning/contract/validated.py does the same."""
        cdef int64_t kv_len = k.shape[2] if k.ndim == 4 else -1, view
        cdef View* views
        if not 0 < prepared.least <= kv_len or kv_len == prepared.call.kv_len:
            return
        views = <View*>self.workspace(prepared.views * sizeof(View))
        memcpy(views, prepared.call.plan.views, prepared.views * sizeof(View))
        for view in range(prepared.views):
            if views[view].offset > 0:
                views[view].offset += kv_len - prepared.call.kv_len
        self.call.plan.views = views
        self.call.kv_len = self.of_k.size[2] = self.of_v.size[2] = kv_len

    cdef bind_score(self, score, int threads):
        """Set the values of the score program from a _score.Bound."""
        cdef ScoreTable* tables
        cdef ScoreTable* table
        cdef int axis
        self.program = self.prepared.program
        self.owners.append(score)
        self.program.numbers = <const double*>cnp.PyArray_DATA(score.numbers)
        tables = <ScoreTable*>self.workspace(len(score.tables) * sizeof(ScoreTable))
        for number, array in enumerate(score.tables):
            table = tables + <int64_t>number
            memset(table, 0, sizeof(ScoreTable))
            table.data = <const char*>cnp.PyArray_DATA(array)
            table.dtype, table.axes = score.dtypes[number], array.ndim
            for axis in range(array.ndim):
                table.shape[axis], table.stride[axis] = array.shape[axis], array.strides[axis]
        for number, begin, end, words in score.sums:
            table = tables + <int64_t>number
            table.sums, table.begin, table.end = <int64_t*>cnp.PyArray_DATA(words), begin, end
        for number, gradient in score.direct:
            table = tables + <int64_t>number
            table.direct = <char*>cnp.PyArray_DATA(gradient)
        self.program.tables = tables
        for axis in range(2):
            self.program.batches[axis], self.program.heads[axis], self.program.queries[axis] = score.items[axis]
        self.program.shared = threads > 1
        self.call.score = &self.program

    cdef replace(self, Array* array, str name, const Shape& shape, instead):
        """Replace K or V in the tile kernels by a finite copy, unless `instead` is None."""
        if instead is not None:
            copy, marked = instead
            array[0] = self.prepared.describe(name, copy, shape)
            self.call.marked = <const uint8_t*>cnp.PyArray_DATA(marked)
            self.owners.append(instead)

    cdef char* workspace(self, size_t size):
        """Allocate 64-byte aligned memory that lives as long as the run; raise MemoryError on failure."""
        memory = _workspace.take(size + kLine)
        self.workspaces.append(memory)
        return <char*>((<size_t>cnp.PyArray_DATA(memory) + kLine - 1) // kLine * kLine)

    cdef allocate(self, int threads, size_t scratch_bytes, int64_t slot_width):
        """Allocate the scratch of each thread and the split-KV partials, rows of `slot_width` values."""
        cdef Call* call = &self.call
        cdef int thread
        self.scratch_bytes = (scratch_bytes + 4095) // 4096 * 4096 + kLine
        self.scratch = self.workspace(threads * self.scratch_bytes + (self.all_heads + 1) * sizeof(int64_t))
        self.first_task = <int64_t*>(self.scratch + threads * self.scratch_bytes)
        for thread in range(threads):
            memset(self.scratch + thread * self.scratch_bytes, 0, kZeroedScratch)
        rows = self.all_heads * call.plan.slots * call.plan.block_q
        if rows:
            call.slots = self.workspace(rows * slot_width * self.value_bytes)

    cdef int64_t count_tasks(self, const int32_t* ends, int64_t at_once, int64_t together) noexcept nogil:
        """Number the tasks of a pass head by head, and return their count. A task processes `at_once` elements of the
        variant's range in `ends` for `together` heads, and is numbered with the first of these heads.
        """
        cdef int64_t number, count, total = 0
        for number in range(self.all_heads):
            self.first_task[number] = total
            if number % together:
                continue
            count = ends[self.variant[number] + 1] - ends[self.variant[number]]
            total += (count + at_once - 1) // at_once
        self.first_task[self.all_heads] = total
        return total

    cdef int64_t head_of(self, int64_t task) noexcept nogil:
        """Return the (batch, head) index of a task by binary search in first_task."""
        cdef int64_t low = 0, high = self.all_heads, middle
        while high - low > 1:
            middle = (low + high) // 2
            if self.first_task[middle] <= task:
                low = middle
            else:
                high = middle
        return low

    cdef void merge_with(self, MergeFunction merge, int64_t task, int thread) noexcept nogil:
        cdef int64_t number = self.head_of(task), variant = self.variant[number]
        cdef int64_t begin = self.merge_variants[variant] + (task - self.first_task[number]) * kMergesAtOnce
        cdef int64_t end = min(begin + kMergesAtOnce, <int64_t>self.merge_variants[variant + 1])
        merge(self.call, number // self.heads, number % self.heads, begin, end,
              self.scratch + thread * self.scratch_bytes)

    cdef bint proceed(self, int thread) noexcept nogil:
        """Return whether to continue. Thread 0, the calling thread, also checks for signals periodically."""
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
        except BaseException as error:  # execute() raises the signal handler's exception
            self.error = error
            self.stopped.store(1)

    cdef int64_t start(self, int step) noexcept nogil:
        """Prepare pass `step` and return the number of its tasks; -1 if there is no such pass."""
        return -1

    cdef void run_task(self, int step, int64_t task, int thread) noexcept nogil:
        """Run a task of pass `step`."""

    cdef void run_tasks(self, int step, int64_t tasks, int thread) noexcept nogil:
        """Take tasks of a pass from the shared counter and run them until none is left."""
        cdef int64_t task
        while True:
            task = self.next_task.fetch_add(1)
            if task >= tasks or not self.proceed(thread):
                break
            self.run_task(step, task, thread)

    cdef void run_team(self, int step, int64_t tasks, int threads) noexcept nogil:
        self.worked.store(0)
        self.lost.store(0)
        self.started = monotonic_ns()
        with parallel(num_threads=threads):
            self.run_member(step, tasks, threadid())
        observe_team(threads, monotonic_ns() - self.started, self.worked.load(), self.lost.load())

    cdef void run_member(self, int step, int64_t tasks, int thread) noexcept nogil:
        """Run the tasks of one thread, and measure how long it waited for a core."""
        cdef int64_t before = thread_cpu_ns(), worked, lost, most
        self.run_tasks(step, tasks, thread)
        worked = thread_cpu_ns() - before
        self.worked.fetch_add(worked)
        lost = monotonic_ns() - self.started - worked
        most = self.lost.load()
        while lost > most and not self.lost.compare_exchange_weak(most, lost):
            pass

    cdef bint execute(self, int threads) except -1:
        """Run all passes; return whether an output row is, or might be, non-finite."""
        cdef int step = self.first_step
        cdef int64_t tasks
        with nogil:
            while True:
                tasks = self.start(step)
                if tasks < 0:
                    break
                self.next_task.store(0)
                if threads == 1 or tasks <= 1:
                    self.run_tasks(step, tasks, 0)
                else:
                    self.run_team(step, tasks, threads)
                step += 1
        _workspace.give_back(self.workspaces)
        if self.error is not None:
            raise self.error
        return self.nonfinite


@cython.final
cdef class Forward(Run):
    """The forward of a call in two passes: run the work items, then combine their partials."""

    cdef const ForwardKernels* kernels

    cdef make_room(self, instead, int threads):
        self.kernels = self.table.forward[self.dtype]
        self.replace(&self.call.v, "v", self.of_v, instead)
        self.allocate(threads, self.kernels.scratch_bytes(self.call),
                      self.call.head_dim_v + sizeof(double) // self.value_bytes)  # lse is a double: results.h

    cdef int64_t start(self, int step) noexcept nogil:
        if step == 0:
            return self.count_tasks(self.work_indptr, self.items_at_once(), self.call.together)
        return self.count_tasks(self.merge_variants, kMergesAtOnce, 1) if step == 1 else -1

    cdef int64_t items_at_once(self) noexcept nogil:
        return max(<int64_t>1, kRowsAtOnce // self.call.plan.block_q)

    cdef void run_task(self, int step, int64_t task, int thread) noexcept nogil:
        cdef int64_t number, variant, item, end
        if step == 1:
            self.merge_with(self.kernels.merge, task, thread)
            return
        number = self.head_of(task)
        variant = self.variant[number]
        item = self.work_indptr[variant] + (task - self.first_task[number]) * self.items_at_once()
        end = min(item + self.items_at_once(), <int64_t>self.work_indptr[variant + 1])
        self.kernels.run(self.call, number // self.heads, number % self.heads, self.call.plan.work + item, end - item,
                         self.scratch + thread * self.scratch_bytes)


@cython.final
cdef class Backward(Run):
    """The backward of a call in up to five passes: compute the softmax statistics of rows with a far lse; run the
    units, which write dQ and accumulate dK and dV; combine the dQ partials; compute the gradients of the sinks; sum dK
    and dV over the units.
    """

    cdef const BackwardKernels* kernels
    cdef const Unit* units
    cdef Sums* sums  # (unit_count)
    cdef int64_t unit_count, per_head  # units in total, and per (batch, key-value head)
    cdef int64_t kv_len, heads_kv
    cdef bint in_place   # whether the units accumulate in the caller's dK and dV
    cdef bint by_thread  # whether a head has one unit, whose thread writes dK and dV while its sums are in cache
    cdef char* dk_rows   # accumulators of all units or, with by_thread, of all threads
    cdef char* dv_rows
    cdef const uint8_t* adding  # (items,): whether an item adds to the gradients of tables; null: all do
    cdef ScoreProgram silent_program
    cdef Call silent            # of the other items: its tables have no gradients

    cdef silence(self, score, cnp.ndarray work):
        """Let only the items of `score.items_of_tables` add to the gradients of tables."""
        cdef int64_t number, count = len(score.tables)
        cdef ScoreTable* table
        cdef ScoreTable* tables = <ScoreTable*>self.workspace(count * sizeof(ScoreTable))
        cdef cnp.ndarray adding = score.items_of_tables
        if (<object>adding).shape != (<object>work).shape or adding.dtype != np.bool_:
            raise ValueError(f"score: expected a bool for each of {len(work)} work items, got {(<object>adding).shape}")
        self.adding = <const uint8_t*>cnp.PyArray_DATA(adding)
        self.silent, self.silent_program = self.call, self.program
        memcpy(tables, self.program.tables, count * sizeof(ScoreTable))
        for number in range(count):
            table = tables + number
            table.sums = NULL
            table.direct = NULL
        self.silent_program.tables, self.silent.score = tables, &self.silent_program

    cdef make_room(self, gradients, split, instead, cnp.ndarray dsinks, cnp.ndarray sink_rows, int threads):
        cdef Call* call = &self.call
        cdef Prepared of = self.prepared
        self.kernels = self.table.backward[self.dtype]
        self.replace(&call.k, "k", of.of_k, instead)
        dout, dlse, dq, dk, dv = gradients
        call.dout, call.dq = of.describe("dout", dout, of.of_out), of.describe("dq", dq, of.of_q)
        call.dk, call.dv = of.describe("dk", dk, of.of_k), of.describe("dv", dv, of.of_v)
        if dlse is not None:
            call.dlse = of.describe("dlse", dlse, of.of_lse)
        if dsinks is not None:
            call.dsinks = <int64_t*>cnp.PyArray_DATA(dsinks)
        if sink_rows is not None:
            call.sink_rows = <const uint8_t*>cnp.PyArray_DATA(sink_rows)
        self.owners += [gradients, split, dsinks, sink_rows]
        self.allocate(threads, self.kernels.scratch_bytes(call[0]), call.head_dim)
        self.units, self.unit_count = <const Unit*>cnp.PyArray_DATA(split.units), len(split.units)
        self.per_head, self.heads_kv, self.kv_len = split.per_head, dk.shape[1], dk.shape[2]
        self.sums = <Sums*>self.workspace(self.unit_count * sizeof(Sums))
        self.in_place = self.per_head == 1 and all([self.fits(x) for x in (dk, dv)])
        self.by_thread = self.per_head == 1 and not self.in_place
        self.find_far_rows()
        self.describe_sums(0 if self.in_place else threads * self.kv_len if self.by_thread else split.rows)

    cdef find_far_rows(self):
        """Allocate softmax statistics if the rounding error of an lse is too large: is_far() in backward/exact.h."""
        lse = self.owners[0][4]
        self.call.far_lse = FAR_LSE[lse.itemsize]
        if ((np.abs(lse) > self.call.far_lse) & (lse != -np.inf)).any():
            normalisers = np.full((lse.size, 3), (-np.inf, 0, 0))
            self.owners.append(normalisers)
            self.call.normalisers = <Normaliser*>cnp.PyArray_DATA(normalisers)
            self.first_step = -1

    cdef fits(self, x):
        """Return whether the rows of an output can serve as accumulators."""
        size = self.value_bytes
        return (x.itemsize == size and x.strides[3] == size and x.strides[2] % size == 0
                and x.ctypes.data % size == 0 and x.shape[3] * size % 64 == 0)

    cdef describe_sums(self, int64_t rows):
        """Point the accumulators of each unit to the outputs, or to `rows` rows of workspace for each of dK and dV.

        With by_thread, run_task() points them to the rows of its thread instead.
        """
        cdef int64_t i, ld_dk, ld_dv
        cdef Array *dk = &self.call.dk, *dv = &self.call.dv
        cdef const Unit* unit
        cdef Sums* sums
        ld_dk = self.row_bytes(self.call.head_dim) // self.value_bytes
        ld_dv = self.row_bytes(self.call.head_dim_v) // self.value_bytes
        self.dk_rows = self.workspace(rows * ld_dk * self.value_bytes)
        self.dv_rows = self.workspace(rows * ld_dv * self.value_bytes)
        for i in range(self.unit_count):
            unit, sums = self.units + i, self.sums + i
            sums.begin, sums.end = unit.begin, unit.end
            if self.in_place:
                sums.dk = dk.data + unit.batch * dk.stride[0] + unit.head_kv * dk.stride[1]
                sums.dv = dv.data + unit.batch * dv.stride[0] + unit.head_kv * dv.stride[1]
                sums.ld_dk, sums.ld_dv = dk.stride[2] // self.value_bytes, dv.stride[2] // self.value_bytes
            else:
                sums.ld_dk, sums.ld_dv = ld_dk, ld_dv
                self.place_sums(sums, unit.offset)

    cdef void place_sums(self, Sums* sums, int64_t row) noexcept nogil:
        sums.dk = self.dk_rows + row * sums.ld_dk * self.value_bytes
        sums.dv = self.dv_rows + row * sums.ld_dv * self.value_bytes

    cdef int64_t row_bytes(self, int64_t width) noexcept nogil:
        """Return the bytes of an accumulator row, a multiple of 64."""
        return (width * self.value_bytes + 63) // 64 * 64

    cdef int64_t start(self, int step) noexcept nogil:
        if step == -1:
            return self.all_heads
        if step == 0:
            return self.unit_count
        if step == 1:
            return self.count_tasks(self.merge_variants, kMergesAtOnce, 1)
        if step == 2:
            return self.all_heads if self.call.dsinks is not NULL else 0
        if step == 3 and not self.in_place and not self.by_thread:
            return self.unit_count // self.per_head * self.tasks_per_head()
        return -1

    cdef int64_t tasks_per_head(self) noexcept nogil:
        return (self.kv_len + kKeysAtOnce - 1) // kKeysAtOnce

    cdef void run_task(self, int step, int64_t task, int thread) noexcept nogil:
        cdef int64_t piece
        if step == -1:
            self.normalise(task, thread)
        elif step == 0:
            if self.by_thread:
                self.place_sums(self.sums + task, thread * self.kv_len)
            self.run_unit(self.units[task], self.sums[task], thread)
            if self.by_thread:
                for piece in range(self.tasks_per_head()):
                    self.add_units(task, piece * kKeysAtOnce, thread)
        elif step == 1:
            self.merge_with(self.kernels.merge_dq, task, thread)
        elif step == 2:
            self.kernels.sink_gradient(self.call, task // self.heads, task % self.heads,
                                       self.scratch + thread * self.scratch_bytes)
        else:
            self.add_units(task // self.tasks_per_head(), task % self.tasks_per_head() * kKeysAtOnce, thread)

    cdef void normalise(self, int64_t number, int thread) noexcept nogil:
        """Run the items of a head sequentially, because several of them may update the same row."""
        cdef int64_t item
        for item in range(self.work_indptr[self.variant[number]], self.work_indptr[self.variant[number] + 1]):
            if not self.proceed(thread):
                return
            self.kernels.normalise(self.call, number // self.heads, number % self.heads,
                                   self.call.plan.work[item], self.scratch + thread * self.scratch_bytes)

    cdef void run_unit(self, const Unit& unit, const Sums& sums, int thread) noexcept nogil:
        cdef const Call* call
        cdef int64_t key, head, variant, item, before = 0
        cdef int64_t first = unit.head_kv * self.call.group
        for key in range(unit.end - unit.begin):
            memset(sums.dk + key * sums.ld_dk * self.value_bytes, 0, self.row_bytes(self.call.head_dim))
            memset(sums.dv + key * sums.ld_dv * self.value_bytes, 0, self.row_bytes(self.call.head_dim_v))
        for head in range(first, first + self.call.group):
            variant = self.variant[unit.batch * self.heads + head]
            item = self.work_indptr[variant] + max(unit.first - before, <int64_t>0)
            before += self.work_indptr[variant + 1] - self.work_indptr[variant]
            for item in range(item, self.work_indptr[variant + 1] - max(before - unit.last, <int64_t>0)):
                if not self.proceed(thread):
                    return
                call = &self.silent if self.adding is not NULL and not self.adding[item] else &self.call
                self.kernels.run(call[0], unit.batch, head, call.plan.work[item], sums,
                                 self.scratch + thread * self.scratch_bytes)

    cdef void add_units(self, int64_t number, int64_t begin, int thread) noexcept nogil:
        self.kernels.add_units(self.call, number // self.heads_kv, number % self.heads_kv,
                               self.sums + number * self.per_head, self.per_head, begin,
                               min(begin + kKeysAtOnce, self.kv_len), self.scratch + thread * self.scratch_bytes)


def exact_sums(int64_t[:, ::1] words, double[::1] out):
    """Write the sums that exact accumulators hold, (n, SUM_WORDS), to `out`: kernels/softmax/table_gradients.h."""
    cdef int64_t i
    with nogil:
        for i in range(words.shape[0]):
            out[i] = exact_sum(&words[i, 0])


def forward(Prepared prepared, q, k, v, out, lse, double scale, int threads, instead=None, score=None, sinks=None,
            dropout=None):
    """Write attention to `out` and `lse` on at most `threads` threads; return whether a row is non-finite.

    A row may be non-finite only because a masked key is. After such a result, the caller repeats the call with
    `instead`, the result of :func:`._nonfinite.without` for `v`, unless that is None. If `prepared` has a score
    program, `score` is its _score.Bound. `sinks` is None or a (heads_q,) array of lse's dtype, `dropout` None or a
    request.dropout.DropoutWords.
    """
    cdef Forward run = Forward.__new__(Forward)
    run.begin(prepared, (q, k, v, out, lse), scale, score, sinks, dropout, threads)
    run.make_room(instead, threads)
    return run.execute(threads)


def backward(Prepared prepared, split, dout, q, k, v, out, lse, dlse, dq, dk, dv, double scale, int threads,
             instead=None, score=None, sinks=None, dsinks=None, sink_rows=None, dropout=None):
    """Write gradients to `dq`, `dk` and `dv`, and add those of tables to the arrays that `score` names. `split` holds
    the Units of the plan for these heads, and `prepared` was created with their work items. `dlse` may be None;
    `instead` replaces `k`. With `sinks`, write the exact sums of their gradients over `sink_rows`, (q_len,) bool
    or None for all, to `dsinks`, (batch, heads_q, SUM_WORDS) int64, unless that is None. Return value as for
    :func:`forward`.
    """
    cdef Backward run = Backward.__new__(Backward)
    run.begin(prepared, (q, k, v, out, lse), scale, score, sinks, dropout, threads)
    run.make_room((dout, dlse, dq, dk, dv), split, instead, dsinks, sink_rows, threads)
    if score is not None and score.items_of_tables is not None:
        run.silence(score, split.work)
    return run.execute(threads)
