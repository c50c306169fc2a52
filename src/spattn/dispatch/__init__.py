"""Dispatch of calls on concrete arrays: find their backend and plan, and cache both."""

from .calls import CONSTANT, attention, attention_backward
from .plans import as_pattern, backend_for, check_grid, check_mask, find_plan, name_for

__all__ = [
    "CONSTANT",
    "as_pattern",
    "attention",
    "attention_backward",
    "backend_for",
    "check_grid",
    "check_mask",
    "find_plan",
    "name_for",
]
