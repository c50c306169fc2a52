"""Immutable traces of PyTorch functions of integers: the operations, and copies of the captured tensors.

Traces of equal operations on equal tensors compare equal.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from .._util.cached import cached_property
from .._util.frozen import frozen
from ..arrays.torch import Torch

__all__ = ["PART", "Constant", "Ref", "Step", "Trace", "in_range", "mapped", "refs"]

TORCH = Torch()
PART = "part"  # pseudo-operation: select one result of an operation that has several


class Ref(NamedTuple):
    """A function argument or the result of a step; the numbers are consecutive, arguments first."""

    number: int
    dtype: str
    shape: tuple[int, ...] = ()  # of the value for one pair


@dataclass(frozen=True, eq=False, repr=False)
class Constant:
    """A copy of a tensor that the function captures; compared by value."""

    array: np.ndarray

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        """Copy a tensor; raise TypeError if it is more than the values in its memory (``ArrayNamespace.oddity``)."""
        oddity = TORCH.oddity(tensor)
        if oddity is not None:
            raise TypeError(f"mask_mod: expected references to plain tensors, got {oddity}")
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

    def __reduce__(self) -> tuple[Any, ...]:
        return Constant, (self.array,)  # without the tensor, a second copy

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The constant as a tensor. No step of a trace writes to it."""
        return TORCH.from_numpy(self.array.copy())


class Step(NamedTuple):
    """A PyTorch operation such as ``aten.add.Tensor`` on references, constants, Python scalars and tuples of these."""

    result: Ref
    name: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Trace:
    """A traced function: the steps on which its result depends, in order."""

    arguments: tuple[Ref, ...]
    steps: tuple[Step, ...]
    result: Ref | Constant
    name: str = field(default="mask_mod", compare=False, repr=False)
    """The function, for messages."""
    lines: Mapping[int, str] = field(default_factory=dict, compare=False, repr=False)
    """The source line of each step, by the number of its result, for messages."""

    @cached_property
    def depends(self) -> dict[int, frozenset[int]]:
        """Map the number of each argument and each step's result to the numbers of the arguments it depends on."""
        found = {ref.number: frozenset({ref.number}) for ref in self.arguments}
        for step in self.steps:
            found[step.result.number] = frozenset().union(*(found[ref.number] for ref in refs(step[2:])))
        return found

    @cached_property
    def made(self) -> dict[int, Step]:
        """Map the number of each result to its step."""
        return {step.result.number: step for step in self.steps}

    @property
    def used(self) -> frozenset[int]:
        """Return the numbers of the arguments on which the result depends."""
        return self.depends[self.result.number] if isinstance(self.result, Ref) else frozenset()

    def needs(self, wanted: Any) -> tuple[Step, ...]:
        """Return the steps on which an operand depends."""
        numbers, steps = {ref.number for ref in refs(wanted)}, []
        for step in reversed(self.steps):
            if step.result.number in numbers:
                steps.append(step)
                numbers |= {ref.number for ref in refs(step[2:])}
        return tuple(reversed(steps))

    def part(self, result: Ref | Constant) -> Trace:
        """Return the trace of another result."""
        return replace(self, steps=self.needs(result), result=result)

    def evaluate(self, wanted: Ref | Constant, arguments: dict[int, np.ndarray]) -> np.ndarray:
        """Evaluate `wanted` for arrays that broadcast, by argument number.

        The result has the arrays' common shape, followed by the shape of `wanted`. Operations on some of the arrays
        alone are not repeated along the axes of the others.
        """
        shape = np.broadcast_shapes(*(x.shape for x in arguments.values()))
        if isinstance(wanted, Constant):
            return np.broadcast_to(wanted.array, shape + wanted.array.shape)
        if 0 in shape:
            return np.empty(shape + wanted.shape, wanted.dtype)  # torch.vmap refuses an empty batch
        steps = self.needs(wanted)
        apart = _of_other_dtypes(steps)

        def run(*scalars: torch.Tensor) -> torch.Tensor:
            constants = dict(zip(map(id, apart), scalars[len(arguments) :], strict=True))
            return _replay(steps, dict(zip(arguments, scalars, strict=False)), constants)[wanted.number]

        padded = [x.reshape((1,) * (len(shape) - x.ndim) + x.shape) for x in arguments.values()]
        sizes = [length for length in (max(x.shape[axis] for x in padded) for axis in range(len(shape))) if length > 1]
        function: Callable[..., torch.Tensor] = run
        for axis in reversed(range(len(shape))):
            along = tuple(0 if x.shape[axis] > 1 else None for x in padded)
            if any(at is not None for at in along):
                function = torch.vmap(function, (*along, *(0 for _ in apart)))
        given = [torch.tensor(x.squeeze(), dtype=torch.int64, device="cpu") for x in padded]
        given += [constant.tensor.expand(sizes) for constant in apart]
        with torch.no_grad(), in_range():
            found = function(*given)
        return TORCH.to_host(found).reshape(shape + wanted.shape)

    def fix(self, number: int, value: int) -> Trace:
        """Bind an argument to a value, and fold the steps that depend on no other argument."""
        if all(ref.number != number for ref in self.arguments):
            return self
        known: dict[int, Any] = {number: torch.tensor(value, device="cpu")}
        steps = []
        with torch.no_grad(), in_range():
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
        return replace(self, arguments=left, steps=tuple(settled), result=settle(self.result))


def mapped(function: Callable[[Any], Any], operand: Any) -> Any:
    """Apply `function` to every leaf of nested tuples."""
    if isinstance(operand, (tuple, list)) and not isinstance(operand, Ref):
        return tuple(mapped(function, x) for x in operand)
    return function(operand)


def refs(operand: Any) -> Iterator[Ref]:
    """Yield all references in nested tuples."""
    if isinstance(operand, Ref):
        yield operand
    elif isinstance(operand, tuple):
        for x in operand:
            yield from refs(x)


@contextlib.contextmanager
def in_range() -> Iterator[None]:
    """Raise ValueError for an index out of range."""
    try:
        yield
    except (IndexError, RuntimeError) as error:  # torch.gather raises the latter
        if not any(words in str(error) for words in ("out of bounds", "out of range", "an empty tensor")):
            raise
        raise ValueError(f"mask_mod: index out of range: {error}") from error


def _of_other_dtypes(steps: tuple[Step, ...]) -> list[Constant]:
    """Return the scalar constants among operands of other dtypes.

    torch.vmap makes arrays of the arguments. A scalar tensor beside an array does not take part in the promotion of
    dtypes, unlike two scalars, so that these constants must become arrays too.
    """
    found: dict[int, Constant] = {}
    for step in steps:
        tensors = [x for x in step.args if isinstance(x, (Ref, Constant))]
        dtypes = {x.dtype if isinstance(x, Ref) else x.array.dtype.name for x in tensors}
        for x in tensors if len(dtypes) > 1 else ():
            if isinstance(x, Constant) and not x.array.ndim:
                found[id(x)] = x
    return list(found.values())


def _replay(
    steps: tuple[Step, ...], values: dict[int, Any], constants: Mapping[int, torch.Tensor] | None = None
) -> dict[int, Any]:
    """Execute steps, add their results to `values` (by number) and return it; `constants` replace those of a step, by
    their identity."""

    def value(operand: Any) -> Any:
        if isinstance(operand, Ref):
            return values[operand.number]
        if isinstance(operand, Constant):
            return operand.tensor if constants is None else constants.get(id(operand), operand.tensor)
        return operand

    for step in steps:
        options = {name: mapped(value, option) for name, option in step.options}
        values[step.result.number] = _operation(step.name)(*mapped(value, step.args), **options)
    return values


@functools.cache
def _operation(name: str) -> Callable[..., Any]:
    return operator.getitem if name == PART else functools.reduce(getattr, name.split("."), torch.ops)
