"""A progress line on a terminal, nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

Item = TypeVar("Item")
_WIDTH = 32


class Progress:
    """Draws ``name [####....] 12/40 detail`` on `stream` while a stage runs, if `stream` is a terminal."""

    def __init__(self, stream: TextIO = sys.stderr):
        self._stream = stream
        self._shown = stream.isatty()
        self._name, self._total, self._done = "", 1, 0

    def start(self, name: str, total: int) -> None:
        """Begins a stage of `total` steps."""
        self._name, self._total, self._done = name, total, 0
        self._draw("")

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Passes items through, one step each."""
        for item in items:
            yield item
            self.step()

    def step(self, detail: str = "") -> None:
        """One step is done; `detail` says what comes next."""
        self._done += 1
        self._draw(detail)

    def finish(self) -> None:
        """Removes the line."""
        if self._shown:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def _draw(self, detail: str) -> None:
        if self._shown:
            filled = _WIDTH * self._done // max(self._total, 1)
            bar = "#" * filled + "." * (_WIDTH - filled)
            self._stream.write(f"\r\033[K{self._name} [{bar}] {self._done}/{self._total} {detail}")
            self._stream.flush()
