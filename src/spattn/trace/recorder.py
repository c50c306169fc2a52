"""Record the operations of a PyTorch function by calling it with tracer tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..score.recorder import line
from .trace import PART, Constant, Ref, Step, Trace, mapped

__all__ = ["trace"]


class _Recorder:
    """A list of recorded steps, and the constants that they use."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.lines: dict[int, str] = {}
        self.numbers = 0
        self._constants: dict[str, Constant] = {}

    def constant(self, tensor: torch.Tensor) -> Constant:
        made = Constant.of(tensor)
        return self._constants.setdefault(repr(made), made)

    def new(self, sample: Any) -> Ref:
        self.numbers += 1
        dtype = str(getattr(sample, "dtype", "")).removeprefix("torch.")
        return Ref(self.numbers - 1, dtype, tuple(getattr(sample, "shape", ())))

    def argument(self) -> Traced:
        sample = torch.zeros((), dtype=torch.int64, device="cpu")
        return Traced(self, self.new(sample), sample)

    def step(self, name: str, args: Any, options: Any, sample: Any) -> Any:
        """Record an operation; return a tracer for its result, or a list for several results."""
        result = self.new(sample)
        if name == "aten.index.Tensor":
            args = self._joined(*args)
        self.steps.append(Step(result, name, args, options))
        self.lines[result.number] = line()
        if isinstance(sample, (tuple, list)):
            return [self.step(PART, (result, n), (), part) for n, part in enumerate(sample)]
        return Traced(self, result, sample)

    def _joined(self, table: Any, indices: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the operands of a look-up; ``table[i][j]`` becomes ``table[i, j]``."""
        made = next((x for x in self.steps if x.result == table), None)
        if made is None or made.name != "aten.index.Tensor" or not all(map(_is_number, (*made.args[1], *indices))):
            return table, indices
        return made.args[0], (*made.args[1], *indices)

    def operand(self, x: Any) -> Any:
        """Return the recorded form of an operand: a Ref, a Constant or the value itself."""
        if isinstance(x, Traced):
            return x.ref
        return self.constant(x) if isinstance(x, torch.Tensor) else x


class Traced(torch.Tensor):  # type: ignore[misc]
    """A tracer tensor: a value for every pair. `sample` is the value if all arguments are 0, with dtype and shape."""

    recorder: _Recorder
    ref: Ref
    sample: torch.Tensor

    @staticmethod
    def __new__(cls, recorder: _Recorder, ref: Ref, sample: torch.Tensor) -> Traced:
        self = torch.Tensor._make_wrapper_subclass(cls, sample.shape, dtype=sample.dtype, device="cpu")
        self.recorder, self.ref, self.sample = recorder, ref, sample
        return self

    def __repr__(self) -> str:
        return f"<{self.ref.dtype} of every pair>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("device") is not None:
            options["device"] = torch.device("cpu")
        recorder = next(x.recorder for x in _leaves((args, tuple(options.values()))) if isinstance(x, Traced))
        _check(func)
        kept = mapped(recorder.operand, args), mapped(recorder.operand, tuple(sorted(options.items())))
        sample = func(*mapped(_sample, args), **{name: mapped(_sample, x) for name, x in options.items()})
        return recorder.step(str(func), *kept, sample)


class _Calls(TorchFunctionMode):  # type: ignore[misc]
    """Mode that records ``table[i]`` as ``aten.index``, because PyTorch would convert the 0-d tracer to a Python int.

    It also rejects random numbers in calls without a tracer argument, which :class:`Traced` does not intercept.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            numbers = all(isinstance(i, torch.Tensor) and i.dtype != torch.bool or type(i) is int for i in index)
            if numbers and any(isinstance(i, Traced) for i in index):
                return torch.ops.aten.index(table, [torch.as_tensor(i, device="cpu") for i in index])
        options = kwargs or {}
        if any(isinstance(x, Traced) for x in _leaves((args, tuple(options.values())))):
            return func(*args, **options)
        with _NoRandomNumbers():
            return func(*args, **options)


class _NoRandomNumbers(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check_random(func)
        return func(*args, **(kwargs or {}))


def _is_number(index: Any) -> bool:
    """Return whether an index selects an element."""
    if isinstance(index, Ref):
        return not index.shape and index.dtype.startswith(("int", "uint"))
    return isinstance(index, Constant) and not index.array.ndim and index.array.dtype.kind in "iu"


def _leaves(operand: Any) -> Iterator[Any]:
    if isinstance(operand, (tuple, list)):
        for x in operand:
            yield from _leaves(x)
    else:
        yield operand


def _sample(x: Any) -> Any:
    if isinstance(x, Traced):
        return x.sample
    return x.detach().cpu() if isinstance(x, torch.Tensor) else x


def _check(func: Any) -> None:
    """Raise TypeError for mutating, random or data-dependent operations."""
    if func._schema.is_mutable:
        raise TypeError(f"mask_mod: in-place operations are not supported, got {func}")
    _check_random(func)
    if torch.Tag.data_dependent_output in func.tags:
        raise TypeError(
            f"mask_mod: {func} needs a concrete value, but indices are symbolic; use tensor operations instead of "
            "'if', 'and', int() and arrays of other libraries"
        )


def _check_random(func: Any) -> None:
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise TypeError(f"mask_mod: expected no random numbers, got {func}; draw them beforehand and index a tensor")


def trace(function: Callable[..., Any], arguments: int) -> Trace:
    """Trace a function of `arguments` integers.

    Raises TypeError if it branches on values, mutates a tensor, draws random numbers, does not return a 0-d bool
    tensor, or refers to a tensor that is sparse, nested, quantized or without data.
    """
    # torch.compile must not trace into the tracers.
    compiler = "torch._dynamo" in sys.modules
    found: Trace = (torch.compiler.disable(_trace) if compiler else _trace)(function, arguments)
    return found


def _trace(function: Callable[..., Any], arguments: int) -> Trace:
    recorder = _Recorder()
    given = [recorder.argument() for _ in range(arguments)]
    try:
        with torch.no_grad(), _Calls():
            result = function(*given)
    except RuntimeError as error:  # raised by PyTorch for operations that need values
        raise TypeError(f"mask_mod: expected operations on 0-d integer tensors, got {error}") from error
    if not isinstance(result, torch.Tensor) or result.dtype != torch.bool or result.ndim:
        got = f"{result.dtype} of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
        raise TypeError(f"mask_mod: expected a function that returns a 0-d bool tensor, got {got}")
    inputs, last = tuple(x.ref for x in given), recorder.operand(result)
    whole = Trace(inputs, tuple(recorder.steps), last, _name(function), recorder.lines)
    whole = replace(whole, steps=whole.needs(last))
    if isinstance(last, Ref):
        _try(whole, last)
    return whole


def _name(function: Callable[..., Any]) -> str:
    """Return the name and the first line of a function, for messages."""
    code, name = getattr(function, "__code__", None), getattr(function, "__qualname__", type(function).__name__)
    return f"mask_mod {name}" + ("" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})")


def _try(whole: Trace, result: Ref) -> None:
    """Raise TypeError if torch.vmap cannot vectorize the trace over pairs."""
    try:
        whole.evaluate(result, {ref.number: np.zeros(2, np.int64) for ref in whole.arguments})
    except RuntimeError as error:
        raise TypeError(f"mask_mod: expected operations that torch.vmap supports, got {error}") from error
