"""Progress lines: the current stage and the second in which it began."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

Item = TypeVar("Item")
_WIDTH = 32


class Progress:
    """Writes ``[ 12 s] stage`` to `stream` (default: standard error); on a terminal, draws a bar below it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._started = time.perf_counter()
        self._total, self._done = 1.0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds since this object was made."""
        return time.perf_counter() - self._started

    def start(self, stage: str, total: float = 0) -> None:
        """Begin a stage of `total` steps, or of unknown length (0)."""
        self.finish()
        self._stream.write(f"[{self.seconds:3.0f} s] {stage}\n")
        self._stream.flush()
        self._total, self._done = total, 0.0

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Pass items through, one step each."""
        for item in items:
            yield item
            self.step()

    def step(self, amount: float = 1, detail: str = "") -> None:
        """Advance the bar by `amount` steps."""
        self._done += amount
        if self._terminal and self._total:
            filled = min(_WIDTH, int(_WIDTH * self._done / self._total))
            self._stream.write(f"\r\033[K        {'#' * filled}{'.' * (_WIDTH - filled)} {detail}")
            self._stream.flush()

    def finish(self) -> None:
        """Remove the bar."""
        if self._terminal:
            self._stream.write("\r\033[K")
            self._stream.flush()
