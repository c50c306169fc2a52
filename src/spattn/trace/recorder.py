"""Record the operations of a PyTorch function by calling it with tracer tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..score.own_tensors import OwnTensors, leaves
from ..score.recorder import line
from .trace import PART, Constant, Ref, Step, Trace, in_range, mapped

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
        """Return the operands of a look-up; ``table[i][j]`` and ``table[:, j][i]`` become ``table[i, j]``."""
        made = next((x for x in self.steps if x.result == table), None)
        if made is None or made.name != "aten.index.Tensor" or not all(map(_selects, (*made.args[1], *indices))):
            return table, indices
        rest = iter(indices)  # they are of the axes that `made` keeps
        return made.args[0], (*(next(rest, None) if i is None else i for i in made.args[1]), *rest)

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

    def __len__(self) -> int:
        return len(self.sample) if self.ndim else _refused(_AXES)

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self.ndim else _refused(_AXES)

    def __hash__(self) -> int:
        return _refused(
            "mask_mod: a dict, a set and functools.cache need a number, which an index lacks since it stands for every "
            "position; look up in a tensor, torch.tensor(table)[q_idx], and write torch.isin for a set"
        )

    def __round__(self, digits: int = 0) -> Any:
        return _refused("mask_mod: round() is not supported; use torch.round")

    def __divmod__(self, other: Any) -> Any:
        return _refused("mask_mod: divmod() is not supported; use x // n and x % n")

    __rdivmod__ = __divmod__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("device") is not None:
            options["device"] = torch.device("cpu")
        recorder = next(x.recorder for x in leaves((args, tuple(options.values()))) if isinstance(x, Traced))
        _check(func)
        if func is torch.ops.aten.index_select.default and not args[2].ndim:
            return func(*args[:2], args[2].unsqueeze(0))  # torch.vmap returns the whole table for a 0-d index
        kept = mapped(recorder.operand, args), mapped(recorder.operand, tuple(sorted(options.items())))
        with in_range():
            sample = func(*mapped(_sample, args), **{name: mapped(_sample, x) for name, x in options.items()})
        return recorder.step(str(func), *kept, sample)


_TRUTH = (
    "mask_mod: 'if', 'and', 'or', 'not', 'in', max() and a <= b <= c need a truth value, which an index lacks since it "
    "stands for every position; use torch.where, &, |, ~, torch.isin, torch.maximum and (a <= b) & (b <= c)"
)
_NUMBER = (
    "mask_mod: int(), float(), item() and tolist() need a number, which an index lacks since it stands for every "
    "position; leave them out, tensors take part in arithmetic, comparisons and look-ups"
)
_AXES = (
    "mask_mod: len(), loops and unpacking need a vector, and an index is a number for every position; loop over "
    "range(n) and compare, q_idx == n"
)
_SIZES = (  # after the name of a function
    "needs a number, which an index lacks since it stands for every position; look up, table[q_idx] for select() and "
    "table[q_idx + torch.arange(n)] for narrow(), or compare, torch.where(torch.arange(n) < q_idx, table, 0) for the "
    "first q_idx elements"
)
_INDICES = (
    "mask_mod: table[...] takes integers, slices, None, ... and integer tensors or lists beside an index; use "
    "torch.where(mask, table, 0) for table[mask], torch.stack([q_idx, kv_idx]) for [q_idx, kv_idx], and "
    "table[q_idx][:, rows] for table[q_idx, :, rows]"
)
_NEEDS = {  # by PyTorch's name of the function
    **dict.fromkeys(("__bool__", "__contains__"), _TRUTH),
    **dict.fromkeys(("__int__", "__float__", "__complex__", "item", "tolist"), _NUMBER),
    "__index__": "mask_mod: a list, range() and an array need an integer, which an index lacks since it stands for "
    "every position; look up in a tensor, torch.tensor(table)[q_idx]",
    "slice": "mask_mod: a slice needs integers, which an index lacks since it stands for every position; compare "
    "positions instead, torch.where(torch.arange(n) < q_idx, table, 0)",
    "__setitem__": "mask_mod: t[q_idx] = x is not supported, since an index stands for every position; use torch.where",
    **dict.fromkeys(
        ("numpy", "__array__"),
        "mask_mod: NumPy needs values, which an index lacks since it stands for every position; use PyTorch",
    ),
}


class _NoNumber(TypeError):
    """A function needs the value of an index."""


def _refused(text: str) -> Any:
    raise TypeError(text + line())


class _Changed(Exception):
    """A captured tensor would change; no TypeError, for which PyTorch tries ``x + y`` instead of ``x += y``."""


class _Calls(TorchFunctionMode):  # type: ignore[misc]
    """Mode that records ``table[i]`` as ``aten.index``, because PyTorch would convert the 0-d tracer to a Python int.

    It also rejects random numbers and changes of captured tensors in calls without a tracer argument, which
    :class:`Traced` does not intercept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._plain = _Plain(
            "mask_mod: a captured tensor must not change, got {}; write x = x + y for x += y, and "
            "torch.where(mask, y, x) for x[mask] = y",
            _Changed,
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(end, Traced) for i in index if isinstance(i, slice) for end in (i.start, i.stop, i.step)):
                raise TypeError(_NEEDS["slice"] + line())
            if any(isinstance(i, Traced) for i in index):
                found = _looked_up(table, index)
                if found is not None:
                    return found
        options = kwargs or {}
        if any(isinstance(x, Traced) for x in leaves((args, tuple(options.values())))):
            name = getattr(func, "__name__", "")
            if name in _NEEDS:
                raise TypeError(_NEEDS[name] + line())
            try:
                return func(*args, **options)
            except _NoNumber as error:
                text = _INDICES if name == "__getitem__" else f"mask_mod: {name}() {_SIZES}"
                raise TypeError(text + line()) from error
        return self._plain.run(func, args, options)


def _looked_up(table: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor | None:
    """Return ``table[index]`` by ``aten.index``, or None for boolean masks, and for slices or None beside vectors."""
    if sum(i is Ellipsis for i in index) == 1:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        every = (slice(None),) * (table.ndim - sum(i is not None for i in index) + 1)
        index = index[:at] + every + index[at + 1 :]
    if any(isinstance(x, torch.Tensor) for i in index if isinstance(i, list) for x in leaves(i)):
        raise TypeError(_INDICES + line())
    index = tuple(torch.tensor(i, device="cpu") if isinstance(i, (list, np.ndarray)) else i for i in index)
    tensors = [i for i in index if isinstance(i, torch.Tensor)]
    if not all(i is None or type(i) in (int, slice) or isinstance(i, torch.Tensor) for i in index) or any(
        i.dtype == torch.bool for i in tensors
    ):
        return None
    if any(i is None or isinstance(i, slice) for i in index):
        if any(i.ndim for i in tensors):
            return None
        for axis in (axis for axis, i in enumerate(index) if i is None):
            table = table.unsqueeze(axis)
        slices = tuple(i if isinstance(i, slice) else slice(None) for i in index)
        table = table if all(own == slice(None) for own in slices) else table[slices]
    found: torch.Tensor = torch.ops.aten.index(
        table, [None if i is None or isinstance(i, slice) else torch.as_tensor(i, device="cpu") for i in index]
    )
    return found


class _Plain(OwnTensors):
    """Mode of operations on plain tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check_random(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _selects(index: Any) -> bool:
    """Return whether an index selects an element of its axis, or is None and keeps the axis."""
    if isinstance(index, Ref):
        return not index.shape and index.dtype.startswith(("int", "uint"))
    return index is None or isinstance(index, Constant) and not index.array.ndim and index.array.dtype.kind in "iu"


def _sample(x: Any) -> Any:
    if isinstance(x, Traced):
        return x.sample
    return x.detach().cpu() if isinstance(x, torch.Tensor) else x


def _check(func: Any) -> None:
    """Raise TypeError for mutating, random or data-dependent operations."""
    if func._schema.is_mutable:
        raise TypeError(f"mask_mod: in-place operations are not supported, got {func}; write x = x + y for x += y")
    _check_random(func)
    if torch.Tag.data_dependent_output in func.tags:
        raise _NoNumber(f"{_NUMBER}; got {func}{line()}")


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
    except _Changed as error:
        raise TypeError(str(error)) from error
    except RuntimeError as error:  # raised by PyTorch for operations that need values
        raise TypeError(f"mask_mod: expected operations on 0-d integer tensors, got {error}") from error
    if not isinstance(result, torch.Tensor) or result.dtype != torch.bool or result.ndim:
        got = f"{result.dtype} of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
        hint = "; reduce it, such as by .all()" if isinstance(result, torch.Tensor) and result.ndim else ""
        hint = hint or "; compare it, such as q_idx >= 0 for True and x > 0 for a number x"
        raise TypeError(f"mask_mod: expected a function that returns a 0-d bool tensor, got {got}{hint}")
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
        hint = "torch.where(mask, x, 0).sum() for x[mask].sum(); " if "dynamic shape" in str(error) else ""
        raise TypeError(f"mask_mod: expected operations that torch.vmap supports, {hint}got {error}") from error
