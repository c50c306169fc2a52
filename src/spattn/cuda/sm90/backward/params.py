"""Parameters of backward.cu, statistics.cu, sum.cu and convert.cu, with embedded tensor maps as in the forward."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ....arrays.operand import Operand, row_major
from ....schedule.tasks import TASK
from ....schedule.tensor_maps import MAPS, VIEW, joint_heads
from ...driver.structs import fields, packer
from ...host.backward_pass import BackwardPass
from ...host.forward_pass import fold_scale
from ..forward.params import STRIDES, with_maps
from ..maps import Maps
from .tables import ENTRY, WORK, Views

__all__ = [
    "DELTA_AT",
    "MAPS",
    "STATISTIC_FLOATS",
    "TABLES",
    "Addresses",
    "PassParams",
    "Template",
    "maps_needed",
    "pack_converted",
    "pack_rows",
    "pack_sum",
    "structs",
]

STATISTIC_FLOATS = 4
TABLES = 8  # captured arrays whose gradients a fused backward can sum
_PASS_POINTERS = ("tasks", "work", "entries", "masks", "row_views", "column_views", "rest_indptr", "rest_sources")
_CALL_POINTERS = (
    "q",
    "k",
    "v",
    "dout",
    "statistics",
    "partial_scores",
    "partial_values",
    "query_sums",
    "added",
    "gate",
    "counter",
)
_INTEGERS = (
    "task_count",
    "heads_q",
    "heads_kv",
    "head_dim",
    "head_dim_v",
    "query_subtiles",
    "q_batch",
    "kv_batch",
    "batch_maps",
    "waits",
)
_FLOATS = ("scale_log2", "sign", "scale")
_SCORE = struct.Struct(f"@QQ{TABLES}q")
_ADDRESSES, _SCALES = struct.Struct(f"@{len(_CALL_POINTERS)}Q"), struct.Struct(f"@{len(_FLOATS)}f")

STATISTIC = np.dtype([("lse", "f4"), ("delta", "f4"), ("unused", "f4", 2)])
DELTA_AT = fields(STATISTIC)["delta"][1]
ROWS = np.dtype(
    [
        *((name, "u8") for name in ("dout", "out", "lse", "dlse", "statistics", "added")),
        *((f"{name}_stride", STRIDES) for name in ("dout", "out", "lse", "dlse")),
        ("rows", "i8"),
        *((name, "i4") for name in ("heads_q", "q_len", "head_dim_v", "added_count", "first", "count")),
    ]
)
SUM = np.dtype(
    [
        *((name, "u8") for name in ("rows", "indptr", "sources", "heads", "partial", "target", "gate")),
        ("target_stride", STRIDES),
        ("partial_rows", "i8"),
        *((name, "i4") for name in ("heads_count", "features", "head_blocks", "unused")),
    ]
)
CONVERTED = np.dtype(
    [
        *((name, "u8") for name in ("query_sums", "added", "nonfinite", "view", "subtiles", "dq")),
        ("dq_stride", STRIDES),
        *((name, "i4") for name in ("query_subtiles", "heads_q", "head_dim")),
        ("scale", "f4"),
    ]
)
pack_rows, pack_sum, pack_converted = packer(ROWS).pack, packer(SUM).pack, packer(CONVERTED).pack


@functools.cache
def params_dtype(room: int) -> np.dtype:
    """Return the dtype of Params for `room` tensor maps."""
    members: list[tuple[Any, ...]] = [(name, "u8") for name in (*_PASS_POINTERS, *_CALL_POINTERS[:5])]
    members += [("partial", "u8", 2), *((name, "u8") for name in _CALL_POINTERS[7:])]
    members += [(f"{name}_stride", STRIDES) for name in ("q", "k", "v", "dout")]
    members += [("partial_rows", "i8"), ("q_len", "i8"), *((name, "i4") for name in _INTEGERS)]
    members += [*((name, "f4") for name in _FLOATS), ("q_offset", "i4"), ("score", "u8")]
    members += [("words", "u8"), ("first", "i8", TABLES)]
    return with_maps(room, members)


def structs(room: int) -> Mapping[str, np.dtype]:
    """Return the dtypes of the structs of params.cuh for `room` tensor maps."""
    return {
        "View": VIEW,
        "Work": WORK,
        "Entry": ENTRY,
        "Task": TASK,
        "Strides": STRIDES,
        "Statistic": STATISTIC,
        "Params": params_dtype(room),
        "Rows": ROWS,
        "Sum": SUM,
        "Converted": CONVERTED,
    }


class PassParams(NamedTuple):
    """Parameters of one launch of backward.cu; `waits` is True if it waits for the preceding launch before starting."""

    at: dict[str, int]  # device addresses of the tables
    tasks: int
    partial_rows: int
    waits: bool = True


class Addresses(NamedTuple):
    """Addresses and scale of a call. `score` is the address of its ScoreArgs, `words` that of the accumulators for its
    captured arrays; `first` is the index of each array's first accumulator."""

    q: int
    k: int
    v: int
    dout: int
    dq: int
    dk: int
    dv: int
    statistics: int
    scale: float
    score: int = 0
    words: int = 0
    first: tuple[int, ...] = ()

    @property
    def mapped(self) -> tuple[int, ...]:
        """Addresses of the arrays with tensor maps, and `moved`."""
        return *self[:8], 0


class Template:
    """Parameters of all calls with the same shapes, strides and dtype."""

    def __init__(self, views: Views, launches: list[PassParams], call: BackwardPass, room: int, query_subtiles: int):
        operands = mapped_operands(call)
        joint = all(map(joint_heads, operands))
        params = np.zeros(1, params_dtype(room))[0]
        self._maps = Maps(room)
        specs = (views.query_specs, (0, 3, 4, 7)), (views.key_specs, (1, 2, 5, 6))
        self._maps.encode(operands, specs, [call.dtype] * 7 + ["float32"], joint)
        for name, operand in (("q", call.q), ("k", call.k), ("v", call.v), ("dout", call.dout)):
            params[f"{name}_stride"] = operand.strides[:3]
        params["q_len"] = call.plan.q_len
        heads_q, heads_kv = call.q.shape[1], call.k.shape[1]
        sizes = (0, heads_q, heads_kv, call.q.shape[3], call.v.shape[3], query_subtiles)
        batches = (heads_q, heads_kv, 0) if joint else (0, 0, views.maps)
        for name, value in zip(_INTEGERS, (*sizes, *batches, 1), strict=True):
            params[name] = value
        params["q_offset"] = call.plan.kv_len - call.plan.q_len
        head_bytes, self._tails = self._maps.bytes, []
        for launch in launches:
            for name in _PASS_POINTERS:
                params[name] = launch.at[name]
            params["task_count"], params["partial_rows"] = launch.tasks, launch.partial_rows
            params["waits"] = launch.waits
            self._tails.append(params.tobytes()[head_bytes:])
        at = {name: offset for name, (_, offset) in fields(params_dtype(room)).items()}
        self.counter_at = at["counter"]
        self._call_at, self._scale_at, self._score_at = (at[name] - head_bytes for name in ("q", "scale_log2", "score"))

    def fill(self, launch: int, to: Addresses, workspaces: tuple[int, ...], counter: int) -> bytes:
        """Pack ``Params`` of a launch."""
        tail = bytearray(self._tails[launch])
        _ADDRESSES.pack_into(tail, self._call_at, *to[:4], to.statistics, *workspaces, counter)
        _SCALES.pack_into(tail, self._scale_at, *fold_scale(to.scale), to.scale)
        first = *to.first, *(0,) * (TABLES - len(to.first))
        _SCORE.pack_into(tail, self._score_at, to.score, to.words, *first)
        return self._maps.at(to.mapped) + tail


def mapped_operands(call: BackwardPass) -> tuple[Operand, ...]:
    """Return the operands in the order of Addresses; the statistics have q's address as a placeholder."""
    shape = (*call.q.shape[:3], STATISTIC_FLOATS)
    statistics = Operand(call.q.pointer, shape, row_major(shape))
    return call.q, call.k, call.v, call.dout, call.dq, call.dk, call.dv, statistics


def maps_needed(views: Views, call: BackwardPass) -> int:
    """Return the number of tensor maps of a call."""
    joint = all(map(joint_heads, mapped_operands(call)))
    return views.maps * (1 if joint else call.q.shape[0])
