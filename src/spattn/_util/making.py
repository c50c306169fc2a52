"""What the plans of one request share while they are made: intermediate results, and reasons for slowness."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Making", "making", "note", "note_new_plan", "shared"]


@dataclass
class Making:
    """Results by key, reasons for slowness, and whether any plan was new rather than found in the cache."""

    results: dict[Hashable, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    is_new: bool = False


_MAKING: ContextVar[Making | None] = ContextVar("_MAKING", default=None)


@contextmanager
def making() -> Iterator[Making | None]:
    """Share results until the block ends; give None in a block within another, which shares the outer block's."""
    if _MAKING.get() is not None:
        yield None
        return
    own = Making()
    token = _MAKING.set(own)
    try:
        yield own
    finally:
        _MAKING.reset(token)


def shared(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return ``make()``, once for each key within a :func:`making` block."""
    own = _MAKING.get()
    if own is None:
        return make()
    if key not in own.results:
        own.results[key] = make()
    return own.results[key]


def note(reason: str) -> None:
    """Note why making a plan may be slow."""
    own = _MAKING.get()
    if own is not None:
        own.reasons.append(reason)


def note_new_plan() -> None:
    """Note that a plan was not in the cache."""
    own = _MAKING.get()
    if own is not None:
        own.is_new = True
