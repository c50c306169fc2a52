"""Python ends after the host's programs: a thread of XLA's that comes into Python later is lost, and what waits for it
waits for ever."""

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
_last = -math.inf  # when an execution ended


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """An execution is under way."""
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
    """Waits for programs whose results somebody has, and then until no other has called for a while.

    XLA does not tell what it has yet to run.
    """
    for x in jax.live_arrays("cpu"):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # whoever reads the array sees it
            x.block_until_ready()
    while _now or time.monotonic() - _last < _QUIET:
        time.sleep(_QUIET / 10)
