"""CuPy arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .namespace import ArrayNamespace, numpy_dtype
from .operand import Operand, in_order


class CuPy(ArrayNamespace):
    """CuPy arrays."""

    name = "cupy"

    def __init__(self) -> None:
        self.module = sys.modules["cupy"]

    def is_plain(self, x: Any) -> bool:
        return type(x) is self.module.ndarray

    def cache_key(self, *arrays: Any) -> tuple[Any, ...] | None:
        return self, *[(x.shape, x.strides, x.dtype, x.device.id) for x in arrays]

    def device(self, x: Any) -> str:
        return f"cuda:{x.device.id}"

    def to_host(self, x: Any) -> np.ndarray:
        return x.get()

    def on_device(self, x: np.ndarray, like: Any) -> Any:
        with like.device:
            return self.module.asarray(x)

    # -- in device memory ---------------------------------------------------------------------------------------------

    def ordinal(self, x: Any) -> int | None:
        return x.device.id

    def operand(self, x: Any) -> Operand:
        return Operand(x.data.ptr, x.shape, tuple(step // x.itemsize for step in x.strides))

    def stream(self, x: Any) -> int | None:
        with x.device:
            return self.module.cuda.get_current_stream().ptr

    def full(self, like: Any, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        with like.device:
            return self.module.full(shape, value, dtype=numpy_dtype(dtype))

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None) -> Any:
        shape, back = in_order(shape, order)
        with like.device:
            made = self.module.empty(shape, dtype=numpy_dtype(dtype))
        return made if back is None else made.transpose(back)

    def allocate(self, like: Any, nbytes: int) -> tuple[int, Any]:
        with like.device:
            owner = self.module.cuda.alloc(nbytes)
        return owner.ptr, owner


KIND = CuPy
