"""Steps of generation: calls of a few queries, which are planned by the rows of any pattern."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from ..._util.cached import BoundedCache
from ...backends import PreparedForward
from ...choose.machine_gpu import BLOCKS, pieces_of
from ...choose.specializations import ROWS
from ...patterns import Pattern
from ...planning import Plan
from ...planning.contract.validated import made_validated
from ...request.call import Call
from ...request.score import ScoreOperands
from ...schedule import few_queries
from .. import families
from ..driver.device import Device
from .repeat import Repeated

__all__ = ["for_all_patterns", "shape_of"]

_MAX_PLANS = 8  # the layers of a model share the plans of a step
_MAX_KNOWN = 8  # launches that differ in their kernels
_FEWEST_ROWS = 16  # of a query tile of the portable kernels, and its divisor


class _Prepare(Protocol):
    def __call__(self, call: Call, plan: Plan, staging: Any) -> PreparedForward: ...


def shape_of(call: Call, device: Device) -> tuple[int, int]:
    """Return how many workers share a list of tiles, and the rows of a tile, which has all heads of a group."""
    packed = (1 << (call.group - 1).bit_length()) * call.q_len
    rows = -(-packed // _FEWEST_ROWS) * _FEWEST_ROWS if packed <= ROWS else _FEWEST_ROWS
    return pieces_of(call, rows, BLOCKS * device.sm_count), rows  # so few rows leave room for several CTAs per SM


def for_all_patterns(call: Call, device: Device, prepare: _Prepare) -> Callable[[Pattern], PreparedForward]:
    """Return a function from any pattern to its cached dispatch, for any number of keys."""
    return _Steps(call, device, prepare).bind


class _Steps:
    """Dispatch of calls that differ in pattern, kv_len and the strides of k and v.

    Tables of PyTorch tensors are copied in stream order.
    The first calls plan and prepare launches; later ones only make tables, if the family's launcher can.
    """

    def __init__(self, call: Call, device: Device, prepare: _Prepare):
        self._shape, self._stream, self._prepare = shape_of(call, device), call.kind.stream, prepare
        self._device = device
        is_torch = call.kind.name == "torch" and call.kind.ordinal(call.q) is not None
        self._torch = sys.modules["torch"] if is_torch else None
        self._call = replace(call, q=None, k=None, v=None)  # keeps no array of the caller alive
        launcher = None if self._torch is None else families.of_call(call, device).launcher
        self._launches = None if launcher is None else launcher.steps(self._shape[0], self._torch)
        self._lately, self._known = BoundedCache(_MAX_PLANS), list[Repeated]()

    def bind(self, pattern: Pattern) -> PreparedForward:
        """Return the dispatch of a pattern."""
        torch = self._torch

        def run(q: Any, k: Any, v: Any, scale: float, score: ScoreOperands | None = None) -> tuple[Any, Any]:
            strides = None if torch is None else (k.stride(), v.stride())  # other dispatches take any
            key = pattern, int(k.shape[2]), strides, self._stream(q)
            own = self._lately.get(key) or self._lately.keep(key, self._at(pattern, q, k, v))
            found: tuple[Any, Any] = own(q, k, v, scale) if score is None else own(q, k, v, scale, score)
            return found

        return run

    def _at(self, pattern: Pattern, q: Any, k: Any, v: Any) -> PreparedForward:
        call, torch, kv_len = self._call, self._torch, int(k.shape[2])
        captures = torch is not None and torch.cuda.is_current_stream_capturing()
        if self._known and self._launches is not None and not captures:
            rows = few_queries.rows_of(pattern, call.q_len, kv_len, call.batch, call.heads_q)
            with self._device.made_current():
                found = self._launches.of_rows(*rows, call.kind.operand(k), call.kind.operand(v))
            if found is not None:
                return self._known[found[0]].of_launches(found[1], functools.partial(self._general, pattern))
        made = self._planned(pattern, q, k, v)
        if isinstance(made, Repeated) and self._launches is not None and len(self._known) < _MAX_KNOWN:
            with self._device.made_current():
                self._known += [made] if self._launches.add(made.launches) else []
        return made

    def _general(
        self, pattern: Pattern, q: Any, k: Any, v: Any, scale: float, *score: ScoreOperands
    ) -> tuple[Any, Any]:
        """Run a step whose arrays its launches cannot address."""
        found: tuple[Any, Any] = self._planned(pattern, q, k, v)(q, k, v, scale, *score)
        return found

    def _planned(self, pattern: Pattern, q: Any, k: Any, v: Any) -> PreparedForward:
        """Plan and prepare a call."""
        own = replace(self._call, q=q, k=k, v=v, kv_len=int(k.shape[2]))
        sizes = own.q_len, own.kv_len, own.batch, own.heads_q
        fields = few_queries.fields_of_rows(pattern, *sizes, *self._shape)
        return self._prepare(own, made_validated(pattern, fields), self._torch)
