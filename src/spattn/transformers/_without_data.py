"""Tensors without data, which a model passes on from layer to layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["WithoutData"]


class WithoutData(torch.Tensor):  # type: ignore[misc]
    """Base class of tensors that stand for a pattern or a bias; operations on them raise TypeError.

    Their result would have no data, either. A subclass has :meth:`computed_with`.
    """

    @classmethod
    def computed_with(cls, operation: Any) -> TypeError:
        """Return the error of an operation."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise cls.computed_with(func)


def _refused(name: str) -> Callable[..., Any]:
    def operator(tensor: WithoutData, other: Any) -> Any:
        raise tensor.computed_with(name)

    return operator


# torch.Tensor's binary operators would replace our TypeError by a generic one; methods of a subclass take precedence.
for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(WithoutData, _method, _refused(_name))
