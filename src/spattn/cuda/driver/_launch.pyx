# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Call the driver through function addresses; ctypes would take longer than the driver itself.

This module does not link against CUDA, so that it builds and imports where CUDA is missing.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from .errors import error

ctypedef int (*GetCurrent)(void** context) noexcept nogil
ctypedef int (*IsCapturing)(void* stream, int* found) noexcept nogil
ctypedef int (*ReplaceAddress)(void* tensor_map, void* address) noexcept nogil
ctypedef int (*EncodeTiled)(
    void* tensor_map, int dtype, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
    const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill
) noexcept nogil
ctypedef int (*CopyToDevice)(uint64_t device, const void* host, size_t nbytes, void* stream) noexcept nogil
ctypedef int (*LaunchKernelEx)(const void* config, void* function, void** parameters, void** extra) noexcept nogil


cdef enum:
    ALIGNMENT = 64  # bytes; required of a tensor map
    MAP_BYTES = 128
    RANK = 5  # of all tensor maps
    L2_256B = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    TABLES = 8  # addresses of tables, and of arrays, in the parameters: cuda/sm90/forward/params.py
    ARRAYS = 8
    EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


cdef struct Attribute:
    # CUlaunchAttribute of cuda.h; its union has 64 bytes.
    int number, unused
    int value[16]


cdef struct Config:
    # CUlaunchConfig of cuda.h.
    unsigned int grid[3]
    unsigned int block[3]
    unsigned int shared_bytes
    void* stream
    void* attributes
    unsigned int attribute_count


def current_context(size_t get_current):
    """Return the handle of this thread's current context, 0 if none; `get_current` is cuCtxGetCurrent's address."""
    cdef void* context = NULL
    cdef int status = (<GetCurrent>get_current)(&context)
    return 0 if status else <size_t>context


cdef class Nothing:
    """Null context manager, faster than contextlib's."""

    def __enter__(self):
        return self

    def __exit__(self, kind, raised, trace):
        return None


def is_capturing(size_t is_capturing_at, size_t stream):
    """True if a graph capture records the stream (raw handle); `is_capturing_at` is cuStreamIsCapturing's address."""
    cdef int found = 0
    cdef int status = (<IsCapturing>is_capturing_at)(<void*>stream, &found)
    if status:
        raise error(status, "cuStreamIsCapturing")
    return found != 0


def address_of(bytearray memory):
    """Return the address of memory that is not resized."""
    return <size_t><char*>memory


def copy_to_device(size_t copy, uint64_t pointer, size_t host, size_t nbytes, size_t stream):
    """Enqueue a copy from host memory on a stream (raw handle); `copy` is cuMemcpyHtoDAsync_v2's address."""
    cdef int status
    with nogil:  # the driver waits if the queue is full
        status = (<CopyToDevice>copy)(pointer, <void*>host, nbytes, <void*>stream)
    if status:
        raise error(status, "cuMemcpyHtoDAsync")


cdef char* map_in(bytearray image, Py_ssize_t at) except NULL:
    if not 0 <= at <= len(image) - MAP_BYTES:
        raise ValueError(f"at: expected 0 … {len(image) - MAP_BYTES}, got {at}")
    return <char*>image + at


cdef char* aligned(char* raw) noexcept nogil:
    return raw + -<size_t>raw % ALIGNMENT


def encode_map(size_t encode, bytearray image, Py_ssize_t at, form, operand, spec, batch=None):
    """Write a tensor map at byte `at` of `image`; return the offset in bytes of its origin from the array's address.

    `encode` is cuTensorMapEncodeTiled's address, `form` the map's (CUtensorMapDataType, itemsize, columns of a box,
    swizzle), `operand` an Operand, `spec` its MapSpec. `batch` is the batch entry to read, None if batch and head are
    one axis.
    """
    cdef int dtype, swizzle, status, axis
    cdef int64_t itemsize, token, offset, step
    cdef uint64_t[RANK] sizes
    cdef uint64_t[RANK - 1] strides
    cdef uint32_t[RANK] box
    cdef uint32_t[RANK] ones
    cdef char[MAP_BYTES + ALIGNMENT] raw
    cdef char* target = map_in(image, at)
    cdef size_t address
    dtype, itemsize, box[0], swizzle = form
    pointer, (entries, heads, _, features), of_axes = operand
    origin, extents, steps, boxes = spec
    token = of_axes[2] * itemsize
    offset = origin * token + (0 if batch is None else batch * of_axes[0] * itemsize)
    sizes[0], sizes[RANK - 1] = features, entries * heads if batch is None else heads
    box[RANK - 1] = 1
    for axis in range(RANK - 1):
        step = steps[axis] * token if axis < RANK - 2 else of_axes[1] * itemsize
        if axis < RANK - 2:
            sizes[axis + 1], box[axis + 1] = extents[axis], boxes[axis]
        # The encoder requires a valid stride even for an axis of one cell.
        strides[axis] = step if step > 0 and sizes[axis + 1] > 1 else 16
    for axis in range(RANK):
        ones[axis] = 1
    address = (<size_t>pointer + <size_t>offset) // 16 * 16  # calls with unaligned addresses read no map
    status = (<EncodeTiled>encode)(
        aligned(raw), dtype, RANK, <void*>address, sizes, strides, box, ones, 0, swizzle, L2_256B, 0
    )
    if status:
        raise error(status, f"cuTensorMapEncodeTiled for {spec} over {operand}")
    memcpy(target, aligned(raw), MAP_BYTES)
    return offset


def replace_address(size_t replace, bytearray image, Py_ssize_t at, size_t address):
    """Point the tensor map at byte `at` of `image` to another array of the same shape and strides; `replace` is
    cuTensorMapReplaceAddress's address."""
    cdef char[MAP_BYTES + ALIGNMENT] raw
    cdef char* target = map_in(image, at)
    memcpy(aligned(raw), target, MAP_BYTES)
    cdef int status = (<ReplaceAddress>replace)(aligned(raw), <void*>address)
    if status:
        raise error(status, "cuTensorMapReplaceAddress")
    memcpy(target, aligned(raw), MAP_BYTES)


cdef struct MovingMap:
    size_t at, address, step


cdef class Launch:
    """A prepared launch: a kernel, its grid and its parameters. Reusable, not thread-safe.

    Parameters
    ----------
    kernel : Kernel
        From :mod:`spattn.cuda.driver.launch`.
    blocks : int
        Number of CTAs.
    params : bytes
        The kernel's only parameter, passed by value.
    stream : int
        Raw handle.
    counter_at : int, optional
        Offset in `params` at which start() stores the address of a task counter.
    moving : Moving, optional
        Fields of `params` that depend on kv_len; `params` holds their values for `moving.moved`.
    early : bool
        Programmatic dependent launch: the kernel calls griddepcontrol.wait itself. Ignored if the driver cannot
        capture such launches in a graph.
    """

    cdef Config config
    cdef Attribute attribute
    cdef bytearray params
    cdef char* first
    cdef char* counter
    cdef void* function
    cdef LaunchKernelEx start
    cdef ReplaceAddress replace
    cdef char* moved_at
    cdef int64_t moved
    cdef bytearray maps
    cdef Py_ssize_t map_count

    def __init__(
        self, kernel, unsigned int blocks, bytes params, size_t stream, counter_at=None, moving=None, bint early=False
    ):
        if len(params) != kernel.params_bytes:
            raise ValueError(f"params: expected {kernel.params_bytes} bytes, got {len(params)}")
        # `params` is never resized, so pointers into it stay valid; tensor maps are aligned and modified in place.
        self.params = bytearray(len(params) + ALIGNMENT)
        self.first = self.params
        self.first += -<size_t>self.first % ALIGNMENT
        memcpy(self.first, <char*>params, len(params))
        self.counter = NULL
        if counter_at is not None:
            self.counter = self.word("counter_at", counter_at)
        self.moved_at = NULL
        if moving is not None:
            self.replace, self.moved = <ReplaceAddress><size_t>moving.replace, moving.moved
            self.moved_at = self.word("moved_at", moving.moved_at)
            self.map_count = len(moving.maps)
            self.maps = bytearray(self.map_count * sizeof(MovingMap))
            for n, (at, address, step) in enumerate(moving.maps):
                (<MovingMap*><char*>self.maps)[n] = MovingMap(self.word("map", at) - self.first, address, step)
        self.function, self.start = <void*><size_t>kernel.handle, <LaunchKernelEx><size_t>kernel.start
        self.config = Config([blocks, 1, 1], [kernel.threads, 1, 1], kernel.shared_bytes, <void*>stream, NULL, 0)
        if early and kernel.starts_early:
            self.attribute.number, self.attribute.value[0] = EARLY, 1
            self.config.attributes, self.config.attribute_count = &self.attribute, 1

    cdef char* word(self, name, at) except NULL:
        last = len(self.params) - ALIGNMENT - sizeof(uint64_t)
        if not 0 <= at <= last:
            raise ValueError(f"{name}: expected 0 … {last}, got {at}")
        return self.first + <size_t>at

    cdef int move(self, int64_t moved) except -1:
        # Modulo 2^64: `moved` may be negative.
        cdef MovingMap* maps = <MovingMap*><char*>self.maps
        cdef int status
        for n in range(self.map_count):
            status = self.replace(self.first + maps[n].at, <void*>(maps[n].address + <size_t>moved * maps[n].step))
            if status:
                raise error(status, "cuTensorMapReplaceAddress")
        memcpy(self.moved_at, &moved, sizeof(moved))
        self.moved = moved
        return 0


def start(list launches, next_counter=None, int64_t moved=0):
    """Start launches in order; the device's context must be current. On return the driver has copied all parameters.

    `next_counter` returns the address of a task counter that no launch in flight uses; `moved` is kv_len minus the
    plan's kv_len.
    """
    cdef Launch launch
    cdef uint64_t counter
    cdef void* parameters[1]
    cdef int status
    for launch in launches:
        if launch.counter is not NULL:
            counter = next_counter()
            memcpy(launch.counter, &counter, sizeof(counter))
        if launch.moved_at is not NULL and launch.moved != moved:
            launch.move(moved)
        parameters[0] = launch.first
        with nogil:  # cuLaunchKernelEx blocks if the queue is full, and a host function in the stream may need Python
            status = launch.start(&launch.config, launch.function, parameters, NULL)
        if status:
            raise error(status, "cuLaunchKernelEx")


cdef struct Place:
    # Of a tensor map: offset in the parameters, index of its array, and bytes from the array's address to its origin.
    Py_ssize_t at
    int64_t array, origin


STEP_FIELDS = {  # bytes of the fields of parameters that StepParams sets, from their offsets on
    "q": 8 * ARRAYS, "scale_log2": 8, "score": 8, "q_offset": 4, "partial_rows": 8, "k_stride": 24, "v_stride": 24,
    "tasks": 8 * TABLES, "task_count": 4, "kv_len": 4, "counter": 8,
}


cdef class StepParams:
    """Parameters of launches of one kernel, for any addresses of q, k, v and out, other keys and other tables.

    Parameters
    ----------
    kernel : Kernel
    image : bytes
        Parameters of one launch.
    at : dict of str to int
        Offsets of the fields that :meth:`of` and :meth:`StepLaunch.launch` set.
    maps : list of (int, int, int)
        Offset, index of the array and origin of each tensor map. Those of k and v have `spec`, and sizes and strides
        of the arrays, with `forms`: see :func:`encode_map`.
    entry_maps : int
        Number of tensor maps of a batch entry, 0 if batch and head are one axis.
    encode, replace : int
        Addresses of cuTensorMapEncodeTiled and cuTensorMapReplaceAddress.
    """

    cdef object kernel, forms, spec
    cdef bytes image
    cdef list maps
    cdef size_t encode, replace
    cdef int64_t entry_maps
    cdef readonly Py_ssize_t counter_at
    cdef Py_ssize_t calls_at, scale_at, score_at, tables_at, tasks_at, length_at, last_at, rows_at
    cdef Py_ssize_t[2] strides_at

    def __init__(
        self, kernel, bytes image, dict at, list maps, forms, spec, int64_t entry_maps, size_t encode, size_t replace
    ):
        for name, nbytes in STEP_FIELDS.items():
            if not 0 <= at[name] <= len(image) - nbytes:
                raise ValueError(f"at: expected 0 … {len(image) - nbytes} for {name}, got {at[name]}")
        self.kernel, self.image, self.maps, self.forms, self.spec = kernel, image, maps, forms, spec
        self.entry_maps, self.encode, self.replace = entry_maps, encode, replace
        self.counter_at, self.calls_at = at["counter"], at["q"]
        self.scale_at, self.score_at = at["scale_log2"], at["score"]
        self.tables_at, self.tasks_at, self.length_at = at["tasks"], at["task_count"], at["kv_len"]
        self.last_at, self.rows_at = at["q_offset"], at["partial_rows"]
        self.strides_at[0], self.strides_at[1] = at["k_stride"], at["v_stride"]

    def of(self, k, v, tuple tables, int32_t tasks, int64_t partial_rows, int32_t q_len, unsigned int blocks):
        """Return the launch of `blocks` CTAs for keys of any length and strides, and tables at these addresses."""
        cdef bytearray params = bytearray(self.image)
        cdef char* to = params
        cdef vector[Place] places
        cdef int64_t number = 0, stride
        cdef int32_t kv_len, last
        cdef uint64_t pointer
        cdef Py_ssize_t n, axis
        kv_len, (origin, extents, steps, box) = k[1][2], self.spec
        spec = origin, (kv_len, *extents[1:]), steps, box
        if len(tables) != TABLES:
            raise ValueError(f"tables: expected {TABLES} addresses, got {len(tables)}")
        for at, array, start in self.maps:
            if array == 1 or array == 2:
                batch = number // self.entry_maps if self.entry_maps else None
                start = encode_map(self.encode, params, at, self.forms[array], k if array == 1 else v, spec, batch)
            map_in(params, at)
            places.push_back(Place(at, array, start))
            number += 1
        last = kv_len - q_len
        memcpy(to + self.last_at, &last, sizeof(last))
        memcpy(to + self.length_at, &kv_len, sizeof(kv_len))
        memcpy(to + self.tasks_at, &tasks, sizeof(tasks))
        memcpy(to + self.rows_at, &partial_rows, sizeof(partial_rows))
        for n, operand in enumerate((k, v)):
            for axis in range(3):
                stride = operand[2][axis]
                memcpy(to + self.strides_at[n] + axis * sizeof(stride), &stride, sizeof(stride))
        for n in range(TABLES):
            pointer = tables[n]
            memcpy(to + self.tables_at + n * sizeof(pointer), &pointer, sizeof(pointer))
        cdef StepLaunch made = StepLaunch.__new__(StepLaunch)
        made.of, made.params, made.places, made.blocks = self, bytes(params), places, blocks
        return made


cdef class StepLaunch:
    """Makes the launches of a step for any addresses; from :meth:`StepParams.of`."""

    cdef StepParams of
    cdef readonly bytes params
    cdef vector[Place] places
    cdef unsigned int blocks

    def launch(self, tuple arrays, float scale_log2, float sign, uint64_t score, size_t stream, bint early):
        """Return a launch. `arrays` are the addresses of q, k, v, out, lse, partials, their lse, and sinks."""
        cdef Launch made = Launch(self.of.kernel, self.blocks, self.params, stream, self.of.counter_at, None, early)
        cdef uint64_t[ARRAYS] pointers
        cdef Py_ssize_t n
        cdef Place place
        cdef int status
        if len(arrays) != ARRAYS:
            raise ValueError(f"arrays: expected {ARRAYS} addresses, got {len(arrays)}")
        for n in range(ARRAYS):
            pointers[n] = arrays[n]
        memcpy(made.first + self.of.calls_at, pointers, sizeof(pointers))
        memcpy(made.first + self.of.scale_at, &scale_log2, sizeof(float))
        memcpy(made.first + self.of.scale_at + sizeof(float), &sign, sizeof(float))
        memcpy(made.first + self.of.score_at, &score, sizeof(score))
        for place in self.places:
            status = (<ReplaceAddress>self.of.replace)(
                made.first + place.at, <void*>(pointers[place.array] + <uint64_t>place.origin)
            )
            if status:
                raise error(status, "cuTensorMapReplaceAddress")
        return made
