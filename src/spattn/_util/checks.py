"""Checks that cost too much for users: ``SPATTN_CHECK_PLANS=1``, and observers of the tables made of plans.

The planner always proves that each row is written once (:mod:`spattn.schedule.proof`). With the environment variable
set to 1 it also runs the checks of foreign plans on its own plans, and compares small ones with their predicates.
Functions in `observers` see each table that a backend makes of a plan; :mod:`spattn.testing.tables` compares them with
the plan. tests/conftest.py switches both on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["MOST_CELLS", "observers", "show"]

MOST_CELLS = 1 << 18  # (query, key) cells of a plan that is compared pair by pair

observers: list[Callable[..., None]] = []  # of (name of the table, **what it is made of)


def show(table: str, **of: Any) -> None:
    """Hands a new table to the observers."""
    for observer in observers:
        observer(table, **of)
