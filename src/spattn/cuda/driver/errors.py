"""Exceptions for CUDA errors."""

from __future__ import annotations

from typing import Any

# Errors after which every CUDA call in the process fails (CUDA driver API, CUresult).
STICKY = frozenset({214, 220, 226, 700, 702, 710, 713, 714, 715, 716, 717, 718, 719, 721, 911, 999})
OUT_OF_MEMORY = 2
NOT_INITIALISED = 3
NO_DEVICE = 100


class CudaError(RuntimeError):
    """A CUDA call failed.

    Attributes
    ----------
    code : int
        CUresult of the driver, 0 if unknown.
    sticky : bool
        True if the context is lost: every later CUDA call in the process fails, including those of other libraries.
    """

    def __init__(self, call: str, code: int, text: str):
        self.code = code
        self.sticky = code in STICKY
        after = "; the CUDA context is lost and the process must restart" if self.sticky else ""
        super().__init__(f"{call} failed with CUDA error {code}: {text}{after}")


def check(result: tuple[Any, ...], call: str = "CUDA call") -> Any:
    """Return the values of a ``cuda.bindings.driver`` call, or raise MemoryError or CudaError for its status."""
    status, *values = result
    code = int(status)
    if code:
        raise error(code, call)
    return values[0] if len(values) == 1 else tuple(values)


def error(code: int, call: str) -> Exception:
    """Return the exception for a CUresult."""
    if code == OUT_OF_MEMORY:
        return MemoryError(f"{call}: the GPU is out of memory")
    if code == NOT_INITIALISED:
        return CudaError(
            call, code, "CUDA is not initialised; a forked process needs the multiprocessing method 'spawn'"
        )
    from cuda.bindings import driver

    _, text = driver.cuGetErrorString(driver.CUresult(code))
    return CudaError(call, code, text.decode() if text else "unknown error")
