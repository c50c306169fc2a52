"""Plans: a pattern compiled to tiles over affine views, for every backend."""

from __future__ import annotations

from .contract.cache import PlanCacheInfo, clear_plan_cache, plan_cache_info
from .contract.types import Plan, positions
from .contract.validated import validate

__all__ = ["Plan", "PlanCacheInfo", "clear_plan_cache", "plan_cache_info", "positions", "validate"]
