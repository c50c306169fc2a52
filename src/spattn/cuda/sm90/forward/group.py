"""Device tables and parameters of grouped launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...._util.ragged import offsets
from ....choose.specializations import ARCH, KEYS_TOGETHER, TILE, build, keys_of, rows_of, variant
from ....planning.contract.types import LARGEST
from ....schedule.group import in_turns
from ....schedule.tasks import merge_heads, order_tasks
from ...driver.buffer import upload
from ...driver.device import Device
from ...driver.launch import Launch, kernel
from ...host.forward_pass import ForwardPass
from ..maps import readable
from .heads import with_packed_heads
from .joined import Joined, join
from .layout import PlanLayout, make_layout
from .params import GROUPS, Addresses, Template, maps_needed, structs
from .prepared import (
    COUNTERS,
    MERGE_TABLES,
    Merging,
    blocks_of,
    build_for,
    counters,
    launches_of,
    merge_blocks,
    merging,
)

__all__ = ["MOST_PROBLEMS", "GroupOnDevice", "Part", "cut", "kind_of_group", "part_of"]

MOST_PROBLEMS, _MOST_MAPS = GROUPS[-1]  # per launch
_TABLES = ("work", "entries", "entry_masks", "masks", "query_views", "key_views", "priors")


class Part(NamedTuple):
    """A call of a group, with packed heads if possible, and its plan's device form."""

    layout: PlanLayout
    call: ForwardPass

    @property
    def rows(self) -> int:
        """Rows of its query tile."""
        return rows_of(self.call.plan.block_q)

    @property
    def maps(self) -> int:
        """Number of its tensor maps."""
        return maps_needed(self.layout, self.call)


def part_of(call: ForwardPass) -> Part | None:
    """The call as a part of a group, or None if TMA cannot address its arrays."""
    call = with_packed_heads(call)
    part = Part(make_layout(call.plan), call)
    addressed = all(map(readable, (call.q, call.k, call.v, call.out)))
    return part if addressed and part.maps <= _MOST_MAPS else None


def kind_of_group(dtype: str, head_dim: int, head_dim_v: int) -> tuple[str, int]:
    """Key under which calls can share a group."""
    return dtype, build(TILE[0], max(head_dim, head_dim_v)).head_dim


def cut(parts: Sequence[Part]) -> list[list[int]]:
    """Assign parts to launches: one specialization each, within the capacity of the parameters. Larger tiles, which
    have the longer items, launch first."""
    launches: list[list[int]] = []
    for number in sorted(range(len(parts)), key=lambda n: -parts[n].rows):
        own = parts[number]
        others = [parts[n] for n in launches[-1]] if launches else []
        maps = own.maps + sum(other.maps for other in others)
        entries = len(own.layout.entries) + sum(len(other.layout.entries) for other in others)
        full = len(others) == MOST_PROBLEMS or maps > _MOST_MAPS or entries > LARGEST
        if full or not others or others[0].rows != own.rows:
            launches.append([])
        launches[-1].append(number)
    return launches


class GroupOnDevice:
    """Calls that share a launch, for any addresses and scales; the device's context must be current."""

    def __init__(self, parts: Sequence[Part], device: Device):
        first = parts[0].call
        layouts = [part.layout for part in parts]
        maps = [part.maps for part in parts]
        joined = join(layouts, offsets(maps)[:-1].tolist())
        length = joined.work["end"] - joined.work["begin"]
        phases = [_tasks(parts, joined, length, finishing) for finishing in (False, True)]
        tables = {name: getattr(joined, name) for name in _TABLES}
        tables |= {"tasks": np.concatenate(phases), "counters": np.zeros(COUNTERS, np.int32)}
        for number, (layout, call) in enumerate(parts):
            heads = merge_heads(layout.merges.variants, call.plan.variant, call.q.shape[0], call.q.shape[1])
            own = (layout.merges.rows, layout.merges.indptr, layout.merges.sources, heads)
            tables |= {f"{name} {number}": array for name, array in zip(MERGE_TABLES, own, strict=True)}
        self._buffer, at = upload(device, tables)
        launches = launches_of(phases)
        most, room = next(size for size in GROUPS if len(parts) <= size[0] and sum(maps) <= size[1])
        self._template = Template(parts, at, launches, room, most)
        self._blocks: tuple[int, ...] = ()
        if launches:
            row = build_for(first, keys_of(length[tables["tasks"]["item"]], first.plan.block_q))
            self._blocks = blocks_of(launches, row, device)
            cells = max(layout.most_cells for layout, _ in parts)
            defines = variant(row, first.dtype, room, most, cells=cells)
            records = structs(room, most)
            self._kernel = kernel(device, "sm90/forward/attention.cu", ARCH, defines, records, "hopper_attention")
        self._merges: list[Merging | None] = []
        for number, (layout, call) in enumerate(parts):
            blocks = merge_blocks(layout.merges)
            merges_at = [at[f"{name} {number}"] for name in MERGE_TABLES]
            self._merges.append(merging(call, merges_at, blocks) if blocks else None)
        self.counter = counters(at["counters"])

    @property
    def computes(self) -> bool:
        """Whether it has an attention launch, not only combines."""
        return len(self._blocks) > 0

    def write(self, to: Sequence[Addresses], stream: int, beside: bool) -> list[list[Launch]]:
        """Launches for these addresses, without task counters, in order of dependency.

        `beside`: the first launch may overlap the preceding one, which belongs to another part of the group."""
        fill, at = self._template.fill_all, self._template.counter_at
        launches = [
            Launch(self._kernel, blocks, fill(number, to, 0), stream, at, early=beside and number == 0)
            for number, blocks in enumerate(self._blocks)
        ]
        for own, merge in zip(to, self._merges, strict=True):
            if merge is not None:
                launches.append(Launch(merge.kernel, merge.blocks, merge.params(own), stream))
        first = int(self.computes)
        return [launches[:first], launches[first:]]


def _tasks(parts: Iterable[Part], joined: Joined, length: np.ndarray, finishing: bool) -> np.ndarray:
    """Tasks of all parts in launch order, either the in-kernel reductions or all others."""
    found = []
    for (layout, call), first in zip(parts, joined.items, strict=True):
        chosen = layout.reduces if finishing else ~layout.reduces
        batch, heads_q = call.q.shape[:2]
        tasks = order_tasks(call.plan, chosen, batch, heads_q, call.k.shape[1], KEYS_TOGETHER)
        tasks["item"] += first
        found.append(tasks)
    return in_turns(found, length)
