"""Preallocated cache of keys and values for generation."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, cast

import numpy as np

from .._util.index_checks import LONGEST, integer_array
from ..arrays import DTYPES, ArrayNamespace, check_plain, compiling, dtype_name, namespace_of
from ..arrays.namespace import numpy_dtype
from ..patterns.base.check import integer
from ..patterns.base.content import on_host
from ..request.call import check_gradients
from .cached_rows import CACHE_CLASSES, CachedRows, runs_of

__all__ = ["KVCache"]


class KVCache:
    """A preallocated cache of keys and values, and attention of the newest tokens to it by the rows of a pattern.

    Where the pattern is a window, with or without sinks, the cache keeps the keys of the sinks and at most two windows.

    Parameters
    ----------
    pattern : Pattern, str, mask_mod or mask
        The allowed pairs, as for :func:`spattn.attention`. Each batch entry is a sequence from position 0. A pattern
        that does not support every length must support `max_len` tokens.
    max_len : int
        Most tokens per batch entry.
    batch, heads_kv, head_dim : int
        Sizes of the keys.
    head_dim_v : int, optional
        Features of the values; default `head_dim`.
    dtype : {"float32", "float64", "float16", "bfloat16"} or dtype, optional
        Default: the dtype of `like`, or float32.
    like : NumPy, PyTorch or CuPy array, optional
        The cache has arrays of this library on this device; default NumPy. For JAX use ``spattn.jax.KVCache``.
    chunk : int, optional
        Most queries of a call of :meth:`attention` after the cache of a window has dropped keys.

    Raises
    ------
    TypeError
        If an argument has the wrong type, or `pattern` is a plan or reads arrays on a GPU.
    ValueError
        If a size is out of range, or the pattern supports neither every length nor `max_len` tokens.

    See Also
    --------
    spattn.attention : For the prompt. Its arrays may then be appended at once, of any length.

    Notes
    -----
    Memory is O(batch · heads_kv · max_len · (head_dim + head_dim_v)). If every query sees only `first` first keys and
    `last` last ones (:meth:`spattn.patterns.Pattern.ends`), it is first + 2 · last + 1 tokens instead of `max_len`,
    and appending moves the last ones forward, once for as many new tokens. Positions stay those of the sequence.

    The cache records no gradients, and cannot be used by several threads at once.

    ``torch.compile(fullgraph=True)`` makes one graph of a step for all lengths, if the pattern has a serialized form
    and there is no score function. Lengths are read, and errors raised, when the graph runs; `lengths` are tensors.

    Examples
    --------
    >>> import numpy as np, spattn
    >>> from spattn.patterns import Causal, Sinks, SlidingWindow
    >>> pattern = Causal() & (Sinks(4) | SlidingWindow(15, 0))
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 16), dtype=np.float32)
    >>> cache = spattn.KVCache(pattern, 4096, batch=1, heads_kv=2, head_dim=16)
    >>> cache.append(k[:, :, :90], v[:, :, :90])                         # the prompt
    >>> for at in range(90, 100):                                        # a token per step
    ...     cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
    ...     out = cache.attention(q[:, :, at : at + 1])
    >>> bool(np.allclose(out, spattn.attention(q, k, v, pattern)[:, :, -1:], atol=1e-6))
    True
    >>> cache.lengths, cache.nbytes < 100 * 2 * 2 * 16 * 4 * 2
    (array([100]), True)
    """

    def __init__(
        self,
        pattern: Any,
        max_len: int,
        *,
        batch: int,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: Any = None,
        like: Any = None,
        chunk: int = 32,
    ) -> None:
        self._max_len = integer("max_len", max_len, 1, LONGEST)
        self._rows = CachedRows(pattern, self._max_len, integer("chunk", chunk, 1, LONGEST))
        batch, heads_kv = integer("batch", batch, 1), integer("heads_kv", heads_kv, 1)
        head_dim = integer("head_dim", head_dim, 1)
        head_dim_v = head_dim if head_dim_v is None else integer("head_dim_v", head_dim_v, 1)
        like = np.zeros(0, np.float32) if like is None else like
        kind = namespace_of(like)
        if kind is None or kind.name == "jax":
            instead = "; use spattn.jax.KVCache, whose methods return a new cache" if kind is not None else ""
            raise TypeError(f"like: expected a NumPy, PyTorch or CuPy array, got {type(like).__name__}{instead}")
        check_plain("like", like)
        name = dtype_name(like) if dtype is None else str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
        if name not in DTYPES:
            raise TypeError(f"dtype: expected one of {', '.join(DTYPES)}, got {name}")
        self._dtype, self._device = name, kind.device(like)
        shape = batch, heads_kv, self._rows.capacity
        self._k, self._v = (_full(like, (*shape, size), name, 0.0) for size in (head_dim, head_dim_v))
        self._numbers = self._new_numbers(batch)

    def _new_numbers(self, batch: int) -> Any:
        """Return lengths and columns, (2, batch) int64 in the host's memory; a tensor for operators of PyTorch."""
        numbers = np.zeros((2, batch), np.int64)
        if self._kind.name != "torch":
            return numbers
        with self._kind.functions().inference_mode(False):
            return self._kind.functions().from_numpy(numbers)

    @property
    def _lengths(self) -> np.ndarray:
        """Tokens of each entry, which may be changed in place."""
        return self._numbers[0] if isinstance(self._numbers, np.ndarray) else self._numbers.numpy()[0]

    @property
    def _columns(self) -> np.ndarray:
        """Columns of the storage that each entry uses, which may be changed in place."""
        return self._numbers[1] if isinstance(self._numbers, np.ndarray) else self._numbers.numpy()[1]

    @property
    def _kind(self) -> ArrayNamespace:
        return cast(ArrayNamespace, namespace_of(self._k))

    def __copy__(self) -> KVCache:
        return copy.deepcopy(self)  # copies must not share the memory that they change

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each batch entry, a copy: (batch,) int64."""
        return self._lengths.copy()

    @property
    def max_len(self) -> int:
        """Most tokens per batch entry."""
        return self._max_len

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, allocated once."""
        return sum(int(np.prod(x.shape)) * numpy_dtype(self._dtype).itemsize for x in (self._k, self._v))

    def __repr__(self) -> str:
        batch, heads, _, head_dim = self._k.shape
        return (
            f"KVCache({self._rows.pattern!r}, max_len={self._max_len}, batch={batch}, heads_kv={heads}, "
            f"head_dim={head_dim}, dtype={self._dtype!r}, lengths={self._lengths.tolist()})"
        )

    def append(self, k: Any, v: Any, *, lengths: Any = None) -> None:
        """Append tokens to each batch entry.

        Parameters
        ----------
        k, v : (batch, heads_kv, new, head_dim) and (batch, heads_kv, new, head_dim_v) arrays
            Keys and values, copied. They may have more tokens than a sliding cache keeps.
        lengths : (batch,) int array, optional
            Number of tokens of each entry, its first ones in `k` and `v`; default: all.

        Raises
        ------
        TypeError
            If an array has another library or dtype than the cache.
        ValueError
            If a shape or device is wrong, or an entry would have more than `max_len` tokens. The cache is unchanged.
        RuntimeError
            If PyTorch records gradients of `k` or `v`.
        """
        if compiling():
            _operators().append(self, k, v, lengths)
            return
        self._check_array("k", k, self._k.shape)
        self._check_array("v", v, self._v.shape, int(k.shape[2]))
        check_gradients("KVCache.append", self._kind, k=k, v=v)
        new = self._counts(lengths, int(k.shape[2]))
        full = np.flatnonzero(self._lengths + new > self._max_len)
        if len(full):
            entry = int(full[0])
            raise ValueError(
                f"k: batch entry {entry} has {self._lengths[entry]} of {self._max_len} tokens (max_len) and cannot "
                f"take {new[entry]} more; make a cache with a larger max_len, or crop this one"
            )
        with self._recording_off():
            self._store(k, v, new)
        self._lengths[:] += new

    def attention(
        self,
        q: Any,
        *,
        lengths: Any = None,
        scale: float | None = None,
        backend: str = "auto",
        return_lse: bool = False,
        precision: str | None = None,
        score: Any = None,
        sinks: Any = None,
    ) -> Any:
        """Compute attention of the newest tokens to the cache.

        Parameters
        ----------
        q : (batch, heads_q, q_len, head_dim) array
            Queries of the newest `q_len` tokens, which were appended before.
        lengths : (batch,) int array, optional
            Number of queries of each entry, its first ones in `q`, which are its newest tokens; default: all.
        scale, backend
            As for :func:`spattn.attention`.
        return_lse : bool, optional
            Also return the log-sum-exp of each row's scores.
        precision
            As for :func:`spattn.attention`.
        score : callable, optional
            As for :func:`spattn.attention`. It gets positions in the sequence, also after keys were dropped.
        sinks
            As for :func:`spattn.attention`.

        Returns
        -------
        out : (batch, heads_q, q_len, head_dim_v) array
            Equal to the same rows of :func:`spattn.attention` with all tokens of the entry; 0 in other rows.
        lse : (batch, heads_q, q_len) array, only with `return_lse`
            −inf in other rows.

        Raises
        ------
        TypeError, BackendUnavailableError
            As :func:`spattn.attention`.
        ValueError
            As :func:`spattn.attention`; if an entry has fewer tokens than queries; or if there are more than `chunk`
            queries, and keys that they need were dropped.
        RuntimeError
            If PyTorch records gradients of `q` or `sinks`.
        """
        if compiling():
            options = {"scale": scale, "backend": backend, "precision": precision, "score": score, "sinks": sinks}
            return _operators().attention(self, q, lengths, return_lse, **options)
        self._check_array("q", q, self._k.shape, heads=False)
        given = {"q": q} if namespace_of(sinks) is not self._kind else {"q": q, "sinks": sinks}
        check_gradients("KVCache.attention", self._kind, **given)
        new = self._counts(lengths, int(q.shape[2]))
        options = {"scale": scale, "backend": backend, "precision": precision, "sinks": sinks}
        found = self._rows.attention(
            q, self._k, self._v, self._lengths, self._columns, new, score=score, return_lse=return_lse, **options
        )
        if len(found) == 1 and found[0][0] == slice(0, len(new)) and new[0] == q.shape[2]:
            return found[0][1]
        return self._joined(q, found, new, return_lse)

    def reorder(self, index: Any) -> None:
        """Replace batch entry i by a copy of entry ``index[i]``, as beam search does.

        Parameters
        ----------
        index : (n,) int array
            If n is not the number of entries, it becomes their number, in new memory.
        """
        order = integer_array("index", on_host(index))
        batch, own = len(self._lengths), self._rows.pattern.sizes()[0]
        if order.ndim != 1 or not len(order) or (own > 1 and len(order) != batch):
            expected = f"({batch},), as many entries as the pattern has" if own > 1 else "(n,) with n >= 1"
            raise ValueError(f"index: expected shape {expected}, got {order.shape}")
        if not 0 <= order.min() <= order.max() < batch:
            raise ValueError(f"index: expected batch entries in [0, {batch - 1}], got {order.min()} to {order.max()}")
        numbers = self._lengths[order], self._columns[order]
        if len(order) != batch:
            self._numbers = self._new_numbers(len(order))
        self._lengths[:], self._columns[:] = numbers
        used, rows = int(self._columns.max()), self._kind.on_device(order, self._k)
        with self._recording_off():
            given = self._k, self._v
            if len(order) != batch:
                self._k, self._v = (_full(x, (len(order), *x.shape[1:]), self._dtype, 0.0) for x in given)
            for x, old in zip((self._k, self._v), given, strict=True):
                x[:, :, :used] = old[rows, :, :used]

    def crop(self, lengths: Any) -> None:
        """Remove the newest tokens of entries that have more than `lengths` tokens.

        Parameters
        ----------
        lengths : int or (batch,) int array
            Most tokens to keep.

        Raises
        ------
        ValueError
            If a sliding cache would have to bring back keys that it dropped: up to ``chunk - 1`` tokens can be removed.
            The cache is unchanged.
        """
        most = integer_array("lengths", on_host(lengths))
        if most.shape not in ((), self._lengths.shape) or most.min(initial=0) < 0:
            raise ValueError(f"lengths: expected integers >= 0, one or {len(self._lengths)}, got {lengths!r}")
        removed = np.maximum(self._lengths - most, 0)
        columns = self._columns - removed
        kept = self._rows.kept(1) if self._rows.slides else 0
        for entry in np.flatnonzero((self._columns < self._lengths) & (removed > 0) & (self._lengths > removed)):
            if kept is None or columns[entry] < kept:
                raise ValueError(
                    f"lengths: batch entry {entry} dropped keys that its token {self._lengths[entry] - removed[entry]} "
                    "needs; reset the entry and append its tokens again"
                )
        self._lengths[:] -= removed
        self._columns[:] = np.where(self._lengths > 0, columns, 0)

    def reset(self, entries: Any = None) -> None:
        """Remove all tokens.

        Parameters
        ----------
        entries : int or sequence of int, optional
            Batch entries; default: all.
        """
        chosen: Any = slice(None)
        if entries is not None:
            chosen = np.atleast_1d(integer_array("entries", on_host(entries)))
            for entry in chosen.tolist():
                integer("entries", entry, 0, len(self._lengths) - 1)
        self._lengths[chosen] = 0
        self._columns[chosen] = 0

    # -- storage ------------------------------------------------------------------------------------------------------

    def _store(self, k: Any, v: Any, new: np.ndarray) -> None:
        columns = self._columns + new
        if columns.max(initial=0) <= self._rows.capacity:
            dropped = np.zeros_like(new)
        else:  # all entries at once, so that entries with equally many columns keep equally many
            dropped = np.maximum(columns - (self._rows.kept(self._rows.chunk) or 0), 0)
        for start, stop in runs_of(self._columns, new, dropped):
            sizes = int(self._columns[start]), int(new[start]), int(dropped[start])
            for x, more in ((self._k, k), (self._v, v)):
                self._write(x[start:stop], more[start:stop], *sizes)
        self._columns[:] = columns - dropped

    def _write(self, x: Any, more: Any, used: int, new: int, dropped: int) -> None:
        """Append `new` tokens to entries with `used` columns, and drop tokens behind the first ones."""
        first = min(max(self._rows.first - used, 0), new) if dropped else 0
        if first:  # the new tokens include some of the first ones
            x[:, :, used : used + first] = more[:, :, :first]
            more, new, used = more[:, :, first:], new - first, used + first
        old = max(used - self._rows.first - dropped, 0) if dropped else used
        if dropped and old:
            at = self._rows.first
            # A copy, because the memory may overlap.
            x[:, :, at : at + old] = _copy(x[:, :, at + dropped : used])
        kept = new - max(dropped - (used - self._rows.first), 0) if dropped else new
        at = self._rows.first + old if dropped else used
        x[:, :, at : at + kept] = more[:, :, new - kept : new]

    def _joined(self, q: Any, found: list[Any], new: np.ndarray, return_lse: bool) -> Any:
        """Return the results of runs of entries as one, with 0 in rows without a query."""
        rows = tuple(int(n) for n in q.shape[:3])
        wide = "float64" if self._dtype == "float64" else "float32"
        # Autocast may have cast the operands.
        narrow = dtype_name(found[0][1][0] if return_lse else found[0][1]) if found else self._dtype
        made = [_full(q, (*rows, int(self._v.shape[3])), narrow, 0.0)]
        made += [_full(q, rows, wide, -np.inf)] if return_lse else []
        for entries, result in found:
            for x, own in zip(made, result if return_lse else (result,), strict=True):
                x[entries, :, : int(new[entries.start])] = own
        return tuple(made) if return_lse else made[0]

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_array(self, name: str, x: Any, like: Any, tokens: int | None = None, heads: bool = True) -> None:
        """Check an array, its tokens if given, and whether it has the heads of the cache."""
        if self._kind.traced():
            raise TypeError(
                "KVCache: supported in graphs of torch.compile, not of other tracers; call it outside of them"
            )
        kind = namespace_of(x)
        if kind is not self._kind:
            raise TypeError(f"{name}: expected a {self._kind.name} array like the cache, got {type(x).__name__}")
        check_plain(name, x)
        if dtype_name(x) != self._dtype:
            raise TypeError(f"{name}: expected dtype {self._dtype} like the cache, got {dtype_name(x)}")
        given, (batch, own_heads, _, head_dim) = tuple(x.shape), like
        names = batch, own_heads if heads else "heads_q", "new" if tokens is None else tokens, head_dim
        expected = f"({', '.join(map(str, names))})"
        if len(given) != 4 or any(isinstance(n, int) and n != got for n, got in zip(names, given, strict=True)):
            raise ValueError(f"{name}: expected shape {expected}, got {given}")
        if self._kind.device(x) != self._device:
            raise ValueError(f"{name}: expected device {self._device} like the cache, got {self._kind.device(x)}")

    def _counts(self, lengths: Any, most: int) -> np.ndarray:
        """Return the number of tokens of each entry in an array of `most` tokens."""
        batch = len(self._lengths)
        if lengths is None:
            return np.full(batch, most, np.int64)
        found = integer_array("lengths", on_host(lengths))
        if found.shape != (batch,):
            raise ValueError(f"lengths: expected shape ({batch},), got {found.shape}")
        if len(found) and not 0 <= found.min() <= found.max() <= most:
            raise ValueError(f"lengths: expected integers in [0, {most}], got {found.min()} to {found.max()}")
        return found

    def _recording_off(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which PyTorch does not record changes of the storage."""
        return self._kind.functions().no_grad() if self._kind.name == "torch" else contextlib.nullcontext()


CACHE_CLASSES["KVCache"] = KVCache


def _operators() -> Any:
    """Import the PyTorch operators while torch.compile traces, which cannot trace a lock of imports."""
    from . import torch_cache

    return torch_cache


def _full(like: Any, shape: tuple[int, ...], dtype: str, value: float) -> Any:
    """Return a new array of the library of `like`, on its device."""
    kind = cast(ArrayNamespace, namespace_of(like))
    functions = kind.functions()
    if kind.name != "torch":
        return functions.zeros(shape, numpy_dtype(dtype)) if value == 0 else functions.full(shape, value, dtype)
    with functions.inference_mode(False):  # else the tensor could only be changed in inference mode
        return kind.full(like, shape, dtype, value)


def _copy(x: Any) -> Any:
    return x.clone() if hasattr(x, "clone") else x.copy()
