"""Memory limit of a plan."""

from __future__ import annotations

from .types import LARGEST

__all__ = ["Budget"]

_RUN_BYTES = 20  # per run: indices, key_view, mask and tile_indptr
_TILE_BYTES = 32  # per tile of expanded lists on a GPU: the list entry and its kernel layout


class Budget:
    """Tracks the memory that making a plan requires; `needed` is the largest request in bytes so far."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.needed = 0
        self._runs = 0

    @property
    def most_runs(self) -> int:
        """Number of runs that still fit."""
        return min(self.max_bytes // _RUN_BYTES, LARGEST) - self._runs

    def need(self, nbytes: int) -> None:
        """ValueError if `nbytes` exceed the limit."""
        self.needed = max(self.needed, nbytes)
        if nbytes > self.max_bytes:
            raise ValueError(
                f"pattern: expected a plan of at most max_bytes = {self.max_bytes} bytes, got one that needs at least "
                f"{nbytes}"
            )

    def need_tiles(self, count: int) -> None:
        """ValueError if expanded lists of `count` tiles exceed the limit."""
        if count > LARGEST:
            raise ValueError(f"pattern: expected at most {LARGEST} tiles on a GPU, got {count}; use a larger tile")
        self.need(_TILE_BYTES * count)

    def need_runs(self, count: int) -> None:
        """ValueError if `count` further runs exceed the limit."""
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
