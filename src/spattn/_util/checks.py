"""Expensive self-checks: ``SPATTN_CHECK_PLANS=1``, and observers of kernel tables.

The planner always proves that each row is written exactly once (:mod:`spattn.schedule.proof`). With
``SPATTN_CHECK_PLANS=1`` it also validates its own plans as if they were user-made, and compares small plans with their
predicates. Functions in `observers` receive every table that a backend derives from a plan;
``tests/tables.py`` compares the tables with the plan. ``tests/conftest.py`` enables both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["MOST_CELLS", "observers", "show"]

MOST_CELLS = 1 << 18  # largest number of (query, key) pairs for a pair-by-pair comparison

observers: list[Callable[..., None]] = []  # called with a table's name; keywords: the table and its sources


def show(table: str, **of: Any) -> None:
    """Pass a new table to the observers."""
    for observer in observers:
        observer(table, **of)
