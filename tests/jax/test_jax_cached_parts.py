"""Attention of a KV cache in a program on a GPU, with a driver and kernels that use the host's memory."""

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.api import cached_rows
from spattn.arrays.operand import Operand
from spattn.arrays.xla import Buffer

pytest.importorskip("jax")

from spattn.jax import _foreign  # noqa: E402

STREAMING = p.Causal() & (p.Sinks(2) | p.SlidingWindow(3, 0))


def buffer(x, execution):
    return Buffer(x.shape, x.dtype, x.ctypes.data, execution)


def read(x):
    """The values of a buffer, by its address and strides."""
    at: Operand = _foreign.XLA.operand(x)
    size = x.dtype.itemsize
    last = sum((n - 1) * step for n, step in zip(at.shape, at.strides, strict=True)) + 1
    flat = np.frombuffer((ctypes.c_char * (last * size)).from_address(at.pointer), x.dtype)
    return np.lib.stride_tricks.as_strided(flat, at.shape, [n * size for n in at.strides])


class Execution:
    ordinal = 0

    def __init__(self, *results):
        self.memory, self.results = [], [buffer(x, self) for x in results]

    def stream(self):
        return 7

    def allocate(self, nbytes):
        self.memory.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(self.memory[-1])


class Driver:
    CUDA_MEMCPY2D = SimpleNamespace
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE=2)

    def cuMemcpyDtoHAsync(self, to, source, nbytes, stream):
        assert stream == 7
        ctypes.memmove(to, source, nbytes)

    def cuStreamSynchronize(self, stream):
        assert stream == 7

    def cuMemcpy2DAsync(self, copy, stream):
        assert stream == 7 and copy.srcMemoryType == copy.dstMemoryType == 2
        assert copy.WidthInBytes <= min(copy.srcPitch, copy.dstPitch)
        for row in range(copy.Height):
            at = copy.dstDevice + row * copy.dstPitch, copy.srcDevice + row * copy.srcPitch
            ctypes.memmove(*at, copy.WidthInBytes)


@pytest.mark.parametrize("pattern", [STREAMING, p.Causal(), p.Causal() & p.BigBird(4, seed=1)], ids=repr)
@pytest.mark.parametrize("new", [(3, 3, 3), (3, 1, 3), (2, 0, 2), (1, 2, 3)])
def test_parts_of_a_batch(pattern, new, monkeypatch):
    """Each entry reads its columns of the cache, and writes its rows alone."""
    rng = np.random.default_rng(0)
    max_len, chunk = 40, 4
    cache = spattn.KVCache(pattern, max_len, batch=3, heads_kv=2, head_dim=4, chunk=chunk)
    for lengths in ((20, 20, 17), (5, 5, 8)):
        cache.append(*rng.standard_normal((2, 3, 2, 20, 4), dtype=np.float32), lengths=lengths)
    q = rng.standard_normal((3, 4, 3, 4), dtype=np.float32)
    out, lse = np.full((3, 4, 3, 4), 9.0, np.float32), np.full((3, 4, 3), 9.0, np.float32)
    execution = Execution(out, lse)
    calls = []

    def attention(q, k, v, pattern, return_lse, sinks, **options):
        given = [read(x) for x in (q, k, v)]
        calls.append(q.shape)
        found = spattn.attention(*given, pattern, return_lse=True, **options)
        results = [q.execution.result(x.shape, x.dtype.name) for x in found]
        for result, x in zip(results, found, strict=True):
            read(result)[...] = x
        return results

    monkeypatch.setattr(cached_rows, "attention", attention)
    monkeypatch.setattr(
        _foreign, "_cuda", lambda: (Driver(), lambda ordinal: contextlib.nullcontext(), lambda *_: None)
    )
    numbers = np.stack([cache.lengths, cache._columns, new]).astype(np.int32)
    operands = [buffer(x, execution) for x in (q, cache._k, cache._v, numbers)]
    options = _foreign.Options("", 0.5, "auto", None, max_len=max_len, chunk=chunk)
    same = {"scale": 0.5, "backend": "auto", "precision": None}
    assert _foreign._cached_attention(options, *operands, pattern=pattern, **same) is execution.results
    monkeypatch.undo()
    want = cache.attention(q, lengths=new, scale=0.5, return_lse=True)
    for entry, count in enumerate(new):
        for got, expected in zip((out, lse), want, strict=True):
            np.testing.assert_allclose(got[entry, :, :count], expected[entry, :, :count], atol=1e-6)
            assert (got[entry, :, count:] == 9).all()
    assert (len(execution.memory) == 0) == (calls == [q.shape])
