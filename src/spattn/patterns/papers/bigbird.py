"""BigBird (Zaheer et al., arXiv:2007.14062)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._util.bit_rows import set_runs
from ..._util.cached import cached_property
from ..._util.frozen import frozen
from ...index_set import Runs
from ..base.check import Count, Positive, Word, reach
from ..base.class_registry import register
from ..base.pattern import Pattern
from ..base.predicate import row_or_last
from ..hints.closed_forms import AND, Place, Program, run, union, whole
from ..hints.table import ListedCells
from ..sequence.basic import Causal
from .layouts import draw_ranks

if TYPE_CHECKING:
    from ..base.rows import AskedRows

__all__ = ["BigBird"]

_DRAWN_AT_ONCE = 16  # block rows; drawing one takes nearly as long


@register("bigbird", example=((4, 3, 1, 2), 64), typical=((64,), 4096))
@dataclass(frozen=True)
class BigBird(Pattern):
    """BigBird: window, global and random blocks (the paper's internal transformer construction).

    For long documents, where random links connect any two tokens within a few layers.

    Parameters
    ----------
    block : int
        Tokens per block.
    window_blocks : int, optional
        Blocks of the window, including the query's own; ``window_blocks // 2`` on either side.
    global_blocks : int, optional
        Number of leading blocks that attend to all blocks and to which all blocks attend.
    random_blocks : int, optional
        Random blocks per block row and head, outside the window and the global blocks.
    seed : int, optional
        Key of the generator, ``0 <= seed < 2**64``.
    causal : bool, optional
        Whether keys after the query are masked and random blocks are drawn from earlier blocks.
    head : int or None, optional
        The head whose random blocks are drawn; :meth:`at` sets it.

    Notes
    -----
    Block row a of head h draws from its own generator, ``numpy.random.Philox(key=seed, counter=[0, 0, h, a])``.

    References
    ----------
    Zaheer et al. Big Bird: Transformers for Longer Sequences. arXiv:2007.14062.
    """

    block: Positive
    window_blocks: Positive = 3
    global_blocks: Count = 1
    random_blocks: Count = 3
    seed: Word = 0
    causal: bool = False
    head: Word | None = None

    def sizes(self) -> tuple[int, int]:
        return 1, 0 if self.random_blocks and self.head is None else 1

    def at(self, batch: int, head: int) -> Pattern:
        return self if self.sizes()[1] else replace(self, head=head)

    def _row_program(self) -> Program | None:
        if self.random_blocks:
            return None
        block, first = reach(self.block), reach(self.global_blocks * self.block)
        back, ahead = (reach(n * self.block) for n in (self.window_blocks // 2, self.window_blocks // 2 + 1))
        window = run(Place(-back, block), Place(ahead, block))
        found = union(whole(0, first), run(Place(0), Place(first)), window)
        return (*found, *Causal()._row_program(), AND) if self.causal else found

    def _rows(self, asked: AskedRows) -> np.ndarray:
        """Set the bits of the random blocks of all heads at once."""
        if asked.q.shape[1] != 1:
            return super()._rows(asked)
        block, (batch, _, queries) = reach(self.block), asked.q.shape
        heads = tuple(range(asked.heads)) if self.head is None else (self.head,)
        blocks, rows = -(-asked.kv_len // block), (asked.q // block).reshape(-1).tolist()
        groups = {n: _drawn(self, heads, _DRAWN_AT_ONCE * n, blocks) for n in {row // _DRAWN_AT_ONCE for row in rows}}
        each = [groups[row // _DRAWN_AT_ONCE][row % _DRAWN_AT_ONCE] for row in rows]
        drawn = each[0] if len(rows) == 1 else np.concatenate(each)  # (batch * queries * heads, blocks)
        if queries > 1:
            drawn = drawn.reshape(batch, queries, len(heads), -1).swapaxes(1, 2).reshape(len(drawn), -1)
        words = asked.of(self._regular).repeat(len(heads), axis=1)
        start = drawn * block
        count = np.minimum(block, asked.kv_len - start)  # a causal row draws blocks before its own alone
        count[drawn < 0] = 0
        set_runs(words.reshape(len(drawn), -1), start, np.ones_like(start), count, asked.kv_len)
        return words

    @cached_property
    def _regular(self) -> BigBird:
        return replace(self, random_blocks=0)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        return _Bound(self, kv_len) if self.random_blocks and self.head is not None else self

    def allows(self, q: Any, k: Any) -> Any:
        if self.random_blocks:
            missing = ".at(batch, head)" if self.head is None else ".bind(q_len, kv_len)"
            raise ValueError(f"BigBird: its random blocks depend on the head and on kv_len; use {missing}")
        return self.cut(self.regular(q, k), q, k)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        return None if self.random_blocks else self.block_runs(q, kv_len, np.zeros((len(q), 0), dtype=np.int64))

    @property
    def _side(self) -> int:
        """Return the number of window blocks on either side of the query's block."""
        return reach(self.window_blocks // 2)

    # -- shared with the bound pattern -------------------------------------------------------------------------------

    def regular(self, q: Any, k: Any) -> Any:
        """Return True where a pair is in the window or in a global block."""
        a, b, side, first = q // reach(self.block), k // reach(self.block), self._side, reach(self.global_blocks)
        near = (a - side <= b) & (b <= a + side)
        return near | ((a >= 0) & (a < first)) | (b < first)  # rows before position 0 are in no block

    def cut(self, allowed: Any, q: Any, k: Any) -> Any:
        """Mask keys after the query if causal."""
        return allowed & (k <= q) if self.causal else allowed

    def draw(self, rows: np.ndarray, blocks: int) -> np.ndarray:
        """Draw the random blocks of the block rows `rows` in a sequence of `blocks` blocks; -1 = none."""
        if self.head is None:
            raise ValueError("BigBird: its random blocks depend on the head; use .at(batch, head)")
        first, side = reach(self.global_blocks), self._side
        below = np.maximum(rows - side - first, 0)  # candidates between the global blocks and the window
        above_start = np.maximum(rows + side + 1, first)
        above = np.zeros_like(rows) if self.causal else np.maximum(blocks - above_start, 0)
        candidates = np.where(rows < first, 0, below + above)
        rank = draw_ranks(self.seed, self.head, rows, candidates, min(self.random_blocks, blocks))
        drawn = np.where(rank < below[:, None], first + rank, (above_start - below)[:, None] + rank)
        return np.where(rank < 0, -1, drawn)

    def block_runs(self, q: np.ndarray, kv_len: int, random: np.ndarray) -> Runs:
        """Return the runs of each query, given its random blocks (len(q), n)."""
        block = reach(self.block)
        own = q // block * block  # start of the query's own block
        back, ahead = (reach(n * self.block) for n in (self.window_blocks // 2, self.window_blocks // 2 + 1))
        end = np.minimum(q + 1, kv_len) if self.causal else np.full_like(q, kv_len)
        first = reach(self.global_blocks * self.block)
        everything = (own >= 0) & (own < first)
        columns = np.where(everything, end, np.minimum(first, end))
        window = np.where(everything, 0, np.minimum(own + ahead, end))
        drawn = np.maximum(random, 0) * block
        stop = np.where(random < 0, 0, np.minimum(drawn + block, kv_len))
        return (
            Runs.span(np.zeros_like(q), columns, kv_len)
            | Runs.span(np.maximum(own - back, first), window, kv_len)
            | Runs(drawn, np.ones_like(drawn), np.maximum(stop - drawn, 0))
        )

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        block, window = draw.size(1, max(2, sizes.kv_len // 4)), draw.size(1, 5)
        blocks = draw.size(0, 2), draw.size(0, 4)  # drawing more random blocks is slow
        rest = (draw.value(cls, name, sizes) for name in ("seed", "causal", "head"))
        return cls(block, window, *blocks, *rest), sizes


@functools.lru_cache(maxsize=1024)  # steps of generation need the same block rows, and the next ones
def _drawn(pattern: BigBird, heads: tuple[int, ...], first: int, blocks: int) -> np.ndarray:
    """Return the random blocks of heads, (_DRAWN_AT_ONCE block rows, heads, n); -1 outside of the block rows."""
    rows = np.arange(first, first + _DRAWN_AT_ONCE)
    each = [replace(pattern, head=head).draw(rows.clip(0, blocks - 1), blocks) for head in heads]
    drawn = np.stack(each, axis=1)
    drawn[(rows < 0) | (rows >= blocks)] = -1
    return frozen(drawn)


@dataclass(frozen=True, repr=False)
class _Bound(Pattern):
    """BigBird bound to `kv_len` tokens, which determine its random blocks."""

    pattern: BigBird
    kv_len: int

    @property
    def blocks(self) -> int:
        return -(-self.kv_len // self.pattern.block)

    @cached_property
    def drawn(self) -> np.ndarray:
        return self.pattern.draw(np.arange(self.blocks), self.blocks)

    @cached_property
    def table(self) -> ListedCells:
        row, slot = np.nonzero(self.drawn >= 0)
        return ListedCells(row, self.drawn[row, slot], (self.blocks, self.blocks))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        return self if kv_len == self.kv_len else self.pattern.bind(q_len, kv_len)

    def allows(self, q: Any, k: Any) -> Any:
        pattern = self.pattern
        random = self.table.contains(q // reach(pattern.block), k // reach(pattern.block))
        return pattern.cut(pattern.regular(q, k) | random, q, k)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        a = q // reach(self.pattern.block)
        rows = np.pad(self.drawn, ((0, 1), (0, 0)), constant_values=-1)  # appends an empty row for `a` out of range
        return self.pattern.block_runs(q, kv_len, rows[row_or_last(a, self.blocks)])

    def _description(self) -> dict[str, Any]:
        return self.pattern._description()

    def __repr__(self) -> str:
        return repr(self.pattern)
