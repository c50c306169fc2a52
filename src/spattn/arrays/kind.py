"""What spattn asks of a kind of arrays, and NumPy's answers."""

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
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def dtype_name(x: Any) -> str:
    """The element type's name without its library: 'float32', 'bfloat16', 'int64', ..."""
    return _name(x.dtype)


@functools.cache  # NumPy takes microseconds to spell a name
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


class ArrayKind:
    """Arrays of one library, whose name is `name`."""

    name: str

    def is_plain(self, x: Any) -> bool:
        """Whether :meth:`signature` tells of arrays of x's class all that matters, but for their values."""
        raise NotImplementedError

    def functions(self) -> Any:
        """The module of the library's functions on arrays: ``where``, ``exp``, ``maximum``, ..."""
        return sys.modules["jax.numpy" if self.name == "jax" else self.name]

    def oddity(self, x: Any) -> str | None:
        """What an array is besides the values in its memory, and the way out; None for a plain array.

        To read the memory alone would lose it in silence: a mask, a structure, a transformation that is under way.
        """
        return None

    def signature(self, *arrays: Any) -> tuple[Any, ...] | None:
        """See :func:`spattn.arrays.signature`; the arrays are of one class and :meth:`is_plain`.

        The kind, then for each array its shape, its strides and whatever else there is to it.
        """
        raise NotImplementedError

    def device(self, x: Any) -> str:
        """'cpu', 'cuda:N', or the library's own name of another device: 'mps:0', 'tpu:3'; N is its number."""
        return "cpu"

    def to_numpy(self, x: Any) -> np.ndarray:
        """A host array seen as NumPy, without copying where the library allows."""
        return np.asarray(x)

    def to_host(self, x: Any) -> np.ndarray:
        """The same for an array anywhere, copied from its device."""
        return np.asarray(x)

    def from_numpy(self, x: np.ndarray) -> Any:
        """A NumPy result as an array of this kind, in host memory."""
        return x

    def wants_gradient(self, x: Any) -> bool:
        """Whether the library would record a gradient through this array now, or carry its tangent on."""
        return False

    def autocast(self, *operands: Any) -> tuple[Any, ...] | None:
        """The operands of attention in the dtype that the library's mixed precision asks for; None where they have it.

        Attention is one call then, of one dtype, whatever the operations before it returned.
        """
        return None

    def traced(self) -> bool:
        """Whether the library follows calls now, to write them into a graph or to transform them.

        Arrays may have no values then, and only the library's own operators are followed.
        """
        return False

    def recorder(self, *operands: Any) -> Callable[..., tuple[Any, Any]] | None:
        """What computes attention so that the library records its gradient; None where it would record none.

        It takes a backward, a forward, q, k, v and the scale, and returns what the forward makes of the last four: out
        and lse. The backward takes dout, q, k, v, out and lse, and as keywords dlse and the scale.
        """
        return None

    # What follows is asked of kinds whose arrays may lie in device memory, and but for `ordinal` only of such arrays.
    # Addresses come from the library's own accessors: ``__cuda_array_interface__`` has no bfloat16.

    def ordinal(self, x: Any) -> int | None:
        """CUDA's number of the device that holds an array; None for host memory."""
        return None

    def resolve(self, x: Any) -> Any:
        """The array with its values written down, or being written on the caller's stream."""
        return x

    def operand(self, x: Any) -> Operand:
        """Address, shape and strides in elements."""
        raise NotImplementedError

    def stream(self, x: Any) -> int | None:
        """Raw handle of the stream that the caller works on; None where the library has none to share."""
        return None

    def full(self, like: Any, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """A new array of one value, of the kind and on the device of `like`."""
        raise NotImplementedError

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None) -> Any:
        """A new array of the kind and on the device of `like`, its axes in memory in this order, slowest first."""
        raise NotImplementedError

    def allocate(self, like: Any, nbytes: int) -> tuple[int, Any]:
        """(address, owner) of memory from the library's allocator, which reuses it in the order of the stream.

        (0, None) asks the caller to bring its own.
        """
        return 0, None


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of this name, bfloat16 included."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


class NumPy(ArrayKind):
    """NumPy: always in host memory."""

    name = "numpy"

    def is_plain(self, x: Any) -> bool:
        return type(x) is np.ndarray

    def oddity(self, x: Any) -> str | None:
        if type(x) is np.ndarray:
            return None
        masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
        return "a masked array; use .filled(), and a pattern for what is not allowed" if isinstance(x, masked) else None

    def signature(self, *arrays: Any) -> tuple[Any, ...] | None:
        return self, *[(x.shape, x.strides, x.dtype) for x in arrays]
