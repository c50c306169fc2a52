"""Arrays of PyTorch, CuPy, JAX and NumPy: where they lie, on which stream to work, and new ones of the same kind.

Pointers come from each library's own accessor: ``__cuda_array_interface__`` has no bfloat16.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import _arrays
from .call import Operand

IN_ORDER = (0, 1, 2, 3)


class Library:
    """What the backend needs of a library, for arrays in device memory."""

    def __init__(self, name: str):
        self.module = sys.modules[name]
        self._names: dict[Any, str] = {}

    def dtype(self, x: Any) -> str:
        """The element type's name without its library."""
        found = self._names.get(x.dtype)
        if found is None:
            found = self._names[x.dtype] = _arrays.dtype_name(x)
        return found

    def ordinal(self, x: Any) -> int | None:
        """CUDA's number of the device that holds an array; None for host memory."""
        raise NotImplementedError

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


class Torch(Library):
    """PyTorch."""

    def __init__(self, name):
        super().__init__(name)
        self._dtypes = {name: getattr(self.module, name) for name in _arrays.DTYPES}

    def ordinal(self, x):
        return x.device.index if x.device.type == "cuda" else None

    def resolve(self, x):
        return x.resolve_neg()  # a negation may be a flag on the tensor

    def operand(self, x):
        return Operand(x.data_ptr(), tuple(x.shape), x.stride())

    def stream(self, x):
        # What torch.cuda.current_stream(x.device).cuda_stream returns, without making a Stream first.
        return self.module._C._cuda_getCurrentRawStream(x.device.index)

    def full(self, like, shape, dtype, value):
        return like.new_full(shape, value, dtype=self._dtypes[dtype])

    def empty(self, like, shape, dtype, order=None):
        shape, back = in_order(shape, order)
        made = like.new_empty(shape, dtype=self._dtypes[dtype])
        return made if back is None else made.permute(back)

    def allocate(self, like, nbytes):
        owner = like.new_empty(nbytes, dtype=self.module.uint8)
        return owner.data_ptr(), owner


class CuPy(Library):
    """CuPy."""

    def ordinal(self, x):
        return x.device.id

    def operand(self, x):
        return Operand(x.data.ptr, x.shape, tuple(step // x.itemsize for step in x.strides))

    def stream(self, x):
        with x.device:
            return self.module.cuda.get_current_stream().ptr

    def full(self, like, shape, dtype, value):
        with like.device:
            return self.module.full(shape, value, dtype=_numpy_dtype(dtype))

    def empty(self, like, shape, dtype, order=None):
        shape, back = in_order(shape, order)
        with like.device:
            made = self.module.empty(shape, dtype=_numpy_dtype(dtype))
        return made if back is None else made.transpose(back)

    def allocate(self, like, nbytes):
        with like.device:
            owner = self.module.cuda.alloc(nbytes)
        return owner.ptr, owner


class Jax(Library):
    """JAX, whose streams are its own: inputs are waited for, and results are finished when they are returned."""

    def ordinal(self, x):
        device = next(iter(x.devices()))
        return None if device.platform == "cpu" else device.local_hardware_id

    def resolve(self, x):
        return x.block_until_ready()

    def operand(self, x):
        return Operand(x.unsafe_buffer_pointer(), x.shape, row_major(x.shape))

    def full(self, like, shape, dtype, value):
        device = next(iter(like.devices()))
        return self.module.device_put(self.module.numpy.full(shape, value, dtype=dtype), device)

    def empty(self, like, shape, dtype, order=None):
        # JAX arrays are immutable to their users; this one is new and computed, so nobody else uses its memory.
        return self.full(like, shape, dtype, 0).block_until_ready()


class NumPy(Library):
    """NumPy: always in host memory."""

    def ordinal(self, x):
        return None


_KINDS = {"torch": Torch, "cupy": CuPy, "jax": Jax, "numpy": NumPy}
_libraries: dict[str, Library] = {}
_by_type: dict[type, Library] = {}


def library(x: Any) -> Library:
    """The library of an array.

    Raises
    ------
    TypeError
        If it is not an array of a library that is known here.
    """
    found = _by_type.get(type(x))
    if found is None:
        kind = _arrays.kind(x)
        if kind is None:
            raise TypeError(f"q: expected a NumPy, PyTorch, CuPy or JAX array, got {type(x).__name__}")
        found = _by_type[type(x)] = _libraries.setdefault(kind, _KINDS[kind](kind))
    return found


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


def memory_order(x: Operand) -> tuple[int, ...]:
    """Axes of `x`, slowest in memory first and the last always last: a result so laid out can be reshaped as `x` can.

    Axes of one element have no order of their own and stay where (batch, heads, rows) has them.
    """
    if x.strides[0] >= x.strides[1] >= x.strides[2]:
        return IN_ORDER
    longer = [axis for axis in range(3) if x.shape[axis] > 1]
    ranked = iter(sorted(longer, key=lambda axis: -abs(x.strides[axis])))
    return (*(next(ranked) if axis in longer else axis for axis in range(3)), 3)


def in_order(shape, order):
    """The shape with its axes in `order`, and the permutation back; None where there is nothing to permute."""
    if order is None or order == IN_ORDER:
        return shape, None
    return tuple(shape[axis] for axis in order), tuple(order.index(axis) for axis in range(len(order)))


def _numpy_dtype(name: str) -> np.dtype:
    return _arrays.BFLOAT16 if name == "bfloat16" else np.dtype(name)
