"""Interface of an array backend, and its NumPy implementation."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from .operand import Operand

DTYPES = ("float32", "float64", "float16", "bfloat16")
FLOAT8 = "float8_e4m3fn"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def dtype_name(x: Any) -> str:
    """Return the name of the dtype without the library prefix: 'float32', 'bfloat16', 'int64', ..."""
    return _name(x.dtype)


@functools.cache  # str(dtype) takes microseconds in NumPy
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


class ArrayNamespace:
    """The interface to an array library."""

    name: str

    def is_plain(self, x: Any) -> bool:
        """Return whether :meth:`cache_key` describes arrays of this class completely, apart from their values."""
        raise NotImplementedError

    def functions(self) -> Any:
        """Return the library's array namespace, with ``where``, ``exp``, ``maximum``, ..."""
        return sys.modules["jax.numpy" if self.name == "jax" else self.name]

    def oddity(self, x: Any) -> str | None:
        """Return why an array is more than the values in its memory, and the remedy; None for a plain array.

        Reading only the memory would silently drop a mask, a structure or an active transformation.
        """
        return None

    def cache_key(self, *arrays: Any) -> tuple[Any, ...] | None:
        """See :func:`spattn.arrays.cache_key`; all arrays are of one class and satisfy :meth:`is_plain`."""
        raise NotImplementedError

    def device(self, x: Any) -> str:
        """Return 'cpu', 'cuda:N' with the device ordinal N, or the library's name of another device ('mps:0')."""
        return "cpu"

    def to_numpy(self, x: Any) -> np.ndarray:
        """View a host array as NumPy, without a copy if the library allows it."""
        return np.asarray(x)

    def to_host(self, x: Any) -> np.ndarray:
        """Convert an array on any device to NumPy."""
        return np.asarray(x)

    def from_numpy(self, x: np.ndarray) -> Any:
        """Convert a NumPy result to a host array of this library."""
        return x

    def on_device(self, x: np.ndarray, like: Any) -> Any:
        """Copy a NumPy array to the device of `like`, an array of this library."""
        return self.from_numpy(x)

    def wants_gradient(self, x: Any) -> bool:
        """Return whether the library currently tracks gradients or tangents of this array."""
        return False

    def autocast(self, *operands: Any) -> tuple[Any, ...] | None:
        """Cast the operands to the library's autocast dtype, as one operation; None if nothing changes."""
        return None

    def traced(self) -> bool:
        """Return whether the library is tracing or transforming the caller.

        Arrays may then have no values, and the trace records only the library's own operators.
        """
        return False

    def recorder(self, *operands: Any) -> Callable[..., tuple[Any, Any]] | None:
        """Return a function that computes attention and records its gradient; None if no gradient is required.

        It takes (backward, forward, q, k, v, scale) and returns ``forward(q, k, v, scale)``, i.e. out and lse.
        `backward` is called as ``backward(dout, q, k, v, out, lse, dlse=, scale=)``.
        """
        return None

    # The methods below are for libraries with device memory and, except `ordinal`, only for arrays in device memory.
    # They read addresses through the library's API, because ``__cuda_array_interface__`` lacks bfloat16.

    def ordinal(self, x: Any) -> int | None:
        """Return the CUDA device ordinal; None for host memory."""
        return None

    def resolve(self, x: Any) -> Any:
        """Materialize lazy values, on the caller's stream if possible."""
        return x

    def operand(self, x: Any) -> Operand:
        """Return the array's address, shape, and strides in elements."""
        raise NotImplementedError

    def seed(self, x: Any) -> tuple[int, Any] | None:
        """Return the address of the 64 bits of an integer, and their owner; None if `x` is no integer.

        The caller may change `x` afterwards. By default None: the host reads `x`.
        """
        return None

    def stream(self, x: Any) -> int | None:
        """Return the raw handle of the caller's stream; None if the library does not expose it."""
        return None

    def full(self, like: Any, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """Return a new array with a constant value on the device of `like`."""
        raise NotImplementedError

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None) -> Any:
        """Return a new array on the device of `like`; `order` lists its axes from slowest to fastest in memory."""
        raise NotImplementedError

    def allocate(self, like: Any, nbytes: int) -> tuple[int, Any]:
        """Allocate memory from the library's stream-ordered allocator: (address, owner), (0, None) if it has none."""
        return 0, None


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype with this name, which may be bfloat16."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


class NumPy(ArrayNamespace):
    """NumPy arrays, always in host memory."""

    name = "numpy"

    def is_plain(self, x: Any) -> bool:
        return type(x) is np.ndarray

    def oddity(self, x: Any) -> str | None:
        if type(x) is np.ndarray:
            return None
        masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
        return "a masked array; use .filled() and pass the mask as a pattern" if isinstance(x, masked) else None

    def cache_key(self, *arrays: Any) -> tuple[Any, ...] | None:
        return self, *[(x.shape, x.strides, x.dtype) for x in arrays]
