"""Time budgets: measurements repeat less where a repeat is slow."""

from __future__ import annotations

import time


class Budget:
    """Wall-clock seconds that a stage may take, counted from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds, at least 0."""
        return max(0.0, self._end - time.perf_counter())

    def share(self, fraction: float) -> Budget:
        """A budget of this fraction of the remaining seconds."""
        return Budget(fraction * self.left)
