"""How much memory a plan may take."""

from __future__ import annotations

from ._types import LARGEST

__all__ = ["Budget"]

_RUN_BYTES = 20  # of a plan's indices, key_view, mask and tile_indptr


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

    def need(self, nbytes: int) -> None:
        """ValueError if so many bytes at once are too many."""
        self.needed = max(self.needed, nbytes)
        if nbytes > self.max_bytes:
            raise ValueError(
                f"pattern: expected a plan of at most max_bytes = {self.max_bytes} bytes, got one that needs at least "
                f"{nbytes}"
            )

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
