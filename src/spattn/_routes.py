"""Short ways for calls that repeat: what a call's checks, plan and kernels depend on, and what a backend made of it.

``backend.route(q, k, v, plan, default_scale)`` is a callable ``(q, k, v, scale or None) -> (out, lse) | None``, or None
itself; see the CUDA backend.
"""

from __future__ import annotations

import sys
from typing import Any

from .patterns import Pattern
from .plan import Plan

_CONSTANT = (Pattern, Plan, str)
_KEPT = 64

recent: dict[tuple, Any] = {}


def of_call(q, k, v, pattern, backend) -> tuple[dict, tuple | None]:
    """Where the routes of such calls are kept, and under which key: whatever the checks, the plan and the choice of
    kernels depend on. None for arrays or patterns that may change while they look the same.

    Routes of a plan are kept with it, so that they do not outlive it.
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if not (type(q) is type(k) is type(v) is tensor) or not isinstance(pattern, _CONSTANT):
        return recent, None
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return recent, None
    routes = recent
    if isinstance(pattern, Plan):
        routes, pattern = pattern.cache, "route"
    try:
        return routes, (
            pattern, backend, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.shape, k.shape, v.shape,
            q.stride(), k.stride(), v.stride(),
        )  # fmt: skip
    except RuntimeError:  # of nested and sparse tensors, which have no shape or no strides
        return recent, None


def remember(routes: dict, key: tuple, route) -> None:
    """Keep a route, or that there is none (None)."""
    if routes is recent and len(routes) >= _KEPT:
        routes.clear()
    routes[key] = route
