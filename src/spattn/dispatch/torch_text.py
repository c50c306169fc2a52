"""Serialized patterns for PyTorch operators."""

from __future__ import annotations

from typing import Any

import torch

from ..patterns import Pattern
from ..patterns.conversion import from_text
from ..planning import Plan

__all__ = ["text_of"]


# torch.compile embeds the results as constants. The method itself is marked, because PyTorch 2.11 rejects a pattern as
# an argument of a constant function.
torch.compiler.assume_constant_result(Pattern._serialized)


def text_of(pattern: Pattern | Plan | str | Any) -> str | None:
    """Serialize a `pattern` argument of attention(), or the pattern of a plan; None if it is not serializable."""
    if isinstance(pattern, type):
        pattern = getattr(pattern, "name", "")
    if isinstance(pattern, str):
        return _text_of_name(pattern)
    if isinstance(pattern, Plan):
        pattern = pattern.pattern
    if not isinstance(pattern, Pattern):
        return None
    id(pattern)  # makes torch.compile guard on the identity of this pattern
    return pattern._serialized()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text_of_name(name: str) -> str | None:
    try:
        return from_text(name)._serialized()
    except ValueError:  # no pattern's text
        return None
