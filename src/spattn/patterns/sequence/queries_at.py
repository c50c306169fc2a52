"""Queries at explicit positions instead of at the end of the keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._util.cached import cached_property
from ..._util.frozen import content
from ..._util.index_checks import LONGEST, q_offset
from ...arrays import namespace_of
from ...index_set import Runs
from ..base.check import assign, integer
from ..base.class_registry import register
from ..base.composition import nesting
from ..base.content import ByContent, frozen_array
from ..base.pattern import Pattern
from ..base.predicate import allowed, apply, row_or_last
from .basic import Causal

if TYPE_CHECKING:
    from ..base.rows import AskedRows

__all__ = ["QueriesAt"]


@register(
    "queries_at",
    example=lambda: ((Causal(), np.arange(32) // 8 * 8 + 7), 32),
    typical=lambda: ((Causal(), np.arange(4096) // 512 * 512 + 511), 4096),
)
@dataclass(frozen=True, eq=False, repr=False)
class QueriesAt(ByContent, Pattern):
    """Another pattern, evaluated for queries at given positions instead of at the end of the keys.

    For fixed-size caches that are not full yet, masks aligned to the top left corner, and packed sequences with
    different query and key lengths.

    Parameters
    ----------
    inner : Pattern
        The pattern to evaluate.
    positions : int or int array (q_len,) or (batch, q_len)
        Position of the first query, which the others follow, or position of each query. Negative positions precede the
        first key.

    Notes
    -----
    `inner` describes a sequence of ``max(kv_len, last position + 1)`` tokens, for each batch entry; the keys are its
    first `kv_len`.
    PyTorch's ``is_causal=True`` is ``QueriesAt(Causal(), 0)``; a cache of `kv_len` keys, `n` of them before the
    queries, is ``QueriesAt(Causal(), n)``.

    Examples
    --------
    >>> from spattn.patterns import Causal
    >>> QueriesAt(Causal(), 0).index_set(2, 4).to_dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0]])
    >>> QueriesAt(Causal(), [2, 0]).index_set(2, 4).to_dense().astype(int)
    array([[1, 1, 1, 0],
           [1, 0, 0, 0]])

    One query for each of two batch entries, at positions 1 and 3 of their caches:

    >>> QueriesAt(Causal(), [[1], [3]]).index_set(1, 4, batch=1).row(0)
    array([0, 1, 2, 3])
    """

    inner: Pattern
    positions: int | np.ndarray
    _lacks_program = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Pattern):
            raise TypeError(f"inner: expected a Pattern, got {self.inner!r}")
        given: Any = self.positions
        if type(given) is int or (namespace_of(given) is None and not isinstance(given, (tuple, list))):
            if type(given) is not int or not -LONGEST <= given < LONGEST:
                assign(self, positions=integer("positions", given, -LONGEST, LONGEST - 1))
        else:
            array = frozen_array("positions", given, np.int64, (1, 2))
            for number in (array.min(initial=0), array.max(initial=0)):
                integer("positions", number, -LONGEST, LONGEST - 1)
            assign(self, positions=array)
        vars(self).update(nesting((self.inner,)))
        if type(self.positions) is not int:
            self.sizes()  # check the number of batch entries

    @property
    def _each_entry(self) -> np.ndarray | None:
        """The positions of each batch entry, (batch, q_len), or None if all entries have the same."""
        at = self.positions
        return None if isinstance(at, int) or at.ndim == 1 else at

    @cached_property
    def _hash(self) -> int:  # as of any pattern with arrays, in fewer calls: each step of generation has positions
        at = self.positions if isinstance(self.positions, int) else (self.positions.shape, content(self.positions))
        return hash((type(self).__qualname__, self.inner, at))

    def sizes(self) -> tuple[int, int]:
        return self.inner.sizes() if isinstance(self.positions, int) else self._sizes

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        batch, heads = self.inner.sizes()
        each = self._each_entry
        if each is None or len(each) == 1:
            return batch, heads
        if 1 < batch != len(each):
            raise ValueError(f"positions: expected {batch} rows, one for each batch entry, got {len(each)}")
        return len(each), heads

    def at(self, batch: int, head: int) -> QueriesAt:
        own = self.inner.at(batch if self.inner.sizes()[0] != 1 else 0, head)
        each = self._each_entry
        if each is not None:
            return QueriesAt(own, each[integer("batch", batch, 0, len(each) - 1) if len(each) > 1 else 0])
        return self if own is self.inner else replace(self, inner=own)

    @classmethod
    def together(cls, patterns: tuple[Pattern, ...], q_len: int) -> QueriesAt | None:
        """Return one pattern for batch entries that differ in the position of the first query alone, or None."""
        entries: tuple[Any, ...] = patterns
        if set(map(type, entries)) != {cls}:
            return None
        inner, places = entries[0].inner, [p.positions for p in entries]
        if inner.sizes() != (1, 1) or set(map(type, places)) != {int}:
            return None
        if [p for p in entries if p.inner is not inner and p.inner != inner]:
            return None
        return cls(inner, np.add.outer(places, np.arange(q_len)))

    def _rows(self, asked: AskedRows) -> np.ndarray:
        row, at = asked.q - q_offset(asked.q_len, asked.kv_len), self.positions
        if isinstance(at, int):
            q = row + at
        elif row.shape[:2] != (1, 1) or at.shape[-1] != asked.q_len:
            return super()._rows(asked)
        elif asked.is_whole:
            q = at.reshape(-1, 1, asked.q_len)
        else:
            known = np.atleast_2d(at)
            known = np.concatenate([known, np.full((len(known), 1), -1)], axis=1)
            q = known[:, None, row_or_last(row[0, 0], asked.q_len)]
        last = at + asked.q_len - 1 if isinstance(at, int) else int(at.max(initial=-1))
        if last >= asked.kv_len:  # the keys are the first ones of a longer sequence, of each entry's own length
            return super()._rows(asked)
        placed = type(asked)(q, asked.kv_len, asked.kv_len, asked.batch, asked.heads, asked.within)
        return placed.of(self.inner)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        last = self.positions + q_len - 1 if isinstance(self.positions, int) else int(self.positions.max(initial=-1))
        if not isinstance(self.positions, int) and self.positions.shape[-1] != q_len:
            raise ValueError(f"positions: expected {q_len} (q_len), got {self.positions.shape[-1]}")
        if last >= LONGEST:
            raise ValueError(f"positions: expected the last one below {LONGEST}, got {last}")
        tokens, given = max(kv_len, last + 1), self
        if self._each_entry is not None and len(self._each_entry) == 1:
            given = QueriesAt(self.inner, self._each_entry[0])
        return _Bound(given, self.inner.bind(tokens, tokens), q_len, kv_len, tokens)

    def allows(self, q: Any, k: Any) -> Any:
        raise ValueError("QueriesAt: its rows depend on the lengths; use .bind(q_len, kv_len)")

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        first, far = draw.integer(-sizes.q_len - 2, sizes.kv_len + 2), sizes.kv_len + 4
        positions = draw.choice([first, draw.integers((sizes.q_len,), -4, far)])
        last = first + sizes.q_len - 1 if isinstance(positions, int) else positions.max(initial=-1)
        tokens = max(sizes.kv_len, int(last) + 1)
        return cls(draw.pattern(sizes._replace(q_len=tokens, kv_len=tokens)), positions), sizes


@dataclass(frozen=True, repr=False)
class _Bound(Pattern):
    """QueriesAt bound to lengths; `inner` is bound to `tokens` tokens."""

    given: QueriesAt
    inner: Pattern
    q_len: int
    kv_len: int
    tokens: int

    def _placed(self, q: Any) -> Any:
        """Map default positions, ``row + kv_len - q_len``, to the given positions."""
        first, positions = q_offset(self.q_len, self.kv_len), self.given.positions
        if isinstance(positions, int):
            return q + (positions - first)
        if positions.ndim > 1:
            raise ValueError("QueriesAt: entries have positions of their own; use .at(batch, head)")
        known = np.append(positions, -1)  # -1 for rows out of range, which an enclosing QueriesAt may request
        return apply(lambda q: known[row_or_last(q - first, len(positions))], q)

    def sizes(self) -> tuple[int, int]:
        return self.given.sizes()

    def at(self, batch: int, head: int) -> Pattern:
        if self.given._each_entry is not None:
            return self.given.at(batch, head).bind(self.q_len, self.kv_len)
        return replace(self, given=self.given.at(batch, head), inner=self.inner.at(batch, head))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        return self if (q_len, kv_len) == (self.q_len, self.kv_len) else self.given.bind(q_len, kv_len)

    def allows(self, q: Any, k: Any) -> Any:
        return allowed(self.inner, self._placed(q), k)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        return self.inner.runs(self._placed(q), kv_len) if self.tokens == kv_len else None

    def _candidates(self, q: np.ndarray, kv_len: int) -> list[Runs] | None:
        return self.inner._candidates(self._placed(q), kv_len) if self.tokens == kv_len else None

    def _description(self) -> dict[str, Any]:
        return self.given._description()

    def __repr__(self) -> str:
        return repr(self.given)
