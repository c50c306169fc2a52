"""Allowed keys of a few rows, as bits: what a step of generation needs instead of tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from ..._util.bit_rows import run_programs, set_runs
from ..._util.cached import BoundedCache
from ..._util.frozen import frozen
from ..._util.index_checks import q_offset
from ...index_set import Runs
from ..hints.closed_forms import Program, operands_of
from .predicate import allowed

__all__ = ["AskedRows"]

_MOST_INSTRUCTIONS = 1024  # longer programs are slower than the bits of each operand


class _Pattern(Protocol):
    """What is asked of a :class:`.pattern.Pattern`, whose module names this one."""

    _lists_pairs: ClassVar[bool]
    _lacks_program: ClassVar[bool]

    def sizes(self) -> tuple[int, int]: ...
    def bind(self, q_len: int, kv_len: int) -> Any: ...
    def at(self, batch: int, head: int) -> Any: ...
    def allows(self, q: Any, k: Any) -> Any: ...
    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None: ...
    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]: ...
    def _row_program(self) -> Program | None: ...
    def _rows(self, asked: AskedRows) -> np.ndarray: ...


class AskedRows(NamedTuple):
    """Rows whose allowed keys are asked for, in a call of `batch` entries and `heads` heads.

    `q` are their positions, (batch or 1, heads or 1, rows) int64, in a sequence that patterns bind to `q_len` and
    `kv_len`. If `within` is given, (batch or 1, heads or 1, rows, words) bits, the result is arbitrary outside it.
    """

    q: np.ndarray
    q_len: int
    kv_len: int
    batch: int
    heads: int
    within: np.ndarray | None = None

    def of(self, pattern: _Pattern) -> np.ndarray:
        """Return the allowed keys of these rows: (batch or 1, a divisor of heads, rows, words) uint64.

        Bit b of word w is key ``64 * w + b``; bits beyond kv_len are arbitrary. The caller may write to the result if
        it is writeable.
        """
        program = _compiled(pattern)
        if program is None:
            return pattern._rows(self)
        batch, heads, rows = self.q.shape
        q = np.ascontiguousarray(self.q)
        if heads == 1:
            return run_programs((program,), q, self.kv_len)
        return run_programs((program,), q.reshape(batch, 1, -1), self.kv_len).reshape(batch, heads, rows, -1)

    def of_heads(self, patterns: Sequence[_Pattern]) -> np.ndarray | None:
        """Return the allowed keys of patterns of one head each in one native call, or None without row programs."""
        programs = [own for pattern in patterns if (own := _compiled(pattern)) is not None]
        if self.q.shape[1] not in (1, len(patterns)) or len(programs) < len(patterns):
            return None
        return run_programs(programs, np.ascontiguousarray(self.q), self.kv_len)

    @property
    def is_whole(self) -> bool:
        """Whether these are the rows of all queries, in order, at the end of the keys."""
        whole = range(q_offset(self.q_len, self.kv_len), self.kv_len)
        return self.q.shape == (1, 1, self.q_len) and self.q[0, 0].tolist() == list(whole)

    def in_parts(self, pattern: _Pattern, general: Callable[..., np.ndarray]) -> np.ndarray:
        """Implement :meth:`of` for any pattern: batch entry by batch entry and head by head, from its hints.

        `general` is the method ``_rows`` of patterns without one of their own.
        """
        batch, heads = pattern.sizes()
        if (batch, heads) == (1, 1):
            bound = pattern.bind(self.q_len, self.kv_len)
            return _rows_of_bound(bound, self) if type(bound)._rows is general else self.of(bound)
        entries = [None] if batch == 1 else range(batch or self.batch)
        each = [None] if heads == 1 else range(heads or self.heads)
        return np.concatenate(
            [np.concatenate([self.entry(b, h).of(pattern.at(b or 0, h or 0)) for h in each], axis=1) for b in entries]
        )

    def entry(self, batch: int | None, head: int | None) -> AskedRows:
        """Return the rows of one batch entry or head; None keeps all of them."""
        each = zip((batch, head), self.q.shape, strict=False)
        at = tuple(slice(None) if n is None else slice(min(n, size - 1), min(n, size - 1) + 1) for n, size in each)
        return self._replace(q=self.q[at], within=None)

    def filled(self, runs: Runs) -> np.ndarray:
        """Return the bits of the keys of runs: (rows, words)."""
        found = np.zeros((len(runs.start), -(-self.kv_len // 64)), np.uint64)
        start, step, count = (np.asarray(x, np.int64) for x in (runs.start, runs.step, runs.count))
        set_runs(found, start, step, count, self.kv_len)
        return found

    @staticmethod
    def packed(rows: np.ndarray) -> np.ndarray:
        """Pack the last axis of a bool array into words: bit b of word w is element ``64 * w + b``."""
        bits = np.packbits(rows, axis=-1, bitorder="little")
        whole = np.zeros((*rows.shape[:-1], -(-rows.shape[-1] // 64) * 8), np.uint8)
        whole[..., : bits.shape[-1]] = bits
        return whole.view(np.uint64)

    @staticmethod
    def combined(operator: np.ufunc, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Combine the words of two patterns, in the memory of either if possible; heads repeat up to the most."""
        heads = max(one.shape[1], other.shape[1])
        one, other = (
            x if x.shape[1] in (1, heads) else np.repeat(x, heads // x.shape[1], axis=1) for x in (one, other)
        )
        shape = tuple(map(max, one.shape, other.shape))
        to = next((x for x in (one, other) if x.flags.writeable and x.shape == shape), None)
        found: np.ndarray = operator(one, other, out=to)
        return found


_programs = BoundedCache(256)  # by pattern; those without a program, which may have large arrays, know it themselves


def _compiled(pattern: _Pattern) -> tuple[np.ndarray, int] | None:
    """Return the row program of a pattern and its largest number of operands, for each step of generation, or None."""
    if pattern._lacks_program:
        return None
    found: tuple[np.ndarray, int] | None = _programs.get(pattern)
    if found is None:
        program = pattern._row_program()
        if program is None or len(program) > _MOST_INSTRUCTIONS:
            vars(pattern)["_lacks_program"] = True
            return None
        found = _programs.keep(pattern, (frozen(np.array(program, np.int64)), operands_of(program)))
    return found


def _rows_of_bound(pattern: _Pattern, asked: AskedRows) -> np.ndarray:
    """Return the allowed keys of a pattern that is bound to lengths, and the same for all batch entries and heads."""
    q, kv_len = asked.q.reshape(-1), asked.kv_len
    if pattern._lists_pairs:
        listed = np.zeros((len(q), kv_len), bool)
        listed[pattern._pairs(q, kv_len)] = True
        return asked.packed(listed).reshape(*asked.q.shape, -1)
    runs = pattern.runs(q, kv_len)
    if runs is not None:
        return asked.filled(runs).reshape(*asked.q.shape, -1)
    if asked.within is None:
        rows = np.broadcast_to(allowed(pattern, q[:, None], np.arange(kv_len)), (len(q), kv_len))
        return asked.packed(rows).reshape(*asked.q.shape, -1)
    shape = np.broadcast_shapes(asked.within.shape[:3], asked.q.shape)
    bits = np.broadcast_to(asked.within, (*shape, asked.within.shape[3]))
    within = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=-1, count=kv_len, bitorder="little")
    some = np.flatnonzero(within)
    row, key = np.divmod(some, kv_len)
    found = np.zeros((*shape, kv_len), bool)
    found.reshape(-1)[some] = allowed(pattern, np.broadcast_to(asked.q, shape).reshape(-1)[row], key)
    return asked.packed(found)
