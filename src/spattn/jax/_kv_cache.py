"""Functional KV cache for JAX programs: arrays of fixed size, and lengths that may be traced."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._util.index_checks import LONGEST
from ..arrays import DTYPES
from ..dispatch import resolve
from ..patterns.base.check import integer
from ..request.call import Call, check_options
from ._attention import buffer_of, serialized, with_score
from ._foreign import CACHED_ATTENTION, Options, cached_rows

__all__ = ["KVCache"]

_INVALID = -(1 << 30)  # the length of an entry for which a program got wrong numbers, until it is reset


@jax.tree_util.register_pytree_node_class
class KVCache:
    """A cache of keys and values for JAX, also inside ``jax.jit`` and ``jax.lax.scan``: methods return a new cache.

    It is a pytree of arrays of fixed size. Lengths may be traced, so a program for one step serves all steps. Donate
    the cache (``jax.jit(step, donate_argnums=...)``), so that XLA changes it in place.

    Parameters
    ----------
    pattern, max_len, batch, heads_kv, head_dim, head_dim_v, dtype, chunk
        As for :class:`spattn.KVCache`. The pattern must have a serialized form.

    Raises
    ------
    TypeError, ValueError
        As :class:`spattn.KVCache`.

    Notes
    -----
    Where the pattern is a window, with or without sinks, memory is first + last + 1 tokens, which each append moves.

    A program cannot raise errors that depend on lengths before it runs: an overflow is the error of the next
    :meth:`attention`. Attention has no gradients. On a GPU it waits for the lengths, once per call.

    Examples
    --------
    >>> import jax, spattn.jax
    >>> from spattn.patterns import Causal, Sinks, SlidingWindow
    >>> pattern = Causal() & (Sinks(4) | SlidingWindow(15, 0))
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 100, 16))
    >>> cache = spattn.jax.KVCache(pattern, 4096, batch=1, heads_kv=2, head_dim=16).append(k[:, :, :90], v[:, :, :90])
    >>> @jax.jit
    ... def step(cache, q, k, v):
    ...     cache = cache.append(k, v)
    ...     return cache, cache.attention(q)
    >>> for at in range(90, 100):
    ...     cache, out = step(cache, *(x[:, :, at : at + 1] for x in (q, k, v)))
    >>> bool(jax.numpy.allclose(out, spattn.jax.attention(q, k, v, pattern)[:, :, -1:], atol=1e-5))
    True
    """

    k: Any
    v: Any
    lengths: Any
    """Tokens of each batch entry: (batch,) int32."""

    def __init__(
        self,
        pattern: Any,
        max_len: int,
        *,
        batch: int,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: Any = jnp.float32,
        chunk: int = 32,
    ) -> None:
        found: Any = resolve(pattern)
        max_len, chunk = integer("max_len", max_len, 1, LONGEST), integer("chunk", chunk, 1, LONGEST)
        head_dim = integer("head_dim", head_dim, 1)
        head_dim_v = head_dim if head_dim_v is None else integer("head_dim_v", head_dim_v, 1)
        rows = cached_rows(found, max_len, chunk)
        serialized(rows.pattern)
        if jnp.dtype(dtype).name not in DTYPES:
            raise TypeError(f"dtype: expected one of {', '.join(DTYPES)}, got {jnp.dtype(dtype).name}")
        columns = rows.kept(chunk) if rows.slides else max_len
        shape = integer("batch", batch, 1), integer("heads_kv", heads_kv, 1), columns
        self.k, self.v = (jnp.zeros((*shape, size), dtype) for size in (head_dim, head_dim_v))
        self.lengths = self._columns = jnp.zeros(batch, jnp.int32)
        self._key = found, max_len, chunk

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arrays, and what is static; for JAX."""
        return (self.k, self.v, self.lengths, self._columns), self._key

    @classmethod
    def tree_unflatten(cls, key: tuple[Any, ...], arrays: Any) -> KVCache:
        """Rebuild a cache from :meth:`tree_flatten`; for JAX."""
        made = cls.__new__(cls)
        made.k, made.v, made.lengths, made._columns = arrays
        made._key = key
        return made

    @property
    def max_len(self) -> int:
        """Most tokens per batch entry."""
        return self._key[1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return int(self.k.nbytes + self.v.nbytes)

    def append(self, k: Any, v: Any, *, lengths: Any = None) -> KVCache:
        """Return the cache with more tokens; see :meth:`spattn.KVCache.append`.

        Parameters
        ----------
        k, v : (batch, heads_kv, new, head_dim) and (batch, heads_kv, new, head_dim_v) arrays
        lengths : (batch,) int array, optional
            Number of tokens of each entry, its first ones in `k` and `v`; default: all. May be traced.

        Returns
        -------
        KVCache

        Raises
        ------
        TypeError, ValueError
            If dtypes or shapes are wrong, or, outside of a program, lengths.
        """
        for name, x, own in (("k", k, self.k), ("v", v, self.v)):
            buffer_of(name, x)
            expected = (*own.shape[:2], "new" if x is k else k.shape[2], own.shape[3])
            if x.dtype != own.dtype:
                raise TypeError(f"{name}: expected dtype {own.dtype} like the cache, got {x.dtype}")
            if x.ndim != 4 or any(n != got for n, got in zip(expected, x.shape, strict=True) if n != "new"):
                raise ValueError(f"{name}: expected shape ({', '.join(map(str, expected))}), got {x.shape}")
        new = self._counts(lengths, k.shape[2])
        total = jnp.maximum(self.lengths + new, _INVALID)
        self._refuse(total > self.max_len, "k: batch entry {} would have more than max_len tokens; make a larger cache")
        first = self._rows.first if self._rows.slides else None
        return self._replace(*_append(first, self.k, self.v, self._columns, new, k, v), lengths=total)

    def attention(
        self,
        q: Any,
        *,
        lengths: Any = None,
        scale: float | None = None,
        backend: str = "auto",
        return_lse: bool = False,
        score: Callable[..., Any] | None = None,
        sinks: Any = None,
    ) -> Any:
        """Compute attention of the newest tokens to the cache; see :meth:`spattn.KVCache.attention`.

        Parameters
        ----------
        q : (batch, heads_q, q_len, head_dim) array
        lengths : (batch,) int array, optional
            Number of queries of each entry, its first ones in `q`; default: all. May be traced.
        scale, backend, return_lse, score, sinks
            As for :func:`spattn.jax.attention`. Arrays of :func:`spattn.score.bias` have `max_len` columns or 1.

        Returns
        -------
        out : (batch, heads_q, q_len, head_dim_v) array
        lse : (batch, heads_q, q_len) array, only with `return_lse`

        Raises
        ------
        TypeError, ValueError
            As :func:`spattn.jax.attention`.
        jax.errors.JaxRuntimeError
            When the program runs: if an entry has more than `max_len` tokens, fewer tokens than queries, or lacks keys
            that it dropped; if a method got wrong numbers for it.
        """
        check_options(backend, return_lse)
        call = Call.of(buffer_of("q", q), buffer_of("k", self.k), buffer_of("v", self.v), scale=scale)
        call = dataclasses.replace(call, kv_len=self.max_len)
        _, max_len, chunk = self._key
        options, captured = with_score(
            Options(serialized(self._rows.pattern), call.scale, backend, None), call, score, sinks
        )
        options = options._replace(max_len=max_len, chunk=chunk)
        new = self._counts(lengths, q.shape[2])
        numbers = jnp.stack([self.lengths, self._columns, new])
        found = _attend(options, lengths is not None, q, self.k, self.v, numbers, *captured)
        return found if return_lse else found[0]

    def reorder(self, index: Any) -> KVCache:
        """Return the cache whose entry i is entry ``index[i]``, as beam search needs it.

        Parameters
        ----------
        index : (batch,) int array
            May be traced.

        Returns
        -------
        KVCache
        """
        batch, order = len(self.lengths), jnp.asarray(index)
        if order.shape != (batch,) or not jnp.issubdtype(order.dtype, jnp.integer):
            raise ValueError(f"index: expected integers of shape ({batch},), got {order.dtype} of {order.shape}")
        outside = (order < 0) | (order >= batch)
        self._refuse(outside, f"index: expected batch entries in [0, {batch - 1}]; that of entry {{}} is another one")
        k, v, columns, lengths = (
            jnp.take(x, order, axis=0, mode="clip") for x in (self.k, self.v, self._columns, self.lengths)
        )
        return self._replace(k, v, columns, lengths=jnp.where(outside, _INVALID, lengths))

    def crop(self, lengths: Any) -> KVCache:
        """Return the cache without the newest tokens of entries that have more than `lengths`; 0 resets an entry.

        Parameters
        ----------
        lengths : int or (batch,) int array
            May be traced.

        Returns
        -------
        KVCache
        """
        most = jnp.asarray(lengths)
        if most.shape not in ((), self.lengths.shape) or not jnp.issubdtype(most.dtype, jnp.integer):
            raise ValueError(
                f"lengths: expected integers, one or {len(self.lengths)}, got {most.dtype} of {most.shape}"
            )
        negative = jnp.broadcast_to(most < 0, self.lengths.shape)
        self._refuse(negative, "lengths: expected integers >= 0; that of entry {} is negative")
        most = jnp.minimum(most, self.max_len).astype(jnp.int32)
        removed = jnp.maximum(self.lengths - most, 0)
        columns, left = self._columns - removed, self.lengths - removed
        lacking = (self._columns < self.lengths) & (columns < (self._rows.kept(1) or LONGEST))
        gone = negative | ((most > 0) & (removed > 0) & lacking)
        self._refuse(gone, "lengths: batch entry {} dropped keys that its last token would need; reset it with 0")
        left = jnp.where(most == 0, 0, jnp.where(gone | (self.lengths < 0), _INVALID, left))
        return self._replace(self.k, self.v, jnp.where(left > 0, columns, 0), lengths=left)

    # -- helpers ------------------------------------------------------------------------------------------------------

    @property
    def _rows(self) -> Any:
        return cached_rows(*self._key)

    def _replace(self, k: Any, v: Any, columns: Any, *, lengths: Any) -> KVCache:
        made = copy.copy(self)
        made.k, made.v, made.lengths, made._columns = k, v, lengths, columns
        return made

    def _counts(self, lengths: Any, most: int) -> Any:
        """Return the number of tokens of each entry in an array of `most` tokens."""
        batch = len(self.lengths)
        if lengths is None:
            return jnp.full(batch, most, jnp.int32)
        found = jnp.asarray(lengths)
        if found.shape != (batch,) or not jnp.issubdtype(found.dtype, jnp.integer):
            raise ValueError(f"lengths: expected integers of shape ({batch},), got {found.dtype} of {found.shape}")
        self._refuse((found < 0) | (found > most), f"lengths: expected integers in [0, {most}]; entry {{}} has another")
        return jnp.where((found < 0) | (found > most), _INVALID, found).astype(jnp.int32)

    @staticmethod
    def _refuse(wrong: Any, message: str) -> None:
        """Raise ValueError for an entry, except in a program, where nothing is known of it."""
        if not isinstance(wrong, jax.core.Tracer) and wrong.any():
            raise ValueError(message.format(int(np.flatnonzero(wrong)[0])))


@functools.partial(jax.jit, static_argnums=0)
def _append(first: int | None, k: Any, v: Any, columns: Any, new: Any, more_k: Any, more_v: Any) -> tuple[Any, ...]:
    """Return keys, values and used columns; `first` is the number of first keys to keep, or None to keep all."""
    capacity, width = k.shape[2], more_k.shape[2]
    if first is None:
        at = columns[:, None] + jnp.arange(width)
        at = jnp.where(jnp.arange(width) < new[:, None], at, capacity)  # what is out of range is not written

        def write(x: Any, at: Any, more: Any) -> Any:
            return x.at[:, at].set(more, mode="drop")

        return jax.vmap(write)(k, at, more_k), jax.vmap(write)(v, at, more_v), jnp.maximum(columns + new, 0)
    total = jnp.maximum(columns + new, 0)
    dropped = jnp.maximum(total - capacity, 0)
    column = jnp.arange(capacity)
    source = column + jnp.where(column < first, 0, dropped[:, None])  # its token in the old ones and the new ones
    old = source < columns[:, None]
    source = jnp.where(old, source, capacity + source - columns[:, None])

    def taken(x: Any, more: Any, source: Any) -> Any:
        return jnp.take(jnp.concatenate([x, more], 1), source, axis=1, mode="clip")

    return jax.vmap(taken)(k, more_k, source), jax.vmap(taken)(v, more_v, source), total - dropped


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(options: Options, ragged: bool, q: Any, k: Any, v: Any, numbers: Any, *captured: Any) -> Any:
    rows, wide = q.shape[:3], jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    out, lse = jax.ShapeDtypeStruct((*rows, v.shape[3]), q.dtype), jax.ShapeDtypeStruct(rows, wide)
    if not q.size:
        return jnp.zeros(out.shape, out.dtype), jnp.zeros(lse.shape, lse.dtype)
    found = jax.ffi.ffi_call(CACHED_ATTENTION, (out, lse))(q, k, v, numbers, *captured, call=options.text)
    if not ragged:
        return found
    queries = (jnp.arange(rows[2]) < numbers[2][:, None])[:, None]
    return jnp.where(queries[..., None], found[0], 0), jnp.where(queries, found[1], -jnp.inf)
