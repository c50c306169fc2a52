"""Windows: sliding, dilated and periodic; columns and diagonals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from ..._util.index_checks import LONGEST, q_offset
from ...index_set import Runs
from ..base.check import MOST_RUNS, REACH, Count, Positive, Range, assign, reach
from ..base.class_registry import register
from ..base.content import dynamic, on_device
from ..base.pattern import Part, Pattern, defers
from ..base.predicate import member
from ..hints.closed_forms import (
    AND,
    NO_KEY_AHEAD,
    Bands,
    Ends,
    Lattice,
    Place,
    Program,
    nearby,
    run,
    same_keys,
    union,
)
from .basic import Causal, always, residue_parts
from .tokens import position_table, token_set

__all__ = ["DilatedWindow", "PeriodicWindow", "SlidingWindow", "VerticalSlash"]

_Side = Annotated[int, Range(-1)]


class _Window(Pattern):
    """Base class of windows; ``right=None`` means ``right=left``."""

    left: Any
    right: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.right is None:
            assign(self, right=self.left)

    @property
    def _right(self) -> int:  # while torch.compile traces, `right` may still be None
        right: int = self.left if self.right is None else self.right
        return right


@register("sliding_window", typical=((256,), 16384))
@dataclass(frozen=True)
class SlidingWindow(_Window):
    """Sliding window: each query attends to keys at most `left` tokens before and `right` tokens after it.

    For long sequences with mostly local dependencies, as in the local layers of language models.

    Parameters
    ----------
    left, right : int
        Tokens before and after the query; −1 = unbounded. `right` defaults to `left`.

    Notes
    -----
    ``SlidingWindow(left, 0)`` has ``left + 1`` keys, including the query's own: Mistral's ``sliding_window=W`` is
    ``SlidingWindow(W - 1, 0)``. FlashAttention's ``window_size=(l, r)`` is ``SlidingWindow(l, r)``, also with −1. The
    window is clipped at the ends of the sequence, where :class:`Neighborhood` shifts it. If q_len > kv_len, a query
    before position 0 attends to keys up to `right` tokens after it.

    References
    ----------
    Beltagy, Peters, Cohan. Longformer. arXiv:2004.05150, §3.1.

    Examples
    --------
    >>> SlidingWindow(2, 0).index_set(4, 4).to_dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [0, 1, 1, 1]])
    """

    left: _Side
    right: _Side | None = None
    translation_invariant = True

    @classmethod
    def _read(cls, fields: dict[str, Any]) -> Pattern:  # before 0.1.0, None meant unbounded
        return cls(**{name: -1 if tokens is None else tokens for name, tokens in fields.items()})

    def allows(self, q: Any, k: Any) -> Any:
        left, right = self.left, self._right
        after = always(q) if left < 0 else q - reach(left) <= k
        before = always(k) if right < 0 else k <= q + reach(right)
        return after & before

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        left, right = self.left, self._right
        start = np.zeros_like(q) if left < 0 else q - reach(left)
        return Runs.span(start, kv_len if right < 0 else q + reach(right) + 1, kv_len)

    def _row_program(self) -> Program:
        start = Place(0) if self.left < 0 else Place(-reach(self.left), 1)
        return union(run(start, Place(REACH) if self._right < 0 else Place(reach(self._right) + 1, 1)))

    def ends(self, q_len: int) -> Ends:
        return Ends(0, q_len, between=True) if self.left < 0 else Ends(0, self.left + q_len)

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        left, right = (REACH if tokens < 0 else reach(tokens) for tokens in (self.left, self._right))
        return (nearby([-right, left + 1]),)


@register("dilated_window", example=((3, None, 3), 32), typical=((256, None, 4), 16384))
@dataclass(frozen=True)
class DilatedWindow(_Window):
    """Dilated window: each query attends to the keys ``p + dilation * t, -left <= t <= right``.

    For a wider receptive field at the cost of a plain window.

    Parameters
    ----------
    left, right : int
        Number of keys before and after the query; `right` defaults to `left`.
    dilation : int, optional
        Distance between consecutive keys in tokens.

    References
    ----------
    Beltagy, Peters, Cohan. Longformer. arXiv:2004.05150, §3.1.
    """

    left: Count
    right: Count | None = None
    dilation: Positive = 1
    translation_invariant = True

    def spans(self) -> tuple[int, int, int]:
        """Return the distances in tokens to the query's first key, to its last key, and between consecutive keys."""
        step = reach(self.dilation)
        back, ahead = (reach(n * self.dilation) // step * step for n in (self.left, self._right))
        return back, ahead, step

    def allows(self, q: Any, k: Any) -> Any:
        back, ahead, d = self.spans()
        return (q % d == k % d) & (q - back <= k) & (k <= q + ahead)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        back, ahead, d = self.spans()
        return Runs.stepped(q - back, q + ahead + 1, d, kv_len)

    def _row_program(self) -> Program:
        back, ahead, step = self.spans()
        return union(run(Place(-back, 1), Place(ahead + 1, 1), step))

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return (Part(self),) if self.dilation == 1 else residue_parts(self, reach(self.dilation), 0, q_len, kv_len)

    def ends(self, q_len: int) -> Ends | None:
        return Ends(0, self.left + q_len) if self.dilation == 1 else None  # residue classes have denser views


@register("periodic_window", example=((8, 1, None, 3), 32), typical=((512, 32), 4096))
@dataclass(frozen=True)
class PeriodicWindow(_Window):
    """Periodic window: each query attends, in every period, to a window around its own index within the period.

    For videos, where a token attends to its surroundings in every frame.

    Parameters
    ----------
    period : int
        Tokens per period.
    left, right : int
        Number of keys per period before and after the query's index; `right` defaults to `left`.
    offset : int, optional
        Position at which one period starts, e.g. after a prompt.

    Notes
    -----
    The window is clipped at the ends of a period. If a prompt of n global tokens comes first, use
    ``GlobalTokens(n) | PeriodicWindow(period, w, offset=n)``.

    References
    ----------
    Xi et al. Sparse VideoGen. arXiv:2502.01776.

    Examples
    --------
    >>> PeriodicWindow(4, 1).index_set(8, 8).row(5)
    array([0, 1, 2, 4, 5, 6])
    """

    period: Annotated[int, Range(1, LONGEST)]
    left: Count
    right: Count | None = None
    offset: Count = 0

    def _place(self, positions: Any) -> Any:
        """Return each position's index within its period."""
        return (positions - self.offset % self.period) % self.period

    def allows(self, q: Any, k: Any) -> Any:
        own, other = self._place(q), self._place(k)
        return (own - reach(self.left) <= other) & (other <= own + reach(self._right))

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        queries, keys = (self._lattices(first, kv_len) for first in (q_offset(q_len, kv_len), 0))
        return tuple(Part(self, query, key) for query in queries for key in keys)

    def _lattices(self, first: int, end: int) -> tuple[Lattice, ...]:
        """Cover the positions ``[first, end)``: whole periods, transposed, and the positions before and after them.

        Transposed means that tokens with the same index in their periods are adjacent.
        """
        start = min(first + -(first - self.offset) % self.period, end)
        periods = (end - start) // self.period
        stop = start + periods * self.period
        whole = (Lattice(start, (1, self.period), (self.period, periods)),) if periods > 1 else ()
        ends = ((first, start), (stop, end)) if whole else ((first, end),)
        return whole + tuple(Lattice(a, (1,), (b - a,)) for a, b in ends if a < b)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        period = draw.integer(1, sizes.kv_len + 2)
        return cls(period, draw.size(0, period), draw.size(0, period), draw.size(0, 2 * period)), sizes


@register(
    "vertical_slash",
    example=(((0, 1, 9), (0, 1, 2, 12)), 32),
    typical=lambda: ((tuple(range(64)), tuple(range(512))), 4096),
)
@dataclass(frozen=True)
class VerticalSlash(Pattern):
    """Vertical-slash pattern, causal key columns and diagonals: ``(j in columns or p - j in diagonals) and j <= p``.

    For long-prompt prefill, with columns and diagonals estimated from a sample of the queries.

    Parameters
    ----------
    columns : tuple of int
        Key positions.
    diagonals : tuple of int
        Distances ``p - j >= 0`` in tokens. If `columns` and `diagonals` are GPU arrays of shape
        ``([[batch,] heads,] n)``, the result is a :class:`~spattn.patterns.dynamic.DynamicVerticalSlash`, which each
        call reads on the device.

    References
    ----------
    Jiang et al. MInference 1.0. arXiv:2407.02490.
    """

    columns: tuple[Count, ...]
    diagonals: tuple[Count, ...]

    def __new__(cls, columns: Any = None, diagonals: Any = None) -> Any:
        if not defers(columns, diagonals) and (on_device(columns) or on_device(diagonals)):
            return dynamic("DynamicVerticalSlash", columns, diagonals)
        return super().__new__(cls, columns, diagonals)

    def __post_init__(self) -> None:
        super().__post_init__()
        assign(self, columns=token_set(self.columns), diagonals=token_set(self.diagonals))

    def allows(self, q: Any, k: Any) -> Any:
        columns, diagonals = map(position_table, (self.columns, self.diagonals))
        return (member(columns, k) | member(diagonals, q - k)) & (k <= q)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        columns, diagonals = map(position_table, (self.columns, self.diagonals))
        if len(q) * (len(columns) + len(diagonals)) > MOST_RUNS:
            return None
        new = np.diff(diagonals, prepend=-2) > 1  # adjacent diagonals form one run
        near, far = diagonals[new], diagonals[np.append(new[1:], True)[: len(diagonals)]]
        row = q[:, None]
        start = np.maximum(row - far, 0)
        bands = Runs(start, np.ones_like(start), np.maximum(np.minimum(row - near + 1, kv_len) - start, 0))
        alone = (columns <= row) & (columns < kv_len) & ~np.isin(row - columns, diagonals)
        start = np.broadcast_to(columns, alone.shape)
        return bands | Runs(start, np.ones_like(start), alone.astype(np.int64))

    def _row_program(self) -> Program:
        columns = (run(Place(reach(column)), Place(reach(column) + 1)) for column in self.columns)
        diagonals = (run(Place(-reach(far), 1), Place(1 - reach(far), 1)) for far in self.diagonals)
        return *union(*columns, *diagonals), *Causal()._row_program(), AND

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        columns, diagonals = map(position_table, (self.columns, self.diagonals))
        chosen = same_keys(columns, columns + 1, np.stack([diagonals, diagonals + 1], axis=1))
        return chosen, NO_KEY_AHEAD
