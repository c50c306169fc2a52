# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Call the driver through function addresses; ctypes would take longer than the driver itself.

This module does not link against CUDA, so that it builds and imports where CUDA is missing.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from .errors import error

ctypedef int (*GetCurrent)(void** context) noexcept nogil
ctypedef int (*IsCapturing)(void* stream, int* found) noexcept nogil
ctypedef int (*ReplaceAddress)(void* tensor_map, void* address) noexcept nogil
ctypedef int (*LaunchKernelEx)(const void* config, void* function, void** parameters, void** extra) noexcept nogil


cdef enum:
    ALIGNMENT = 64  # bytes; required of a tensor map
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
        self.counter = NULL if counter_at is None else self.word("counter_at", counter_at)
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
