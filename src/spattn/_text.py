"""Patterns as text, which operators of PyTorch and programs of XLA hold, and which means the same in any process."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from ._api import as_pattern
from .patterns import Pattern, from_dict
from .plan import Plan

__all__ = ["pattern_of", "text_of"]


def text_of(pattern: Pattern | Plan | str | Any) -> str | None:
    """The text of what attention() takes as a pattern, of a plan's own; None where no text says all of it.

    In a graph that torch.compile is tracing, an object that is made there lacks its fields, but for their defaults.
    """
    try:
        pattern = pattern.pattern if isinstance(pattern, Plan) else as_pattern(pattern)
        if pattern is None or not {field.name for field in dataclasses.fields(pattern)} <= vars(pattern).keys():
            return None
        text = json.dumps(pattern.to_dict(), separators=(",", ":"))
        return text if from_dict(json.loads(text)) == pattern else None
    except (TypeError, ValueError):  # no pattern, of no registered class, or with parameters that JSON does not have
        return None


@functools.lru_cache(maxsize=32)
def pattern_of(text: str) -> Pattern:
    """The pattern of this text."""
    return from_dict(json.loads(text))
