"""Test utilities for authors of patterns and backends.

Provides inputs, error bounds, a reference executor of plans, and the properties that every pattern must have.
Hypothesis strategies are in :mod:`spattn.testing.strategies`.
"""

from typing import NoReturn

from .._util.imports import whole_imports
from .arrays import DTYPES, LAYOUTS, at_protected_page, eps, inputs, random
from .bounds import assert_within_bound, count_orders, dense_mask, error_bound, naive, naive_gradients, naive_orders
from .check import Expectation, check_pattern
from .contract import check_plan, execute, plan_pairs
from .dropout import dropout_mask
from .gradients import GradientExpectation, naive_from_results
from .verify import Difference, Verification

__all__ = [
    "DTYPES",
    "Difference",
    "Expectation",
    "GradientExpectation",
    "LAYOUTS",
    "Verification",
    "assert_within_bound",
    "at_protected_page",
    "check_pattern",
    "check_plan",
    "count_orders",
    "dense_mask",
    "dropout_mask",
    "eps",
    "error_bound",
    "execute",
    "inputs",
    "naive",
    "naive_from_results",
    "naive_gradients",
    "naive_orders",
    "plan_pairs",
    "random",
]


def __getattr__(name: str) -> NoReturn:
    with whole_imports:
        from .._util.renamed import unknown

    raise unknown(__name__, name)
