"""PyTorch operators of a KV cache, for graphs of torch.compile."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..dispatch.torch_schemas import DEVICES
from ..dispatch.torch_text import text_of
from ..patterns.base.in_graphs import restored
from .cached_rows import CACHE_CLASSES, CachedRows

__all__ = ["append", "attention"]

# A CUDA graph would repeat the columns of its first run.
_UNSAFE = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)
_CACHE = "Tensor{} keys, Tensor{} values, Tensor{} numbers, str pattern, int max_len, int chunk, Tensor? lengths"
_rows = functools.lru_cache(maxsize=32)(CachedRows)


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "spattn::append_to_cache",
    mutates_args=("keys", "values", "numbers"),
    device_types=DEVICES,
    schema=f"({_CACHE.format('(a!)', '(b!)', '(c!)')}, Tensor k, Tensor v) -> ()",
    tags=_UNSAFE,
)
def _append(
    keys: Any, values: Any, numbers: Any, pattern: str, max_len: int, chunk: int, lengths: Any, k: Any, v: Any
) -> None:
    _cache(keys, values, numbers, pattern, max_len, chunk).append(k, v, lengths=lengths)


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "spattn::attention_to_cache",
    mutates_args=(),
    device_types=DEVICES,
    schema=f"({_CACHE.format('', '', '')}, Tensor q, float? scale, str backend, str? precision, Tensor? sinks) "
    "-> (Tensor out, Tensor lse)",
    tags=_UNSAFE,
)
def _attention(
    keys: Any,
    values: Any,
    numbers: Any,
    pattern: str,
    max_len: int,
    chunk: int,
    lengths: Any,
    q: Any,
    scale: float | None,
    backend: str,
    precision: str | None,
    sinks: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    cache = _cache(keys, values, numbers, pattern, max_len, chunk)
    options = {"scale": scale, "backend": backend, "precision": precision, "sinks": sinks}
    out, lse = cache.attention(q, lengths=lengths, return_lse=True, **options)
    return out.contiguous(), lse


@_append.register_fake  # type: ignore[untyped-decorator]
def _(*arguments: Any) -> None:
    return None


@_attention.register_fake  # type: ignore[untyped-decorator]
def _(
    keys: Any, values: Any, numbers: Any, pattern: Any, max_len: Any, chunk: Any, lengths: Any, q: Any, *_: Any
) -> Any:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], values.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


def _cache(keys: Any, values: Any, numbers: Any, pattern: str, max_len: int, chunk: int) -> Any:
    """Return a cache that has the given memory."""
    made: Any = object.__new__(CACHE_CLASSES["KVCache"])
    made._k, made._v, made._numbers = keys, values, numbers
    made._rows, made._max_len = _rows(restored(pattern), max_len, chunk), max_len
    made._dtype, made._device = str(keys.dtype).removeprefix("torch."), made._kind.device(keys)
    return made


# -- traced by torch.compile -------------------------------------------------------------------------------------------


def append(cache: Any, k: Any, v: Any, lengths: Any) -> None:
    """Implement :meth:`spattn.KVCache.append`; values are checked when the graph runs."""
    _check_traced(k, v)
    torch.ops.spattn.append_to_cache(*_state(cache, lengths), k, v)


def attention(cache: Any, q: Any, lengths: Any, return_lse: bool, *, score: Any, **options: Any) -> Any:
    """Implement :meth:`spattn.KVCache.attention`; values are checked when the graph runs."""
    _check_traced(q, options["sinks"])
    if score is not None:
        raise TypeError("score: not supported in graphs of a KVCache; decorate the caller with torch.compiler.disable")
    given = options["scale"], options["backend"], options["precision"], options["sinks"]
    out, lse = torch.ops.spattn.attention_to_cache(*_state(cache, lengths), q, *given)
    return (out, lse) if return_lse else out


def _check_traced(*arrays: Any) -> None:
    for x in arrays:
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"KVCache: expected tensors in a graph, got {type(x).__name__}")
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("KVCache: has no gradients; call it under torch.no_grad()")


def _state(cache: Any, lengths: Any) -> tuple[Any, ...]:
    text = text_of(cache._rows.pattern)
    if text is None:
        raise TypeError(
            "pattern: a KVCache in a graph needs a serializable pattern, of a registered class; decorate the caller "
            "with torch.compiler.disable"
        )
    if lengths is not None and not isinstance(lengths, torch.Tensor):
        lengths = torch.tensor(lengths)
    return cache._k, cache._v, cache._numbers, text, cache._max_len, cache._rows.chunk, lengths
