"""The plans that were used last, with what backends made of them.

There is no lock, so that neither a forked child nor a signal handler ever waits for one: dictionaries do one operation
after the other, and nothing here relies on two of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from ..patterns import Pattern
from ._sealed import Sealed, sealed
from ._types import Plan

__all__ = ["PlanCacheInfo", "clear_plan_cache", "derived", "find", "keep", "plan_cache_info", "routes", "size_of"]

_MAX_BYTES = 256 << 20
_MAX_PLANS = 256
_OBJECT_BYTES = 8192  # of a plan, its sealed copy and its key, beside the pattern and the elements of arrays

_clock = itertools.count()
_plans: dict[tuple, Kept] = {}
routes: dict[tuple, Any] = {}  # see spattn._routes; here because they keep patterns alive, as plans do
_counts = {"hits": 0, "misses": 0}


@dataclasses.dataclass(eq=False, slots=True)
class Kept:
    """A plan, what making it took (`needed` bytes), and what it and its key take now."""

    plan: Plan
    sealed: Sealed
    needed: int
    own_bytes: int
    used: int = dataclasses.field(default_factory=_clock.__next__)

    @property
    def nbytes(self) -> int:
        return self.own_bytes + self.sealed.derived_bytes


class PlanCacheInfo(NamedTuple):
    """What :func:`spattn.plan_cache_info` returns.

    Parameters
    ----------
    hits, misses : int
        How often a plan was found, and made, since the start or :func:`spattn.clear_plan_cache`. Not exact while
        several threads plan.
    plans : int
        Plans that are kept.
    bytes, max_bytes : int
        Host memory that they take, with their patterns and what backends made of them, and the most that they may.
    """

    hits: int
    misses: int
    plans: int
    bytes: int
    max_bytes: int


def find(key: tuple) -> Kept | None:
    """The plan that was kept under `key`."""
    kept = _plans.get(key)
    if kept is not None:
        kept.used = next(_clock)
        _counts["hits"] += 1
    return kept


def keep(key: tuple, plan: Plan, needed: int) -> Plan:
    """Keeps a plan, unless it is larger than all of them may be; returns the one that was there first."""
    _counts["misses"] += 1
    kept = Kept(plan, sealed(plan), needed, _OBJECT_BYTES + plan.nbytes + size_of(key[0]))
    if kept.nbytes > _MAX_BYTES:
        return plan
    kept = _plans.setdefault(key, kept)
    _forget()
    return kept.plan


def derived(plan: Plan, key: Hashable, make: Callable[[], Any]) -> Any:
    """What a backend makes of a plan: ``make()`` at first use, then kept as long as the plan."""
    of = sealed(plan)
    if key not in of.derived:
        made = make()
        if of.derived.setdefault(key, made) is made:
            vars(of)["derived_bytes"] += size_of(made)
            _forget()
    return of.derived[key]


def _forget() -> None:
    """Drops the plans that were not used for longest while there are too many."""
    plans = _plans.copy()
    total, left = sum(kept.nbytes for kept in plans.values()), len(plans)
    if total <= _MAX_BYTES and left <= _MAX_PLANS:
        return
    for key, kept in sorted(plans.items(), key=lambda item: item[1].used):
        _plans.pop(key, None)
        total, left = total - kept.nbytes, left - 1
        if total <= _MAX_BYTES and left <= _MAX_PLANS:
            return


def plan_cache_info() -> PlanCacheInfo:
    """What is kept of the plans made so far.

    Returns
    -------
    PlanCacheInfo
        A named tuple (hits, misses, plans, bytes, max_bytes).

    Examples
    --------
    >>> import spattn
    >>> spattn.clear_plan_cache()
    >>> for _ in range(3):
    ...     made = spattn.plan(spattn.patterns.Causal(), 1000)
    >>> info = spattn.plan_cache_info()
    >>> info.hits, info.misses, info.plans, info.max_bytes >> 20
    (2, 1, 1, 256)
    """
    kept = _plans.copy().values()
    return PlanCacheInfo(**_counts, plans=len(kept), bytes=sum(one.nbytes for one in kept), max_bytes=_MAX_BYTES)


def clear_plan_cache() -> None:
    """Forget all plans that are kept for calls to come, with their patterns and what backends made of them.

    Plans that somebody else holds stay as they are. Only time and memory depend on what is kept, never a result.

    Examples
    --------
    >>> import spattn
    >>> spattn.clear_plan_cache()
    >>> spattn.plan_cache_info().plans
    0
    """
    _plans.clear()
    routes.clear()
    _counts.update(hits=0, misses=0)


def size_of(thing: Any) -> int:
    """Bytes of an object and of all arrays, containers, patterns and dataclasses in it, each counted once."""
    total, seen, pending = 0, set(), [thing]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        pending.extend(_parts(one))
    return total


def _parts(thing: Any):
    if isinstance(thing, np.ndarray):
        return () if thing.base is None else (thing.base,)
    if isinstance(thing, (tuple, list, set, frozenset)):
        return thing
    if isinstance(thing, dict):
        return (*thing, *thing.values())
    inside = isinstance(thing, Pattern) or dataclasses.is_dataclass(thing) and not isinstance(thing, type)
    return vars(thing).values() if inside and hasattr(thing, "__dict__") else ()
