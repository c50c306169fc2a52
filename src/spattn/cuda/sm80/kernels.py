"""Requests for the kernels of both passes, and their loading at first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..driver.device import Device
from ..driver.launch import Kernel, Request, kernel, load_kernels
from ..host.sinks import sink_macros
from .params import structs_of
from .variants import Variant, variant

__all__ = ["captured_request", "common_request", "load", "load_common", "requests"]


@functools.lru_cache(1024)
def load(
    device: Device,
    text: str,
    sinks: bool,
    find: Callable[..., list[Variant]],
    *problem: Any,
    beside: tuple[str, ...] = (),
) -> list[tuple[Kernel, int]]:
    """Return kernels, with their rows per CTA, for the variants ``find(*problem, device.shared_bytes)``; `text` is the
    C++ of their score function. The device's context must be current.

    Also load the sources `beside` for :func:`load_common`, so that all kernels of a call are compiled at once.
    """
    found = requests(device, text, sinks, find, *problem)
    rows = [own.rows for own in find(*problem, device.shared_bytes)]
    common = [common_request(device, source, problem[0], sinks) for source in beside]
    return list(zip(load_kernels(device, found + common), rows, strict=False))


def requests(
    device: Device, text: str, sinks: bool, find: Callable[..., list[Variant]], *problem: Any
) -> list[Request]:
    """Return the requests for the kernels that :func:`load` returns."""
    macros = sink_macros(sinks)
    return [_request(device, own.source, own.macros | macros, text) for own in find(*problem, device.shared_bytes)]


def captured_request(device: Device, own: Variant, text: str, tables: int) -> Request:
    """Return the request for the kernel for gradients of captured arrays."""
    return _request(device, own.source, own.macros, text, tables)


@functools.cache
def load_common(device: Device, source: str, dtype: str, sinks: bool = False) -> Kernel:
    """Return a kernel that depends only on the dtype and on whether there are sinks; the device's context must be
    current."""
    return kernel(device, common_request(device, source, dtype, sinks))


def common_request(device: Device, source: str, dtype: str, sinks: bool = False) -> Request:
    """Return the request for the kernel that :func:`load_common` returns."""
    own = variant(source, dtype)
    return _request(device, own.source, own.macros | sink_macros(sinks))


def _request(device: Device, source: str, macros: dict[str, object], text: str = "", tables: int = 0) -> Request:
    entry = source.rpartition("/")[2].removesuffix(".cu").partition("_")[0]  # attention_mma.cu defines attention()
    return Request(source, device.arch, macros, structs_of(source, tables), entry, text)
