"""Block candidates: documents on the diagonal, and layouts of square blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..._util.ragged import ramp
from ..listed.masks import BlockLayout
from ..sequence.basic import BlockLocal
from ..sequence.documents import Documents
from ._candidate import TILE, Candidate
from ._counts import Evidence
from ._pairs import KeyRuns, Pairs

__all__ = ["documents", "layouts", "scattered_layouts"]

_SIDE = 64  # side of the square that tests a document boundary
_BLOCKS = range(8, 1025)  # tokens
_NEARLY = 0.9
_MOST_BLOCKS = 1 << 20


def documents(evidence: Evidence) -> Iterator[Candidate]:
    """Propose documents of any lengths, causal or not."""
    starts, pairs = _boundaries(evidence), evidence.pairs
    if not 0 < len(starts) <= pairs.kv_len // 2:
        return
    first, end = np.append(0, starts), np.append(starts, pairs.kv_len)
    document = np.repeat(np.arange(len(end)), end - first)
    used = int(np.flatnonzero(_inside(evidence.total.runs(None), document, first, end))[-1:].sum()) + 1
    if used < 2:
        return
    base = _named((end - first)[:used], pairs.kv_len)
    q, low = np.arange(max(pairs.first, 0), end[used - 1]), evidence.low
    stop = end[document[q]] if low is None else q + 1
    there, new = evidence.of_both(lambda each: int(_inside(each.runs(low), document, first, end)[:used].sum()))
    missing = int((stop - first[document[q]]).sum()) - there
    yield Candidate(base, low, None, new, missing, used if isinstance(base, Documents) else 0)


def _inside(runs: KeyRuns, document: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Count the pairs of each document."""
    keep = runs.q >= 0
    runs = runs if keep.all() else KeyRuns(*(each[keep] for each in runs))
    own = document[runs.q]
    runs = runs.cut(first[own], end[own])
    return np.bincount(document[runs.q], runs.stop - runs.start, len(first)).astype(np.int64)


def _boundaries(evidence: Evidence) -> np.ndarray:
    """Return positions t where the square of queries from t on and keys before t is (nearly) empty: local minima."""
    kv_len = evidence.pairs.kv_len
    total, left = evidence.of_both(lambda each: _in_squares(each.runs(0), kv_len))
    t = np.arange(kv_len + 1)
    area = np.minimum(t, _SIDE) * (np.minimum(t + _SIDE, kv_len) - np.maximum(t, evidence.pairs.first)).clip(0)
    unknown = area - (total - left)
    share = np.where(unknown > 0, left / np.maximum(unknown, 1), 1.0)
    least = (share[1:-1] <= share[:-2]) & (share[1:-1] <= share[2:])
    return np.flatnonzero(least & (share[1:-1] <= 4 * (1 - evidence.fill))) + 1


def _in_squares(runs: KeyRuns, kv_len: int) -> np.ndarray:
    """Count, per position, the pairs of _SIDE queries from it on and _SIDE keys before it."""
    near = runs.cut(runs.q - 2 * _SIDE + 1, runs.q)
    count = near.stop - near.start
    q, k = np.repeat(near.q, count), np.repeat(near.start, count) + ramp(count)
    first, behind = np.maximum(k + 1, q - _SIDE + 1), np.minimum(q, k + _SIDE) + 1
    return np.cumsum(np.bincount(first, minlength=kv_len + 1) - np.bincount(behind, minlength=kv_len + 1))


def _named(lengths: np.ndarray, kv_len: int) -> BlockLocal | Documents:
    """Name documents of these lengths: blocks if all but the last have one length."""
    length = int(lengths[0])
    if (lengths[:-1] == length).all() and lengths[-1] <= length and lengths.sum() == kv_len:
        return BlockLocal(length)
    return Documents(tuple(lengths.tolist()))


def layouts(evidence: Evidence) -> Iterator[Candidate]:
    """Propose square blocks, causal or not on the diagonal; empty cells of their tiles add to the cost."""
    for found in scattered_layouts(evidence):
        if isinstance(found.base, BlockLayout):
            yield found._replace(cost=found.cost + max(_cells(found.base) - found.new, 0) // 2)


def scattered_layouts(evidence: Evidence) -> Iterator[Candidate]:
    """Propose square blocks, regardless of the fill of their tiles."""
    pairs, low, block = evidence.pairs, evidence.low, _block(evidence)
    blocks = -(-pairs.kv_len // block) if block else 0
    if blocks < 2 or blocks * blocks > _MOST_BLOCKS + 4 * len(pairs.keys):
        return
    room = _room(pairs, block, blocks, low)
    total, left = evidence.of_both(lambda each: _in_blocks(each.runs(low), block, blocks))
    chosen = evidence.filled(room, total, left) & (left > 0)
    new, missing = int(left[chosen].sum()), int((room - total)[chosen].sum())
    yield Candidate(BlockLayout(chosen, block), low, None, new, missing, blocks * blocks)


def _cells(pattern: BlockLayout) -> int:
    """Count the cells of all tiles with a block."""
    layout = pattern.layout
    rows, columns = (min(-(-side // block), len(layout)) for side, block in zip(TILE, pattern._tokens(), strict=True))
    padded = np.pad(layout, [(0, -len(layout) % side) for side in (rows, columns)])
    tiles = padded.reshape(len(padded) // rows, rows, -1, columns).any(axis=(1, 3))
    return int(tiles.sum()) * rows * columns * math.prod(pattern._tokens())


def _block(evidence: Evidence) -> int:
    """Return the largest block whose multiples start nearly all runs above the noise; 0 = none."""
    starts = np.bincount(evidence.total.runs(None).start, minlength=evidence.pairs.kv_len)[1:]
    unusual = np.maximum(starts - 4 * np.median(starts), 0) if len(starts) else starts
    enough = max(_NEARLY * unusual.sum(), 1)
    return next((b for b in reversed(_BLOCKS) if unusual[b - 1 :: b].sum() >= enough), 0)


def _in_blocks(runs: KeyRuns, block: int, blocks: int) -> np.ndarray:
    """Count the pairs of each block, for queries from position 0 on."""
    q, start, stop = runs.split(block)
    cell = q // block * blocks + start // block
    inside = cell >= 0
    count = np.bincount(cell[inside], (stop - start)[inside], blocks * blocks)
    return count.astype(np.int64).reshape(blocks, blocks)


def _room(pairs: Pairs, block: int, blocks: int, low: int | None) -> np.ndarray:
    """Return the capacity of each block in pairs, all or the causal ones, for queries from position 0 on."""
    first = max(pairs.first, 0)
    edges = np.minimum(block * np.arange(blocks + 1), pairs.kv_len)
    queries, keys = np.diff(np.maximum(edges, first)), np.diff(edges)
    room = np.outer(queries, keys)
    if low is not None:
        room = np.tril(room)
        above = np.maximum(edges[:-1], first) - edges[:-1]  # queries of the block before the first one
        np.fill_diagonal(room, (keys * (keys + 1) - above * (above + 1)) // 2)
        room[queries == 0] = 0
    return room
