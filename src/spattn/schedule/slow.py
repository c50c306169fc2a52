"""Warn about plans that take long to make."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from .._util.making import making
from ..errors import PlanningWarning
from ..patterns import Pattern
from ..planning import Plan

__all__ = ["warned"]

_SECONDS = 1.0
_TIMES, _LEAST_SECONDS = 10, 0.25  # times the predicted call; shorter plans are never worth a warning
_PACKAGE = str(Path(__file__).parents[1])
_ADVICE = "make the plan once, with spattn.plan or spattn.plan_for, and pass it to all calls"


def warned(pattern: Pattern, make: Callable[[], Plan], predicted_ms: Callable[[Plan], float] | None = None) -> Plan:
    """Return ``make()``; warn if a new plan takes more than a second, or ten predicted calls, of processor time.

    Plans that are made within share intermediate results, and do not warn.
    """
    start = time.thread_time()
    with making() as own:
        plan = make()
    seconds = time.thread_time() - start
    if own is None or not own.is_new or seconds < _LEAST_SECONDS:
        return plan
    call_ms = float("inf") if predicted_ms is None else predicted_ms(plan)
    if seconds > _SECONDS or 1e3 * seconds > _TIMES * call_ms:
        compared = "" if predicted_ms is None else f", a call is predicted to take {call_ms:.3g} ms"
        why = f"; {own.reasons[0]}" if own.reasons else ""
        warnings.warn(
            f"{pattern!r}: planning took {seconds:.1f} s{compared}; {_ADVICE}{why}",
            PlanningWarning,
            stacklevel=_caller_level(),
        )
    return plan


def _caller_level() -> int:
    """Return the `stacklevel`, in the function that calls this one, of the first frame outside the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
