"""Validated plans: private copies that backends execute."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from ..._util.cached import BoundedCache
from ..._util.frozen import frozen
from ..._util.imports import whole_imports
from ...patterns import Pattern
from .types import Plan

__all__ = [
    "Part",
    "Validated",
    "made_validated",
    "mark_part",
    "mark_validated",
    "moved",
    "moved_plan",
    "validated",
    "validated_for",
    "validate",
]


Growth = Callable[[int], dict[str, Any]]


class Part(NamedTuple):
    """The whole plan of a part, and the index of each of the part's items among the whole plan's items in row order."""

    whole: Plan
    items: np.ndarray


MAX_CALLS = 64  # cached dispatches per plan
_fields_of = operator.attrgetter(*(field.name for field in fields(Plan)))


class Validated(Plan):
    """A validated private copy of a plan; only backends hold it.

    Attributes
    ----------
    derived : dict
        Memoized results such as schedules and device copies: :func:`~spattn.planning.contract.cache.kept_with_plan`.
    derived_bytes : int
        Host memory of `derived`.
    calls : BoundedCache
        Cached dispatches by cache key: :func:`~spattn.planning.contract.cache.keep_call`.
    least : int or None
        Smallest kv_len that a length-polymorphic plan supports; None if kv_len is fixed. See :func:`moved`.
    growth : callable or None
        Maps kv_len to the plan's fields (:class:`~spattn.schedule.growth.Growth`); None if only offsets depend on it.
    part : Part or None
        The plan that this one is a part of; None for a whole plan.
    """

    derived: dict[tuple[Hashable, ...], Any]
    derived_bytes: int
    calls: BoundedCache
    least: int | None
    growth: Growth | None
    part: Part | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update(_nothing_made(), least=None, growth=None)

    @property
    def slides(self) -> bool:
        """Whether kv_len is variable and changes only the offsets of the views of the last keys."""
        return self.least is not None and self.growth is None


def validated(plan: Plan) -> Validated:
    """Return the validated copy of a plan, made at first use; raise the errors of :func:`validate`."""
    if isinstance(plan, Validated):
        return plan
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
    found = vars(plan).get("_validated")
    if found is None:
        with whole_imports:  # imported late: the planner's own plans do not need it
            from .validate import check

        copy = _copy(plan)
        check(copy)
        found = vars(plan).setdefault("_validated", copy)
    return found


def validated_for(plan: Plan, batch: int, heads: int, q_len: int, kv_len: int) -> Validated:
    """Return the validated plan for a call of these sizes; raise ValueError if they differ from the plan's."""
    found = validated(plan)
    if found.q_len != q_len or found.kv_len != kv_len:
        raise ValueError(f"plan: expected lengths {q_len} and {kv_len}, got {found.q_len} and {found.kv_len}")
    shape = found.variant.shape
    if shape[0] not in (1, batch) or shape[1] not in (1, heads):
        raise ValueError(f"plan: expected {batch} batch entries and {heads} heads, got {shape[0]} and {shape[1]}")
    return found


def mark_validated(plan: Plan, least: int | None, growth: Growth | None) -> Plan:
    """Mark a plan of the planner as validated and, unless `least` is None, as length-polymorphic; return it.

    Raise RuntimeError if a query view has an offset, which :func:`moved` would change.
    """
    if least is not None and plan.views["offset"][plan.components["query_view"]].any():
        raise RuntimeError(
            "plan: the offset of a query view depends on kv_len; this is a bug in spattn, please report it"
        )
    vars(plan)["_validated"] = copy = _copy(plan)
    vars(copy).update(least=least, growth=growth)
    if os.environ.get("SPATTN_CHECK_PLANS") == "1":
        _check_own(copy)
    return plan


def made_validated(pattern: Pattern, fields: dict[str, Any]) -> Validated:
    """Return a plan of the planner that only a backend holds, without copies of the arrays in `fields`."""
    made = object.__new__(Validated)
    vars(made).update(fields, pattern=pattern, **_nothing_made(), least=None, growth=None)
    if os.environ.get("SPATTN_CHECK_PLANS") == "1":
        _check_own(made)
    return made


def mark_part(plan: Plan, part: Part) -> Plan:
    """Mark a plan as a part of a validated plan and return it; it leaves the rows undefined that it does not write."""
    vars(plan)["_validated"] = copy = _copy(plan)
    vars(copy).update(part=part)
    return plan


def moved(plan: Validated, kv_len: int) -> Validated:
    """Return a length-polymorphic plan at another kv_len; raise ValueError if it does not support that length."""
    if plan.least is None or kv_len < plan.least:
        goes = f"{plan.kv_len} keys" if plan.least is None else f"{plan.least} keys or more"
        raise ValueError(f"plan: expected {goes}, got {kv_len}")
    made = object.__new__(Validated)
    # The two plans may share array objects, because only backends hold a validated plan.
    vars(made).update(vars(plan), **_changed(plan, kv_len), **_nothing_made())
    vars(made).pop("tiles", None)  # a cached property that depends on kv_len
    if os.environ.get("SPATTN_CHECK_PLANS") == "1":
        _check_own(made)
    return made


def _changed(plan: Validated, kv_len: int) -> dict[str, Any]:
    """Return the fields that depend on kv_len. Of a plan without growth, only views of the last keys have an offset."""
    if plan.growth is not None:
        return plan.growth(kv_len)
    views = plan.views.copy()
    views["offset"] += np.where(views["offset"] > 0, kv_len - plan.kv_len, 0)
    return {"kv_len": kv_len, "views": frozen(views)}


def moved_plan(plan: Plan, kv_len: int) -> Plan:
    """Return the result of :func:`moved` as a public plan."""
    own = moved(validated(plan), kv_len)
    made = Plan(*_fields_of(own))
    vars(made)["_validated"] = own
    return made


def _nothing_made() -> dict[str, Any]:
    return {"derived": {}, "derived_bytes": 0, "calls": BoundedCache(MAX_CALLS)}


def validate(plan: Plan) -> Plan:
    """Validate a plan and return it.

    Parameters
    ----------
    plan : Plan
        Any plan, in particular a hand-made one.

    Returns
    -------
    Plan
        The same object.

    Raises
    ------
    TypeError
        If `plan` is not a Plan.
    ValueError
        If an array has the wrong dtype or shape, an index is out of range, a row of the output would be written twice
        or not at all, or `nnz` is wrong.

    Notes
    -----
    Kernels trust plans, so backends call this for every plan that :func:`spattn.plan` did not make (edited, copied,
    unpickled, hand-made). The cost is O(tiles + items · block_q), for gathered plans also O(n log n) in the length of
    `kv_order`. It does not check that components are disjoint.
    """
    validated(plan)
    return plan


def _check_own(plan: Validated) -> None:
    """Validate a plan of the planner and compare it with the predicate of its pattern."""
    with whole_imports:
        from .validate import check, check_pairs

    check(plan)
    check_pairs(plan)


def _copy(plan: Plan) -> Validated:
    return Validated(*_fields_of(plan))
