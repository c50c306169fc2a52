"""Grouped launches: assign problems to launches, and build their device tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ...._util.ragged import offsets
from ....choose.specializations import KEYS_TOGETHER, TILE, build, has_build, keys_of, rows_of
from ....planning.contract.types import LARGEST
from ....schedule.group import in_turns
from ....schedule.tasks import merge_heads, order_tasks
from ...driver.buffer import upload
from ...host.forward_pass import ForwardPass
from ..maps import readable
from .heads import with_packed_heads
from .joined import Joined, join
from .launches import COUNTERS, MERGE_TABLES, Launches, Part, Tables, counters, launch_ranges
from .params import GROUPS
from .tables import make_layout

__all__ = ["MOST_PROBLEMS", "cut", "group", "group_key", "part_of", "prepare"]

MOST_PROBLEMS, _MOST_MAPS = GROUPS[-1]  # per launch
_TABLES = ("work", "entries", "entry_masks", "masks", "query_views", "key_views", "priors")


def part_of(call: ForwardPass) -> Part | None:
    """Return the call as a part of a group, or None if no kernel has its tiles, or TMA cannot address its arrays."""
    if call.plan.ordered:
        raise ValueError("plan: grouped launches do not permute or gather tokens")
    call = with_packed_heads(call)
    part = Part(make_layout(call.plan), call)
    arrays = call.q, call.k, call.v, call.out
    fits = has_build(call.plan.block_q, (call.q.shape[3], call.v.shape[3])) and all(map(readable, arrays))
    return part if fits and part.maps <= _MOST_MAPS else None


def group_key(dtype: str, head_dim: int, head_dim_v: int) -> tuple[str, int, int]:
    """Return the key of calls that can share a group."""
    row = build(TILE[0], (head_dim, head_dim_v))
    return dtype, row.head_dim, row.head_dim_v


def cut(parts: Sequence[Part]) -> list[list[int]]:
    """Assign parts to launches, each with one specialization and within the capacity of the parameters. Larger tiles,
    which have the longer items, launch first."""
    launches: list[list[int]] = []
    kinds = [(-rows_of(call.plan.block_q), call.score.text, bool(call.sinks)) for _, call in parts]
    for number in sorted(range(len(parts)), key=lambda n: kinds[n]):
        own = [*(launches[-1] if launches else []), number]
        maps = sum(parts[n].maps for n in own)
        entries = sum(len(parts[n].layout.entries) for n in own)
        full = len(own) > MOST_PROBLEMS or maps > _MOST_MAPS or entries > LARGEST
        if full or len(own) == 1 or kinds[own[0]] != kinds[number]:
            launches.append([])
        launches[-1].append(number)
    return launches


def group(calls: Mapping[int, ForwardPass]) -> list[tuple[list[int], Launches]]:
    """Return launches with their call indices, without calls whose arrays TMA cannot address; the context must be
    current."""
    parts = {number: part for number, call in calls.items() if (part := part_of(call)) is not None}
    numbers, members = list(parts), list(parts.values())
    return [([numbers[n] for n in own], prepare([members[n] for n in own])) for own in cut(members)]


def prepare(parts: Sequence[Part]) -> Launches:
    """Return the launches of parts that :func:`cut` assigned together; the device's context must be current."""
    first, maps = parts[0].call, [part.maps for part in parts]
    joined = join([part.layout for part in parts], offsets(maps)[:-1].tolist())
    length = joined.work["end"] - joined.work["begin"]
    phases = [_tasks(parts, joined, length, finishing) for finishing in (False, True)]
    tables = {name: getattr(joined, name) for name in _TABLES}
    tables |= {"tasks": np.concatenate(phases), "counters": np.zeros(COUNTERS, np.int32)}
    for number, (layout, call) in enumerate(parts):
        heads = merge_heads(layout.merges.variants, call.plan.variant, call.q.shape[0], call.q.shape[1])
        own = (layout.merges.rows, layout.merges.indptr, layout.merges.sources, heads)
        tables |= {f"{name} {number}": array for name, array in zip(MERGE_TABLES, own, strict=True)}
    buffer, at = upload(first.device, tables)
    merges = [tuple(at[f"{name} {number}"] for name in MERGE_TABLES) for number in range(len(parts))]
    keys = keys_of(length[tables["tasks"]["item"]], first.plan.block_q)
    most, room = next(size for size in GROUPS if len(parts) <= size[0] and sum(maps) <= size[1])
    own_tables = Tables(at, merges, launch_ranges(phases), keys, counters(at["counters"]), (buffer,))
    return Launches(parts, own_tables, room, most)


def _tasks(parts: Iterable[Part], joined: Joined, length: np.ndarray, finishing: bool) -> np.ndarray:
    """Return the tasks of all parts in launch order, either the in-kernel reductions or all others."""
    found = []
    for (layout, call), first in zip(parts, joined.items, strict=True):
        chosen = layout.reduces if finishing else ~layout.reduces
        batch, heads_q = call.q.shape[:2]
        tasks = order_tasks(call.plan, chosen, batch, heads_q, call.k.shape[1], KEYS_TOGETHER)
        tasks["item"] += first
        found.append(tasks)
    return in_turns(found, length)
