"""Diagonal candidates: windows, strides, and unordered diagonals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..sequence.basic import Full, Stride
from ..sequence.vertical_slash import VerticalSlash
from ._candidate import TILE, Candidate
from ._counts import Evidence, intervals, usual_spacing
from ._pairs import Pairs

__all__ = ["diagonals_without_order", "strides", "windows"]

_MOST_RUNS = 1 << 23
_SHORT = 8  # diagonals shorter than the longest by this factor cannot be told from noise
_AS_GOOD = 1.15  # accepted growth in tiles for fewer listed pairs
_FEW = 4  # most groups of diagonals, and the width of a narrow group


class _Diagonals:
    """Diagonals and whether they are filled, numbered from the least distance on."""

    def __init__(self, evidence: Evidence):
        room, total, self.left = (each.diagonals for each in (evidence.room, evidence.total, evidence.left))
        self.least, self.count = evidence.pairs.first - evidence.pairs.kv_len + 1, len(room)
        self.missing = room - total
        self.filled = evidence.filled(room, total, self.left)
        long = np.flatnonzero(_SHORT * room >= room.max(initial=0))
        if evidence.fill < 1 and len(long):  # short diagonals copy the nearest long one
            self.filled[: long[0]], self.filled[long[-1] :] = self.filled[long[0]], self.filled[long[-1]]

    def candidate(self, base: Full | Stride, numbers: np.ndarray) -> Candidate:
        """Make the candidate of diagonals spaced as the keys of `base`."""
        step = base.stride if isinstance(base, Stride) else 1
        low = None if numbers[0] < step else int(numbers[0]) + self.least
        high = None if numbers[-1] + step >= self.count else int(numbers[-1]) + self.least
        return Candidate(base, low, high, int(self.left[numbers].sum()), int(self.missing[numbers].sum()))

    def fullest(self, base: Full | Stride, numbers: np.ndarray) -> Candidate | None:
        """Return the run of filled diagonals among `numbers` that has most uncovered pairs."""
        starts, stops = intervals(self.filled[numbers])
        if not len(starts):
            return None
        sums = np.append(0, np.cumsum(self.left[numbers]))
        best = (sums[stops] - sums[starts]).argmax()
        return self.candidate(base, numbers[starts[best] : stops[best]])


def windows(evidence: Evidence) -> Iterator[Candidate]:
    """Propose adjacent diagonals; ignore narrow groups if there are many groups."""
    diagonals = _Diagonals(evidence)
    starts, stops = intervals(diagonals.filled)
    if len(starts) > _FEW:
        for start, stop in zip(starts, stops, strict=True):
            diagonals.filled[start:stop] &= stop - start > _FEW
    found = diagonals.fullest(Full(), np.arange(diagonals.count))
    if found is not None:
        yield found


def strides(evidence: Evidence) -> Iterator[Candidate]:
    """Propose evenly spaced diagonals if residue classes need fewer tiles than token order."""
    diagonals = _Diagonals(evidence)
    spacing = usual_spacing(intervals(diagonals.filled)[0])
    if spacing is None:
        return
    step, first = spacing
    found = diagonals.fullest(Stride(step, (first + diagonals.least) % step), np.arange(first, diagonals.count, step))
    if found is not None and found.new > 2 * evidence.pairs.q_len and _views_pay(found.new, step, evidence.pairs):
        yield found


def _views_pay(new: int, step: int, pairs: Pairs) -> bool:
    """Whether `new` pairs on diagonals `step` apart intersect fewer tiles in residue classes than in token order."""
    block_q, block_kv = TILE
    queries, keys, diagonals = -(-pairs.q_len // step), -(-pairs.kv_len // step), -(-new // max(pairs.q_len, 1))

    def tiles(queries: int, keys: int, reach: int) -> int:
        """Count the tiles of a band of `reach` diagonals."""
        return -(-queries // block_q) * min(-(-keys // block_kv), -(-(block_q + reach) // block_kv) + 1)

    in_order = min(tiles(pairs.q_len, pairs.kv_len, diagonals * step), diagonals * tiles(pairs.q_len, pairs.kv_len, 1))
    return step * tiles(queries, keys, diagonals) <= _AS_GOOD * in_order


def diagonals_without_order(evidence: Evidence) -> Iterator[Candidate]:
    """Propose unordered causal diagonals, if their closed form fits into one array."""
    diagonals = _Diagonals(evidence)
    numbers = np.flatnonzero(diagonals.filled & (diagonals.left > 0))
    numbers = numbers[numbers + diagonals.least >= 0]
    if 0 < len(numbers) <= _MOST_RUNS // max(evidence.pairs.q_len, 1):
        base = VerticalSlash((), tuple((numbers + diagonals.least).tolist()))
        new, missing = (int(each[numbers].sum()) for each in (diagonals.left, diagonals.missing))
        yield Candidate(base, None, None, new, missing, len(numbers))
