"""Exact sparse attention on CPU and GPU, at a cost proportional to the allowed pairs."""

from typing import TYPE_CHECKING

from . import patterns, score
from ._util.imports import whole_imports
from .api.attention import attention, attention_backward
from .api.plans import Tiling, plan, plan_for
from .backends import available_backends
from .errors import BackendUnavailableError, EfficiencyWarning, PlanningWarning
from .planning import Plan, PlanCacheInfo, clear_plan_cache, plan_cache_info

__all__ = [
    "BackendUnavailableError",
    "EfficiencyWarning",
    "KVCache",
    "Plan",
    "PlanCacheInfo",
    "PlanningWarning",
    "Tiling",
    "__version__",
    "attention",
    "attention_backward",
    "available_backends",
    "clear_plan_cache",
    "explain",
    "float8_attention",
    "grouped_attention",
    "merge_attentions",
    "patterns",
    "plan",
    "plan_cache_info",
    "plan_for",
    "score",
    "set_num_threads",
    "show_versions",
    "threads",
    "verify",
]

if TYPE_CHECKING:
    from .api.explain import explain
    from .api.float8 import float8_attention
    from .api.grouped import grouped_attention
    from .api.kv_cache import KVCache
    from .api.merge import merge_attentions
    from .api.versions import show_versions
    from .cpu import set_num_threads, threads
    from .testing.verify import verify

    __version__: str


def __getattr__(name: str) -> object:
    """Import rarely used names on first access; reading package metadata is slow."""
    with whole_imports:
        if name == "float8_attention":
            from .api.float8 import float8_attention

            return float8_attention
        if name == "grouped_attention":
            from .api.grouped import grouped_attention

            return grouped_attention
        if name == "KVCache":
            from .api.kv_cache import KVCache

            return KVCache
        if name == "explain":
            from .api.explain import explain

            return explain
        if name == "merge_attentions":
            from .api.merge import merge_attentions

            return merge_attentions
        if name in ("set_num_threads", "threads"):
            from . import cpu

            return getattr(cpu, name)
        if name == "verify":
            from .testing.verify import verify

            return verify
        if name in ("__version__", "show_versions"):
            from .api import versions as _versions

            return _versions.version() if name == "__version__" else _versions.show_versions
        from ._util.renamed import unknown

    raise unknown(__name__, name)
