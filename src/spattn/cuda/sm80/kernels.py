"""Load the kernels of both passes at first use; the device's context must be current."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..driver import compile
from ..driver.device import Device
from ..driver.launch import Kernel, kernel
from ..host.sinks import sink_macros
from .params import structs_of
from .variants import Variant, variant

__all__ = ["compile_captured", "load", "load_captured", "load_common"]


@functools.lru_cache(1024)
def load(
    device: Device, text: str, sinks: bool, find: Callable[..., list[Variant]], *problem: Any
) -> list[tuple[Kernel, int]]:
    """Return kernels, with their rows per CTA, for the variants ``find(*problem, device.shared_bytes)``; `text` is the
    C++ of their score function."""
    found, macros = find(*problem, device.shared_bytes), sink_macros(sinks)
    return [(_kernel(device, own.source, own.macros | macros, text), own.rows) for own in found]


def load_captured(device: Device, own: Variant, text: str, tables: int) -> Kernel:
    """Return the kernel for gradients of captured arrays."""
    return _kernel(device, own.source, own.macros, text, tables)


def compile_captured(device: Device, own: Variant, text: str, tables: int) -> None:
    """Compile the kernel that :func:`load_captured` returns, from any thread, into the cache on disk."""
    compile.cubin(own.source, device.arch, own.macros, structs_of(own.source, tables), text)


@functools.cache
def load_common(device: Device, source: str, dtype: str, sinks: bool = False) -> Kernel:
    """Return a kernel that depends only on the dtype and on whether there are sinks."""
    own = variant(source, dtype)
    return _kernel(device, own.source, own.macros | sink_macros(sinks))


def _kernel(device: Device, source: str, macros: dict[str, object], text: str = "", tables: int = 0) -> Kernel:
    entry = source.rpartition("/")[2].removesuffix(".cu").partition("_")[0]  # attention_mma.cu defines attention()
    return kernel(device, source, device.arch, macros, structs_of(source, tables), entry, text)
