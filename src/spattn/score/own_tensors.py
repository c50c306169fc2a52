"""A PyTorch mode that protects the tensors that a traced function captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .recorder import line

__all__ = ["OwnTensors", "leaves"]


class OwnTensors(TorchDispatchMode):  # type: ignore[misc]
    """Mode that raises an error for an operation that writes to a tensor that no operation under the mode has made.

    Functions of PyTorch also write to tensors that they make themselves, as torch.nn.functional.one_hot does.
    """

    def __init__(self, refusal: str, error: type[Exception] = TypeError) -> None:
        super().__init__()
        self._refusal, self._error = refusal, error  # the refusal with {} for the operation
        self._made: dict[int, Any] = {}  # storages by address; alive, so that no other one gets the address

    def run(self, func: Callable[..., Any], args: Any, options: dict[str, Any]) -> Any:
        """Call a function of PyTorch under this mode."""
        with self:
            found = func(*args, **options)
        if func is torch.tensor:  # PyTorch makes it of Python numbers without an operation
            self._made |= _storages(found)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            operands = {own.name: x for own, x in zip(arguments, args, strict=False)} | options
            for own in arguments:
                written = own.alias_info is not None and own.alias_info.is_write
                if written and any(not self._owns(x) for x in leaves(operands.get(own.name))):
                    raise self._error(self._refusal.format(func) + line())
        found = func(*args, **options)
        given = _storages((args, tuple(options.values())))
        self._made |= {address: x for address, x in _storages(found).items() if address not in given}
        return found

    def _owns(self, x: Any) -> bool:
        storages = _storages(x)
        return not isinstance(x, torch.Tensor) or bool(storages) and storages.keys() <= self._made.keys()


def leaves(operand: Any) -> Iterator[Any]:
    """Yield the elements of nested tuples and lists."""
    if isinstance(operand, (tuple, list)):
        for x in operand:
            yield from leaves(x)
    else:
        yield operand


def _storages(operand: Any) -> dict[int, Any]:
    """Return the storages of tensors by address; a sparse tensor has none."""
    tensors = (x for x in leaves(operand) if isinstance(x, torch.Tensor) and torch._C._has_storage(x))
    return {storage._cdata: storage for storage in (x.untyped_storage() for x in tensors)}
