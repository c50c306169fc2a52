"""The plan: the data contract between planner and backends.

A plan consists of positions, tiles and bitmasks; kernels do not see the pattern. They rely on these definitions only:

view
    An affine lattice of sequence positions over three axes. The lattice point with coordinates ``(c0, c1, c2)``,
    ``0 <= c_a < extent[a]``, is the position ``offset + sum_a stride[a] * c_a``; positions are distinct. Unused axes
    have extent 1, box 1 and stride 0 and come first: a plain sequence is ``extent = (1, 1, n)``,
    ``stride = (0, 0, 1)``.
tile
    The lattice is partitioned into boxes of ``box[0] * box[1] * box[2] == block`` cells (``block_q`` for a query view,
    ``block_kv`` for a key view), ``grid[a] = ceil(extent[a] / box[a])`` of them along axis a. Tile ``t`` is the box
    with row-major index ``t`` in ``grid``; cell ``c`` of a tile has row-major index ``c`` in ``box``. A cell whose
    coordinate reaches ``extent`` is padding: it is never read or written.
run
    The key tiles ``indices[r]``, ``indices[r] + 1``, ... of one view with one bitmask: ``tile_indptr[r + 1] -
    tile_indptr[r]`` tiles, at least one.
component
    A query view with a list of key tiles for each query tile: the runs of CSR row ``first_row + query_tile`` of
    ``indptr``, concatenated. The tiles of run ``r`` belong to view ``component.key_view + key_view[r]`` and have
    bitmask ``mask[r]``; -1 means a full tile (every pair is allowed and no key is padding). Key tiles are numbered
    consecutively over all lists; run r starts at ``tile_indptr[r]``.
    Components of one family share their CSR rows and differ only in the offsets of their views. Each family's rows
    follow those of the family before. Components of a variant allow disjoint sets of pairs; hand-made plans must ensure
    this, because it is too expensive to validate.
permutation (order)
    Views are lattices of *indices*: index p of variant v is query row ``q_order[v, p]`` or key ``kv_order[v, p]``.
    `q_order` has each row once. If `kv_order` repeats or omits a key, the plan is *gathered*; a pair is then allowed at
    one index of its key only. An empty array is the identity; `kv_order` may be empty only if `q_order` is. Combines
    refer to query rows, not to indices.
bitmask
    ``masks[m, r, w]``: bit ``b`` (1 << b) is set if query cell ``r`` may attend to key cell ``64 * w + b``. In rows
    that are not padding, bits of padding keys are zero; padding rows are undefined.
work item
    The key tiles ``[begin, end)`` of one list, at least one; an item may start and end within a run. The items of a
    list partition it. An item computes softmax attention of the query tile's rows over these keys. If ``slot`` is -1,
    no other item has these rows, and the item writes ``out`` and ``lse``. Otherwise it writes a split-KV partial to
    this slot of the workspace: normalized rows in float32 (float64 for float64 inputs) and their natural-log lse.
    Items of a variant are sorted by descending cost.
combine (merge)
    Query row ``merge_rows[m]`` is the log-sum-exp combination of the workspace rows
    ``merge_sources[merge_indptr[m]:merge_indptr[m + 1]]``, in this order; each is ``slot * block_q + query cell``. A
    row without sources attends to no key (``out = 0``, ``lse = -inf``).
variant
    Heads and batch entries with different patterns use different components. Head h of batch entry b has variant
    ``variant[b, h]`` (broadcast over axes of size 1). Variant v owns the items ``work_indptr[v]:work_indptr[v + 1]``
    and the combines ``merge_variants[v]:merge_variants[v + 1]``; its slots are numbered from 0.
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
LARGEST = 2**31 - 1  # int32 limit on lengths, tiles of a view and runs
LARGEST_SIDE = 1 << 15  # largest block_q and block_kv
TILE = (128, 64)  # default tile of a plan that is made for no backend
SCATTERED_TILE = (64, 64)  # likewise, for scattered pairs, where nearly every non-empty tile has a separate bitmask

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
NO_ORDER = frozen(np.zeros((0, 0), np.int32))  # the identity permutation
WORK = np.dtype([("component", "i4"), ("query_tile", "i4"), ("begin", "i8"), ("end", "i8"), ("slot", "i8")])


def positions(view: np.void, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of each cell of `tiles`, (tiles, block) int64, and a bool mask of the real cells.

    A padding cell repeats the nearest real cell, so every value is a valid position of the view.
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
    """Return the number of real cells of tile ``tiles[i]`` of ``views[i]`` along each axis: (n, axes) int64."""
    return np.minimum(views["box"], views["extent"] - first_coordinates(views, tiles))


def padding_kinds(view: np.void, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the padding class of each tile, (n,) int64, and the real cells of each class, (classes, block) bool.

    Class 0 has no padding.
    """
    axes = list(zip(view["box"].tolist(), view["extent"].tolist(), view["grid"].tolist(), strict=True))
    kind, below = np.zeros(len(tiles), np.int64), int(view["tiles"])
    if not any(extent % box for box, extent, _ in axes):
        return kind, np.ones((1, math.prod(box for box, _, _ in axes)), bool)
    real = np.ones((1, 1), bool)
    for box, extent, grid in axes:
        below //= grid  # step in tile indices along this axis
        along = np.ones((1, box), bool)
        if extent % box:
            kind = 2 * kind + (tiles // below % grid == grid - 1)
            along = np.stack([along[0], np.arange(box) < extent % box])
        real = (real[:, None, :, None] & along[None, :, None, :]).reshape(len(real) * len(along), -1)
    return kind, real


def real_cells(views: np.ndarray, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (index into `tiles`, index of the cell in its tile, position) of all real cells, in order."""
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
    """Return the coordinates of the first cell of each tile: (n, axes) int64."""
    first, rest = np.zeros((len(tiles), AXES), np.int64), tiles.astype(np.int64)
    for axis in reversed(range(AXES)):
        rest, number = np.divmod(rest, views["grid"][:, axis])
        first[:, axis] = number * views["box"][:, axis].astype(np.int64)
    return first


@dataclass(frozen=True, eq=False)
class Plan:
    """A pattern compiled for given lengths, as :func:`spattn.plan` returns it.

    :mod:`spattn.planning.contract.types` defines the fields. A plan is immutable, also after copying or unpickling.
    Backends validate a plan that :func:`spattn.plan` did not make before they first execute it.

    Parameters
    ----------
    pattern : Pattern or None
        The planned pattern; None for a hand-made plan.
    q_len, kv_len : int
        Lengths in tokens.
    block_q, block_kv : int
        Tile shape in tokens; `block_kv` is a multiple of 64.
    views : (views,) array of VIEW
        Affine lattices of positions, divided into tiles.
    components : (components,) array of COMPONENT
        Query view, first key view and lists of each component.
    indptr : (rows + 1,) int32 array
        Start of each query tile's list of runs.
    tile_indptr : (runs + 1,) int64 array
        Start of each run in the concatenation of all tile lists.
    indices : (runs,) int32 array
        First key tile of each run.
    key_view : (runs,) int32 array
        View of each run's key tiles, relative to its component's first.
    mask : (runs,) int32 array
        Bitmask of each run's key tiles; -1 for full tiles.
    masks : (n, block_q, block_kv // 64) uint64 array
        The bitmasks.
    work : (items,) array of WORK
        Work items, grouped by variant.
    work_indptr : (variants + 1,) int32 array
        Start of each variant's items.
    slots : int
        Number of split-KV partials of one head in the workspace: the maximum over variants.
    merge_rows : (merges,) int32 array
        Query rows that are combined from the workspace.
    merge_indptr : (merges + 1,) int32 array
        Start of each combine's sources.
    merge_sources : (sources,) int32 array
        Rows of the workspace, ``slot * block_q + query cell``.
    merge_variants : (variants + 1,) int32 array
        Start of each variant's combines.
    variant : (batch or 1, heads or 1) int32 array
        Variant of each batch entry and query head.
    nnz : int
        Number of allowed (query, key) pairs, summed over variants.
    q_order : (variants, q_len) or (0, 0) int32 array, optional
        Query row at each index, for each variant; empty (the default) for the identity.
    kv_order : (variants, n) or (0, 0) int32 array, optional
        Key at each index, for each variant; empty (the default) for the identity, if `q_order` is empty too.
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
        """Copy and unpickle through the constructor: the result has its own arrays and does not count as validated."""
        return Plan, tuple(getattr(self, field.name) for field in fields(Plan))

    @property
    def ordered(self) -> bool:
        """Whether queries or keys are permuted."""
        return bool(self.q_order.size or self.kv_order.size)

    @cached_property
    def gathered(self) -> bool:
        """Whether keys are gathered, i.e. `kv_order` is not a permutation."""
        order = self.kv_order
        if order.shape == (0, 0):
            return False
        return order.shape[1] != self.kv_len or bool((np.sort(order, axis=1) != np.arange(self.kv_len)).any())

    @property
    def variants(self) -> int:
        """Number of distinct patterns among heads and batch entries."""
        return len(self.work_indptr) - 1

    @cached_property
    def tiles(self) -> int:
        """Number of computed tiles, summed over components and variants."""
        first, starts = self.components["first_row"], self.tile_indptr[self.indptr]
        return int((starts[first + self.components["query_tiles"]] - starts[first]).sum())

    @property
    def tile(self) -> tuple[int, int]:
        """``(block_q, block_kv)``."""
        return self.block_q, self.block_kv

    @property
    def efficiency(self) -> float:
        """``nnz / (tiles × tile area)``: the useful share of the arithmetic, between 0 and 1."""
        return self.nnz / (self.tiles * self.block_q * self.block_kv) if self.tiles else 1.0

    @property
    def density(self) -> float:
        """``nnz / (q_len × kv_len)``, averaged over variants."""
        cells = self.q_len * self.kv_len * self.variants
        return self.nnz / cells if cells else 0.0

    @property
    def nbytes(self) -> int:
        """Total bytes of the arrays."""
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
    """Return the number of tiles with padding before each tile of a view, and in all: (tiles + 1,) int64."""
    padded = np.zeros(tuple(view["grid"]), bool)
    for axis in range(AXES):
        if view["extent"][axis] % view["box"][axis]:
            padded[(slice(None),) * axis + (-1,)] = True
    return offsets(padded.ravel())


class TileLists(NamedTuple):
    """A plan's key tile lists with one entry per tile; `indptr` is the start of each query tile's list."""

    indptr: np.ndarray
    indices: np.ndarray
    key_view: np.ndarray
    mask: np.ndarray


def tile_lists(plan: Plan) -> TileLists:
    """Expand a plan's runs to tiles; raise ValueError if int32 cannot index them."""
    tiles = int(plan.tile_indptr[-1])
    if tiles > LARGEST:
        raise ValueError(f"plan: expected at most {LARGEST} tiles in expanded lists, got {tiles}; use a larger tile")
    count = np.diff(plan.tile_indptr)
    indices = np.repeat(plan.indices, count)
    indices += ramp(count).astype(np.int32)
    key_view, mask = (np.repeat(column, count) for column in (plan.key_view, plan.mask))
    return TileLists(plan.tile_indptr[plan.indptr].astype(np.int32), indices, key_view, mask)


def grid_of(extent: Iterable[int], box: Iterable[int]) -> tuple[int, ...]:
    """Return the number of boxes along each axis."""
    return tuple(math.ceil(n / b) for n, b in zip(extent, box, strict=True))
