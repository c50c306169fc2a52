"""FFI targets for the host and GPUs, with handlers in Python.

Handlers are ctypes callbacks that read XLA's C structs, so nothing is compiled or linked against XLA.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import dispatch
from .._util.imports import whole_imports
from ..api.cached_rows import CachedRows
from ..arrays import add_plain
from ..arrays.namespace import numpy_dtype
from ..arrays.xla import Buffer, Xla
from ..patterns import Pattern, from_json
from ..patterns.base.in_graphs import restored
from ..score.serialized import restore
from . import _c_api as c_api
from ._at_work import at_work
from ._execution import Execution, new_error

__all__ = ["ATTENTION", "ATTENTION_BACKWARD", "CACHED_ATTENTION", "XLA", "Options"]

XLA = Xla()
add_plain(Buffer, XLA)


class Options(NamedTuple):
    """Static arguments of a call, stored in the program.

    `score` is the serialized score function, its floats and its integers; None is the identity. `sinks` says whether
    there are sinks, and `tables` how many arrays the function captures. With dropout, there is a seed, the low and the
    high 32 bits. `arrays` is the number of the pattern's operands. They are the last operands, in this order. `max_len`
    and `chunk` are those of a KV cache.
    """

    pattern: str
    scale: float
    backend: str
    precision: str | None
    score: tuple[str, tuple[float, ...], tuple[int, ...]] | None = None
    sinks: bool = False
    tables: int = 0
    dropout_p: float = 0.0
    arrays: int = 0
    max_len: int = 0
    chunk: int = 0

    @property
    def captured(self) -> int:
        """Number of operands behind the attention's own."""
        return self.sinks + self.tables + (self.dropout_p != 0) + self.arrays

    @property
    def text(self) -> str:
        """Return the serialized form, which is passed as the call's attribute."""
        return json.dumps(self)


@functools.lru_cache(maxsize=32)
def _options_of(text: str) -> tuple[Options, dict[str, Any]]:
    """Return the options, and the static arguments of the dispatch."""
    options = Options(*json.loads(text))
    same = {"scale": options.scale, "backend": options.backend, "precision": options.precision}
    return options, same if options.arrays else same | {"pattern": from_json(options.pattern)}


def _split(options: Options, operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the attention's own operands, and arguments of the dispatch: score function, sinks and dropout."""
    own = len(operands) - options.captured
    rest = iter(operands[own:])
    sinks = next(rest) if options.sinks else None
    tables = tuple(next(rest) for _ in range(options.tables))
    score = None if options.score is None else restore(*options.score, tables)
    seed = next(rest) if options.dropout_p else None
    if seed is not None and XLA.ordinal(seed) is None:
        seed = XLA.to_numpy(seed).view(np.uint64)[0]
    same = {"score": score, "sinks": sinks, "dropout_p": options.dropout_p, "seed": seed}
    if options.arrays:
        same["pattern"] = restored(options.pattern, [_on_host(x) for x in rest])
    return operands[:own], same


def _on_host(x: Buffer) -> np.ndarray:
    """Return the values of an operand; on a GPU, wait for them."""
    ordinal = XLA.ordinal(x)
    if ordinal is None:
        return XLA.to_numpy(x)
    driver, get, check = _cuda()
    host, stream = np.empty(x.shape, x.dtype), XLA.stream(x)
    with get(ordinal):
        if host.nbytes:
            check(driver.cuMemcpyDtoHAsync(host.ctypes.data, x.pointer, host.nbytes, stream), "cuMemcpyDtoHAsync")
        check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
    return host


def _cuda() -> tuple[Any, Any, Any]:
    with whole_imports:
        from cuda.bindings import driver

        from ..cuda.driver.device import get
        from ..cuda.driver.errors import check
    return driver, get, check


def _attention(options: Options, *operands: Any, **same: Any) -> Any:
    (q, k, v), modified = _split(options, operands)
    return dispatch.attention(q, k, v, return_lse=True, **same, **modified)


def _attention_backward(options: Options, *operands: Any, **same: Any) -> Any:
    (dout, dlse, q, k, v, out, lse), modified = _split(options, operands)
    *found, last = dispatch.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **same, **modified)
    if options.score is None:
        return *found, last
    dcaptured, dsinks = (found.pop(), (last,)) if options.sinks else (last, ())
    return *found, *dcaptured, *dsinks


@functools.lru_cache(maxsize=32)
def cached_rows(pattern: Pattern, max_len: int, chunk: int) -> CachedRows:
    """Return the rows of a pattern for caches, which share what they remember."""
    return CachedRows(pattern, max_len, chunk)


def _cached_attention(options: Options, *operands: Any, pattern: Pattern, **same: Any) -> Any:
    """Compute attention of the newest tokens to a cache; an operand has lengths, columns and numbers of queries."""
    execution = operands[0].execution
    on_gpu = XLA.ordinal(operands[0]) is not None
    (q, k, v, numbers), modified = _split(options, operands if on_gpu else tuple(map(XLA.to_numpy, operands)))
    lengths, columns, new = _on_host(numbers) if on_gpu else numbers
    wrong = np.flatnonzero((lengths < 0) | (lengths > options.max_len))
    if len(wrong):
        has, most = lengths[wrong[0]], options.max_len
        why = f"has {has} of {most} tokens" if has > 0 else "was cropped to dropped keys, or got wrong numbers"
        raise ValueError(f"KVCache: batch entry {wrong[0]} {why}; make a larger cache, or reset this one")
    if (new < 0).any():
        raise ValueError(f"lengths: expected integers in [0, {q.shape[2]}]")
    rows, score, sinks = cached_rows(pattern, options.max_len, options.chunk), modified["score"], modified["sinks"]
    counts = (x.astype(np.int64) for x in (lengths, columns, new))
    if on_gpu:  # rows without a query stay undefined: the program replaces them
        q = replace(q, execution=_Parts(execution))
    found = rows.attention(q, k, v, *counts, score=score, sinks=sinks, return_lse=True, **same)
    if on_gpu:
        for entries, parts in found:
            for result, part in zip(execution.results, parts, strict=True):
                if part is not result:
                    _copy_rows(result[(entries,)], part)
        return execution.results
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    lse = np.full(q.shape[:3], -np.inf, np.float64 if q.dtype == np.float64 else np.float32)
    for entries, results in found:
        for x, own in zip((out, lse), results, strict=True):
            x[entries, :, : new[entries.start]] = own
    return out, lse


class _Parts:
    """An execution whose calls compute results of parts of the batch, in memory of their own."""

    def __init__(self, execution: Any):
        self.ordinal, self.stream, self.allocate = execution.ordinal, execution.stream, execution.allocate
        self._whole = execution.results

    def result(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        """Return the result buffer that has the shape, or a new one for a part of it."""
        for whole in self._whole:
            if whole.shape == shape:
                return whole
        kind = numpy_dtype(dtype)
        return Buffer(shape, kind, self.allocate(math.prod(shape) * kind.itemsize), self)


def _copy_rows(to: Buffer, part: Buffer) -> None:
    """Copy (entries, heads, rows, ...) to the first rows of each head, in stream order."""
    driver, get, check = _cuda()
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = part.pointer, to.pointer
    copy.srcPitch, copy.dstPitch = (math.prod(x.shape[2:]) * x.dtype.itemsize for x in (part, to))
    copy.WidthInBytes, copy.Height = copy.srcPitch, math.prod(part.shape[:2])
    with get(XLA.ordinal(part)):
        check(driver.cuMemcpy2DAsync(copy, XLA.stream(part)), "cuMemcpy2DAsync")


def _register(name: str, function: Callable[..., Any]) -> list[Any]:
    """Register a function as FFI target; return the handlers, which must outlive all XLA calls."""
    handlers = []
    for platform, on_gpu in (("cpu", False), ("CUDA", True)):
        handler = c_api.Handler(functools.partial(_handle, function, on_gpu))
        address = ctypes.cast(handler, ctypes.c_void_p).value
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform=platform)
        handlers.append(handler)
    return handlers


def _handle(function: Callable[..., Any], on_gpu: bool, at: Any) -> int | None:
    frame = at.contents
    try:
        if not _answer(frame):
            with nullcontext() if on_gpu else at_work(), Execution(frame, on_gpu) as execution:
                _execute(function, execution)
    except BaseException as error:  # exceptions must not propagate through a C callback
        return new_error(frame, error)
    return None


def _answer(frame: Any) -> bool:
    """Answer XLA's initial query for the handler's version and traits; return False for any other call.

    XLA checks the version and reports unsupported ones. No traits are set, because a call must not be captured in a
    CUDA graph, whose replay would use freed memory.
    """
    extension = frame.extensions
    while extension and extension.contents.type != c_api.METADATA:
        extension = extension.contents.next
    if extension:
        about = ctypes.cast(extension, ctypes.POINTER(c_api.MetadataExtension)).contents.metadata.contents
        about.version.major, about.version.minor, about.traits = *c_api.VERSION, 0
    return bool(extension)


def _execute(function: Callable[..., Any], execution: Execution) -> None:
    options, same = _options_of(execution.text())
    found = function(options, *execution.operands, **same)
    for made, result in zip(found, execution.results, strict=True):
        if made is not result:  # the backend allocated a new host array
            XLA.to_numpy(result)[...] = made


ATTENTION, ATTENTION_BACKWARD = "spattn_attention", "spattn_attention_backward"
CACHED_ATTENTION = "spattn_cached_attention"
_handlers = _register(ATTENTION, _attention) + _register(ATTENTION_BACKWARD, _attention_backward)
_handlers += _register(CACHED_ATTENTION, _cached_attention)
