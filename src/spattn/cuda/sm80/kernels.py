"""Kernels of both passes, loaded at first use."""

from __future__ import annotations

from ..driver.device import Device
from ..driver.launch import Kernel, kernel
from .params import structs_of
from .variants import Variant

__all__ = ["load"]


def load(device: Device, variant: Variant) -> Kernel:
    """The kernel of a variant; the device's context must be current."""
    source, macros, _ = variant
    entry = source.rpartition("/")[2].removesuffix(".cu").partition("_")[0]  # attention_mma.cu defines attention()
    return kernel(device, source, device.arch, macros, structs_of(source), entry)
