"""spattn: exact sparse attention on CPU and GPU, at a cost that follows the allowed (query, key) pairs."""

from . import patterns
from ._api import attention, attention_backward, plan
from ._backends import available_backends
from ._errors import BackendUnavailable
from ._versions import show_versions
from .plan import Plan, PlanCacheInfo, clear_plan_cache, plan_cache_info

__all__ = [
    "BackendUnavailable", "Plan", "PlanCacheInfo", "attention", "attention_backward", "available_backends",
    "clear_plan_cache", "patterns", "plan", "plan_cache_info", "show_versions",
]  # fmt: skip
