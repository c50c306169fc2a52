"""Tile lists that grow with kv_len, for plans that allow all keys between the ends of the sequence.

The planner finds the tiles once, for a short sequence. A longer sequence adds full tiles between the ends, and changes
the bitmask of the last tile before the last keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .._util.cached import BoundedCache
from .._util.frozen import frozen
from .._util.ragged import offsets
from ..planning.tiles.build import Tiled
from .items import Sharing, share_out

__all__ = ["Growth"]

_MAX_LISTS = 8  # maximum number of cached lists: one for each number of tiles; each serves block_kv lengths


@dataclass(frozen=True, eq=False)
class Growth:
    """Computes the fields of a plan that grow with kv_len; `lists` caches tile lists by number of tiles."""

    tiled: Tiled
    q_len: int
    sharing: Sharing
    lists: BoundedCache = field(default_factory=lambda: BoundedCache(_MAX_LISTS))

    def fields(self, kv_len: int) -> dict[str, Any]:
        """Return the fields of the plan that depend on kv_len, which must be at least ``tiled.kv_len``."""
        own, (block_q, block_kv) = self.tiled, self.tiled.tile
        by, growing = kv_len - own.kv_len, own.components["key_view"][own.growing]
        keys = int(own.views["extent"][growing[0], -1]) + by
        tiles = -(-keys // block_kv)
        views, mask = own.views.copy(), own.mask.copy()
        offset = views["offset"]
        offset[offset > 0] += by
        views["extent"][growing, -1], views["grid"][growing, -1], views["tiles"][growing] = keys, tiles, tiles
        rest = keys - (tiles - 1) * block_kv
        mask[own.rests] = -1 if rest == block_kv else len(own.masks)
        return {
            "kv_len": kv_len,
            "views": frozen(views),
            "mask": frozen(mask),
            "masks": frozen(np.concatenate([own.masks, _first_keys(rest, block_q, block_kv)])),
            "nnz": own.nnz + len(own.growing) * self.q_len * by,
            **(self.lists.get(tiles) or self.lists.keep(tiles, self._listed(tiles, views))),
        }

    def _listed(self, tiles: int, views: np.ndarray) -> dict[str, Any]:
        """Return the lists and work items for `tiles` tiles in the growing key view."""
        own = self.tiled
        more = tiles - int(own.views["tiles"][own.components["key_view"][own.growing[0]]])
        count, indices = np.diff(own.tile_indptr), own.indices.copy()
        count[own.rests - 1] += more
        indices[own.rests] += more
        listed: dict[str, Any] = {"tile_indptr": frozen(offsets(count)), "indices": frozen(indices)}
        grown = replace(own, views=views, **listed)
        items = share_out(grown, own.variant_components, self.q_len, own.tile[0], self.sharing)
        return listed | items._asdict()


def _first_keys(keys: int, block_q: int, block_kv: int) -> np.ndarray:
    """Return a bitmask, (1, block_q, words), in which every query may attend to the first `keys` keys."""
    row = np.frombuffer(((1 << keys) - 1).to_bytes(block_kv // 8, "little"), "<u8").astype(np.uint64)
    return np.broadcast_to(row, (1, block_q, len(row)))
