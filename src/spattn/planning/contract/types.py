"""The plan: what every backend executes. A data contract, nothing else.

A plan knows positions, tiles and bitmasks; it does not know patterns. A kernel needs only this page:

view
    An affine lattice of sequence positions over three axes. The lattice point with coordinates ``(c0, c1, c2)``,
    ``0 <= c_a < extent[a]``, is the position ``offset + sum_a stride[a] * c_a``; no two points are one position. Unused
    axes have extent 1, box 1 and stride 0 and come first, so a plain sequence is ``extent = (1, 1, n)``,
    ``stride = (0, 0, 1)``.
tile
    The lattice is cut into boxes of ``box[0] * box[1] * box[2] == block`` cells (``block_q`` for a query view,
    ``block_kv`` for a key view). There are ``grid[a] = ceil(extent[a] / box[a])`` boxes along axis a; tile ``t`` is the
    box with row-major number ``t`` in ``grid``. Cell ``c`` of a tile is the row-major number in ``box``. A cell whose
    coordinate reaches ``extent`` is padding: it is never read and never written.
run
    The key tiles ``indices[r]``, ``indices[r] + 1``, ... of one view, all of one bitmask: ``tile_indptr[r + 1] -
    tile_indptr[r]`` of them, at least one.
component
    One query view with, for each of its query tiles, a list of key tiles: the runs of CSR row ``first_row +
    query_tile`` of ``indptr``, one tile after the other. The tiles of run ``r`` are those of view ``component.key_view
    + key_view[r]``, with the bitmask ``mask[r]`` (-1: every pair of the tile is allowed and no key of it is padding).
    Key tiles of all lists, one list after the other, are numbered through: those of run r from ``tile_indptr[r]`` on.
    Components of one family share their CSR rows; they differ only in where their views start. The rows of the
    families follow one another. No two components of a variant allow the same pair: whoever makes a plan by hand sees
    to it, because nobody can check that cheaply.
order
    Views are lattices of *places*. Place p of variant v is query row ``q_order[v, p]``, each once, or key ``kv_order[v,
    p]``, which may have any number of places: the plan is *gathered* where a key has several, or none. No pair is
    allowed at two places. Where `q_order` is empty, place p is row p; where `kv_order` is empty, too, place p is key p.
    Merges name rows.
bitmask
    ``masks[m, r, w]``: bit ``b`` (1 << b) is set when query cell ``r`` may attend to key cell ``64 * w + b``. Bits of
    padding keys are never set in a row that is not padding; rows that are padding hold anything.
work item
    The key tiles ``[begin, end)`` of one list, at least one, which may start and end within a run; the pieces of a list
    are the whole list. It computes
    softmax attention of the tile's rows over those keys. ``slot == -1``: nobody else writes these rows, so the item
    writes ``out`` and ``lse`` itself. Otherwise it writes its normalised float32 rows (float64 for float64 inputs) and
    their natural-log lse to ``slot`` of the workspace.
    Items of a variant are sorted by falling cost.
merge
    Row ``merge_rows[m]`` is the log-sum-exp combination, in this order, of the workspace rows
    ``merge_sources[merge_indptr[m]:merge_indptr[m + 1]]``, each ``slot * block_q + query cell``. No source: the row may
    attend to nothing (``out = 0``, ``lse = -inf``).
variant
    Heads and batch entries with different patterns have different components. ``variant[b, h]`` (broadcast over axes
    of size 1) says which variant they use; variant v owns the items ``work_indptr[v]:work_indptr[v + 1]`` and the
    merges ``merge_variants[v]:merge_variants[v + 1]``; its slots count from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._util.cached import cached_property
from ..._util.frozen import frozen
from ..._util.ragged import offsets, ramp

if TYPE_CHECKING:
    from ...patterns import Pattern

AXES = 3
LARGEST = 2**31 - 1  # what int32 holds: lengths, tiles of a view, runs
LARGEST_SIDE = 1 << 15  # tokens of a tile's side
TILE = (128, 64)  # of a plan that is for no backend in particular
SCATTERED_TILE = (64, 64)  # of such a plan where nearly each tile that holds a pair has a bitmask of its own

VIEW = np.dtype(
    [
        ("offset", "i8"),
        ("stride", "i8", AXES),
        ("extent", "i4", AXES),
        ("box", "i4", AXES),
        ("grid", "i4", AXES),
        ("tiles", "i4"),
    ],
    align=True,
)
COMPONENT = np.dtype(
    [("query_view", "i4"), ("key_view", "i4"), ("first_row", "i4"), ("query_tiles", "i4"), ("variant", "i4")]
)
NO_ORDER = frozen(np.zeros((0, 0), np.int32))  # of places that are rows and keys
WORK = np.dtype([("component", "i4"), ("query_tile", "i4"), ("begin", "i8"), ("end", "i8"), ("slot", "i8")])


def positions(view: np.void, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the cells of `tiles` of a view and which of them are real.

    Returns
    -------
    position : (len(tiles), block) int64 array
        Padding cells repeat the nearest real cell, so every value is a valid position of the view.
    valid : (len(tiles), block) bool array
    """
    position = np.full((len(tiles), 1), int(view["offset"]), dtype=np.int64)
    valid = np.ones((len(tiles), 1), dtype=bool)
    for axis, number in enumerate(np.unravel_index(tiles, tuple(view["grid"]))):
        box, extent = int(view["box"][axis]), int(view["extent"][axis])
        coordinate = (number * box)[:, None] + np.arange(box)
        inside = coordinate < extent
        step = np.minimum(coordinate, extent - 1) * int(view["stride"][axis])
        cells = position.shape[1] * box
        position = (position[:, :, None] + step[:, None, :]).reshape(len(tiles), cells)
        valid = (valid[:, :, None] & inside[:, None, :]).reshape(len(tiles), cells)
    return position, valid


def real_extents(views: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """(n, axes) int64: how many coordinates along each axis tile ``tiles[i]`` of ``views[i]`` has that are not padding;
    these come first."""
    return np.minimum(views["box"], views["extent"] - first_coordinates(views, tiles))


def padding_kinds(view: np.void, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) int64, (kinds, block) bool: the kind of each of n tiles of a view, 0 where no cell is padding, and which
    cells of a kind are none."""
    axes = list(zip(view["box"].tolist(), view["extent"].tolist(), view["grid"].tolist(), strict=True))
    kind, below = np.zeros(len(tiles), np.int64), int(view["tiles"])
    if not any(extent % box for box, extent, _ in axes):
        return kind, np.ones((1, math.prod(box for box, _, _ in axes)), bool)
    real = np.ones((1, 1), bool)
    for box, extent, grid in axes:
        below //= grid  # tiles from one to the next along this axis
        along = np.ones((1, box), bool)
        if extent % box:
            kind = 2 * kind + (tiles // below % grid == grid - 1)
            along = np.stack([along[0], np.arange(box) < extent % box])
        real = (real[:, None, :, None] & along[None, :, None, :]).reshape(len(real) * len(along), -1)
    return kind, real


def real_cells(views: np.ndarray, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All real cells of tiles, tile after tile: number of the tile (tile ``tiles[i]`` of ``views[i]`` is number i),
    number of the cell in it, position."""
    first = first_coordinates(views, tiles)
    real = np.minimum(views["box"], views["extent"] - first)
    origin = views["offset"] + (views["stride"] * first).sum(axis=1)
    count = real.prod(axis=1)
    owner, rest = np.repeat(np.arange(len(tiles)), count), ramp(count)
    position, cell, cells = origin[owner], np.zeros(len(owner), np.int64), np.ones(len(tiles), np.int64)
    for axis in reversed(range(AXES)):
        if (real[:, axis] > 1).any():
            rest, coordinate = np.divmod(rest, real[owner, axis])
            position += views["stride"][owner, axis] * coordinate
            cell += cells[owner] * coordinate
        cells = cells * views["box"][:, axis]
    return owner, cell, position


def first_coordinates(views: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """(n, axes) int64: the first coordinates of each tile."""
    first, rest = np.zeros((len(tiles), AXES), np.int64), tiles.astype(np.int64)
    for axis in reversed(range(AXES)):
        rest, number = np.divmod(rest, views["grid"][:, axis])
        first[:, axis] = number * views["box"][:, axis].astype(np.int64)
    return first


@dataclass(frozen=True, eq=False)
class Plan:
    """An executable description of a pattern at given lengths. Made by :func:`spattn.plan`; see the module's text.

    A plan is a value: nobody can change its arrays, whether it was made, replaced, copied or unpickled. Backends check
    a plan that :func:`spattn.plan` did not make before they first execute it.

    Parameters
    ----------
    pattern : Pattern or None
        What was planned; None for a plan made by hand.
    q_len, kv_len : int
        Lengths in tokens.
    block_q, block_kv : int
        Tile shape in tokens; `block_kv` is a multiple of 64.
    views : (views,) array of VIEW
        Affine lattices of positions, cut into tiles.
    components : (components,) array of COMPONENT
        Query view, key views and lists of each component.
    indptr : (rows + 1,) int32 array
        Where the runs of each query tile's list start.
    tile_indptr : (runs + 1,) int64 array
        Where the key tiles of each run start, when all lists are written out.
    indices : (runs,) int32 array
        First key tile of each run.
    key_view : (runs,) int32 array
        View of each run's key tiles, counted from its component's first.
    mask : (runs,) int32 array
        Bitmask of each run's key tiles, -1 for none.
    masks : (n, block_q, block_kv // 64) uint64 array
        The bitmasks.
    work : (items,) array of WORK
        Work items, by variant.
    work_indptr : (variants + 1,) int32 array
        Where the items of each variant start.
    slots : int
        Slots of the workspace of one head: the most that a variant has.
    merge_rows : (merges,) int32 array
        Query rows that are put together from the workspace.
    merge_indptr : (merges + 1,) int32 array
        Where the sources of each merge start.
    merge_sources : (sources,) int32 array
        Rows of the workspace, ``slot * block_q + query cell``.
    merge_variants : (variants + 1,) int32 array
        Where the merges of each variant start.
    variant : (batch or 1, heads or 1) int32 array
        Variant of each batch entry and query head.
    nnz : int
        Allowed (query, key) pairs, summed over variants.
    q_order : (variants, q_len) or (0, 0) int32 array, optional
        The query row at each place of each variant; empty (the default) where all are in order.
    kv_order : (variants, places) or (0, 0) int32 array, optional
        The key at each place; empty (the default) where all are in order, and `q_order` is empty.
    """

    pattern: Pattern | None
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    views: np.ndarray
    components: np.ndarray
    indptr: np.ndarray
    tile_indptr: np.ndarray
    indices: np.ndarray
    key_view: np.ndarray
    mask: np.ndarray
    masks: np.ndarray
    work: np.ndarray
    work_indptr: np.ndarray
    slots: int
    merge_rows: np.ndarray
    merge_indptr: np.ndarray
    merge_sources: np.ndarray
    merge_variants: np.ndarray
    variant: np.ndarray
    nnz: int
    q_order: np.ndarray = field(default_factory=lambda: NO_ORDER)
    kv_order: np.ndarray = field(default_factory=lambda: NO_ORDER)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                object.__setattr__(self, name, frozen(value))
            elif isinstance(value, np.integer):
                object.__setattr__(self, name, int(value))

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        """Copies and unpickled plans are made as any other: with arrays of their own, and unchecked."""
        return Plan, tuple(getattr(self, field.name) for field in fields(Plan))

    @property
    def ordered(self) -> bool:
        """Whether places are not simply rows and keys: see `q_order`."""
        return bool(self.q_order.size or self.kv_order.size)

    @cached_property
    def gathered(self) -> bool:
        """Whether a key has several places, or none: see `kv_order`."""
        order = self.kv_order
        if order.shape == (0, 0):
            return False
        return order.shape[1] != self.kv_len or bool((np.sort(order, axis=1) != np.arange(self.kv_len)).any())

    @property
    def variants(self) -> int:
        """How many different patterns the heads and batch entries have."""
        return len(self.work_indptr) - 1

    @cached_property
    def tiles(self) -> int:
        """Key tiles visited, summed over query tiles, components and variants."""
        first, starts = self.components["first_row"], self.tile_indptr[self.indptr]
        return int((starts[first + self.components["query_tiles"]] - starts[first]).sum())

    @property
    def tile(self) -> tuple[int, int]:
        """(block_q, block_kv)."""
        return self.block_q, self.block_kv

    @property
    def efficiency(self) -> float:
        """nnz / (tiles × tile area): the useful share of the arithmetic, between 0 and 1."""
        return self.nnz / (self.tiles * self.block_q * self.block_kv) if self.tiles else 1.0

    @property
    def density(self) -> float:
        """nnz / (q_len × kv_len), averaged over variants."""
        cells = self.q_len * self.kv_len * self.variants
        return self.nnz / cells if cells else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))

    def __repr__(self) -> str:
        partial = int(np.diff(self.tile_indptr)[self.mask >= 0].sum())
        return (
            f"Plan({self.pattern!r}, {self.q_len} × {self.kv_len} tokens: {self.nnz} pairs "
            f"({100 * self.density:.3g} %) in {self.tiles} tiles of {self.block_q} × {self.block_kv}, "
            f"efficiency {self.efficiency:.2f}; "
            f"{len(self.components)} components, {len(self.masks)} bitmasks for {partial} partial tiles, "
            f"{len(self.work)} work items, {self.slots} slots, {self.nbytes / 1024:.0f} KiB)"
        )


def padded_before(view: np.void) -> np.ndarray:
    """(tiles + 1,) int64: how many tiles with padding cells a view has before each one, and in all."""
    padded = np.zeros(tuple(view["grid"]), bool)
    for axis in range(AXES):
        if view["extent"][axis] % view["box"][axis]:
            padded[(slice(None),) * axis + (-1,)] = True
    return offsets(padded.ravel())


class TileLists(NamedTuple):
    """The lists of a plan, tile by tile.

    Attributes
    ----------
    indptr : (rows + 1,) int32 array
        Where the list of each query tile starts.
    indices, key_view, mask : (tiles,) int32 arrays
        Of each key tile what the plan has of each run.
    """

    indptr: np.ndarray
    indices: np.ndarray
    key_view: np.ndarray
    mask: np.ndarray


def tile_lists(plan: Plan) -> TileLists:
    """A plan's runs written out; ValueError where they have more tiles than int32 can number."""
    tiles = int(plan.tile_indptr[-1])
    if tiles > LARGEST:
        raise ValueError(f"plan: expected at most {LARGEST} tiles to write out, got {tiles}; use a larger tile")
    count = np.diff(plan.tile_indptr)
    indices = np.repeat(plan.indices, count)
    indices += ramp(count).astype(np.int32)
    key_view, mask = (np.repeat(column, count) for column in (plan.key_view, plan.mask))
    return TileLists(plan.tile_indptr[plan.indptr].astype(np.int32), indices, key_view, mask)


def grid_of(extent: Iterable[int], box: Iterable[int]) -> tuple[int, ...]:
    """Boxes along each axis."""
    return tuple(math.ceil(n / b) for n, b in zip(extent, box, strict=True))
