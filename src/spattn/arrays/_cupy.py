"""All that knows CuPy."""

from __future__ import annotations

import sys

from ._kind import ArrayKind


class CuPy(ArrayKind):
    """CuPy."""

    name = "cupy"

    def __init__(self) -> None:
        self.module = sys.modules["cupy"]

    def is_plain(self, x):
        return type(x) is self.module.ndarray

    def signature(self, *arrays):
        return self, *[(x.dtype, x.device.id, x.shape, x.strides) for x in arrays]

    def device(self, x):
        return f"cuda:{x.device.id}"

    def to_host(self, x):
        return x.get()


KIND = CuPy()
