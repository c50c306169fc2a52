"""Warn about plans that take long to make."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

from .._util.making import making
from ..errors import PlanningWarning
from ..patterns import Pattern
from ..planning import Plan

__all__ = ["warned"]

_SECONDS = 1.0
_TIMES, _LEAST_SECONDS = 10, 0.25  # times the predicted call; shorter plans are never worth a warning
_ADVICE = "make the plan once, with spattn.plan or spattn.plan_for, and pass it to all calls"


def warned(pattern: Pattern, make: Callable[[], Plan], predicted_ms: Callable[[Plan], float] | None = None) -> Plan:
    """Return ``make()``; warn if it takes more than a second, or ten times the predicted call, of processor time.

    Plans that are made within share intermediate results, and do not warn.
    """
    start = time.thread_time()
    with making() as reasons:
        plan = make()
    seconds = time.thread_time() - start
    if reasons is None or seconds < _LEAST_SECONDS:
        return plan
    call_ms = float("inf") if predicted_ms is None else predicted_ms(plan)
    if seconds > _SECONDS or 1e3 * seconds > _TIMES * call_ms:
        compared = "" if predicted_ms is None else f", a call is predicted to take {call_ms:.3g} ms"
        why = f"; {reasons[0]}" if reasons else ""
        warnings.warn(
            f"{pattern!r}: planning took {seconds:.1f} s{compared}; {_ADVICE}{why}", PlanningWarning, stacklevel=3
        )
    return plan
