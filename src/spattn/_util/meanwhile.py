"""Work that a call offers to do while it waits for a compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["meanwhile", "take_work"]

_work: ContextVar[Callable[[], None] | None] = ContextVar("work", default=None)


@contextlib.contextmanager
def meanwhile(work: Callable[[], None] | None) -> Iterator[None]:
    """Offer `work`, which runs at most once, in this thread, and only if the block waits for a compiler."""
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def take_work() -> Callable[[], None] | None:
    """Return the work that the current call offers, or None; a second call returns None."""
    work = _work.get()
    if work is not None:
        _work.set(None)
    return work
