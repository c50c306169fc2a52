"""Attention of the newest tokens to a KV cache, by the rows of a pattern."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..dispatch import resolve
from ..patterns import Pattern, PerBatch, PerHead, QueriesAt, Sinks
from ..planning import Plan
from ..score.kept_traces import find_or_trace
from ..score.moved import Shift, moved
from ..score.recorder import Sizes
from ..score.tracing import Traced
from .attention import attention

__all__ = ["CACHE_CLASSES", "CachedRows", "runs_of"]

# The operators of PyTorch graphs (torch_cache.py) make caches of these classes, which import the operators.
CACHE_CLASSES: dict[str, type] = {}


def runs_of(*numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the maximal runs of consecutive entries that agree in all `numbers`."""
    changes = np.zeros(max(len(numbers[0]) - 1, 0), bool)
    for each in numbers:
        changes |= each[1:] != each[:-1]
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(numbers[0])]
    yield from ((start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True) if start < stop)


class CachedRows:
    """The rows of a pattern for the newest tokens of each batch entry, and the keys that these rows need.

    A row is that of the same token where all tokens of the entry are queries: ``pattern.bind(n, n)`` at n tokens, or
    ``pattern.bind(max_len, max_len)`` if the pattern does not support every length.

    Attributes
    ----------
    slides : bool
        Whether keys between the first and the last ones may be dropped.
    first : int
        If so, the number of first keys to keep.
    capacity : int
        Columns of a storage in which few appended tokens make others move.
    """

    def __init__(self, pattern: Any, max_len: int, chunk: int) -> None:
        own = resolve(pattern)
        if isinstance(own, Plan):
            raise TypeError("pattern: a Plan has fixed lengths; pass its pattern")
        self.pattern, self.max_len, self.chunk = own, max_len, chunk
        self._own: dict[tuple[int, int, int], tuple[Pattern, list[Pattern]]] = {}
        self._kept: dict[int, int | None] = {}
        batch, heads = own.sizes()
        variants = own.variants(batch or 1, heads or 1)[0]
        self._any_length = all(_accepts(p, 1) for p in variants)
        if not self._any_length:
            for p in variants:
                p.bind(max_len, max_len)
        self.first, self.capacity, self.slides = 0, max_len, False
        ends = self._ends(chunk) if batch and heads and self._any_length else None
        if ends is not None and all(map(self._is_free, variants)):
            # Twice the window: appending a window of tokens moves one window.
            first, last = ends
            capacity = first + last + 1 + max(last, chunk)
            if capacity < max_len:
                self.first, self.capacity, self.slides = first, capacity, True

    def _ends(self, q_len: int) -> tuple[int, int] | None:
        """Return how many of the first and of the last keys `q_len` queries see; None if others may be allowed."""
        found = [p.ends(q_len) for p in self.pattern.variants(*(n or 1 for n in self.pattern.sizes()))[0]]
        if any(ends is None or ends.between for ends in found):
            return None
        return max(ends.first for ends in found if ends), max(ends.last for ends in found if ends)

    def _is_free(self, own: Pattern) -> bool:
        """Whether the predicate of one head does not depend on the lengths."""
        return all(own.bind(1, n) == own == own.bind(n, n) for n in (1, 2, self.max_len))

    def kept(self, q_len: int) -> int | None:
        """Return the columns that `q_len` queries need if keys in the middle are dropped; None if they need all."""
        if q_len not in self._kept:
            ends = self._ends(q_len)
            # One column more than both ends, which are those of longer sequences.
            self._kept[q_len] = None if ends is None or ends[0] > self.first else self.first + ends[1] + 1
        return self._kept[q_len]

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        lengths: np.ndarray,
        columns: np.ndarray,
        new: np.ndarray,
        *,
        score: Any,
        return_lse: bool,
        **options: Any,
    ) -> list[tuple[slice, Any]]:
        """Compute attention for runs of batch entries that agree in their numbers.

        Parameters
        ----------
        q : (batch, heads_q, q_len, head_dim) array
        k, v : arrays
            Storage, (batch, heads_kv, capacity, head_dim).
        lengths, columns, new : (batch,) int64 arrays
            Tokens of each entry, columns of the storage that it uses, and its queries, which are its newest tokens.
        score, return_lse, options
            As for :func:`spattn.attention`.

        Returns
        -------
        list of (slice of entries, result)
            Without the entries that have no queries.
        """
        batch, heads = q.shape[:2]
        self._check(lengths, columns, new)
        found = []
        # Only score functions see how many tokens were dropped.
        for start, stop in runs_of(columns, new, *(() if score is None else (lengths,))):
            count, n, used = int(new[start]), int(lengths[start]), int(columns[start])
            if not count:
                continue
            pattern, keys = self._placed(*self._of_entries(start, stop, batch, heads), count, n, used)
            entries = slice(start, stop)
            if score is not None:
                sizes = Sizes(batch, heads, q.shape[2], n)
                traced = score if isinstance(score, Traced) else find_or_trace(score, sizes)
                shift = Shift(start, n - keys, n - used, self.first)
                options["score"] = traced if shift[:3] == (0, 0, 0) else moved(traced, shift)
            own = attention(
                q[entries, :, :count],
                k[entries, :, :keys],
                v[entries, :, :keys],
                pattern,
                return_lse=return_lse,
                **options,
            )
            found.append((entries, own))
        return found

    def _check(self, lengths: np.ndarray, columns: np.ndarray, new: np.ndarray) -> None:
        few = np.flatnonzero(new > lengths)
        if len(few):
            entry = int(few[0])
            raise ValueError(
                f"q: expected at most {lengths[entry]} queries for batch entry {entry}, which has as many tokens; got "
                f"{new[entry]}; append keys and values first"
            )
        for entry in np.flatnonzero((columns < lengths) & (new > 0)).tolist():
            kept = self.kept(int(new[entry]))
            if kept is None or kept > columns[entry]:
                raise ValueError(
                    f"q: a cache that drops keys keeps those of the newest {self.chunk} queries (chunk), got "
                    f"{new[entry]}; pass a larger chunk= to the cache, or prompts to spattn.attention"
                )

    def _placed(self, pattern: Pattern, variants: list[Pattern], count: int, n: int, used: int) -> tuple[Pattern, int]:
        """Return the pattern of the newest `count` of n tokens, and the number of keys of the call."""
        if not self._any_length:
            return QueriesAt(pattern, n - count) & Sinks(n), self.max_len
        if used < n or all(p.bind(count, n) == p.bind(n, n) for p in variants):
            return pattern, used
        return QueriesAt(pattern, n - count), n

    def _of_entries(self, start: int, stop: int, batch: int, heads: int) -> tuple[Pattern, list[Pattern]]:
        """Return the pattern of some batch entries, and its distinct patterns."""
        own_batch = self.pattern.sizes()[0]
        key = (start, stop, heads) if own_batch != 1 else (0, 0, heads)
        found = self._own.get(key)
        if found is None:
            pattern = self.pattern
            if own_batch != 1:
                if own_batch not in (0, batch):
                    raise ValueError(f"pattern: expected one for {batch} batch entries, got one for {own_batch}")
                pattern, entries = pattern._for_heads(heads), []
                own_heads = pattern.sizes()[1]
                for entry in range(start, stop):
                    each = tuple(pattern.at(entry, head) for head in range(own_heads or heads))
                    entries.append(each[0] if len(each) == 1 else PerHead(each))
                pattern = PerBatch(tuple(entries))
            found = self._own[key] = pattern, pattern.variants(stop - start, heads)[0]
        return found


def _accepts(pattern: Pattern, tokens: int) -> bool:
    try:
        pattern.bind(tokens, tokens)
    except ValueError:
        return False
    return True
