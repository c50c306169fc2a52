"""Kernels and parameters of one forward or a group of them, for any addresses, scales and streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....choose.specializations import ARCH, ROWS, TILE, Specialization, build, has_build, terms_of, variant
from ....schedule.reductions import Merges
from ....schedule.tensor_maps import MAPS
from ...driver.buffer import Buffer
from ...driver.launch import Kernel, Launch, Request, load_kernels, start
from ...host.forward_pass import ForwardPass
from ...host.sinks import sink_macros
from .params import Addresses, Template, maps_needed, pack_merge, structs
from .tables import PlanLayout
from .terms import blocks as blocks_of_split
from .terms import pack_split, specialization, split_request, term_bytes

__all__ = [
    "COUNTERS",
    "MERGE_TABLES",
    "ROWS_PER_BLOCK",
    "Launches",
    "Merging",
    "Part",
    "Tables",
    "counters",
    "launch_ranges",
    "merge_request",
    "merging",
]

COUNTERS = 1024  # at most this many calls of a plan run at once on different streams
MERGE_TABLES = ("merge_rows", "merge_indptr", "merge_sources", "merge_heads")
ROWS_PER_BLOCK = 32  # rows per CTA of merge.cu
_ALIGNMENT = 256  # of a problem's partials, in bytes


class Part(NamedTuple):
    """A problem of a launch, with packed heads if possible, and its plan's device form."""

    layout: PlanLayout
    call: ForwardPass

    @property
    def maps(self) -> int:
        """Number of tensor maps."""
        return maps_needed(self.layout, self.call)


class Tables(NamedTuple):
    """Device tables of a launch.

    Attributes
    ----------
    at : dict
        Addresses of the tables of all problems.
    merges : list of tuple
        Addresses of MERGE_TABLES of each problem's combine kernel.
    ranges : list of (int, int)
        First task and number of tasks of each attention launch.
    keys : float
        Keys per work item, see :func:`~spattn.choose.specializations.item_keys`.
    counter : callable
        Returns the address of a task counter that no launch in flight uses.
    buffers : tuple of Buffer
        Buffers that own the tables.
    """

    at: dict[str, int]
    merges: list[tuple[int, ...]]
    ranges: list[tuple[int, int]]
    keys: float
    counter: Callable[[], int]
    buffers: tuple[Buffer, ...]


class Merging(NamedTuple):
    """Combine launch of a problem."""

    kernel: Kernel
    blocks: int
    head: tuple[int, ...]  # leading fields of Merge: arrays of the plan
    tail: tuple[int, ...]  # trailing fields: sizes

    def params(self, to: Addresses) -> bytes:
        """Pack ``Merge``."""
        return pack_merge(*self.head, to.partial, to.partial_lse, to.out, to.lse, to.sinks, *self.tail)


class Launches:
    """:class:`~spattn.cuda.host.family.ForwardLaunches` of `parts`; `room` and `problems` are how many tensor maps and
    problems the kernel's parameters hold. The device's context must be current."""

    def __init__(self, parts: Sequence[Part], tables: Tables, room: int, problems: int = 1):
        call = parts[0].call
        self.part = parts[0]
        self._row = row = specialization(call, tables.keys)
        self._tables, self.counter, self.moves = tables, tables.counter, parts[0].layout.moves
        self.ctas = row.ctas * call.device.sm_count
        self._blocks = [min(self.ctas, tasks) for _, tasks in tables.ranges]
        self.computes = len(self._blocks)
        attention = request("attention", row, call, room, problems, parts[0].layout.gathers)
        merge = [merge_request(own) for layout, own in parts if merge_blocks(layout.merges)]
        terms = term_bytes(call)
        split = [split_request(call)] if terms and self.computes else []
        loaded = iter(load_kernels(call.device, [attention] * bool(self.computes) + split + merge))
        self.attention: Any = next(loaded) if self.computes else None
        self._split = next(loaded) if split else None
        self.template = Template(parts, tables.at, tables.ranges, room, problems)
        self._merges = [
            merging(own, at, next(loaded), blocks, own.plan.slots * own.plan.block_q)
            if (blocks := merge_blocks(layout.merges))
            else None
            for (layout, own), at in zip(parts, tables.merges, strict=True)
        ]
        self._partials, self.workspace_bytes = [], 0
        for _, own in parts:
            of_rows, total = own.partial_bytes()
            first = -(-self.workspace_bytes // _ALIGNMENT) * _ALIGNMENT
            self._partials.append((first, first + of_rows))
            self.workspace_bytes = first + total if total else self.workspace_bytes
        self._terms = []
        for size in terms if split else []:
            first = -(-self.workspace_bytes // _ALIGNMENT) * _ALIGNMENT
            self._terms.append(first)
            self.workspace_bytes = first + size

    def executes(self, keys: float) -> bool:
        """Return whether the attention kernel suits other tables of such a plan, with `keys` keys per work item."""
        return specialization(self.part.call, keys) == self._row and self.computes > 0 and not self._terms

    def write(
        self,
        problems: Sequence[tuple[Any, ...]],
        workspace: int,
        stream: int,
        early: int = 0,
        moved: int = 0,
        tables: Mapping[str, int] | None = None,
    ) -> list[Launch]:
        """See :class:`~spattn.cuda.host.family.ForwardLaunches`; `tables` overrides table addresses."""
        template, to, launches = self.template, [], []
        for problem, (partial, partial_lse) in zip(problems, self._partials, strict=True):
            q, k, v, out, lse, scale, score, sinks = problem
            partials = workspace + partial, workspace + partial_lse
            terms = tuple(workspace + first for first in self._terms)
            to.append(Addresses(q, k, v, out, lse, *partials, scale, moved, score, sinks, terms))
            if self._split is not None:
                split = pack_split(self.part.call, (q, k, v), terms)
                launches.append(Launch(self._split, blocks_of_split(self.part.call), split, stream, early=True))
                early = 1  # attention waits for the split itself
        moving = template.moving(to[0]) if self.moves else None
        for number, blocks in enumerate(self._blocks):
            params, at_once = template.fill(number, to, tables), number < early
            launches.append(Launch(self.attention, blocks, params, stream, template.counter_at, moving, at_once))
        for own, merge in zip(to, self._merges, strict=True):
            if merge is not None:
                launches.append(Launch(merge.kernel, merge.blocks, merge.params(own), stream))
        return launches

    def run(self, call: ForwardPass, tables: Mapping[str, int] | None = None) -> None:
        """Enqueue a call, the only problem of the launches."""
        workspace = call.allocate(self.workspace_bytes) if self.workspace_bytes else 0
        pointers = call.q.pointer, call.k.pointer, call.v.pointer, call.out.pointer, call.lse
        problem = *pointers, call.scale, call.score.address, call.sinks
        start(self.write([problem], workspace, call.stream, tables=tables), self.counter)


def launch_ranges(phases: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Return (first task, number of tasks) of each launch, for the concatenated tasks of the phases."""
    starts = itertools.accumulate(map(len, phases[:-1]), initial=0)
    return [(start, len(tasks)) for start, tasks in zip(starts, phases, strict=True) if len(tasks)]


def counters(at: int, count: int = COUNTERS) -> Callable[[], int]:
    """Return a function that cycles through the task counters at an address: calls in flight use different ones."""
    return itertools.cycle(range(at, at + 4 * count, 4)).__next__


def request(
    name: str, row: Specialization, call: ForwardPass, room: int, problems: int = 1, gathers: bool = False
) -> Request:
    """Return the request for the kernel `name`, with `problems` problems and `room` tensor maps, with KV gathered or
    not."""
    defines = variant(row, call.dtype, room, problems, gathers) | sink_macros(call.sinks)
    source, records = f"sm90/forward/{name}.cu", structs(room, problems)
    text = call.score.text if name == "attention" else ""
    return Request(source, ARCH, defines, records, f"hopper_{name}", text)


def merge_blocks(merges: Merges) -> int:
    """Return the CTAs of merge.cu per head."""
    return -(-int(np.diff(merges.variants).max(initial=0)) // ROWS_PER_BLOCK)


def merge_request(call: ForwardPass) -> Request:
    """Return the request for merge.cu."""
    return request("merge", _merge_row(call), call, MAPS[0])


def merging(call: ForwardPass, at: tuple[int, ...], kernel: Kernel, blocks: int, rows: int) -> Merging:
    """Return the combine launch of a problem, with `blocks` CTAs per head, whose tables are at addresses `at`; a head
    has `rows` partial rows."""
    (batch, heads_q), strides = call.q.shape[:2], call.out.strides[:3]
    tail = rows, call.plan.q_len, *strides, heads_q, call.v.shape[3], blocks, call.plan.q_len // call.packed
    return Merging(kernel, batch * heads_q * blocks, at, tail)


def _merge_row(call: ForwardPass) -> Specialization:
    """Return the specialization whose macros merge.cu gets; it depends on the head dimension alone."""
    head_dim, terms = max(call.q.shape[3], call.v.shape[3]), terms_of(call.dtype, call.precision)
    return build(TILE[0] if has_build(TILE[0], head_dim, terms) else ROWS, head_dim, terms=terms)
