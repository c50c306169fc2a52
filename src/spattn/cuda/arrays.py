"""Device arrays of PyTorch, CuPy and JAX: where they lie, on which stream to work, and new ones of the same kind.

Pointers come from each library's own accessor: ``__cuda_array_interface__`` has no bfloat16.
"""

from __future__ import annotations

import sys
from typing import Any

from .._arrays import dtype_name, kind
from .params import Operand


def ordinal(x: Any) -> int | None:
    """CUDA's number of the device that holds an array; None for arrays in host memory."""
    match kind(x):
        case "torch":
            return x.device.index if x.device.type == "cuda" else None
        case "cupy":
            return x.device.id
        case "jax":
            device = next(iter(x.devices()))
            return None if device.platform == "cpu" else device.local_hardware_id
    return None


def resolve(x: Any) -> Any:
    """The array with its values written down: PyTorch can hold a negation as a flag, JAX a computation under way."""
    match kind(x):
        case "torch":
            return x.resolve_neg()
        case "jax":
            return x.block_until_ready()
    return x


def operand(x: Any) -> Operand:
    """Address, shape and strides in elements."""
    match kind(x):
        case "torch":
            return Operand(x.data_ptr(), tuple(x.shape), x.stride())
        case "cupy":
            return Operand(x.data.ptr, x.shape, tuple(step // x.itemsize for step in x.strides))
    return Operand(x.unsafe_buffer_pointer(), x.shape, row_major(x.shape))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


def stream(x: Any) -> int | None:
    """Raw handle of the stream that the caller works on; None where the library has none to share (JAX)."""
    match kind(x):
        case "torch":
            return sys.modules["torch"].cuda.current_stream(x.device).cuda_stream
        case "cupy":
            with x.device:
                return sys.modules["cupy"].cuda.get_current_stream().ptr
    return None


def full(like: Any, shape: tuple[int, ...], dtype: str, value: float) -> Any:
    """A new array of one value, of the kind and on the device of `like`."""
    match kind(like):
        case "torch":
            torch = sys.modules["torch"]
            return torch.full(shape, value, dtype=getattr(torch, dtype), device=like.device)
        case "cupy":
            with like.device:
                return sys.modules["cupy"].full(shape, value, dtype=_cupy_dtype(like, dtype))
    jax = sys.modules["jax"]
    return jax.device_put(jax.numpy.full(shape, value, dtype=dtype), next(iter(like.devices())))


def empty(like: Any, shape: tuple[int, ...], dtype: str, order: tuple[int, ...]) -> Any:
    """A new array of the kind and on the device of `like`, with its axes in memory in this order, slowest first.

    JAX arrays are immutable to their users; this one is new and computed, so nobody else reads or writes its memory.
    """
    inner = tuple(shape[axis] for axis in order)
    back = tuple(order.index(axis) for axis in range(len(order)))
    match kind(like):
        case "torch":
            torch = sys.modules["torch"]
            return torch.empty(inner, dtype=getattr(torch, dtype), device=like.device).permute(back)
        case "cupy":
            with like.device:
                return sys.modules["cupy"].empty(inner, dtype=_cupy_dtype(like, dtype)).transpose(back)
    return full(like, shape, dtype, 0).block_until_ready()


def allocate(like: Any, nbytes: int) -> tuple[int, Any]:
    """(address, owner) of memory from the allocator of `like`'s library, which reuses it in the order of the stream.

    JAX has no such allocator; (0, None) asks the caller to bring its own.
    """
    match kind(like):
        case "torch":
            torch = sys.modules["torch"]
            owner = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
            return owner.data_ptr(), owner
        case "cupy":
            with like.device:
                owner = sys.modules["cupy"].cuda.alloc(nbytes)
            return owner.ptr, owner
    return 0, None


def memory_order(x: Operand) -> tuple[int, ...]:
    """Axes of `x`, slowest in memory first and the last always last: a result so laid out can be reshaped as `x` can.

    Axes of one element have no order of their own and stay where (batch, heads, rows) has them.
    """
    longer = [axis for axis in range(3) if x.shape[axis] > 1]
    ranked = iter(sorted(longer, key=lambda axis: -abs(x.strides[axis])))
    return (*(next(ranked) if axis in longer else axis for axis in range(3)), 3)


def _cupy_dtype(like: Any, dtype: str) -> Any:
    return like.dtype if dtype_name(like) == dtype else dtype
