"""Plans: what a pattern allows, as tiles over affine views, and who computes them; every backend executes the same."""

from __future__ import annotations

from ._cache import PlanCacheInfo, clear_plan_cache, plan_cache_info
from ._sealed import validate
from ._types import Plan, positions

__all__ = ["Plan", "PlanCacheInfo", "clear_plan_cache", "plan_cache_info", "positions", "validate"]
