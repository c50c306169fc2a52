"""Serialized patterns for PyTorch operators."""

from __future__ import annotations

from typing import Any

import torch

from ..patterns import Pattern
from ..patterns.base.in_graphs import described, serialized_call
from ..patterns.base.pattern import Deferred
from ..patterns.conversion import from_text
from ..planning import Plan

__all__ = ["operands_of", "text_of"]


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


def operands_of(pattern: Any, has_grid: bool) -> tuple[str | None, list[torch.Tensor]]:
    """Serialize a `pattern` argument in a graph; return its arrays apart, which may then change.

    The graph depends on the values of all other parameters, not on the identity of patterns. In exported programs, and
    for tensors that have a grid, arrays of existing patterns are constants.
    """
    later, compiles = isinstance(pattern, Deferred), torch.compiler.is_dynamo_compiling()
    constant = has_grid or not compiles or torch.compiler.is_exporting()
    if not later and (constant or not isinstance(pattern, Pattern)):
        return text_of(pattern), []
    arrays: list[Any] = []
    text = _text_of_call(described(pattern, arrays, not compiles), len(arrays))
    if text is None or (has_grid and arrays):  # a text with operands has no grid
        return None if later else text_of(pattern), []
    return text, [torch.as_tensor(x) for x in arrays]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text_of_call(call: Any, operands: int) -> str | None:
    return serialized_call(call, operands)
