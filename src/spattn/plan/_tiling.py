"""From one pattern piece and two views to a list of tiles with deduplicated bitmasks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._ragged import ramp
from ..patterns import Lattice, Pattern
from ..patterns._predicate import allowed as allowed_pairs
from ._symbolic import Boxes, TilePairs, unique_rows
from ._types import AXES, LARGEST, VIEW, grid_of, positions

_PAIRS_AT_ONCE = 1 << 15  # tile pairs of the coarsest level of the search
_CELLS_AT_ONCE = 1 << 22  # of a side of the boxes that are evaluated at once, unless there are many times as many
_MOST_AT_ONCE = 8  # shares that a side is evaluated in
_CELL_BYTES = 9  # of a position and of whether it is real
_PAIR_BYTES = 41  # of a tile pair while it is refined
_TILES_AT_ONCE = 64  # tiles evaluated cell by cell at once
_COARSER = 4  # boxes joined along each axis from one level of the search to the next
_TILE_BYTES = 12  # of a plan's indices, key_view and mask


class Budget:
    """What making a plan takes at least.

    Parameters
    ----------
    max_bytes : int
        The most that it may take.

    Attributes
    ----------
    needed : int
        The most that was asked for so far, in bytes.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.needed = 0
        self._tiles = 0

    def need(self, nbytes: int) -> None:
        """ValueError if so many bytes at once are too many."""
        self.needed = max(self.needed, nbytes)
        if nbytes > self.max_bytes:
            raise ValueError(
                f"pattern: expected a plan of at most max_bytes = {self.max_bytes} bytes, got one that needs at least "
                f"{nbytes}"
            )

    def need_tiles(self, count: int) -> None:
        """ValueError if a plan with `count` tiles more than it has is too large."""
        tiles = self._tiles + count
        if tiles > LARGEST:
            raise ValueError(f"pattern: expected at most {LARGEST} tiles, got at least {tiles}; use a larger tile")
        self.need(_TILE_BYTES * tiles)

    def add_tiles(self, count: int) -> None:
        """So many tiles have been found."""
        self.need_tiles(count)
        self._tiles += count


class Tiles(NamedTuple):
    """Tiles of one (query view, key view) pair, by query tile, then key tile; `mask` is -1 for full tiles."""

    query_tile: np.ndarray
    key_tile: np.ndarray
    mask: np.ndarray
    nnz: int


class Masks:
    """The deduplicated bitmasks of a plan."""

    def __init__(self, block_q: int, block_kv: int, budget: Budget):
        self.tile = block_q, block_kv
        self.shape = block_q, block_kv // 64
        self._budget = budget
        self._number: dict[bytes, int] = {}  # in the order of the numbers

    def add(self, masks: np.ndarray) -> np.ndarray:
        """The number of each of `masks`, n · block_q · words numbers of uint64."""
        known, content, size = self._number, masks.tobytes(), 8 * math.prod(self.shape)
        numbers = [known.setdefault(content[at : at + size], len(known)) for at in range(0, len(content), size)]
        self._budget.need(size * len(known))
        return np.array(numbers, np.int32)

    def find(self, mask: np.ndarray, rows: np.ndarray) -> int | None:
        """A known mask that equals `mask` in these rows."""
        if self._number and not rows.all():
            same = (self.array()[:, rows] == mask[rows]).all(axis=(1, 2))
            return int(same.argmax()) if same.any() else None
        return None

    def array(self) -> np.ndarray:
        """All of them, (n, block_q, words) uint64."""
        return np.ndarray((len(self._number), *self.shape), np.uint64, b"".join(self._number))


def make_view(lattice: Lattice, block: int) -> np.void:
    """The VIEW record of a lattice cut into boxes of `block` cells."""
    return _view(lattice.offset, lattice.strides, lattice.extents, choose_box(lattice.extents, block))


def _view(offset: int, strides: Sequence[int], extents: Sequence[int], box: Sequence[int]) -> np.void:
    missing = AXES - len(extents)
    view = np.zeros(1, dtype=VIEW)[0]
    view["offset"] = offset
    view["stride"] = (0,) * missing + tuple(strides)
    view["extent"] = (1,) * missing + tuple(extents)
    view["box"] = (1,) * missing + tuple(box)
    view["grid"] = grid_of(view["extent"], view["box"])
    view["tiles"] = np.prod(view["grid"], dtype=np.int64)
    return view


def choose_box(extents: tuple[int, ...], block: int) -> tuple[int, ...]:
    """The most cubic box of `block` cells among those that need (almost) the fewest; a tie favours the last axis."""

    def boxes(box: tuple[int, ...]) -> int:
        return math.prod(grid_of(extents, box))

    candidates = _factorisations(block, len(extents))
    fewest = min(map(boxes, candidates))
    near = [box for box in candidates if boxes(box) <= 1.1 * fewest]
    return min(near, key=lambda box: (sum(box), box))


def _factorisations(number: int, factors: int) -> list[tuple[int, ...]]:
    if factors == 1:
        return [(number,)]
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [(d, *rest) for d in divisors for rest in _factorisations(number // d, factors - 1)]


def find_tiles(pattern: Pattern, query: np.void, key: np.void, shift: int, masks: Masks, budget: Budget) -> Tiles:
    """All tiles of `pattern` on a pair of views that hold an allowed pair.

    Parameters
    ----------
    shift : int
        kv_len − q_len: what turns a row of the query view into a position.
    budget : Budget
        Raises ValueError where they are too many.
    """
    budget.need(_CELL_BYTES * sum(int(view["tiles"]) * view["box"].prod(dtype=np.int64) for view in (query, key)))
    if pattern._lists_pairs and _plain(query) and _plain(key):
        from ._listed import tiles_of_pairs  # which few patterns need

        return tiles_of_pairs(pattern, query, key, shift, masks, budget)
    # A single tile is sooner evaluated than searched for.
    single = int(query["tiles"]) == int(key["tiles"]) == 1
    found = None if single else _search(pattern, query, key, shift, budget)
    q_positions, q_valid = positions(query, np.arange(query["tiles"]))
    k_positions, k_valid = positions(key, np.arange(key["tiles"]))
    q_positions = q_positions + shift
    if found is None:
        q_box, k_box, full = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, bool)
        kinds = first = np.arange(1)
    else:
        q_box, k_box, full = found
        full &= np.all(k_valid, axis=1)[k_box]
        open_pairs = np.nonzero(~full)[0]
        first, kinds = _kinds(pattern, q_positions, k_positions, q_valid, k_valid, q_box[~full], k_box[~full])
        first = open_pairs[first]
    mask = np.full(len(q_box), -1, dtype=np.int32)
    numbers = _evaluate(pattern, (q_positions, q_valid), (k_positions, k_valid), q_box[first], k_box[first], masks)
    mask[~full] = numbers[kinds]
    keep = mask > _EMPTY
    q_tile, k_tile, number = q_box[keep], k_box[keep], mask[keep]
    order = np.argsort(q_tile * int(key["tiles"]) + k_tile)
    q_tile, k_tile, number = q_tile[order], k_tile[order], number[order]
    return Tiles(q_tile, k_tile, number, _count(number, q_tile, q_valid, masks))


_EMPTY = -2


def _plain(view: np.void) -> bool:
    """Whether a view is one of consecutive positions."""
    return bool(view["stride"][-1] == 1 and view["extent"][:-1].max() == 1)


def _search(
    pattern: Pattern, query: np.void, key: np.void, shift: int, budget: Budget
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tile pairs that may hold an allowed pair: (query box, key box, whether every cell is allowed).

    Starts with coarse boxes and refines only what is undecided, so the cost follows the number of tiles found. What is
    decided at a coarse level is known to be in the plan before it is listed.
    """
    levels = [(query, key)]
    while int(levels[-1][0]["tiles"]) * int(levels[-1][1]["tiles"]) > _PAIRS_AT_ONCE:
        coarser = _coarse(levels[-1][0]), _coarse(levels[-1][1])
        if all(a["tiles"] == b["tiles"] for a, b in zip(coarser, levels[-1], strict=True)):
            break
        levels.append(coarser)
    top_q, top_k = levels[-1]
    q_box, k_box = (a.reshape(-1) for a in np.indices((int(top_q["tiles"]), int(top_k["tiles"]))))
    always = np.zeros(len(q_box), dtype=bool)
    for level in range(len(levels) - 1, -1, -1):
        q_view, k_view = levels[level]
        unknown = np.nonzero(~always)[0]
        lo, hi = _decide(pattern, q_view, k_view, shift, q_box[unknown], k_box[unknown])
        always[unknown] = lo > 0
        alive = always.copy()
        alive[unknown] |= hi > 0
        q_box, k_box, always = q_box[alive], k_box[alive], always[alive]
        if level:
            finer = levels[level - 1]
            budget.need_tiles(_pairs_inside(levels[level], (query, key), q_box[always], k_box[always]))
            budget.need(_PAIR_BYTES * _pairs_inside(levels[level], finer, q_box, k_box))
            q_box, k_box, always = _refine(q_box, k_box, always, *levels[level], *finer)
    return q_box, k_box, always


def _decide(
    pattern: Pattern, q_view: np.void, k_view: np.void, shift: int, q_box: np.ndarray, k_box: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of the predicate on pairs of boxes, computed on so many positions at once that memory is
    bounded."""
    (q_share, q_starts), (k_share, k_starts) = _shares(q_view), _shares(k_view)
    if len(q_starts) == len(k_starts) == 1:
        boxes = _boxes(q_view, 0, q_share, shift), _boxes(k_view, 0, k_share, 0)
        result = TilePairs(*boxes, q_box, k_box, with_keys=False).evaluate(pattern)
        return result.lo, result.hi
    lo, hi = np.zeros((2, len(q_box)), dtype=np.int64)
    for q_start in q_starts:
        of_share = np.nonzero(q_box // q_share == q_start // q_share)[0]
        q_boxes = _boxes(q_view, q_start, q_share, shift)
        for k_start in k_starts:
            own = of_share[k_box[of_share] // k_share == k_start // k_share]
            k_boxes = _boxes(k_view, k_start, k_share, 0)
            pairs = TilePairs(q_boxes, k_boxes, q_box[own] - q_start, k_box[own] - k_start, with_keys=False)
            result = pairs.evaluate(pattern)
            lo[own], hi[own] = result.lo, result.hi
    return lo, hi


def _shares(view: np.void) -> tuple[int, range]:
    """(boxes evaluated at once, where each share starts)."""
    tiles, cells = int(view["tiles"]), int(view["box"].prod(dtype=np.int64))
    share = max(1, _CELLS_AT_ONCE // cells, -(-tiles // _MOST_AT_ONCE))
    return share, range(0, tiles, share)


def _boxes(view: np.void, start: int, count: int, shift: int) -> Boxes:
    found = positions(view, np.arange(start, min(start + count, int(view["tiles"]))))[0]
    found += shift
    return Boxes(found)


def _coarse(view: np.void) -> np.void:
    """The view in boxes that join several along each axis, as far as their size is an int32."""
    sides = zip(view["box"].tolist(), view["grid"].tolist(), strict=True)
    box = [b * (_COARSER if g > 1 and _COARSER * b <= LARGEST else 1) for b, g in sides]
    return _view(view["offset"], view["stride"], view["extent"], box)


def _pairs_inside(
    coarse: tuple[np.void, np.void], fine: tuple[np.void, np.void], q_box: np.ndarray, k_box: np.ndarray
) -> int:
    """How many pairs of boxes of the views `fine` some pairs of boxes of the views `coarse` hold."""
    in_q, in_k = (_boxes_inside(*views) for views in zip(coarse, fine, strict=True))
    return int((in_q[q_box] * in_k[k_box]).sum())


def _boxes_inside(coarse: np.void, fine: np.void) -> np.ndarray:
    """How many boxes of `fine` each box of `coarse` holds."""
    counts = np.ones(1, np.int64)
    for ratio, boxes, finer in zip(coarse["box"] // fine["box"], coarse["grid"], fine["grid"], strict=True):
        axis = np.minimum(ratio, finer - ratio.astype(np.int64) * np.arange(boxes))
        counts = (counts[:, None] * axis).ravel()
    return counts


def _refine(
    q_box: np.ndarray,
    k_box: np.ndarray,
    always: np.ndarray,
    q_coarse: np.void,
    k_coarse: np.void,
    q_fine: np.void,
    k_fine: np.void,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Replaces every pair of coarse boxes by the pairs of fine boxes inside it."""
    q_children, q_count = _children(q_coarse, q_fine)
    k_children, k_count = _children(k_coarse, k_fine)
    pairs = q_count[q_box] * k_count[k_box]
    parent = np.repeat(np.arange(len(q_box)), pairs)
    q_number, k_number = np.divmod(ramp(pairs), k_count[k_box[parent]])
    return q_children[q_box[parent], q_number], k_children[k_box[parent], k_number], always[parent]


def _children(coarse: np.void, fine: np.void) -> tuple[np.ndarray, np.ndarray]:
    """Fine boxes inside each coarse box: (boxes, most) numbers with the real ones first, and how many are real."""
    fine_at = np.stack(np.unravel_index(np.arange(fine["tiles"]), tuple(fine["grid"])))
    ratio = (coarse["box"] // fine["box"])[:, None]
    parent = np.ravel_multi_index(tuple(fine_at // ratio), tuple(coarse["grid"]))
    order = np.argsort(parent, kind="stable")
    count = np.bincount(parent, minlength=int(coarse["tiles"]))
    children = np.zeros((int(coarse["tiles"]), int(count.max())), dtype=np.int64)
    children[np.arange(children.shape[1]) < count[:, None]] = order
    return children, count


def _kinds(
    pattern: Pattern,
    q_positions: np.ndarray,
    k_positions: np.ndarray,
    q_valid: np.ndarray,
    k_valid: np.ndarray,
    q_box: np.ndarray,
    k_box: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Groups tile pairs whose bitmasks are equal: (one pair of each group, group of each pair)."""
    if not len(q_box):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    used_q, q_at = np.unique(q_box, return_inverse=True)
    used_k, k_at = np.unique(k_box, return_inverse=True)
    pairs = TilePairs(Boxes(q_positions[used_q]), Boxes(k_positions[used_k]), q_at, k_at, with_keys=True)
    q_padding, k_padding = (unique_rows(v)[1] for v in (q_valid[used_q], k_valid[used_k]))
    content: Any = pairs.evaluate(pattern).key  # never None: these pairs have keys
    first, kinds = unique_rows(np.stack([content, q_padding[q_at], k_padding[k_at]], axis=1))
    if pairs.unfollowed:
        warnings.warn(
            f"{pattern!r}: allows() cannot be evaluated on whole tiles ({pairs.unfollowed[0]}); planning evaluates "
            f"every cell of {len(first)} tiles",
            stacklevel=2,
        )
    return first, kinds


def _evaluate(
    pattern: Pattern,
    query: tuple[np.ndarray, np.ndarray],
    key: tuple[np.ndarray, np.ndarray],
    q_box: np.ndarray,
    k_box: np.ndarray,
    masks: Masks,
) -> np.ndarray:
    """Number of the bitmask of each tile pair; -1 when full, `_EMPTY` when nothing is allowed."""
    (q_positions, q_valid), (k_positions, k_valid) = query, key
    block_q, words = masks.shape
    numbers = np.zeros(len(q_box), dtype=np.int32)
    # Tiles without padding rows first: a padded tile reuses their masks where its real rows agree.
    order = np.argsort(~q_valid[q_box].all(axis=1), kind="stable")
    for part in np.array_split(order, max(1, math.ceil(len(order) / _TILES_AT_ONCE))):
        q, k = q_box[part], k_box[part]
        allowed = allowed_pairs(pattern, q_positions[q][:, :, None], k_positions[k][:, None, :])
        allowed = np.broadcast_to(allowed, (len(part), block_q, words * 64)) & k_valid[k][:, None, :]
        packed = np.packbits(allowed, axis=2, bitorder="little").view("<u8").astype(np.uint64)
        real = allowed & q_valid[q][:, :, None]
        whole = allowed.all(axis=(1, 2)) | (real.all(axis=2) | ~q_valid[q]).all(axis=1)
        for n, bits, rows, any_, all_ in zip(part, packed, q_valid[q], real.any(axis=(1, 2)), whole, strict=True):
            if not any_ or all_:
                numbers[n] = -1 if all_ else _EMPTY
            else:
                found = masks.find(bits, rows)
                numbers[n] = masks.add(bits)[0] if found is None else found
    return numbers


def _count(mask: np.ndarray, q_box: np.ndarray, q_valid: np.ndarray, masks: Masks) -> int:
    """Allowed pairs of these tiles; padding rows do not count."""
    rows_bits = np.bitwise_count(masks.array()).sum(axis=2, dtype=np.int64)  # (masks, block_q)
    block_kv = masks.shape[1] * 64
    real_rows = q_valid.sum(axis=1)[q_box]
    full = mask < 0
    nnz = int((real_rows[full] * block_kv).sum())
    plain = ~full & (real_rows == q_valid.shape[1])
    nnz += int(rows_bits.sum(axis=1)[mask[plain]].sum())
    for n in np.nonzero(~full & ~plain)[0]:
        nnz += int(rows_bits[mask[n]][q_valid[q_box[n]]].sum())
    return nnz
