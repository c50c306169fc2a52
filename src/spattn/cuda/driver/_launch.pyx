# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""The driver calls of a launch, called at their addresses: ctypes takes longer for one than the driver does.

Nothing here links against CUDA, so that it is built, and imported, on machines without.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from .errors import error

ctypedef int (*GetCurrent)(void** context) noexcept nogil
ctypedef int (*IsCapturing)(void* stream, int* found) noexcept nogil
ctypedef int (*LaunchKernelEx)(const void* config, void* function, void** parameters, void** extra) noexcept nogil


cdef struct Config:
    # CUlaunchConfig of cuda.h.
    unsigned int grid[3]
    unsigned int block[3]
    unsigned int shared_bytes
    void* stream
    void* attributes
    unsigned int attribute_count


def current_context(size_t get_current):
    """The raw handle of the context that is current in this thread, 0 for none.

    Parameters
    ----------
    get_current : int
        Address of cuCtxGetCurrent.
    """
    cdef void* context = NULL
    cdef int status = (<GetCurrent>get_current)(&context)
    return 0 if status else <size_t>context


def is_capturing(size_t is_capturing_at, size_t stream):
    """Whether a stream is being captured into a graph.

    Parameters
    ----------
    is_capturing_at : int
        Address of cuStreamIsCapturing.
    stream : int
        Raw handle.
    """
    cdef int found = 0
    cdef int status = (<IsCapturing>is_capturing_at)(<void*>stream, &found)
    if status:
        raise error(status, "cuStreamIsCapturing")
    return found != 0


cdef class Launch:
    """A prepared launch: a kernel, its grid and its parameters. Reusable, not thread-safe.

    Parameters
    ----------
    kernel : Kernel
        Of :mod:`spattn.cuda.driver.launch`.
    blocks : int
        Of the grid.
    params : bytes
        The kernel's only parameter, passed by value.
    stream : int
        Raw handle.
    counter_at : int, optional
        Where in `params` the address of a work counter stands, another one each time.
    """

    cdef Config config
    cdef bytearray params
    cdef char* first
    cdef char* counter
    cdef void* function
    cdef LaunchKernelEx start

    def __init__(self, kernel, unsigned int blocks, bytes params, size_t stream, counter_at=None):
        if len(params) != kernel.params_bytes:
            raise ValueError(f"params: expected {kernel.params_bytes} bytes, got {len(params)}")
        last = len(params) - sizeof(uint64_t)
        if counter_at is not None and not 0 <= counter_at <= last:
            raise ValueError(f"counter_at: expected 0 … {last}, got {counter_at}")
        self.params = bytearray(params)  # stays where it is: its size does not change
        self.first = self.params
        self.counter = NULL if counter_at is None else self.first + <size_t>counter_at
        self.function, self.start = <void*><size_t>kernel.handle, <LaunchKernelEx><size_t>kernel.start
        self.config = Config([blocks, 1, 1], [kernel.threads, 1, 1], kernel.shared_bytes, <void*>stream, NULL, 0)


def start(list launches, next_counter=None):
    """Start launches in their order; the device's context must be current. The driver has copied everything when this
    returns.

    Parameters
    ----------
    next_counter : callable, optional
        () to the address of a work counter that no launch in flight uses.
    """
    cdef Launch launch
    cdef uint64_t counter
    cdef void* parameters[1]
    cdef int status
    for launch in launches:
        if launch.counter is not NULL:
            counter = next_counter()
            memcpy(launch.counter, &counter, sizeof(counter))
        parameters[0] = launch.first
        with nogil:  # the driver waits where its queue is full, and a function in a stream may want Python
            status = launch.start(&launch.config, launch.function, parameters, NULL)
        if status:
            raise error(status, "cuLaunchKernelEx")
