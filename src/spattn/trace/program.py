"""Programs of NumPy functions, which evaluate rules on many cells, block by block, or in native code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from .._util.cached import cached_property
from .native import Converted, NativeProgram, compiled

__all__ = ["Program", "Recorded"]

_COMPILED_FROM = 1 << 14  # fewer cells take less time than compiling a program
_CELLS_AT_ONCE = 1 << 16  # the temporary arrays of a block fit into a core's cache


class Recorded(NDArrayOperatorsMixin):
    """A value of a program; `sample` has its dtype. Functions of it are appended to the program."""

    def __init__(self, program: Program, number: int, sample: Any):
        self.program, self.number, self.sample = program, number, sample

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.sample.dtype)

    @property
    def is_truth(self) -> bool:
        return self.dtype == np.dtype(bool)

    def record(self, function: Callable[..., Any], *operands: Any, dtype: Any = None) -> Recorded:
        """Append ``function(*operands)``; its `dtype` is that of the samples' result by default."""
        samples = (x.sample if isinstance(x, Recorded) else x for x in operands)
        with np.errstate(all="ignore"):
            sample = function(*samples) if dtype is None else np.zeros(1, dtype)
        return self.program.add(function, operands, sample)

    def astype(self, dtype: Any) -> Recorded:
        """See ``numpy.ndarray.astype``."""
        return self.record(Converted(dtype), self)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return NotImplemented if method != "__call__" or options else self.record(ufunc, *inputs)

    def __array_function__(self, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return NotImplemented if options else self.record(function, *args)


class Program:
    """Inputs and functions of values, numbered together in the order in which they are added."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., Any] | None, tuple[Any, ...], list[int]]] = []  # None: an input
        self._dtypes: list[np.dtype] = []  # of the values
        self._result = -1

    def input(self, dtype: Any) -> Recorded:
        """Append an input."""
        return self.add(None, (), np.zeros(1, dtype))

    def add(self, function: Callable[..., Any] | None, operands: tuple[Any, ...], sample: Any) -> Recorded:
        """Append a step and return its value."""
        self._steps.append((function, operands, []))
        self._dtypes.append(np.dtype(sample.dtype))
        return Recorded(self, len(self._steps) - 1, sample)

    def finish(self, result: Recorded) -> None:
        """Set the boolean result, and note after which step each other value is no longer needed."""
        self._result, seen = result.number, {result.number}
        for _, operands, last in reversed(self._steps):
            numbers = {x.number for x in operands if isinstance(x, Recorded)}
            last.extend(numbers - seen)
            seen |= numbers

    @cached_property
    def _native(self) -> NativeProgram | None:
        return compiled([(function, operands) for function, operands, _ in self._steps], self._dtypes, self._result)

    def run(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Evaluate the program on arrays that broadcast."""
        large = math.prod(np.broadcast_shapes(*(x.shape for x in inputs))) >= _COMPILED_FROM
        found = self._native.run(inputs) if large and self._native is not None else None
        return self.run_by_numpy(inputs) if found is None else found

    def run_by_numpy(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Evaluate the program by its functions, in blocks along the first axis of the inputs."""
        shape = np.broadcast_shapes(*(x.shape for x in inputs))
        rows = max(1, _CELLS_AT_ONCE * shape[0] // max(math.prod(shape), 1)) if shape else 1
        if not shape or rows >= shape[0]:
            return np.asarray(np.broadcast_to(self._run(inputs), shape))
        found = np.empty(shape, bool)
        padded = [x.reshape((1,) * (len(shape) - x.ndim) + x.shape) for x in inputs]
        for first in range(0, shape[0], rows):
            some = slice(first, first + rows)
            found[some] = self._run([x if len(x) == 1 else x[some] for x in padded])
        return found

    def _run(self, inputs: Sequence[np.ndarray]) -> Any:
        given, values = iter(inputs), list[Any]()
        with np.errstate(all="ignore"):
            for function, operands, last in self._steps:
                own = [values[x.number] if isinstance(x, Recorded) else x for x in operands]
                values.append(next(given) if function is None else function(*own))
                for number in last:
                    values[number] = None
        return values[self._result]
