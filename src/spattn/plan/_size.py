"""How much memory an object keeps alive."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from ..patterns import Pattern

__all__ = ["size_of"]


def size_of(thing: Any) -> int:
    """Bytes of an object and of all arrays, containers, patterns and dataclasses in it, each counted once."""
    total, seen, pending = 0, set(), [thing]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        pending.extend(_parts(one))
    return total


def _parts(thing: Any):
    if isinstance(thing, np.ndarray):
        return () if thing.base is None else (thing.base,)
    if isinstance(thing, (tuple, list, set, frozenset)):
        return thing
    if isinstance(thing, dict):
        return (*thing, *thing.values())
    inside = isinstance(thing, Pattern) or dataclasses.is_dataclass(thing) and not isinstance(thing, type)
    return vars(thing).values() if inside and hasattr(thing, "__dict__") else ()
