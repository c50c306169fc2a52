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

from ....arrays.operand import Operand
from ....schedule.tasks import TASK
from ....schedule.tensor_maps import VIEW, joint_heads
from ...driver._launch import encode_map
from ...driver.device import address
from ...driver.launch import Moving
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
_MAPS_OF_ENTRY = 4  # tensor maps of a batch entry, with one view of queries and one of keys: q, out, k, v
Place = tuple[int, int, int]  # of a tensor map: offset in the parameters, operand, origin from the operand's address
_MOVED, _ADDRESS, _COUNT = struct.Struct("@q"), struct.Struct("@Q"), struct.Struct("@i")
_STRIDES, _TABLES = struct.Struct("@3q"), struct.Struct(f"@{len(PLAN_POINTERS)}Q")
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
    """Addresses and scale of a call. `moved` is its kv_len minus the plan's kv_len; `score` and `sinks` are the
    addresses of its ScoreArgs and its sinks, 0 without them; `terms` are those of the terms of q, k and v, if any."""

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
            pointers += *(own.terms or own[:3]), own.out, own.moved
        if to[0].terms:
            _TERMS.pack_into(tail, self._at["terms"] - self._head_bytes, *to[0].terms)
        return self._maps.at(tuple(pointers)) + tail

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


class StepParams:
    """Parameters of steps: those of a template with one problem, for other keys, tables and addresses.

    Its plan has one view of all keys.
    """

    def __init__(self, template: Template, layout: PlanLayout, call: ForwardPass):
        self._image, self._call, (self._spec,) = template.image, call, layout.key_specs
        self._joint = all(map(joint_heads, operands_of(call)))
        self._formats = [FORMATS[name] for name in formats_of(call)]
        places = ((number * MAP_BYTES, one.operand, one.offset) for number, one in enumerate(template.maps))
        self._maps = list(places)
        self._encode, self._replace = address("cuTensorMapEncodeTiled"), address("cuTensorMapReplaceAddress")
        at = {name: offset for name, (_, offset) in fields(params_dtype(template.room)).items()}
        self._of_problem = {name: at["problems"] + offset for name, offset in _PROBLEM_AT.items()}
        self._tables_at, self._count_at, self._length_at = at["tasks"], at["task_count"], at["kv_len"]
        self.counter_at = at["counter"]
        own = self._of_problem
        self._q_at, self._scale_at, self._score_at, self._moved_at = (
            own[name] for name in ("q", "scale_log2", "score", "moved")
        )

    def of_keys(self, k: Operand, v: Operand) -> tuple[bytes, list[Place]]:
        """Return the parameters for another k and v, of any length and strides, and the places of their tensor maps.
        Batch and heads must be one axis of all arrays, or of none, as before."""
        params, own, kv_len = bytearray(self._image), self._of_problem, k.shape[2]
        spec, places = self._spec._replace(extents=(kv_len, *self._spec.extents[1:])), []
        for number, (at, operand, origin) in enumerate(self._maps):
            if operand in (1, 2):
                batch = None if self._joint else number // _MAPS_OF_ENTRY
                given, form = (k, v)[operand - 1], self._formats[operand]
                origin = encode_map(self._encode, params, at, form, given, spec, batch)
            places.append((at, operand, origin))
        _COUNT.pack_into(params, own["q_offset"], kv_len - self._call.plan.q_len)
        _COUNT.pack_into(params, self._length_at, kv_len)
        _STRIDES.pack_into(params, own["k_stride"], *k.strides[:3])
        _STRIDES.pack_into(params, own["v_stride"], *v.strides[:3])
        return bytes(params), places

    def of_tables(self, image: bytes, at: Sequence[int], tasks: int, partial_rows: int) -> bytes:
        """Return the parameters for the tables at these addresses, the first of which are PLAN_POINTERS."""
        params = bytearray(image)
        _TABLES.pack_into(params, self._tables_at, *at[: len(PLAN_POINTERS)])
        _COUNT.pack_into(params, self._count_at, tasks)
        _MOVED.pack_into(params, self._of_problem["partial_rows"], partial_rows)
        return bytes(params)

    def fill(self, image: bytes, places: list[Place], to: Addresses) -> tuple[bytes, Moving]:
        """Return the parameters of a call, and the addresses of its tensor maps."""
        params, pointers = bytearray(image), to[:4]
        _ADDRESSES.pack_into(params, self._q_at, *to[:7], to.sinks)
        _SCALES.pack_into(params, self._scale_at, *fold_scale(to.scale))
        _ADDRESS.pack_into(params, self._score_at, to.score)
        maps = [(at, pointers[operand] + origin, 0) for at, operand, origin in places]
        return bytes(params), Moving(self._replace, 0, self._moved_at, maps)


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
