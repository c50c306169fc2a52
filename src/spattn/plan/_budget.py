"""Plans that cannot fit are refused before the memory is asked for."""

from __future__ import annotations

from ._types import LARGEST

__all__ = ["Budget"]

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
