"""Plans of calls that run side by side: which tiles each has, and whether its lists are split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..planning import Plan
from ..request.call import Call
from ..schedule import compiler
from ..schedule.finishers import find_finishers
from ..schedule.group import tiles_of, workers
from .gpu import How, among_others, sizes_of
from .machine_gpu import LAUNCH_MS, build_of, price_ms
from .specializations import rows_of

__all__ = ["Member", "shared"]

_CLEARLY = 1.1  # times as long: prices that are no further apart tell nothing, and splitting costs memory
_WORKERS = (0.25, 0.5, 1, 2)  # of a block, among which long lists may be split


class Member(NamedTuple):
    """A call of a group: the plan that it would have by itself, whether it has to keep that, and how many workers would
    share a head of it."""

    call: Call
    plan: Plan
    kept: bool
    each: int


class _Way(NamedTuple):
    """One way to compute a call in a group, and by how many milliseconds the group takes longer for it."""

    plan: Plan
    how: How | None  # None: its lists stay as they are
    ms: float


def shared(members: Mapping[int, Member], sms: int) -> dict[int, Plan]:
    """The plans of calls that have a device of so many SMs together.

    All are in the tiles of most plans, or those that take less time in smaller ones are in these, which take a launch
    more. Lists stay whole: where the longest items start first and short ones fill what they leave, long ones cost
    nothing. Only those that all others would wait for are split, each piece of which is rows to write, read and merge.
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
    """The plan that is kept, or plans of whole lists, the one in the tiles of most plans first; the call's own where
    they take too many bytes."""
    call, own, pattern = member.call, member.plan, member.plan.pattern
    hows: list[How | None] = [None]
    if not member.kept and pattern is not None:
        hows = [*among_others(pattern, call, member.each, sms)]
    for how in hows:
        plan = own
        if how is not None:
            plan = compiler.planned_or(own, pattern, call, how.tile, 1, None, True, how.box, tiled_for=member.each)
        yield _Way(plan, None if plan is own else how, _price(plan, call, sms))


def _split(call: Call, way: _Way, others: float, sms: int) -> Plan:
    """The plan whose lists are split as is best for the group, whose other calls take so many milliseconds."""
    plan, how, blocks = way.plan, way.how, _blocks(way.plan, call, sms)
    longest = (plan.work["end"] - plan.work["begin"]).max(initial=0)
    tiles = tiles_of(plan, call.batch, call.heads_q)
    if how is None or way.ms * blocks * longest <= (others + way.ms) * tiles:  # nobody waits
        return plan
    best, least = plan, _ends(plan, call, others, sms) / _CLEARLY
    for each in (workers(int(blocks * share), call.batch * call.heads_q) for share in _WORKERS):
        made = compiler.planned_or(plan, plan.pattern, call, how.tile, each, None, True, how.box, tiled_for=1)
        ms = _ends(made, call, others, sms)
        if ms < least:
            best, least = made, ms
    return best


def _ends(plan: Plan, call: Call, others: float, sms: int) -> float:
    """Milliseconds after which a group is done whose other calls, which fill what this one leaves, take so many."""
    finishes, length = find_finishers(plan).finishes, plan.work["end"] - plan.work["begin"]
    blocks = _blocks(plan, call, sms)
    # Of either phase the tiles of all items, and as many as all blocks do while one does the longest item.
    (tiles, longest), (last, longest_last) = (
        (tiles_of(plan, call.batch, call.heads_q, chosen), blocks * int(length[chosen].max(initial=0)))
        for chosen in (~finishes, finishes)
    )
    tile_ms = _price(plan, call, sms) / (tiles + last)  # if all blocks share it
    ms = max(tile_ms * longest, others + tile_ms * tiles)
    if last:  # finishers wait for all that is before them
        ms += LAUNCH_MS + tile_ms * max(longest_last, last)
    return ms


def _price(plan: Plan, call: Call, sms: int) -> float:
    return price_ms(plan, sizes_of(call), sms, alone=False)


def _blocks(plan: Plan, call: Call, sms: int) -> int:
    """That run side by side."""
    return sms * build_of(plan, max(call.head_dim, call.head_dim_v)).ctas
