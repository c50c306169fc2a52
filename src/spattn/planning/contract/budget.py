"""Limits on the memory, runs and tiles of a plan."""

from __future__ import annotations

from .types import LARGEST

__all__ = ["Budget"]

_RUN_BYTES = 20  # indices, key_view and mask (4 bytes each) and tile_indptr (8 bytes)
_TILE_BYTES = 32  # each tile's entry in expanded lists, and the kernels' copy of it on a GPU


class Budget:
    """Memory limit while a plan is made; `needed` is the largest request so far, in bytes."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.needed = 0
        self._runs = 0

    @property
    def most_runs(self) -> int:
        """Number of further runs that fit the limit."""
        return min(self.max_bytes // _RUN_BYTES, LARGEST) - self._runs

    def need(self, nbytes: int) -> None:
        """Raise ValueError if `nbytes` exceeds the limit."""
        self.needed = max(self.needed, nbytes)
        if nbytes > self.max_bytes:
            raise ValueError(
                f"pattern: expected a plan of at most max_bytes = {self.max_bytes} bytes, got one that needs at least "
                f"{nbytes}"
            )

    def need_tiles(self, count: int) -> None:
        """Raise ValueError if tile lists with `count` entries exceed the limit."""
        if count > LARGEST:
            raise ValueError(f"pattern: expected at most {LARGEST} tiles on a GPU, got {count}; use a larger tile")
        self.need(_TILE_BYTES * count)

    def need_runs(self, count: int) -> None:
        """Raise ValueError if `count` further runs exceed the limit."""
        runs = self._runs + count
        if runs > LARGEST:
            raise ValueError(
                f"pattern: expected at most {LARGEST} runs of tiles, got at least {runs}; use a larger tile"
            )
        self.need(_RUN_BYTES * runs)

    def add_runs(self, count: int) -> None:
        """Account for `count` runs."""
        self.need_runs(count)
        self._runs += count
