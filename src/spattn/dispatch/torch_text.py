"""Serialized patterns for PyTorch operators."""

from __future__ import annotations

from typing import Any

import torch

from ..patterns import Pattern
from ..patterns.base.in_graphs import described, serialized_call
from ..patterns.base.pattern import Deferred
from ..planning import Plan
from .plans import as_pattern

__all__ = ["operands_of", "text_of"]


# torch.compile embeds the results as constants. The method itself is marked, because PyTorch 2.11 rejects a pattern as
# an argument of a constant function.
torch.compiler.assume_constant_result(Pattern._serialized)


def text_of(pattern: Pattern | Plan | str | Any) -> str | None:
    """Serialize a `pattern` argument of attention(), or the pattern of a plan; None if it is not serializable."""
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
        return as_pattern(name)._serialized()
    except ValueError:  # not a registered name
        return None


def operands_of(pattern: Any, constant: bool = False) -> tuple[str | None, list[torch.Tensor]]:
    """Serialize a `pattern` argument in the graph of torch.compile; return its arrays apart, which may then change.

    The graph depends on the values of all other parameters, not on the identity of patterns. If `constant`, arrays of
    existing patterns are constants of the graph.
    """
    if not torch.compiler.is_dynamo_compiling() or not isinstance(pattern, Pattern):
        return text_of(pattern), []
    if constant and not isinstance(pattern, Deferred):
        return text_of(pattern), []
    arrays: list[Any] = []
    text = _text_of_call(described(pattern, arrays), len(arrays))
    return (text_of(pattern), []) if text is None else (text, [torch.as_tensor(x) for x in arrays])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text_of_call(call: Any, operands: int) -> str | None:
    return serialized_call(call, operands)
