"""Choose the plan with the lowest predicted time among the candidates of a machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from .._util.limits import memory
from ..patterns import Pattern
from ..planning import Plan
from ..planning.contract.cache import MAX_BYTES, kept_with_plan
from ..request.call import Call
from ..schedule import compiler
from ..schedule.slow import warned

__all__ = ["How", "Machine", "Sizes", "Tried", "best", "cheapest", "planned", "predicted_ms"]


class Sizes(NamedTuple):
    """The sizes of a call that a cost model needs in addition to the plan."""

    batch: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int

    @classmethod
    def of(cls, call: Call) -> Sizes:
        return cls(call.batch, call.heads_q, call.heads_kv, call.head_dim, call.head_dim_v)


class How(NamedTuple):
    """Planning options of a pattern, see :func:`~spattn.schedule.compiler.plan`."""

    tile: tuple[int, int]
    box: tuple[int, ...] | None = None
    workers: int = 1  # for each head
    ordered: bool = False
    gathered: bool = False
    pieces: int = 0


class Machine(Protocol):
    """A machine with its cost model, and with candidates that may be faster than the first plan; hashable."""

    @property
    def expands(self) -> bool:
        """Whether the kernels need lists with one entry per tile, which limits the number of tiles."""

    def cost_ms(self, plan: Plan, sizes: Sizes) -> float:
        """Return the predicted milliseconds of a forward pass."""

    def scattered(self, how: How) -> How:
        """Return the planning options for scattered pairs; see :func:`~spattn.schedule.compiler.are_scattered`."""

    def settled(self, first: Plan) -> bool:
        """Return whether no candidate can be faster than a plan."""

    def candidates(self, first: Plan, how: How, sizes: Sizes, tried: Tried) -> Iterator[How]:
        """Yield other planning options for the pattern of `first`, which was planned with the options `how`."""

    def fits(self, plan: Plan) -> bool:
        """Return whether the kernels can execute a candidate."""


class Tried:
    """The plans of a pattern made so far, by planning options, with their predicted times."""

    def __init__(self, first: Plan, how: How, sizes: Sizes, machine: Machine):
        self.first, self.how, self.sizes = first, how, sizes
        self.plans = {how: first}
        self.ms = functools.cache(lambda how: machine.cost_ms(self.plans[how], sizes))

    def add(self, how: How) -> None:
        """Plan the pattern with these options too, unless the plan would be too large for the plan cache."""
        most = min(memory(), MAX_BYTES)  # every call would plan a larger one again
        if (made := planned(self.first, self.sizes, how, tiled_for=self.how.workers, max_bytes=most)) is not None:
            self.plans[how] = made

    def best(self) -> How:
        """Return the options with the lowest predicted time; a single plan needs no prediction."""
        return min(self.plans, key=self.ms) if len(self.plans) > 1 else next(iter(self.plans))


def predicted_ms(counts: tuple[float, ...], coefficients: tuple[float, ...]) -> float:
    """Return the predicted milliseconds, given coefficients in nanoseconds."""
    return 1e-6 * sum(number * cost for number, cost in zip(counts, coefficients, strict=True))


def planned(first: Plan, sizes: Sizes, how: How, **options: Any) -> Plan | None:
    """Plan the pattern of `first` with other options; return None if the plan exceeds the memory limit.

    The pattern has been planned before, so that a ValueError has no other cause.
    """
    assert first.pattern is not None, "a plan of a pattern"
    options |= {"batch": sizes.batch, "heads": sizes.heads_q, **how._asdict()}
    try:
        return compiler.plan(first.pattern, first.q_len, first.kv_len, **options)
    except ValueError:
        return None


def cheapest(
    pattern: Pattern, q_len: int, kv_len: int, sizes: Sizes, how: How, machine: Machine, max_bytes: int | None = None
) -> Plan:
    """Return the plan with the lowest predicted time that `max_bytes` allows, with options `how` or a candidate's."""
    return warned(
        pattern,
        lambda: _cheapest(pattern, q_len, kv_len, sizes, how, machine, max_bytes),
        lambda plan: machine.cost_ms(plan, sizes),
    )


def _cheapest(
    pattern: Pattern, q_len: int, kv_len: int, sizes: Sizes, how: How, machine: Machine, max_bytes: int | None
) -> Plan:
    batch, heads = sizes.batch, sizes.heads_q
    limits: dict[str, Any] = {"max_bytes": max_bytes, "tile_by_tile": machine.expands}
    scattered = compiler.are_scattered(pattern, q_len, kv_len, batch, heads, how.tile)
    own = machine.scattered(how) if scattered else how
    first = compiler.plan(pattern, q_len, kv_len, batch=batch, heads=heads, **own._asdict(), **limits)
    if scattered or machine.settled(first):
        return first
    other = best(first, how, sizes, machine)
    return first if other == how else planned(first, sizes, other, **limits) or first


@kept_with_plan
def best(first: Plan, how: How, sizes: Sizes, machine: Machine) -> How:
    """Return the planning options with the lowest predicted time; `first` was planned with the options `how`."""
    tried = Tried(first, how, sizes, machine)
    for other in machine.candidates(first, how, sizes, tried):
        tried.add(other)
    while len(tried.plans) > 1 and not machine.fits(tried.plans[tried.best()]):
        del tried.plans[tried.best()]
    return tried.best()
