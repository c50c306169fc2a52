"""Counters that stand for the cost of planning.

A clock measures it too loosely for a test: benchmarks/planning/attacks.py prints the times of the same problems.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import tracemalloc
from dataclasses import dataclass, field

import numpy as np

import spattn
from spattn import patterns as p

__all__ = ["Asked", "asked_cells", "peak_bytes", "plans_made"]


@dataclass
class Asked:
    """How often predicates were called, and on how many (query, key) cells.

    A call on the planner's symbolic positions, which stand for whole tiles, is a call on no cells.
    """

    calls: int = 0
    allows: int = 0
    by_operation: collections.Counter = field(default_factory=collections.Counter)

    @property
    def cells(self) -> int:
        """Cells that ``allows`` was called on, or elements that PyTorch's most frequent operation computed."""
        return max(self.allows, *self.by_operation.values(), 0)


@contextlib.contextmanager
def asked_cells(pattern):
    """Counts the cells that the predicates of a pattern are evaluated on, within the block."""
    asked, depth = Asked(), [0]

    def counting(own):
        def allows(self, q, k):
            asked.calls += 1
            if not depth[0] and isinstance(q, np.ndarray) and isinstance(k, np.ndarray):
                asked.allows += np.broadcast(q, k).size
            depth[0] += 1
            try:
                return own(self, q, k)
            finally:
                depth[0] -= 1

        return allows

    with contextlib.ExitStack() as stack:
        for cls in _classes(pattern):
            if "allows" in vars(cls):
                stack.callback(setattr, cls, "allows", vars(cls)["allows"])
            else:
                stack.callback(delattr, cls, "allows")
            cls.allows = counting(cls.allows)
        if "torch" in sys.modules:
            stack.enter_context(_torch_elements(asked.by_operation))
        yield asked


def _classes(pattern):
    """The classes of a pattern and of all patterns that it is made of."""
    found, left = set(), [pattern]
    while left:
        one = left.pop()
        found.add(type(one))
        for value in vars(one).values():
            left += [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, p.Pattern)]
    return found


def _torch_elements(by_operation):
    """A mode of PyTorch's that counts the elements of results, by the name of the operation."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Elements(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                by_operation[str(function)] += result.numel()
            return result

    return Elements()


def plans_made(call):
    """How many plans are made while `call()` runs."""
    before = spattn.plan_cache_info().misses
    call()
    return spattn.plan_cache_info().misses - before


def peak_bytes(call):
    """The most bytes that Python and NumPy hold at a time for `call()`, beyond those that they hold now."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
