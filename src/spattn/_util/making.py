"""What the plans of one request share while they are made: intermediate results, and reasons for slowness."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["making", "note", "shared"]

_RESULTS: ContextVar[dict[Hashable, Any] | None] = ContextVar("_RESULTS", default=None)
_REASONS: ContextVar[list[str] | None] = ContextVar("_REASONS", default=None)


@contextmanager
def making() -> Iterator[list[str] | None]:
    """Share results until the block ends; give the list of reasons for slowness, or None in a block within another."""
    if _RESULTS.get() is not None:
        yield None
        return
    reasons: list[str] = []
    tokens = _RESULTS.set({}), _REASONS.set(reasons)
    try:
        yield reasons
    finally:
        _RESULTS.reset(tokens[0])
        _REASONS.reset(tokens[1])


def shared(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return ``make()``, once for each key within a :func:`making` block."""
    results = _RESULTS.get()
    if results is None:
        return make()
    if key not in results:
        results[key] = make()
    return results[key]


def note(reason: str) -> None:
    """Note why making a plan may be slow."""
    reasons = _REASONS.get()
    if reasons is not None:
        reasons.append(reason)
