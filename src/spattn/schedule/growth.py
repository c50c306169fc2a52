"""Tile lists that grow with kv_len, for plans with all keys between the sequence ends allowed.

Tiles are found once, for a short sequence. A longer one adds full tiles between the ends, and changes the bitmask of
the last tile before the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .._util.cached import Recent
from .._util.frozen import frozen
from .._util.ragged import offsets
from ..planning.tiles.build import Tiled
from .items import Sharing, share_out

__all__ = ["Growth"]

_MAX_LISTS = 8  # numbers of tiles with cached lists: each serves as many key lengths as a tile has keys


@dataclass(frozen=True, eq=False)
class Growth:
    """A plan with growing tile lists: tiles at `kv_len` keys, call sizes, lists cached by number of tiles."""

    tiled: Tiled
    q_len: int
    sharing: Sharing
    lists: Recent = field(default_factory=lambda: Recent(_MAX_LISTS))

    def fields(self, kv_len: int) -> dict[str, Any]:
        """Return the length-dependent plan fields for `kv_len` keys, at least those of the tiles."""
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
        """Return the lists with `tiles` tiles before the end, and their work items."""
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
    """Return the bitmask, (1, block_q, words), that allows the first `keys` keys to every query."""
    row = np.frombuffer(((1 << keys) - 1).to_bytes(block_kv // 8, "little"), "<u8").astype(np.uint64)
    return np.broadcast_to(row, (1, block_q, len(row)))
