"""Patterns as text, which operators of PyTorch take, and which means the same in any process."""

from __future__ import annotations

from typing import Any

import torch

from ..patterns import Pattern
from ..planning import Plan
from .plans import as_pattern

__all__ = ["text_of"]


# A graph of torch.compile holds what these return. A method, since PyTorch 2.11 takes a pattern for no argument of one.
torch.compiler.assume_constant_result(Pattern._serialized)


def text_of(pattern: Pattern | Plan | str | Any) -> str | None:
    """The text of what attention() takes as a pattern, of a plan's own; None where no text says all of it."""
    if isinstance(pattern, str):
        return _text_of_name(pattern)
    if isinstance(pattern, Plan):
        pattern = pattern.pattern
    if not isinstance(pattern, Pattern):
        return None
    id(pattern)  # a graph that is traced now is for this pattern alone, whatever its parameters
    return pattern._serialized()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text_of_name(name: str) -> str | None:
    try:
        return as_pattern(name)._serialized()
    except ValueError:  # of no registered pattern
        return None
