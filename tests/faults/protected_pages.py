"""Every array of a call beside a page that nobody may touch; test_memory.py runs it in processes of its own.

python tests/faults/protected_pages.py avx512 after        # prints "intact", or ends by a signal
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import math
import mmap
import sys
from unittest import mock

import numpy as np

import spattn
from spattn import cpu, patterns
from spattn.testing import DTYPES, inputs, random

_NO_ACCESS = 0  # PROT_NONE, which mmap does not have
LENGTHS = [(1, 1), (1, 67), (17, 31), (49, 65), (97, 193), (3, 2051)]  # the last one has pieces and merges
HEAD_DIMS = [(1, 1), (3, 5), (15, 17), (33, 31), (63, 65), (128, 101), (255, 256)]
PATTERNS = [patterns.Causal(), patterns.DilatedWindow(3, 3, 4), patterns.longformer(8, global_tokens=1)]
LAYOUTS = {
    "rows": lambda x, copy: copy(x),
    "reversed": lambda x, copy: copy(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1],
    "tokens first": lambda x, copy: copy(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
}


def beside_protected_page(shape, dtype, side) -> np.ndarray:
    """An array whose first byte is the first one after such a page (`side` "before"), or whose last byte is the last
    one before it ("after"). Linux only."""
    dtype, page = np.dtype(dtype), mmap.PAGESIZE
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    room = math.ceil(max(nbytes, 1) / page) * page
    pages = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    protected, first = (0, page) if side == "before" else (room, room - nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + protected), ctypes.c_size_t(page), _NO_ACCESS) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")
    return np.ndarray(shape, dtype, pages, first)


def copy_beside(x, side) -> np.ndarray:
    """A copy of it there, in C order."""
    copy = beside_protected_page(x.shape, x.dtype, side)
    copy[...] = x
    return copy


@contextlib.contextmanager
def allocations_beside(side):
    """While it lasts, what the core allocates stands there: results and workspace."""

    def empty(shape, dtype=float):
        return beside_protected_page(shape, dtype, side)

    def empty_like(like, *, shape=None, subok=True):
        return beside_protected_page(like.shape if shape is None else shape, like.dtype, side)

    class NumPy:
        """What the backend makes `out` with, whose memory order is its own."""

        def __getattr__(self, name):
            return getattr(np, name)

        @staticmethod
        def ndarray(shape, dtype, buffer, offset, strides):
            return np.ndarray(shape, dtype, beside_protected_page(math.prod(shape), dtype, side), offset, strides)

    with (
        mock.patch.object(np, "empty", empty),
        mock.patch.object(np, "empty_like", empty_like),
        mock.patch.object(cpu, "np", NumPy()),
    ):
        yield


def results(isa, plan, dlse, dout, q, k, v) -> list[np.ndarray]:
    """out, lse, dq, dk, dv."""
    out, lse = cpu.forward(q, k, v, plan, 0.3, isa=isa)
    return [out, lse, *cpu.backward(dout, q, k, v, out, lse, plan, 0.3, dlse=dlse, isa=isa)]


def check(isa, side, arrays, pattern) -> None:
    """The same bits as from ordinary memory, in every layout."""
    plan, q = spattn.plan_for(pattern, *arrays[1:], backend="cpu"), arrays[1]
    dlse = random(q.shape[:3], np.promote_types(q.dtype, np.float32), seed=8)
    expected = results(isa, plan, dlse, *arrays)
    dlse = copy_beside(dlse, side)
    moved = {name: copy_beside(x, side) for name, x in vars(plan).items() if isinstance(x, np.ndarray)}
    plan = dataclasses.replace(plan, **moved)
    for name, lay in LAYOUTS.items():
        laid = [lay(x, lambda x: copy_beside(x, side)) for x in arrays]
        with allocations_beside(side):
            got = results(isa, plan, dlse, *laid)
        for x, y in zip(got, expected, strict=True):
            assert np.array_equal(x, y), (name, pattern, [x.shape for x in arrays])


def main(isa, side) -> None:
    sizes = list(itertools.product(LENGTHS, HEAD_DIMS))[::3]  # there are 7 head_dims: each meets two lengths
    for dtype, ((q_len, kv_len), dims) in itertools.product(DTYPES, sizes):
        q, k, v = inputs(1, 2, 1, q_len, kv_len, *dims, dtype=dtype)
        dout = random((*q.shape[:3], v.shape[3]), dtype, seed=9)
        for pattern in PATTERNS:
            check(isa, side, (dout, q, k, v), pattern)
    print("intact")


if __name__ == "__main__":
    main(*sys.argv[1:])
