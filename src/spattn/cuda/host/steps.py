"""Steps of generation: calls of a few queries, which are planned by the rows of any pattern."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from ..._util.cached import BoundedCache
from ...backends import PreparedForward
from ...choose.machine_gpu import pieces_of, workers_of
from ...choose.specializations import ROWS
from ...patterns import Pattern
from ...planning import Plan
from ...planning.contract.validated import made_validated
from ...request.call import Call
from ...request.score import ScoreOperands
from ...schedule import few_queries
from ..driver.device import Device

__all__ = ["for_all_patterns", "shape_of"]

_MAX_PLANS = 8  # the layers of a model share the plans of a step
_FEWEST_ROWS = 16  # of a query tile of the portable kernels, and its divisor


class _Prepare(Protocol):
    def __call__(self, call: Call, plan: Plan, staging: Any) -> PreparedForward: ...


def shape_of(call: Call, device: Device) -> tuple[int, int]:
    """Return how many workers share a list of tiles, and the rows of a tile, which has all heads of a group."""
    packed = (1 << (call.group - 1).bit_length()) * call.q_len
    rows = -(-packed // _FEWEST_ROWS) * _FEWEST_ROWS if packed <= ROWS else _FEWEST_ROWS
    pieces = pieces_of(call, ROWS, device.sm_count)
    return pieces or workers_of(call.batch, call.heads_q, device.sm_count), rows


def for_all_patterns(call: Call, device: Device, prepare: _Prepare) -> Callable[[Pattern], PreparedForward]:
    """Return a function from any pattern to its cached dispatch, for any number of keys.

    A step of PyTorch tensors copies its tables once, through pinned memory and in the order of the current stream.
    """
    shape, stream_of = shape_of(call, device), call.kind.stream
    is_torch = call.kind.name == "torch" and call.kind.ordinal(call.q) is not None
    staging = sys.modules["torch"] if is_torch else None
    bare = replace(call, q=None, k=None, v=None)  # keeps no array of the caller alive
    lately = BoundedCache(_MAX_PLANS)

    def at(pattern: Pattern, q: Any, k: Any, v: Any) -> PreparedForward:
        own = replace(bare, q=q, k=k, v=v, kv_len=int(k.shape[2]))
        fields = few_queries.fields_of_rows(pattern, own.q_len, own.kv_len, own.batch, own.heads_q, *shape)
        return prepare(own, made_validated(pattern, fields), staging)

    def bind(pattern: Pattern) -> PreparedForward:
        def run(q: Any, k: Any, v: Any, scale: float, score: ScoreOperands | None = None) -> tuple[Any, Any]:
            key = pattern, int(k.shape[2]), stream_of(q)
            own = lately.get(key) or lately.keep(key, at(pattern, q, k, v))
            found: tuple[Any, Any] = own(q, k, v, scale) if score is None else own(q, k, v, scale, score)
            return found

        return run

    return bind
