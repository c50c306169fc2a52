"""Load the kernels of both passes at first use; the device's context must be current."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...request.score import Score
from ..driver.device import Device
from ..driver.launch import Kernel, kernel
from ..host.score import score_macros
from ..host.sinks import sink_macros
from .params import structs_of
from .variants import Variant, variant

__all__ = ["load", "load_common"]


@functools.lru_cache(1024)  # bounded: parameters of score functions may change from call to call
def load(
    device: Device, score: Score | None, sinks: bool, find: Callable[..., list[Variant]], *problem: Any
) -> list[tuple[Kernel, int]]:
    """Return kernels, with their rows per CTA, for the variants ``find(*problem, device.shared_bytes)``."""
    found, macros = find(*problem, device.shared_bytes), score_macros(score) | sink_macros(sinks)
    return [(_kernel(device, own.source, own.macros | macros), own.rows) for own in found]


@functools.cache
def load_common(device: Device, source: str, dtype: str, sinks: bool = False) -> Kernel:
    """Return a kernel that depends on the dtype, and on whether there are sinks, only."""
    own = variant(source, dtype)
    return _kernel(device, own.source, own.macros | sink_macros(sinks))


def _kernel(device: Device, source: str, macros: dict[str, object]) -> Kernel:
    entry = source.rpartition("/")[2].removesuffix(".cu").partition("_")[0]  # attention_mma.cu defines attention()
    return kernel(device, source, device.arch, macros, structs_of(source), entry)
