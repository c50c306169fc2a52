"""Dispatch of calls on concrete arrays: find their backend and plan, and cache both."""

from ._efficiency import may_lose
from .calls import CONSTANT, attention, attention_backward
from .plans import backend_for, check_grid, find_plan, name_for, resolve

__all__ = [
    "CONSTANT",
    "attention",
    "attention_backward",
    "backend_for",
    "check_grid",
    "find_plan",
    "may_lose",
    "name_for",
    "resolve",
]
