"""CUDA's errors as Python exceptions that say what to do next."""

from __future__ import annotations

from typing import Any

# Codes after which every later call in the process fails: the context is lost (CUDA driver API, CUresult).
STICKY = frozenset({214, 220, 226, 700, 702, 710, 713, 714, 715, 716, 717, 718, 719, 721, 911, 999})
OUT_OF_MEMORY = 2
NOT_INITIALISED = 3
NO_DEVICE = 100


class CudaError(RuntimeError):
    """A CUDA call failed.

    Attributes
    ----------
    code : int
        The driver's CUresult, 0 where it is not known.
    sticky : bool
        Whether the process has lost the GPU: every later CUDA call in it fails, those of other libraries included.
    """

    def __init__(self, call: str, code: int, text: str):
        self.code = code
        self.sticky = code in STICKY
        after = "; the process has lost the GPU and must restart" if self.sticky else ""
        super().__init__(f"{call} failed with CUDA error {code}: {text}{after}")


def check(result: tuple[Any, ...], call: str = "CUDA call") -> Any:
    """Return what a call of ``cuda.bindings.driver`` returned, or raise what its status says.

    Raises
    ------
    MemoryError
        If the device is out of memory.
    CudaError
        For any other failure.
    """
    status, *values = result
    code = int(status)
    if code:
        raise error(code, call)
    return values[0] if len(values) == 1 else tuple(values)


def error(code: int, call: str) -> Exception:
    """The exception for a CUresult."""
    if code == OUT_OF_MEMORY:
        return MemoryError(f"{call}: the GPU is out of memory")
    if code == NOT_INITIALISED:
        return CudaError(call, code, "CUDA cannot start; a forked process needs the multiprocessing method 'spawn'")
    from cuda.bindings import driver

    _, text = driver.cuGetErrorString(driver.CUresult(code))
    return CudaError(call, code, text.decode() if text else "unknown error")
