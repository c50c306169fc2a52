"""XLA buffers: the form in which a compiled JAX program passes arrays to a foreign function."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .namespace import ArrayNamespace
from .operand import Operand, row_major

__all__ = ["Buffer", "Execution", "Xla"]


class Execution(Protocol):
    """The context of one execution of a foreign function; `ordinal` is the CUDA device, None for the host."""

    ordinal: int | None

    def stream(self) -> int:
        """Return the raw handle of XLA's stream."""

    def result(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        """Return the next result buffer that XLA allocated and no one has taken."""

    def allocate(self, nbytes: int) -> int:
        """Return the address of device memory that lives until the execution ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """An array, or only its shape and dtype if it has no address and execution; `strides` of None are row-major."""

    shape: tuple[int, ...]
    dtype: Any
    pointer: int = 0
    execution: Execution | None = None
    strides: tuple[int, ...] | None = None
    """In elements."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> Buffer:
        """Return a part with the given slices of the first axes, of step 1."""
        strides = self.strides or row_major(self.shape)
        ranges = [range(n)[part] for n, part in zip(self.shape, index, strict=False)]
        offset = sum(part.start * step for part, step in zip(ranges, strides, strict=False))
        shape = *map(len, ranges), *self.shape[len(ranges) :]
        return Buffer(shape, self.dtype, self.pointer + offset * self.dtype.itemsize, self.execution, strides)


class Xla(ArrayNamespace):
    """XLA buffers, which error messages call JAX arrays."""

    name = "jax"

    def is_plain(self, x: Any) -> bool:
        return True

    def cache_key(self, *arrays: Any) -> tuple[Any, ...] | None:
        return self, *[(x.shape, x.strides, x.dtype, self.ordinal(x)) for x in arrays]

    def device(self, x: Any) -> str:
        ordinal = self.ordinal(x)
        return "cpu" if ordinal is None else f"cuda:{ordinal}"

    def to_numpy(self, x: Any) -> np.ndarray:
        memory = (ctypes.c_char * (math.prod(x.shape) * x.dtype.itemsize)).from_address(x.pointer)
        return np.ndarray(x.shape, x.dtype, memory)

    # -- in device memory ---------------------------------------------------------------------------------------------

    def ordinal(self, x: Any) -> int | None:
        return None if x.execution is None else x.execution.ordinal

    def operand(self, x: Any) -> Operand:
        return Operand(x.pointer, x.shape, x.strides or row_major(x.shape))

    def seed(self, x: Any) -> tuple[int, Any] | None:  # programs pass its low and high words
        return x.pointer, x.execution

    def stream(self, x: Any) -> int | None:
        return x.execution.stream()

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None) -> Any:
        return like.execution.result(shape, dtype)

    def allocate(self, like: Any, nbytes: int) -> tuple[int, Any]:
        return like.execution.allocate(nbytes), like.execution
