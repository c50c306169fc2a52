"""Delay interpreter exit until XLA's host executions end.

An XLA thread that enters Python during finalization never returns, and threads that wait for it hang.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import time
from collections.abc import Iterator

import jax

__all__ = ["at_work"]

_QUIET = 0.1  # seconds

_now: set[object] = set()
_last = -math.inf  # end time of the last execution


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Mark an execution as running."""
    global _last
    if _last == -math.inf:
        atexit.register(_wait)
    token = object()
    _now.add(token)
    try:
        yield
    finally:
        _last = time.monotonic()
        _now.remove(token)


def _wait() -> None:
    """Wait for all live arrays, and then until no execution has run for `_QUIET` seconds.

    XLA has no API to list pending executions.
    """
    for x in jax.live_arrays("cpu"):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # raised again when the array is read
            x.block_until_ready()
    while _now or time.monotonic() - _last < _QUIET:
        time.sleep(_QUIET / 10)
