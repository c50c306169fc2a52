"""Deduplicated cell values that depend on queries or keys alone.

Most boxes of a view differ by a constant, so each stores a *base* and its *kind*, a row in a table of distinct boxes.
Operators keep this form if possible: evaluating a predicate costs O(boxes + kinds · cells) instead of O(tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._util.cached import cached_property
from ..contract.types import AXES, first_coordinates

__all__ = ["MOST", "Cells", "evaluate", "distinct", "unique_rows"]

MOST = 1 << 61  # largest value of an operand: sums and differences of two stay within int64
_INT64 = np.dtype(np.int64)
_CLOSE = 8  # values need no sorting to be deduplicated if their range is at most _CLOSE times their number


@dataclass(frozen=True, eq=False)
class Cells:
    """Values of boxes: cell c of box b is ``table[kind[b], c] + base[b]``; bases are 0 unless the table is int64."""

    table: np.ndarray
    kind: np.ndarray
    base: np.ndarray

    @classmethod
    def listed(cls, values: np.ndarray) -> Cells:
        """Build from any (boxes, cells) array; all boxes with a constant value share one kind."""
        if values.dtype != _INT64 or not values.size:
            return cls(values, np.arange(len(values)), np.zeros(len(values), np.int64))
        differ = np.nonzero((values != values[:, :1]).any(axis=1))[0]
        table = np.zeros((1 + len(differ), values.shape[1]), np.int64)
        table[1:] = values[differ]
        kind, base = np.zeros(len(values), np.int64), values[:, 0].copy()
        kind[differ], base[differ] = 1 + np.arange(len(differ)), 0
        return cls(table, kind, base)

    @classmethod
    def of_view(cls, view: np.void, shift: int = 0, tiles: np.ndarray | None = None) -> Cells:
        """Return the positions of a view's `tiles` (default: all), plus `shift`; padding repeats the nearest cell."""
        tiles = np.arange(int(view["tiles"])) if tiles is None else tiles
        views = np.broadcast_to(view, tiles.shape)
        first = first_coordinates(views, tiles)
        base = int(view["offset"]) + shift + first @ view["stride"]
        reach = np.minimum(view["box"], view["extent"] - first)  # real cells along each axis
        sample, kind = unique_rows(reach)
        table = np.zeros((len(sample), 1), np.int64)
        for axis in range(AXES):
            step = np.minimum(np.arange(view["box"][axis]), reach[sample, axis : axis + 1] - 1) * view["stride"][axis]
            table = (table[:, :, None] + step[:, None, :]).reshape(len(sample), table.shape[1] * step.shape[1])
        return cls(table, kind, base)

    @property
    def dtype(self) -> np.dtype:
        return self.table.dtype

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def values(self) -> np.ndarray:
        """All values as a (boxes, cells) array."""
        found = self.table[self.kind]
        if self.base.any():
            found += self.base[:, None]
        return found

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Minimum and maximum of each box."""
        return self.table.min(axis=1)[self.kind] + self.base, self.table.max(axis=1)[self.kind] + self.base

    @cached_property
    def largest(self) -> int:
        """Upper bound on the absolute values of cells, bases and table entries."""
        return _magnitude(self.table) + _magnitude(self.base)

    @cached_property
    def step(self) -> int:
        """The largest modulus for which the values of each box are congruent; 0 if they are equal."""
        return int(np.gcd.reduce(np.diff(self.table, axis=1), axis=None)) if self.table.shape[1] > 1 else 0

    @cached_property
    def shape_and_base(self) -> tuple[np.ndarray, np.ndarray]:
        """The shape index and the first value of each box. Boxes with equal shape indices differ by a constant.

        If the table is not int64, each distinct row is a shape, and the bases are 0.
        """
        if self.dtype != _INT64:
            return unique_rows(self.table)[1][self.kind], self.base
        first = self.table[:, 0]
        return unique_rows(self.table - first[:, None])[1][self.kind], self.base + first[self.kind]

    def alone(self) -> Cells:
        """Return the same values with all bases 0."""
        if not self.base.any():
            return self
        sample, kind = _pairs(self.kind, self.base)
        return Cells(self.table[self.kind[sample]] + self.base[sample, None], kind, np.zeros_like(self.base))

    def take(self, boxes: np.ndarray) -> Cells:
        """Select boxes and drop unused kinds."""
        used, kind = np.unique(self.kind[boxes], return_inverse=True)
        return Cells(self.table[used], kind, self.base[boxes])

    def rank(self, table: np.ndarray) -> Cells:
        """Return ``np.searchsorted(table, values, side="right")``."""
        low, high = (np.searchsorted(table, bound, side="right") for bound in self.bounds)
        return self._where(low != high, low, lambda x: np.searchsorted(table, x, side="right"))

    def member(self, table: np.ndarray) -> Cells:
        """Return ``np.isin(values, table)`` for a sorted table."""
        low, high = self.bounds
        some = np.searchsorted(table, high, side="right") > np.searchsorted(table, low, side="left")
        return self._where(some, np.zeros(len(self), np.int64), lambda x: np.isin(x, table))

    def _where(self, open_: np.ndarray, constant: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> Cells:
        """Apply `function` to the boxes where `open_` is true; the others get their value in `constant`."""
        found = self.take(open_).map(function)
        table = np.concatenate([np.zeros_like(found.table, shape=(1, self.table.shape[1])), found.table])
        kind, base = np.zeros(len(self), np.int64), constant.copy()
        kind[open_], base[open_] = 1 + found.kind, found.base
        return Cells(table, kind, base)

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Cells:
        """Apply `function` to every value."""
        own = self.alone()
        found = Cells.listed(function(own.table))
        return Cells(found.table, found.kind[own.kind], found.base[own.kind])


def evaluate(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> Cells:
    """Evaluate a ufunc with one result; the inputs are scalars and values of the same boxes."""
    boxes = next(len(x) for x in inputs if isinstance(x, Cells))
    rule = _RULES.get(ufunc)
    if rule is not None and all(map(_followed, inputs)):
        found = rule(ufunc, *(x if isinstance(x, Cells) else _constant(int(x), boxes) for x in inputs))
        if found is not None:
            return found
    sides = [x.alone() for x in inputs if isinstance(x, Cells)]
    sample, kind = distinct(_joined(sides))
    rows = iter(x.table[x.kind[sample]] for x in sides)
    found = Cells.listed(ufunc(*(next(rows) if isinstance(x, Cells) else x for x in inputs)))
    return Cells(found.table, found.kind[kind], found.base[kind])


def unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (index of one row of each kind, kind of each row); rows with equal bytes are of one kind."""
    rows = np.ascontiguousarray(rows)
    if rows.shape[1] == 0 or rows.shape[0] == 0:
        return np.zeros(min(1, rows.shape[0]), np.int64), np.zeros(rows.shape[0], np.int64)
    opaque = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
    _, first, kind = np.unique(opaque, return_index=True, return_inverse=True)
    return first, kind.reshape(-1)


def _magnitude(numbers: np.ndarray) -> int:
    """Return the maximum absolute value as a Python int, which cannot overflow."""
    return max(-int(numbers.min(initial=0)), int(numbers.max(initial=0)))


def _followed(x: Any) -> bool:
    """Return whether sums of two such values stay within int64."""
    if isinstance(x, Cells):
        return x.dtype == _INT64 and x.largest <= MOST
    return isinstance(x, (int, np.signedinteger)) and not isinstance(x, bool) and abs(int(x)) <= MOST


def _constant(number: int, boxes: int) -> Cells:
    return Cells(np.zeros((1, 1), np.int64), np.zeros(boxes, np.int64), np.full(boxes, number))


def distinct(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (index of one occurrence, inverse) of the distinct values in ascending order; sort only sparse values."""
    if not len(codes):
        return codes, codes
    low, high = int(codes.min()), int(codes.max())
    if high - low > _CLOSE * len(codes) + _CLOSE:
        _, sample, which = np.unique(codes, return_index=True, return_inverse=True)
        return sample, which
    codes = codes - low
    place = np.full(high - low + 1, -1)
    place[codes] = np.arange(len(codes))
    there = place >= 0
    return place[there], (np.cumsum(there) - 1)[codes]


def _pairs(kind: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Apply `distinct` to the pairs (kind, number)."""
    places, rank = distinct(number)
    return distinct(kind * len(places) + rank) if kind.any() else (places, rank)


def _joined(sides: list[Cells]) -> np.ndarray:
    """Return a code for each box that identifies its kinds in all of `sides`."""
    code = sides[0].kind
    for side in sides[1:]:
        code = code * len(side.table) + side.kind
    return code


def _aligned(x: Cells, y: Cells) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return table rows of x and of y, for each distinct pair of kinds (or one that broadcasts), and each box's row."""
    if len(x.table) == 1 or len(y.table) == 1:
        return x.table, y.table, y.kind if len(x.table) == 1 else x.kind
    sample, kind = distinct(_joined([x, y]))
    return x.table[x.kind[sample]], y.table[y.kind[sample]], kind


def _linear(ufunc: np.ufunc, x: Cells, y: Cells) -> Cells:
    *rows, kind = _aligned(x, y)
    return Cells(ufunc(*rows), kind, ufunc(x.base, y.base))


def _negative(ufunc: np.ufunc, x: Cells) -> Cells:
    return Cells(-x.table, x.kind, -x.base)


def _product(ufunc: np.ufunc, x: Cells, y: Cells) -> Cells | None:
    for one, other in ((x, y), (y, x)):
        if one.table.shape == (1, 1) and (one.base == one.base[:1]).all() and one.largest * other.largest <= MOST:
            factor = int(one.table[0, 0]) + int(one.base[0]) if len(one) else 0
            return Cells(other.table * factor, other.kind, other.base * factor)
    return None


def _by_modulus(ufunc: np.ufunc, x: Cells, y: Cells) -> Cells | None:
    """Divide base and table separately if no cell carries; boxes with a carry get new table rows."""
    modulus = int(y.base[0]) if len(y) and y.table.shape == (1, 1) and (y.base == y.base[0]).all() else 0
    if modulus <= 0 or y.table[0, 0]:
        return None
    quotient, remainder = np.divmod(x.base, modulus)
    most = np.remainder(x.table, modulus).max(axis=1, initial=0)
    carries = np.nonzero(most[x.kind] + remainder >= modulus)[0]
    sample, own = _pairs(x.kind[carries], remainder[carries])
    carried = x.table[x.kind[carries[sample]]] + remainder[carries[sample], None]
    kind = x.kind.copy()
    kind[carries] = len(x.table) + own
    base = quotient if ufunc is np.floor_divide else remainder
    if ufunc is np.remainder:
        base[carries] = 0
    return Cells(ufunc(np.concatenate([x.table, carried]), modulus), kind, base)


def _apart(x: Cells, y: Cells) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (rows of x plus the difference of the bases, rows of y, row index of each box, the differences)."""
    reach = 1 + _magnitude(x.table) + _magnitude(y.table)  # a larger difference of bases decides the order alone
    distance = np.clip(x.base - y.base, -reach, reach)
    x_rows, y_rows, kind = _aligned(x, y)
    sample, kind_apart = _pairs(kind, distance)
    own = kind[sample]
    x_rows, y_rows = (rows if len(rows) == 1 else rows[own] for rows in (x_rows, y_rows))
    return x_rows + distance[sample, None], y_rows, kind_apart, distance


def _comparison(ufunc: np.ufunc, x: Cells, y: Cells) -> Cells:
    x_rows, y_rows, kind, distance = _apart(x, y)
    return Cells(ufunc(x_rows, y_rows), kind, np.zeros_like(distance))


def _extreme(ufunc: np.ufunc, x: Cells, y: Cells) -> Cells:
    x_rows, y_rows, kind, distance = _apart(x, y)
    x_wins = (distance > 0) == (ufunc is np.maximum)
    return Cells(ufunc(x_rows, y_rows), kind, np.where(x_wins, x.base - distance, y.base))


_RULES: dict[np.ufunc, Callable[..., Cells | None]] = {
    np.add: _linear,
    np.subtract: _linear,
    np.negative: _negative,
    np.multiply: _product,
    np.remainder: _by_modulus,
    np.floor_divide: _by_modulus,
    np.minimum: _extreme,
    np.maximum: _extreme,
}
_RULES |= dict.fromkeys((np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal), _comparison)
