"""LRU cache of plans, their derived data and cached dispatches.

The cache takes no lock, so that neither a forked child nor a signal handler can deadlock: a single dict operation is
atomic, and no invariant spans two of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from ..._util.cached import BoundedCache
from ...patterns import Pattern
from .types import Plan
from .validated import MAX_CALLS, Validated, moved_plan, validated

__all__ = [
    "MAX_BYTES",
    "PlanCacheInfo",
    "clear_plan_cache",
    "find",
    "find_call",
    "find_rows",
    "keep",
    "keep_call",
    "keep_rows",
    "kept_with_plan",
    "plan_cache_info",
    "size_of",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

MAX_BYTES = 256 << 20
_MAX_PLANS = 256
_MAX_MOVED = 64  # cached lengths per length-polymorphic plan
_OBJECT_BYTES = 8192  # estimate for a plan, its validated copy and its key, without pattern and array data

_clock = itertools.count()
_plans: dict[tuple[Any, ...], Kept] = {}
_calls: dict[
    tuple[object, Hashable], tuple[Any, Kept]
] = {}  # (pattern, cache key) to (cached dispatch, the plan that it executes)
_rows = BoundedCache(MAX_CALLS)  # cached dispatches of calls that are planned by their rows, for any pattern
_counts = {"hits": 0, "misses": 0}


@dataclasses.dataclass(eq=False, slots=True)
class Kept:
    """A cached plan. `needed` is the smallest `max_bytes` that allows it; `moved` caches the plan at other kv_len."""

    plan: Plan
    validated: Validated
    needed: int
    own_bytes: int
    moved: BoundedCache = dataclasses.field(default_factory=lambda: BoundedCache(_MAX_MOVED))
    signatures: list[tuple[object, Hashable]] = dataclasses.field(default_factory=list)  # its keys in _calls
    used: int = dataclasses.field(default_factory=_clock.__next__)

    @property
    def nbytes(self) -> int:
        others = [validated(plan) for plan in self.moved.copy().values()]
        own = self.plan.views.nbytes if self.validated.growth is None else self.plan.nbytes  # other arrays are shared
        return (
            self.own_bytes
            + len(others) * (_OBJECT_BYTES + own)
            + sum(one.derived_bytes for one in (self.validated, *others))
        )

    def at(self, kv_len: int) -> Plan:
        """Return the plan at another kv_len that it supports."""
        if kv_len == self.plan.kv_len:
            return self.plan
        return self.moved.get(kv_len) or self.moved.keep(kv_len, moved_plan(self.plan, kv_len))

    def executes(self, plan: Validated) -> bool:
        """Return whether `plan` is this plan at some kv_len."""
        return any(validated(one) is plan for one in (self.plan, *self.moved.copy().values()))


class PlanCacheInfo(NamedTuple):
    """Statistics of the plan cache; see :func:`spattn.plan_cache_info`.

    Parameters
    ----------
    hits, misses : int
        `hits` counts lookups that found a plan or a cached dispatch, `misses` counts plans made, both since the start
        or the last :func:`spattn.clear_plan_cache`. Approximate if several threads plan at once.
    plans : int
        Number of cached plans.
    bytes, max_bytes : int
        Host memory of the plans, their patterns and derived data, and the limit on it.
    """

    hits: int
    misses: int
    plans: int
    bytes: int
    max_bytes: int


def find(key: tuple[Any, ...]) -> Kept | None:
    """Return the plan with this key, or a length-polymorphic plan that supports the key's kv_len (``key[2]``)."""
    kept = _plans.get(key)
    if kept is None:
        kept = _plans.get(_at_any_length(key))
        if kept is None or kept.validated.least is None or key[2] < kept.validated.least:
            return None
    kept.used = next(_clock)
    _counts["hits"] += 1
    return kept


def _at_any_length(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key under which a length-polymorphic plan is stored."""
    return *key[:2], None, *key[3:]


def keep(key: tuple[Any, ...], plan: Plan, needed: int) -> Plan:
    """Cache a plan unless it is larger than the cache; return an earlier plan with this key if there is one."""
    _counts["misses"] += 1
    kept = Kept(plan, validated(plan), needed, _OBJECT_BYTES + plan.nbytes + size_of(key[0]))
    if kept.nbytes > MAX_BYTES:
        return plan
    kept = _plans.setdefault(key if kept.validated.least is None else _at_any_length(key), kept)
    _forget()
    return kept.at(plan.kv_len)


def kept_with_plan(make: Callable[Concatenate[Plan, _P], _R]) -> Callable[Concatenate[Plan, _P], _R]:
    """Memoize a function of a plan and hashable arguments for the lifetime of the plan."""

    @functools.wraps(make)
    def found_or_made(plan: Plan, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        of, key = validated(plan), (make, *args, *kwargs.items())
        if key not in of.derived:
            made = make(plan, *args, **kwargs)
            if of.derived.setdefault(key, made) is made:
                vars(of)["derived_bytes"] += size_of(made)
                _forget()
        return of.derived[key]

    return found_or_made


def find_call(pattern: Hashable, cache_key: Hashable) -> Any:
    """Return the cached dispatch for a pattern (or plan) and a cache key, or None."""
    if isinstance(pattern, Plan):
        return validated(pattern).calls.get(cache_key)
    found = _calls.get((pattern, cache_key))
    if found is None:
        return None
    prepared, kept = found
    kept.used = next(_clock)
    _counts["hits"] += 1
    return prepared


def keep_call(pattern: Hashable, cache_key: Hashable, plan: Plan, prepared: Any) -> None:
    """Cache a dispatch with the plan that it executes: the caller's plan, or the plan cached for the pattern."""
    if isinstance(pattern, Plan):
        validated(pattern).calls.keep(cache_key, prepared)
        return
    own = validated(plan)
    kept = next((kept for kept in _plans.copy().values() if kept.executes(own)), None)
    if kept is None:  # too large for the cache
        return
    if len(kept.signatures) >= MAX_CALLS:
        _forget_calls(kept)
    key = plan.pattern, cache_key  # of equal patterns, the cache stores and counts one object
    kept.signatures.append(key)
    _calls[key] = prepared, kept
    if all(one is not kept for one in _plans.copy().values()):  # evicted meanwhile by another thread
        _forget_calls(kept)


def find_rows(cache_key: Hashable) -> Any:
    """Return what finds the cached dispatch of a call that is planned by its rows, or None."""
    return _rows.get(cache_key)


def keep_rows(cache_key: Hashable, prepared: Any) -> None:
    """Cache what finds the dispatch of calls that are planned by their rows."""
    _rows.keep(cache_key, prepared)


def _forget_calls(kept: Kept) -> None:
    while kept.signatures:
        _calls.pop(kept.signatures.pop(), None)


def _forget() -> None:
    """Evict least recently used plans until the cache is within its limits."""
    plans = _plans.copy()
    total, left = sum(kept.nbytes for kept in plans.values()), len(plans)
    if total <= MAX_BYTES and left <= _MAX_PLANS:
        return
    for key, kept in sorted(plans.items(), key=lambda item: item[1].used):
        _plans.pop(key, None)
        _forget_calls(kept)
        total, left = total - kept.nbytes, left - 1
        if total <= MAX_BYTES and left <= _MAX_PLANS:
            return


def plan_cache_info() -> PlanCacheInfo:
    """Return statistics of the plan cache.

    Returns
    -------
    PlanCacheInfo
        Named tuple (hits, misses, plans, bytes, max_bytes).

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
    return PlanCacheInfo(**_counts, plans=len(kept), bytes=sum(one.nbytes for one in kept), max_bytes=MAX_BYTES)


def clear_plan_cache() -> None:
    """Empty the plan cache, with the patterns and derived data of its plans.

    Plans held elsewhere stay valid. The cache affects time and memory, never results.

    Examples
    --------
    >>> import spattn
    >>> spattn.clear_plan_cache()
    >>> spattn.plan_cache_info().plans
    0
    """
    _plans.clear()
    _calls.clear()
    _rows.clear()
    _counts.update(hits=0, misses=0)


def size_of(thing: Any) -> int:
    """Return the size in bytes of an object with the arrays, containers, patterns and dataclasses in it."""
    total, seen, pending = 0, set(), [thing]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        parts = _parts(one)
        if type(parts) is tuple and set(map(type, parts)) == {int}:  # fast path for long tuples of positions
            numbers = dict(zip(map(id, parts), parts, strict=True))
            for known in seen.intersection(numbers):
                del numbers[known]
            seen.update(numbers)
            total += sum(map(int.__sizeof__, numbers.values()))
        else:
            pending.extend(parts)
    return total


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, np.ndarray):
        return () if thing.base is None else (thing.base,)
    if isinstance(thing, (tuple, list, set, frozenset)):
        return thing
    if isinstance(thing, dict):
        return (*thing, *thing.values())
    inside = isinstance(thing, Pattern) or dataclasses.is_dataclass(thing) and not isinstance(thing, type)
    return vars(thing).values() if inside and hasattr(thing, "__dict__") else ()
