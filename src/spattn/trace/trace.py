"""A function of a few integers that is written with PyTorch, as a value: its operations, and copies of its tensors.

A trace stays what it was, and two traces of equal operations on equal tensors are equal.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .._util.cached import cached_property
from .._util.frozen import frozen
from ..arrays.torch import Torch

__all__ = ["PART", "Constant", "Ref", "Step", "Trace", "mapped"]

TORCH = Torch()
PART = "part"  # the operation that takes one of several results


class Ref(NamedTuple):
    """An argument of the function, or the result of a step; arguments have the first numbers."""

    number: int
    dtype: str


@dataclass(frozen=True, eq=False, repr=False)
class Constant:
    """A copy of a tensor that the function refers to, compared by what it holds."""

    array: np.ndarray

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        """The copy; TypeError for a tensor without values of its own."""
        oddity = TORCH.oddity(tensor)
        if oddity is not None:
            raise TypeError(f"mask_mod: expected to refer to plain tensors, got {oddity}")
        return cls(frozen(TORCH.to_host(tensor)))

    @cached_property
    def _digest(self) -> str:
        return hashlib.blake2b(self.array.tobytes(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        return f"<{self.array.dtype} {self.array.shape} {self._digest}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(self._digest)

    def tensor(self) -> torch.Tensor:
        """A tensor of the same numbers."""
        return TORCH.from_numpy(self.array.copy())


class Step(NamedTuple):
    """An operation of PyTorch's: ``aten.add.Tensor`` of references, constants, numbers and tuples of these."""

    result: Ref
    name: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Trace:
    """What a function does: the steps that its result needs, in order."""

    arguments: tuple[Ref, ...]
    steps: tuple[Step, ...]
    result: Ref | Constant

    @cached_property
    def depends(self) -> dict[int, frozenset[int]]:
        """The numbers of the arguments that each argument and the result of each step depend on."""
        found = {ref.number: frozenset({ref.number}) for ref in self.arguments}
        for step in self.steps:
            found[step.result.number] = frozenset().union(*(found[ref.number] for ref in refs(step[2:])))
        return found

    @property
    def used(self) -> frozenset[int]:
        """The numbers of the arguments that the result depends on."""
        return self.depends[self.result.number] if isinstance(self.result, Ref) else frozenset()

    def needs(self, wanted: Any) -> tuple[Step, ...]:
        """The steps that an operand needs."""
        numbers, steps = {ref.number for ref in refs(wanted)}, []
        for step in reversed(self.steps):
            if step.result.number in numbers:
                steps.append(step)
                numbers |= {ref.number for ref in refs(step[2:])}
        return tuple(reversed(steps))

    def evaluate(self, wanted: Ref, arguments: dict[int, np.ndarray]) -> np.ndarray:
        """An operand for each element of arrays of one shape, which stand for arguments by number."""
        shape = next(iter(arguments.values())).shape
        if 0 in shape:
            return np.empty(shape, wanted.dtype)  # torch.vmap refuses a batch of nothing
        steps = self.needs(wanted)
        given = (torch.tensor(x.ravel(), dtype=torch.int64, device="cpu") for x in arguments.values())

        def run(*scalars: torch.Tensor) -> torch.Tensor:
            return _replay(steps, dict(zip(arguments, scalars, strict=True)))[wanted.number]

        try:
            with torch.no_grad():
                found = torch.vmap(run)(*given)
        except IndexError as error:
            raise ValueError(f"mask_mod: expected tensors as long as what they are asked for, got {error}") from error
        return TORCH.to_host(found).reshape(shape)

    def fix(self, number: int, value: int) -> Trace:
        """The trace with an argument of a known value; steps that depend on it alone are taken now."""
        if all(ref.number != number for ref in self.arguments):
            return self
        known: dict[int, Any] = {number: torch.tensor(value, device="cpu")}
        steps = []
        with torch.no_grad():
            for step in self.steps:
                if all(ref.number in known for ref in refs(step[2:])):
                    known |= _replay((step,), known)
                else:
                    steps.append(step)
        keep = functools.cache(lambda number: Constant.of(known[number]))

        def settle(operand: Any) -> Any:
            return keep(operand.number) if isinstance(operand, Ref) and operand.number in known else operand

        settled = (
            step._replace(args=mapped(settle, step.args), options=mapped(settle, step.options)) for step in steps
        )
        left = tuple(ref for ref in self.arguments if ref.number != number)
        return Trace(left, tuple(settled), settle(self.result))


def mapped(function: Callable[[Any], Any], operand: Any) -> Any:
    """`function` of everything in nested tuples."""
    if isinstance(operand, (tuple, list)) and not isinstance(operand, Ref):
        return tuple(mapped(function, x) for x in operand)
    return function(operand)


def refs(operand: Any) -> Iterator[Ref]:
    """All references in nested tuples."""
    if isinstance(operand, Ref):
        yield operand
    elif isinstance(operand, tuple):
        for x in operand:
            yield from refs(x)


def _replay(steps: tuple[Step, ...], values: dict[int, Any]) -> dict[int, Any]:
    """What steps give, by number, added to the values that they refer to."""

    def value(operand: Any) -> Any:
        if isinstance(operand, Ref):
            return values[operand.number]
        return operand.tensor() if isinstance(operand, Constant) else operand

    for step in steps:
        options = {name: mapped(value, option) for name, option in step.options}
        values[step.result.number] = _operation(step.name)(*mapped(value, step.args), **options)
    return values


@functools.cache
def _operation(name: str) -> Callable[..., Any]:
    return operator.getitem if name == PART else functools.reduce(getattr, name.split("."), torch.ops)
