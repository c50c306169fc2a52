"""Kernels of both passes, loaded at first use."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ..driver.device import Device
from ..driver.launch import Kernel, kernel
from .params import structs_of
from .variants import Variant, variant

__all__ = ["load", "load_common"]


def load(device: Device, variant: Variant, more_macros: Iterable[tuple[str, object]] = ()) -> Kernel:
    """The kernel of a variant; the device's context must be current."""
    source, macros, _ = variant
    entry = source.rpartition("/")[2].removesuffix(".cu").partition("_")[0]  # attention_mma.cu defines attention()
    return kernel(device, source, device.arch, macros | dict(more_macros), structs_of(source), entry)


@functools.cache
def load_common(device: Device, source: str, dtype: str) -> Kernel:
    """A kernel that depends on the dtype only."""
    return load(device, variant(source, dtype))
