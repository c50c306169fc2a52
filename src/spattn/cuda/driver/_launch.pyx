# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""The driver calls of a launch, called at their addresses: ctypes takes longer for one than the driver does.

Nothing here links against CUDA, so that it is built, and imported, on machines without.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from .errors import error

ctypedef int (*GetCurrent)(void** context) noexcept nogil
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
    """

    cdef Config config
    cdef bytearray params
    cdef char* first
    cdef void* function
    cdef LaunchKernelEx start

    def __init__(self, kernel, unsigned int blocks, bytes params, size_t stream):
        if len(params) != kernel.params_bytes:
            raise ValueError(f"params: expected {kernel.params_bytes} bytes, got {len(params)}")
        self.params = bytearray(params)  # stays where it is: its size does not change
        self.first = self.params
        self.function, self.start = <void*><size_t>kernel.handle, <LaunchKernelEx><size_t>kernel.start
        self.config = Config([blocks, 1, 1], [kernel.threads, 1, 1], kernel.shared_bytes, <void*>stream, NULL, 0)

    def __call__(self, size_t at=0, word=None):
        """Start it; the device's context must be current. The driver has copied everything when this returns.

        Parameters
        ----------
        at, word : int
            Eight bytes of the parameter to replace first.
        """
        cdef uint64_t value
        cdef void* parameters[1]
        cdef int status
        if word is not None:
            if at + sizeof(value) > <size_t>len(self.params):
                raise ValueError(f"at: expected 0 … {len(self.params) - sizeof(value)}, got {at}")
            value = word
            memcpy(self.first + at, &value, sizeof(value))
        parameters[0] = self.first
        with nogil:  # the driver waits where its queue is full, and a function in a stream may want Python
            status = self.start(&self.config, self.function, parameters, NULL)
        if status:
            raise error(status, "cuLaunchKernelEx")
