"""Short ways for calls that repeat: what a call's checks, plan and kernels depend on, and what a backend made of it.

``backend.route(q, k, v, plan, default_scale)`` is a callable ``(q, k, v, scale or None) -> (out, lse) | None``, or None
itself; see the CUDA backend.
"""

from __future__ import annotations

import sys

from .patterns import Pattern
from .plan import Plan
from .plan._cache import routes as recent
from .plan._cache import size_of
from .plan._sealed import sealed

_CONSTANT = (Pattern, Plan, str)
_KEPT = 64
_MAX_BYTES = 64 << 20  # of the patterns that recent calls keep alive


def of_call(q, k, v, pattern, backend) -> tuple[dict, tuple | None]:
    """Where the routes of such calls are kept, and under which key: whatever the checks, the plan and the choice of
    kernels depend on. None for arrays or patterns that may change while they look the same.

    Routes of a plan are kept with it, so that they do not outlive it; :func:`spattn.clear_plan_cache` forgets the
    others.
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if not (type(q) is type(k) is type(v) is tensor) or not isinstance(pattern, _CONSTANT):
        return recent, None
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return recent, None
    routes = recent
    if isinstance(pattern, Plan):
        routes, pattern = sealed(pattern).routes, "route"
    try:
        return routes, (
            pattern, backend, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.shape, k.shape, v.shape,
            q.stride(), k.stride(), v.stride(),
        )  # fmt: skip
    except RuntimeError:  # of nested and sparse tensors, which have no shape or no strides
        return recent, None


def remember(routes: dict, key: tuple, route) -> None:
    """Keep a route, or that there is none (None)."""
    patterns = {id(key[0]): key[0] for key in (key, *routes.copy())}
    if len(routes) >= _KEPT or sum(map(size_of, patterns.values())) > _MAX_BYTES:
        routes.clear()
    routes[key] = route
