"""Choose the plans of calls in a grouped launch: their tile shapes, and which lists to split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..planning import Plan
from ..request.call import Call
from ..schedule.group import tiles_of, workers
from ..schedule.reductions import find_reductions
from .chooser import How, Sizes, planned
from .machine_gpu import LAUNCH_MS, among_others, cost_ms, specialization_of
from .specializations import rows_of

__all__ = ["Member", "shared"]

_CLEARLY = 1.1  # lists are split if that is faster by this factor; smaller gains are noise, and splitting costs memory
_WORKERS = (0.25, 0.5, 1, 2)  # numbers of workers per CTA to try when splitting long lists


class Member(NamedTuple):
    """A call of a group: its plan, whether that must be kept, and its workers per head in a launch of its own."""

    call: Call
    plan: Plan
    kept: bool
    each: int


class _Way(NamedTuple):
    """A candidate plan of a call in a group, and the milliseconds that it adds to the group."""

    plan: Plan
    how: How | None  # None: do not split lists
    ms: float


def shared(members: Mapping[int, Member], sms: int) -> dict[int, Plan]:
    """Return plans for calls that share a device with `sms` SMs.

    Either all calls use the common tile shape, or the calls that are faster with smaller tiles use these, at the cost
    of one more launch. Lists stay whole: the longest items start first and short items fill the gaps, so that long
    lists cost no time. Only lists that outlast all other work are split, since partials are written, read and combined.
    """
    ways = {number: list(_ways(member, sms)) for number, member in members.items()}
    alike = {number: own[0] for number, own in ways.items()}
    quickest = {number: min(own, key=lambda way: way.ms) for number, own in ways.items()}
    taken = min(alike, quickest, key=_total_ms)
    total = sum(way.ms for way in taken.values())
    return {number: _split(members[number].call, way, total - way.ms, sms) for number, way in taken.items()}


def _total_ms(taken: Mapping[int, _Way]) -> float:
    launches = {rows_of(way.plan.block_q) for way in taken.values()}
    return sum(way.ms for way in taken.values()) + LAUNCH_MS * len(launches)


def _ways(member: Member, sms: int) -> Iterator[_Way]:
    """Yield the kept plan, or plans with whole lists, first the one with the common tile shape."""
    call, own, pattern = member.call, member.plan, member.plan.pattern
    hows: list[How | None] = [None]
    if not member.kept and pattern is not None:
        hows = [*among_others(pattern, call, member.each, sms)]
    for how in hows:
        plan = own
        if how is not None:
            # The call's own plan replaces a plan that exceeds the memory limit.
            plan = planned(own, Sizes.of(call), how, tile_by_tile=True, tiled_for=member.each) or own
        yield _Way(plan, None if plan is own else how, _cost(plan, call, sms))


def _split(call: Call, way: _Way, others: float, sms: int) -> Plan:
    """Split the lists of a plan as is best for the group, whose other calls take `others` ms; return the plan."""
    plan, how, blocks = way.plan, way.how, _blocks(way.plan, call, sms)
    longest = (plan.work["end"] - plan.work["begin"]).max(initial=0)
    tiles = tiles_of(plan, call.batch, call.heads_q)
    if how is None or way.ms * blocks * longest <= (others + way.ms) * tiles:  # no list outlasts the group
        return plan
    best, least = plan, _ends(plan, call, others, sms) / _CLEARLY
    for each in (workers(int(blocks * share), call.batch * call.heads_q) for share in _WORKERS):
        again = how._replace(workers=each)
        made = planned(plan, Sizes.of(call), again, tile_by_tile=True, tiled_for=1) or plan
        ms = _ends(made, call, others, sms)
        if ms < least:
            best, least = made, ms
    return best


def _ends(plan: Plan, call: Call, others: float, sms: int) -> float:
    """Return the milliseconds of the group, if its other calls take `others` ms and fill the gaps of this call."""
    reduces, length = find_reductions(plan).reduces, plan.work["end"] - plan.work["begin"]
    blocks = _blocks(plan, call, sms)
    # For each phase: the tiles of all items, and the tiles that all CTAs compute while one computes the longest item.
    (tiles, longest), (last, longest_last) = (
        (tiles_of(plan, call.batch, call.heads_q, chosen), blocks * int(length[chosen].max(initial=0)))
        for chosen in (~reduces, reduces)
    )
    tile_ms = _cost(plan, call, sms) / (tiles + last)  # time of a tile if all CTAs share the work evenly
    ms = max(tile_ms * longest, others + tile_ms * tiles)
    if last:  # in-kernel reductions wait for all earlier items
        ms += LAUNCH_MS + tile_ms * max(longest_last, last)
    return ms


def _cost(plan: Plan, call: Call, sms: int) -> float:
    return cost_ms(plan, Sizes.of(call), sms, alone=False)


def _blocks(plan: Plan, call: Call, sms: int) -> int:
    """Return the number of CTAs that are resident at the same time."""
    return sms * specialization_of(plan, (call.head_dim, call.head_dim_v)).ctas
