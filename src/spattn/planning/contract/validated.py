"""The plan as backends read it: checked once, then out of the reach of whoever holds the plan."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any

import numpy as np

from ..._util.cached import Recent
from ..._util.frozen import frozen
from ..._util.imports import whole_imports
from .types import Plan

__all__ = ["Sealed", "moved", "moved_plan", "seal", "sealed", "sealed_for", "validate"]


Growth = Callable[[int], dict[str, Any]]
MAX_CALLS = 64  # prepared for one plan
_fields_of = operator.attrgetter(*(field.name for field in fields(Plan)))


class Sealed(Plan):
    """A checked plan that only backends hold. As every plan it has array objects of its own.

    Attributes
    ----------
    derived : dict
        What was made of it: orders of work, device copies. See :func:`~spattn.planning.contract.cache.kept_with_plan`.
    derived_bytes : int
        Bytes of host memory that this takes.
    calls : Recent
        Prepared calls that execute it, by their signatures. See :func:`~spattn.planning.contract.cache.keep_call`.
    least : int or None
        The plan *moves*: at any number of keys from this one on it is the same, but for where the views of the last
        keys lie. See :func:`moved`. None: it does not.
    growth : callable or None
        It moves by growing between the ends of the sequence: the fields that differ at a number of keys. See
        :class:`~spattn.schedule.growth.Growth`.
    """

    derived: dict[tuple[Hashable, ...], Any]
    derived_bytes: int
    calls: Recent
    least: int | None
    growth: Growth | None

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update(_nothing_made(), least=None, growth=None)

    @property
    def slides(self) -> bool:
        """Whether it moves without growing: only where the views of the last keys lie depends on their number."""
        return self.least is not None and self.growth is None


def sealed(plan: Plan) -> Sealed:
    """The plan to execute; checks one that is new here.

    Raises
    ------
    TypeError
        If `plan` is not a Plan.
    ValueError
        As :func:`validate`.
    """
    if isinstance(plan, Sealed):
        return plan
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
    found = vars(plan).get("_sealed")
    if found is None:
        with whole_imports:  # which plans that spattn makes do not need
            from .validate import check

        copy = _copy(plan)
        check(copy)
        found = vars(plan).setdefault("_sealed", copy)
    return found


def sealed_for(plan: Plan, batch: int, heads: int, q_len: int, kv_len: int) -> Sealed:
    """The plan to execute in a call of these sizes; ValueError if it is made for others."""
    found = sealed(plan)
    if found.q_len != q_len or found.kv_len != kv_len:
        raise ValueError(f"plan: expected lengths {q_len} and {kv_len}, got {found.q_len} and {found.kv_len}")
    shape = found.variant.shape
    if shape[0] not in (1, batch) or shape[1] not in (1, heads):
        raise ValueError(f"plan: expected {batch} batch entries and {heads} heads, got {shape[0]} and {shape[1]}")
    return found


def seal(plan: Plan, least: int | None, growth: Growth | None) -> Plan:
    """Marks the planner's own plan as checked, and says from how many keys on it moves and if it grows; returns it.

    Raises
    ------
    RuntimeError
        If it moves and a view of queries does not start at row 0: :func:`moved` would move that view too.
    """
    if least is not None and plan.views["offset"][plan.components["query_view"]].any():
        raise RuntimeError(
            "plan: a view of queries would move with the keys; this is a bug in spattn, please report it"
        )
    vars(plan)["_sealed"] = copy = _copy(plan)
    vars(copy).update(least=least, growth=growth)
    if os.environ.get("SPATTN_CHECK_PLANS") == "1":
        _check_own(copy)
    return plan


def moved(plan: Sealed, kv_len: int) -> Sealed:
    """A plan that moves, at another number of keys.

    Raises
    ------
    ValueError
        If it does not move there.
    """
    if plan.least is None or kv_len < plan.least:
        goes = f"{plan.kv_len} keys" if plan.least is None else f"{plan.least} keys or more"
        raise ValueError(f"plan: expected {goes}, got {kv_len}")
    made = object.__new__(Sealed)
    # Sealed plans may share array objects: nobody else holds them.
    vars(made).update(vars(plan), **_changed(plan, kv_len), **_nothing_made())
    vars(made).pop("tiles", None)  # which is computed when it is asked for
    if os.environ.get("SPATTN_CHECK_PLANS") == "1":
        _check_own(made)
    return made


def _changed(plan: Sealed, kv_len: int) -> dict[str, Any]:
    """The fields that depend on the number of keys. The views of the last keys are those that have an offset."""
    if plan.growth is not None:
        return plan.growth(kv_len)
    views = plan.views.copy()
    views["offset"] += np.where(views["offset"] > 0, kv_len - plan.kv_len, 0)
    return {"kv_len": kv_len, "views": frozen(views)}


def moved_plan(plan: Plan, kv_len: int) -> Plan:
    """The same of a plan that anybody may hold."""
    own = moved(sealed(plan), kv_len)
    made = Plan(*_fields_of(own))
    vars(made)["_sealed"] = own
    return made


def _nothing_made() -> dict[str, Any]:
    return {"derived": {}, "derived_bytes": 0, "calls": Recent(MAX_CALLS)}


def validate(plan: Plan) -> Plan:
    """Check a plan; returns it.

    Parameters
    ----------
    plan : Plan
        Made by anybody.

    Returns
    -------
    Plan
        The same.

    Raises
    ------
    TypeError
        If `plan` is not a Plan.
    ValueError
        If an array has the wrong type or shape, an entry points outside of what it refers to, a row of the output would
        be written twice or not at all, or `nnz` is not the number of pairs. Kernels trust plans, so plans that did not
        come from :func:`spattn.plan` (edited, copied, unpickled, hand-made) are checked before they run.

    Notes
    -----
    Costs O(tiles + items · block_q), and O(places · log places) where a key has several places, because no list may
    allow a pair at two of them. That no two components allow the same pair is not checked.
    """
    sealed(plan)
    return plan


def _check_own(plan: Sealed) -> None:
    """The checks of foreign plans, and that it allows the pairs of its pattern, for a plan that the planner made."""
    with whole_imports:
        from .validate import check, check_pairs

    check(plan)
    check_pairs(plan)


def _copy(plan: Plan) -> Sealed:
    return Sealed(*_fields_of(plan))
