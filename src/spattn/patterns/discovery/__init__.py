"""From bits or pairs to structure."""

from __future__ import annotations

from typing import Any

from .._pattern import Pattern
from ._pairs import Pairs
from ._search import discovered

__all__ = ["discover"]


def discover(mask: Any, grid: Any = None) -> Pattern:
    return discovered(Pairs.of_mask(mask))
