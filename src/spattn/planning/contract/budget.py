"""How much memory a plan may take."""

from __future__ import annotations

from .types import LARGEST

__all__ = ["Budget"]

_RUN_BYTES = 20  # of a plan's indices, key_view, mask and tile_indptr
_TILE_BYTES = 32  # of a tile that a GPU's lists have: of what is written out, and of what a layout makes of it


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
        self._runs = 0

    @property
    def most_runs(self) -> int:
        """How many runs more the plan may have."""
        return min(self.max_bytes // _RUN_BYTES, LARGEST) - self._runs

    def need(self, nbytes: int) -> None:
        """ValueError if so many bytes at once are too many."""
        self.needed = max(self.needed, nbytes)
        if nbytes > self.max_bytes:
            raise ValueError(
                f"pattern: expected a plan of at most max_bytes = {self.max_bytes} bytes, got one that needs at least "
                f"{nbytes}"
            )

    def need_tiles(self, count: int) -> None:
        """ValueError if lists of `count` tiles in all are too large to be written out."""
        if count > LARGEST:
            raise ValueError(f"pattern: expected at most {LARGEST} tiles on a GPU, got {count}; use a larger tile")
        self.need(_TILE_BYTES * count)

    def need_runs(self, count: int) -> None:
        """ValueError if a plan with `count` runs of tiles more than it has is too large."""
        runs = self._runs + count
        if runs > LARGEST:
            raise ValueError(
                f"pattern: expected at most {LARGEST} runs of tiles, got at least {runs}; use a larger tile"
            )
        self.need(_RUN_BYTES * runs)

    def add_runs(self, count: int) -> None:
        """So many runs have been found."""
        self.need_runs(count)
        self._runs += count
