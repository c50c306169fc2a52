"""Allowed keys of a few rows, as bits: what a step of generation needs instead of tiles."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._util.frozen import frozen
from ..._util.imports import whole_imports
from .predicate import allowed

if TYPE_CHECKING:
    from ...index_set import Runs
    from .pattern import Pattern

__all__ = [
    "AND",
    "NOT",
    "OR",
    "Program",
    "AskedRows",
    "Place",
    "alike",
    "filled",
    "joined",
    "packed",
    "rows",
    "rows_of_bound",
    "run",
    "union",
    "whole",
]

_MOST_INSTRUCTIONS = 1024  # longer programs are slower than the bits of each operand


class Place(NamedTuple):
    """A position that depends on the query's: `by` plus, unless `block` is 0, the query's position.

    The position is rounded down to ``offset + n * block``.
    """

    by: int
    block: int = 0
    offset: int = 0


Instruction = tuple[int, ...]  # operation, start, stop and step, as in _util/_bit_rows.pyx
Program = tuple[Instruction, ...]  # in reverse Polish notation
_EMPTY, _RUN, _WHOLE, _OR, _AND, _NOT = range(6)
_NO_OPERANDS = (0,) * 7
OR, AND, NOT = ((operation, *_NO_OPERANDS) for operation in (_OR, _AND, _NOT))


def run(start: Place, stop: Place, step: int = 1) -> Instruction:
    """Return the keys ``start, start + step, ...`` below `stop`, clipped to the sequence; `start` may be negative."""
    return _RUN, *start, *stop, step


def whole(first: int, stop: int) -> Instruction:
    """Return all keys for the queries at ``[first, stop)``, and none for others."""
    return _WHOLE, *Place(first), *Place(stop), 0


def union(*instructions: Instruction) -> Program:
    """Return the program of a pattern that is a union of runs and whole rows."""
    return (_EMPTY, *_NO_OPERANDS), *instructions


def joined(programs: Iterable[Program | None], operator: Instruction) -> Program | None:
    """Return the program that combines others; None if there is none for one of them."""
    found: Program = ()
    for own in programs:
        if own is None:
            return None
        simple = operator == OR and found and all(operation in (_RUN, _WHOLE) for operation, *_ in own[1:])
        found += own[1:] if simple else (*own, operator) if found else own
    return found


@functools.cache
def _native() -> Any:
    """Import the compiled part at the first step of generation."""
    with whole_imports:
        from ..._util import _bit_rows
    return _bit_rows


class _Compiled(NamedTuple):
    code: np.ndarray
    depth: int


@functools.lru_cache(maxsize=256)
def _compiled(pattern: Pattern) -> _Compiled | None:
    """Return the row program of a pattern, which each step of generation runs again, or None."""
    program = pattern._row_program()
    if program is None or len(program) > _MOST_INSTRUCTIONS:
        return None
    levels = itertools.accumulate((operation == _EMPTY) - (operation in (_OR, _AND)) for operation, *_ in program)
    return _Compiled(frozen(np.array(program, np.int64)), max(levels))


def rows(pattern: Pattern, asked: AskedRows) -> np.ndarray:
    """Return the allowed keys of a few rows: (batch or 1, a divisor of heads, rows, words) uint64.

    Bit b of word w is key ``64 * w + b``; bits beyond kv_len are arbitrary. The caller may write to the result if it is
    writeable.
    """
    program = _compiled(pattern)
    if program is None:
        return pattern._rows(asked)
    q = np.ascontiguousarray(asked.q.reshape(-1))
    found = _native().run_program(program.code, program.depth, q, asked.kv_len)
    return found.reshape(*asked.q.shape, -1)


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

    def entry(self, batch: int | None, head: int | None) -> AskedRows:
        """Return the rows of one batch entry or head; None keeps all of them."""
        each = zip((batch, head), self.q.shape, strict=False)
        at = tuple(slice(None) if n is None else slice(min(n, size - 1), min(n, size - 1) + 1) for n, size in each)
        return self._replace(q=self.q[at], within=None)


def alike(each: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Repeat the heads of (batch or 1, heads, ...) arrays up to the largest number of heads."""
    found = list(each)
    heads = max(x.shape[1] for x in found)
    return [x if x.shape[1] in (1, heads) else np.repeat(x, heads // x.shape[1], axis=1) for x in found]


def packed(rows: np.ndarray) -> np.ndarray:
    """Pack the last axis of a bool array into words: bit b of word w is element ``64 * w + b``."""
    bits = np.packbits(rows, axis=-1, bitorder="little")
    whole = np.zeros((*rows.shape[:-1], -(-rows.shape[-1] // 64) * 8), np.uint8)
    whole[..., : bits.shape[-1]] = bits
    return whole.view(np.uint64)


def rows_of_bound(pattern: Pattern, asked: AskedRows) -> np.ndarray:
    """Return the allowed keys of a pattern that is bound to lengths, and the same for all batch entries and heads."""
    q, kv_len = asked.q.reshape(-1), asked.kv_len
    if pattern._lists_pairs:
        listed = np.zeros((len(q), kv_len), bool)
        listed[pattern._pairs(q, kv_len)] = True
        return packed(listed).reshape(*asked.q.shape, -1)
    runs = pattern.runs(q, kv_len)
    if runs is not None:
        return filled(runs, kv_len).reshape(*asked.q.shape, -1)
    if asked.within is None:
        rows = np.broadcast_to(allowed(pattern, q[:, None], np.arange(kv_len)), (len(q), kv_len))
        return packed(rows).reshape(*asked.q.shape, -1)
    shape = np.broadcast_shapes(asked.within.shape[:3], asked.q.shape)
    bits = np.broadcast_to(asked.within, (*shape, asked.within.shape[3]))
    within = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=-1, count=kv_len, bitorder="little")
    some = np.flatnonzero(within)
    row, key = np.divmod(some, kv_len)
    found = np.zeros((*shape, kv_len), bool)
    found.reshape(-1)[some] = allowed(pattern, np.broadcast_to(asked.q, shape).reshape(-1)[row], key)
    return packed(found)


def filled(runs: Runs, kv_len: int) -> np.ndarray:
    """Return the bits of the keys of runs: (rows, words) uint64."""
    found = np.zeros((len(runs.start), -(-kv_len // 64)), np.uint64)
    _native().set_runs(found, *(np.asarray(x, np.int64) for x in (runs.start, runs.step, runs.count)), kv_len)
    return found
