"""The CPU as a machine of the chooser. Candidates are query boxes, the token order, and one-query tiles.

A coefficient is the time of one unit of a feature in nanoseconds, measured by ``benchmarks/costs/price_cpu.py`` on a
Xeon with AMX; for bfloat16 with avx512bf16 on an EPYC (Zen 4), where that is the best instruction set.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..planning import Plan
from ..planning.contract.types import grid_of
from ..planning.tiles.tiling import choose_box, last_cell
from .boxes import Overlap, overlap_of_boxes
from .chooser import How, Sizes, Tried, predicted_ms
from .features_cpu import (
    ROWS,
    ROWS_AT_ONCE,
    Counts,
    Kernels,
    RowCounts,
    count,
    count_dense,
    count_pairs,
    count_rows,
    row_counts,
)

__all__ = ["Processor", "few_of", "kernels_of", "processor"]

_EFFICIENT = 0.6  # no candidate is tried from this efficiency on
_SPARSE = 1 / 16  # tiles of one query are tried below this efficiency
_CELLS = range(17, 97)  # cells of a box; with more cells, the weights would exceed the L1 cache
_MOST_KEYS = 128  # maximum number of keys of a box with more rows than ROWS_AT_ONCE, which must fit one tile
_MANY = 4  # the token order is also tried if dense attention has at most _MANY times the tiles of the ordered plan
_MOST_SMALL_BOXES = 1 << 14  # maximum number of boxes of few rows, which gain the most
_MOST_BOXES = 2560  # maximum number of other boxes; each has its own views
_TRIED, _ROWS_TRIED = 2, 1  # number of query-vectorized candidates, and of candidates with few-query tiles

# In the order of Counts.
_NANOSECONDS: dict[tuple[str, str], tuple[float, ...]] = {
    ("baseline", "float32"): (0, 145, 1.39, 0.19, 3.64, 1.52, 0.306, 0),
    ("baseline", "float64"): (0, 0, 2.23, 0.156, 5.09, 1.89, 0.622, 0),
    ("baseline", "float16"): (0, 172, 1.79, 0.213, 3.78, 1.25, 1.33, 0),
    ("baseline", "bfloat16"): (0, 187, 1.15, 0.212, 3.45, 1.29, 0.474, 0.228),
    ("avx2", "float32"): (0, 0, 1.02, 0.108, 3.03, 0.976, 0.174, 0.122),
    ("avx2", "float64"): (0, 0, 1.49, 0.144, 3.89, 1.04, 0.449, 0),
    ("avx2", "float16"): (49.6, 0, 0.895, 0.144, 3.38, 0.706, 0.197, 0.341),
    ("avx2", "bfloat16"): (11.1, 0, 0.774, 0.143, 3.38, 0.719, 0.197, 0.438),
    ("avx512", "float32"): (173, 0, 0.625, 0.206, 5.09, 0.588, 0.24, 0.326),
    ("avx512", "float64"): (0, 0, 1.33, 0.212, 4.95, 0.787, 0.22, 0.182),
    ("avx512", "float16"): (295, 0, 0.601, 0.192, 5.06, 0.407, 0.148, 0.303),
    ("avx512", "bfloat16"): (273, 0, 0.528, 0.211, 5.29, 0.471, 0.143, 0.426),
    ("avx512bf16", "float32"): (118, 0, 0.587, 0.205, 4.33, 0.608, 0.216, 0.305),
    ("avx512bf16", "float64"): (0, 0, 1.35, 0.271, 5.49, 0.467, 0.222, 0.0628),
    ("avx512bf16", "float16"): (485, 0, 0.62, 0.209, 5.99, 0.579, 0.144, 0.383),
    ("avx512bf16", "bfloat16"): (319, 94.3, 0.237, 0.14, 5.11, 0.597, 0.144, 0.379),
    ("amx", "float32"): (145, 0, 0.582, 0.182, 4.35, 0.463, 0.231, 0.258),
    ("amx", "float64"): (0, 0, 1.38, 0.235, 4.75, 0.334, 0.205, 0),
    ("amx", "float16"): (596, 0, 0.739, 0.0446, 3.84, 0, 0.217, 0.343),
    ("amx", "bfloat16"): (536, 0, 0.539, 0.00412, 2.48, 4.71, 0.158, 0.347),
}

# Fields as in RowCounts, for one-query tiles with scattered keys, and for few-query tiles that share keys.
_ROW_NANOSECONDS: dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]] = {
    ("baseline", "float32"): ((46.6, 1.34, 0, 0.215), (20.2, 0.365, 0.727, 0.0612)),
    ("baseline", "float64"): ((93.1, 1.42, 0, 0.486), (0, 0.927, 2.48, 0.18)),
    ("baseline", "float16"): ((158, 2.13, 3.8, 1.28), (37.1, 2.3, 0.782, 0.0566)),
    ("baseline", "bfloat16"): ((186, 0.58, 0, 0.272), (28.8, 0.555, 0.894, 0.0583)),
    ("avx2", "float32"): ((127, 0.681, 0, 0.164), (24.6, 0.248, 0.302, 0.03)),
    ("avx2", "float64"): ((52.4, 1.47, 0, 0.382), (0, 1.11, 0.501, 0.0619)),
    ("avx2", "float16"): ((146, 0.698, 0, 0.103), (32.5, 0.214, 0.399, 0.0305)),
    ("avx2", "bfloat16"): ((212, 0.1, 0, 0.118), (32.3, 0.105, 0.353, 0.0307)),
    ("avx512", "float32"): ((137, 0.714, 0, 0.144), (31.8, 0.239, 0.168, 0.0177)),
    ("avx512", "float64"): ((84.2, 1.09, 0, 0.324), (3, 0.995, 0.688, 0.0306)),
    ("avx512", "float16"): ((180, 0.608, 0, 0.08), (31.8, 0.332, 0.245, 0.0162)),
    ("avx512", "bfloat16"): ((192, 0.392, 0.52, 0.0777), (32.1, 0.162, 0.275, 0.0156)),
    ("avx512bf16", "float32"): ((186, 0.678, 0, 0.146), (21.2, 0.383, 0.187, 0.0169)),
    ("avx512bf16", "float64"): ((57.4, 1.28, 0, 0.317), (16.7, 0.85, 0.123, 0.0359)),
    ("avx512bf16", "float16"): ((182, 0.513, 0, 0.0793), (32.6, 0.342, 0.26, 0.016)),
    ("avx512bf16", "bfloat16"): ((126, 0.631, 7.72, 0.0531), (23.9, 0.28, 0.579, 0.0142)),
    ("amx", "float32"): ((122, 0.684, 0, 0.129), (23.2, 0.353, 0.235, 0.0165)),
    ("amx", "float64"): ((79.4, 1.16, 0, 0.319), (11.2, 0.823, 0.295, 0.0356)),
    ("amx", "float16"): ((203, 0.336, 0.12, 0.0812), (30.2, 0.368, 0.218, 0.0165)),
    ("amx", "bfloat16"): ((207, 0.262, 0.471, 0.0786), (29.8, 0.194, 0.245, 0.0162)),
}


@dataclass(frozen=True, eq=False)  # hashed by identity, since every call hashes it
class Processor:
    """An instruction set and a dtype, as a :class:`.chooser.Machine`.

    The forward pass computes tiles of up to `few` queries a few rows at once, with coefficients `together`, and tiles
    of one query pair by pair, with coefficients `one`.
    """

    kernels: Kernels
    few: int
    nanoseconds: Counts
    one: RowCounts
    together: RowCounts
    expands: ClassVar[bool] = False

    def cost_ms(self, plan: Plan, sizes: Sizes) -> float:
        """Return the predicted milliseconds of a forward pass on one thread."""
        if plan.block_q == 1:
            return self._of_pairs_ms(plan, sizes)
        if plan.block_q <= self.few:
            return predicted_ms(count_rows(plan, sizes, self.kernels.lanes), self.together)
        return predicted_ms(count(plan, sizes, self.kernels), self.nanoseconds)

    def dense_ms(self, q_len: int, kv_len: int, tile: tuple[int, int], sizes: Sizes) -> float:
        """Return the predicted milliseconds of dense attention, without a plan."""
        return predicted_ms(count_dense(q_len, kv_len, tile, sizes, self.kernels), self.nanoseconds)

    def scattered(self, how: How) -> How:
        return How((1, how.tile[1]), workers=how.workers)

    def settled(self, first: Plan) -> bool:
        if first.efficiency >= _EFFICIENT or first.pattern is None:
            return True
        return not (first.ordered or first.pattern.grids() or first.efficiency < _SPARSE)

    def candidates(self, first: Plan, how: How, sizes: Sizes, tried: Tried) -> Iterator[How]:
        """Yield query boxes, or for an ordered plan the token order if that has few tiles; then one-query tiles."""
        if first.ordered:
            every = first.variants * math.prod(grid_of((first.q_len, first.kv_len), how.tile))
            if every <= _MANY * first.tiles:
                yield how._replace(ordered=False)
        elif first.pattern is not None and first.pattern.grids():
            yield from self.in_boxes(first, sizes, how.workers)
        plan = tried.plans[tried.best()]
        # If q_len is less than block_q, padding lowers the efficiency but costs nothing.
        if plan.efficiency < _SPARSE and plan.q_len >= plan.block_q > 1:
            if self._of_pairs_ms(plan, sizes) < tried.ms(tried.best()):
                yield How((1, plan.block_kv), workers=how.workers)

    def fits(self, plan: Plan) -> bool:
        return True

    def cheaper(self, plan: Plan, sizes: Sizes) -> Plan | None:
        """Return a plan with query boxes that is predicted to be faster than `plan`, or None."""
        tried = Tried(plan, How(plan.tile), sizes, self)
        for how in self.in_boxes(plan, sizes, workers=1):
            tried.add(how)
        found = tried.plans[tried.best()]
        return None if found is plan else found

    def in_boxes(self, plan: Plan, sizes: Sizes, workers: int) -> list[How]:
        """Return the query boxes with the lowest estimated cost, based on the spans of the pattern's largest part."""
        overlap = overlap_of_boxes(plan, sizes.batch, sizes.heads_q, _CELLS.stop)
        if overlap is None:
            return []
        # With other head dimensions, the kernels copy rows for each box.
        whole = sizes.head_dim % self.kernels.lanes == sizes.head_dim_v % self.kernels.lanes == 0
        rows = list(self._estimates_of_rows(overlap, sizes, plan.block_kv)) if whole else []
        # At equal cost, boxes with more rows come first, because they have fewer items.
        rows.sort(key=lambda each: (each[0], -math.prod(each[1]), each[1:]))
        tiles = sorted(self._estimates_of_tiles(overlap, sizes, plan.block_kv))
        shapes = rows[:_ROWS_TRIED] + tiles[:_TRIED]
        return [How((math.prod(box), block_kv), box, workers) for _, box, block_kv in shapes]

    def _of_pairs_ms(self, plan: Plan, sizes: Sizes) -> float:
        """Return the predicted milliseconds of the plan's pairs in one-query tiles."""
        return predicted_ms(count_pairs(plan, sizes), self.one)

    def _estimates_of_rows(self, overlap: Overlap, sizes: Sizes, block_kv: int) -> Iterator[_Estimate]:
        """Yield the estimated cost of a head, for each shape of a box that is computed a few rows at once."""
        features = sizes.head_dim + sizes.head_dim_v
        for box, boxes in overlap.candidates(range(ROWS_AT_ONCE, self.few + 1, ROWS_AT_ONCE), _MOST_SMALL_BOXES):
            kinds, cells = list(overlap.kinds(box)), math.prod(box)
            most = max(math.prod(own) for own, _ in kinds)
            together = cells == ROWS_AT_ONCE
            if not together and most > _MOST_KEYS:
                continue
            own_kv = block_kv if together else block_kv * -(-most // block_kv)
            reached = overlap.mean_keys(_neighbours(box, ROWS_AT_ONCE))
            lanes = self.kernels.lanes
            pairs = cells * sum(count * _keys_reached(own, reached, own_kv, lanes) for own, count in kinds)
            yield predicted_ms(row_counts(boxes * cells, pairs, features), self.together), box, own_kv

    def _estimates_of_tiles(self, overlap: Overlap, sizes: Sizes, block_kv: int) -> Iterator[_Estimate]:
        """Yield the estimated cost of a head, for each shape of a query-vectorized box."""
        lanes = self.kernels.lanes
        for box, boxes in overlap.candidates(_CELLS, _MOST_BOXES):

            def overlap_of(cells: int, box: tuple[int, ...] = box) -> float:
                inside = _neighbours(box, cells)
                return math.prod(overlap.keys_along(inside)) * math.prod(inside) / cells

            counts = Counts(
                items=boxes,
                tiles=0,
                rows=0,
                scores=overlap_of(lanes) * sizes.head_dim,
                weights=-(-math.prod(box) // lanes) * math.prod(overlap.keys_along(box)),
                output=overlap_of(ROWS) * -(-sizes.head_dim_v // lanes),
                gathered=math.prod(overlap.keys_along(box)) * (sizes.head_dim + sizes.head_dim_v),
                merged=0,
            )
            yield predicted_ms(counts, self.nanoseconds), box, block_kv


_Estimate = tuple[float, tuple[int, ...], int]  # milliseconds, box, block_kv


def _keys_reached(own: tuple[int, ...], reached: tuple[int, ...], block_kv: int, lanes: int) -> int:
    """Return how many keys of a box are computed for rows that reach `reached` keys along each axis."""
    box = choose_box(own, block_kv)
    tiles = math.prod(grid_of(own, box))
    if tiles > 1:
        return block_kv * tiles
    last = last_cell(tuple(map(min, own, reached)), box)
    return -(-(1 + last) // lanes) * lanes


def _neighbours(box: tuple[int, ...], cells: int) -> tuple[int, ...]:
    """Return the sides of the bounding box of `cells` consecutive cells of `box`."""
    sides: tuple[int, ...] = ()
    for side in reversed(box):
        sides = min(side, cells), *sides
        cells = max(1, round((cells + side - 1) / side) if cells % side else cells // side)
    return sides


@functools.cache
def processor(isa: str, dtype: str, backward: bool = False) -> Processor:
    """Return the machine of an instruction set, named as in the kernels, and a dtype."""
    one, together = (RowCounts(*each) for each in _ROW_NANOSECONDS[isa, dtype])
    few = 0 if backward else few_of(isa, dtype)  # the backward pass has no few-query tiles
    return Processor(kernels_of(isa, dtype), few, Counts(*_NANOSECONDS[isa, dtype]), one, together)


def few_of(isa: str, dtype: str) -> int:
    """Return the largest query tile that the forward computes a few rows at once, as in ``kernels/forward.cpp``."""
    lanes, _, panel = kernels_of(isa, dtype)
    return lanes // 2 if panel else lanes


def kernels_of(isa: str, dtype: str) -> Kernels:
    """Return how an instruction set executes tiles of a dtype."""
    vector_bytes, copies = {"baseline": 16, "avx2": 32}.get(isa, 64), dtype not in ("float32", "float64")
    return Kernels(vector_bytes // (8 if dtype == "float64" else 4), copies, 32 if isa == "amx" and copies else 0)
