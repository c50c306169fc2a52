"""Trace score functions: call them once with symbols, and record what they do."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._util.imports import whole_imports
from .captures import CapturedArray, look_up, visible
from .graph import Graph
from .recorder import CURRENT, Recorded, Recorder, Sizes, is_array, line
from .shared_builder import ARGUMENTS
from .symbol import Symbol, check_unchanged, torch_call, torch_name

__all__ = ["Traced", "call", "trace"]


class Traced(NamedTuple):
    """A traced function.

    Attributes
    ----------
    graph : Graph
        Its one result is the modified score.
    parameters : tuple
        Captured numbers, in the order of their indices.
    tables : tuple
        Captured arrays, as they were given.
    """

    graph: Graph
    parameters: tuple[float, ...]
    tables: tuple[Any, ...]


def trace(function: Callable[..., Any], sizes: Sizes | None = None) -> Traced:
    """Trace a score function, ``(score, b, h, q, k) -> score``.

    Parameters
    ----------
    function : callable
    sizes : Sizes, optional
        Sizes of the call. ``alibi()`` needs the number of heads, and ``bias()`` checks its shape.

    Raises
    ------
    TypeError
        For an operation that cannot be traced, with the line of the function.
    """
    if not callable(function):
        raise TypeError(f"score: expected a function of (score, b, h, q, k), got {type(function).__name__}")
    recorder = Recorder(sizes)
    symbols = [Symbol(recorder, at) for at in range(len(ARGUMENTS))]
    outer = CURRENT.set(recorder)
    try:
        with _lookups()():
            result = call(function, *symbols)
    finally:
        CURRENT.reset(outer)
    return Traced(*recorder.result(result))


def call(function: Callable[..., Any], score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Call a score function with numbers, or with symbols, which may then index its captured arrays."""
    if not isinstance(score, Recorded):
        return function(score, b, h, q, k)
    recorder = score.recorder
    if recorder.in_graph:
        return recorder.call(function, score, b, h, q, k)
    try:
        result = visible(function, recorder.literals)(score, b, h, q, k)
    except IndexError as error:
        if "only integers" not in str(error):  # NumPy's error for symbols
            raise
        raise TypeError(
            "score: an array that spattn cannot see was indexed; refer to it by a variable of the function, or write "
            f"spattn.score.take(array, index){line(error.__traceback__)}"
        ) from error
    except (AttributeError, TypeError) as error:
        text = str(error).partition("\n")[0]
        if text.startswith("score: "):
            raise TypeError(str(error)) from error.__cause__
        raise TypeError(
            f"score: {text}{line(error.__traceback__)}; score functions may call functions of NumPy, torch and "
            "spattn.score"
        ) from error
    if isinstance(result, Recorded):
        return result
    if isinstance(result, (int, float, np.number)) or (is_array(result) and result.ndim == 0):
        return Symbol(recorder, recorder.index(result))
    raise TypeError(
        f"score: expected a function that returns the modified score, got {_described(result)}{_definition(function)}"
    )


def _described(result: Any) -> str:
    result = result.array if isinstance(result, CapturedArray) else result
    shape = f" of shape {tuple(result.shape)}" if is_array(result) else ""
    return f"{'None' if result is None else type(result).__name__}{shape}"


def _definition(function: Any) -> str:
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"


def _lookups() -> Callable[[], Any]:
    """A context in which symbols may index tensors."""
    return _tensor_lookups() if "torch" in sys.modules else contextlib.nullcontext


@functools.cache
def _tensor_lookups() -> Callable[[], Any]:
    with whole_imports:
        import torch
        from torch.overrides import TorchFunctionMode

        from .own_tensors import OwnTensors

    class Lookups(TorchFunctionMode):  # type: ignore[misc]
        """Records tensor look-ups by symbols, which torch would ask for a number."""

        def __init__(self) -> None:
            super().__init__()
            self._tensors = OwnTensors("score: a score function must not change arrays, got {}")

        def __torch_function__(self, func: Any, types_: Any, operands: Any = (), options: Any = None) -> Any:
            if func is torch.Tensor.__getitem__:
                index = operands[1] if isinstance(operands[1], tuple) else (operands[1],)
                if any(isinstance(x, Recorded) for x in index):
                    return look_up(operands[0], index)
            options = options or {}
            check_unchanged(torch_name(func), options)
            if any(isinstance(x, Recorded) for x in (*operands, *options.values())):
                return torch_call(func, operands, options)
            return self._tensors.run(func, operands, options)

    return Lookups
