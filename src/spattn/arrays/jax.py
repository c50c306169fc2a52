"""JAX arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .namespace import ArrayNamespace
from .operand import Operand, row_major


class Jax(ArrayNamespace):
    """JAX arrays."""

    name = "jax"

    def __init__(self) -> None:
        self.module = sys.modules["jax"]

    def is_plain(self, x: Any) -> bool:
        return not isinstance(x, self.module.core.Tracer)

    def oddity(self, x: Any) -> str | None:
        if isinstance(x, self.module.core.Tracer):
            return (
                "a tracer, which has no values; call this outside of jax.jit, jax.grad and jax.vmap, or use "
                "spattn.jax.attention inside"
            )
        devices = len(x.devices())
        return f"an array on {devices} devices; use jax.device_put(x, device)" if devices > 1 else None

    def cache_key(self, *arrays: Any) -> tuple[Any, ...] | None:
        return self, *[(x.shape, None, x.dtype, x.sharding) for x in arrays]

    def device(self, x: Any) -> str:
        device = next(iter(x.devices()))
        name = {"gpu": "cuda"}.get(device.platform, device.platform)
        return "cpu" if name == "cpu" else f"{name}:{device.local_hardware_id}"

    def from_numpy(self, x: np.ndarray) -> Any:
        return self.module.numpy.asarray(x)

    def on_device(self, x: np.ndarray, like: Any) -> Any:
        return self.module.device_put(x, next(iter(like.devices())))

    # -- in device memory ---------------------------------------------------------------------------------------------

    def ordinal(self, x: Any) -> int | None:
        device = next(iter(x.devices()))
        return None if device.platform == "cpu" else device.local_hardware_id

    def resolve(self, x: Any) -> Any:
        return x.block_until_ready()

    def operand(self, x: Any) -> Operand:
        return Operand(x.unsafe_buffer_pointer(), x.shape, row_major(x.shape))

    def full(self, like: Any, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        device = next(iter(like.devices()))
        return self.module.device_put(self.module.numpy.full(shape, value, dtype=dtype), device)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None) -> Any:
        # Kernels may write to this new array: its values are already computed, and users cannot write to it.
        return self.full(like, shape, dtype, 0).block_until_ready()


KIND = Jax
