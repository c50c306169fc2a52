"""Parameters of attention.cu and merge.cu.

Tensor maps are part of the parameters, so that a launch needs no copy and can be captured in a graph. Shapes and
strides are encoded once; a call at other addresses only replaces addresses.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....schedule.tasks import TASK
from ....schedule.tensor_maps import VIEW, joint_heads
from ...driver.device import address
from ...driver.launch import Kernel, Moving, StepParams
from ...driver.structs import fields, packer
from ...host.forward_pass import ForwardPass, fold_scale
from ..maps import ALIGNMENT, FORMATS, MAP_BYTES, Map, Maps
from .tables import ENTRY, WORK, PlanLayout
from .terms import formats_of, operands_of

GROUPS = ((16, 96), (32, 192))  # (problems, tensor maps): capacities of the parameters of grouped launches
PLAN_POINTERS = ("tasks", "work", "entries", "entry_masks", "masks", "query_views", "key_views", "priors")
_ROWS = ("query_rows", "key_rows")  # row tables of ordered and gathered plans
_CALL_POINTERS = ("q", "k", "v", "out", "lse", "partial_out", "partial_lse", "sinks")
_INTEGERS = ("head_dim", "head_dim_v", "block_q", "q_batch", "kv_batch", "batch_maps", "heads_q", "group")
_FLOATS = ("scale_log2", "sign")
_TERMS = struct.Struct("@3Q")
_OF_STEPS = "q", "scale_log2", "score", "q_offset", "partial_rows", "k_stride", "v_stride"
_MOVED, _ADDRESS = struct.Struct("@q"), struct.Struct("@Q")
_ADDRESSES, _SCALES = struct.Struct(f"@{len(_CALL_POINTERS)}Q"), struct.Struct(f"@{len(_FLOATS)}f")

STRIDES = np.dtype([(name, "i8") for name in ("batch", "head", "token")])
PROBLEM = np.dtype(
    [
        *((name, "u8") for name in _CALL_POINTERS),
        *((f"{name}_stride", STRIDES) for name in ("q", "k", "v", "out")),
        *((name, "i8") for name in ("partial_rows", "q_len", "moved")),
        *((name, "i4") for name in _INTEGERS),
        *((name, "f4") for name in _FLOATS),
        ("q_offset", "i4"),
        ("sink_rows", "i4"),
        ("score", "u8"),
        ("scales", "u8"),
    ]
)
_PROBLEM_AT = {name: offset for name, (_, offset) in fields(PROBLEM).items()}
MERGE = np.dtype(
    [
        *((name, "u8") for name in ("rows", "indptr", "sources", "heads", "partial_out", "partial_lse", "out", "lse")),
        ("sinks", "u8"),
        ("partial_rows", "i8"),
        ("q_len", "i8"),
        ("out_stride", STRIDES),
        *((name, "i4") for name in ("heads_q", "head_dim_v", "head_blocks", "sink_rows")),
    ]
)
pack_merge = packer(MERGE).pack


def with_maps(room: int, members: list[tuple[Any, ...]]) -> np.dtype:
    """Return the dtype of a parameter struct: `room` tensor maps, then `members`, padded to the maps' alignment."""
    plain = np.dtype([("maps", "u1", (room, MAP_BYTES)), *members])
    inner, offsets = zip(*fields(plain).values(), strict=True)
    return np.dtype(
        {
            "names": list(fields(plain)),
            "formats": list(inner),
            "offsets": list(offsets),
            "itemsize": -(-plain.itemsize // ALIGNMENT) * ALIGNMENT,
        }
    )


@functools.cache
def params_dtype(room: int, problems: int = 1) -> np.dtype:
    """Return the dtype of Params for `room` tensor maps and `problems` problems."""
    members: list[tuple[Any, ...]] = [("problems", PROBLEM, (problems,))]
    members += [(name, "u8") for name in (*PLAN_POINTERS, *_ROWS, "counter")]
    members += [("terms", "u8", (3,)), ("task_count", "i4"), ("kv_len", "i4")]
    return with_maps(room, members)


def structs(room: int, problems: int = 1) -> Mapping[str, np.dtype]:
    """Return the dtypes of the structs of params.cuh for `room` tensor maps and `problems` problems."""
    return {
        "View": VIEW,
        "Work": WORK,
        "Entry": ENTRY,
        "Task": TASK,
        "Strides": STRIDES,
        "Problem": PROBLEM,
        "Params": params_dtype(room, problems),
        "Merge": MERGE,
    }


class Addresses(NamedTuple):
    """Addresses and scale of a call. `moved` is its kv_len minus the plan's kv_len; `score`, `sinks` and `scales` are
    the addresses of its ScoreArgs, its sinks and its scales of float8, 0 without them; `terms` are those of the terms
    of q, k and v, if any."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    partial: int
    partial_lse: int
    scale: float
    moved: int = 0
    score: int = 0
    sinks: int = 0
    terms: tuple[int, ...] = ()
    scales: int = 0


class Template:
    """Parameters of all calls with the same shapes, strides and dtype, for any kv_len.

    Parameters
    ----------
    parts : sequence of (PlanLayout, ForwardPass)
        The problems of a launch: one, or those of a group.
    plan_at : dict
        Device addresses of the problems' tables.
    launches : list of (int, int)
        First task and number of tasks of each launch.
    room, problems : int
        How many tensor maps and problems the kernel's parameters hold.
    """

    def __init__(
        self,
        parts: Sequence[tuple[PlanLayout, ForwardPass]],
        plan_at: dict[str, int],
        launches: list[tuple[int, int]],
        room: int,
        problems: int = 1,
    ):
        dtype = params_dtype(room, problems)
        params = np.zeros(1, dtype)[0]
        self.room, self._maps = room, Maps(room)
        for number, (layout, call) in enumerate(parts):
            operands = operands_of(call)
            joint = all(map(joint_heads, operands))
            specs = (layout.query_specs, (0, 3)), (layout.key_specs, (1, 2))
            self._maps.encode(operands, specs, formats_of(call), joint, layout.moves)
            _fill_sizes(params["problems"][number], layout, call, joint)
        for name in PLAN_POINTERS:
            params[name] = plan_at[name]
        params["kv_len"] = parts[0][1].k.shape[2]
        for name in _ROWS:
            if len(getattr(parts[0][0], name)):
                params[name] = plan_at[name]
        self._head_bytes = head_bytes = self._maps.bytes
        self._tails = []
        for first, count in launches:
            params["tasks"], params["task_count"] = plan_at["tasks"] + first * TASK.itemsize, count
            self._tails.append(params.tobytes()[head_bytes:])
        self._at = at = {name: offset for name, (_, offset) in fields(dtype).items()}
        first_at = at["problems"] - self._head_bytes
        self._problems_at = range(first_at, first_at + len(parts) * PROBLEM.itemsize, PROBLEM.itemsize)
        self.counter_at, self._moves = at["counter"], any(layout.moves for layout, _ in parts)

    def fill(self, launch: int, to: Sequence[Addresses], tables: Mapping[str, int] | None = None) -> bytes:
        """Pack ``Params`` of a launch, without task counter; `tables` overrides table addresses."""
        tail = bytearray(self._tails[launch])
        for name, elsewhere in (tables or {}).items():
            _ADDRESS.pack_into(tail, self._at[name] - self._head_bytes, elsewhere)
        pointers: list[int] = []
        for at, own in zip(self._problems_at, to, strict=True):
            _ADDRESSES.pack_into(tail, at, *own[:7], own.sinks)
            _MOVED.pack_into(tail, at + _PROBLEM_AT["moved"], own.moved)
            _SCALES.pack_into(tail, at + _PROBLEM_AT["scale_log2"], *fold_scale(own.scale))
            _ADDRESS.pack_into(tail, at + _PROBLEM_AT["score"], own.score)
            _ADDRESS.pack_into(tail, at + _PROBLEM_AT["scales"], own.scales)
            pointers += *(own.terms or own[:3]), own.out, own.moved
        if to[0].terms:
            _TERMS.pack_into(tail, self._at["terms"] - self._head_bytes, *to[0].terms)
        return self._maps.at(tuple(pointers)) + tail

    @property
    def problems_at(self) -> Sequence[int]:
        """Offset of each problem in the parameters."""
        return [self._head_bytes + at for at in self._problems_at]

    @property
    def maps(self) -> Sequence[Map]:
        """The tensor maps, in order."""
        return self._maps.maps

    @property
    def image(self) -> bytes:
        """The parameters of the first launch, with some addresses of arrays."""
        return bytes(self._maps.image) + self._tails[0]

    def moving(self, to: Addresses) -> Moving | None:
        """Return the parameters that depend on kv_len, or None if the plan is not length-polymorphic."""
        if not self._moves:
            return None
        pointers = to[:4]
        maps = [
            (number * MAP_BYTES, pointers[one.operand] + one.offset, one.step)
            for number, one in enumerate(self._maps.maps)
            if one.step
        ]
        moved_at = self._head_bytes + self._problems_at[0] + _PROBLEM_AT["moved"]
        return Moving(address("cuTensorMapReplaceAddress"), to.moved, moved_at, maps)


def step_params(template: Template, kernel: Kernel, layout: PlanLayout, call: ForwardPass) -> StepParams:
    """Return the parameters of steps: those of a template with one problem, whose plan has one view of all keys.

    Batch and heads must be one axis of all arrays of a step, or of none, as before.
    """
    (spec,), (problem, *_) = layout.key_specs, template.problems_at
    at = {name: offset for name, (_, offset) in fields(params_dtype(template.room)).items()}
    of_call = {name: problem + _PROBLEM_AT[name] for name in _OF_STEPS}
    of_launch = {name: at[name] for name in ("tasks", "task_count", "kv_len", "counter")}
    maps = [(number * MAP_BYTES, one.operand, one.offset) for number, one in enumerate(template.maps)]
    entry_maps = 0 if all(map(joint_heads, operands_of(call))) else layout.maps
    forms = [FORMATS[name] for name in formats_of(call)]
    functions = address("cuTensorMapEncodeTiled"), address("cuTensorMapReplaceAddress")
    return StepParams(kernel, template.image, of_call | of_launch, maps, forms, spec, entry_maps, *functions)


def _fill_sizes(problem: np.void, layout: PlanLayout, call: ForwardPass, joint: bool) -> None:
    """Fill in a problem's sizes and strides."""
    for name in ("q", "k", "v", "out"):
        problem[f"{name}_stride"] = getattr(call, name).strides[:3]
    problem["partial_rows"], problem["q_len"] = call.plan.slots * call.plan.block_q, call.plan.q_len
    heads_q, heads_kv = call.q.shape[1], call.k.shape[1]
    batches = (heads_q, heads_kv, 0) if joint else (0, 0, layout.maps)
    sizes = (call.q.shape[3], call.v.shape[3], call.plan.block_q, *batches, heads_q, heads_q // heads_kv)
    for name, value in zip(_INTEGERS, sizes, strict=True):
        problem[name] = value
    problem["q_offset"], problem["sink_rows"] = call.plan.kv_len - call.plan.q_len, call.plan.q_len // call.packed


def maps_needed(layout: PlanLayout, call: ForwardPass) -> int:
    """Return the number of tensor maps of a call."""
    joint = all(map(joint_heads, operands_of(call)))
    return layout.maps * (1 if joint else call.q.shape[0])
