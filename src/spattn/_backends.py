"""Backends by name. Nothing is imported before it is asked for.

A backend is a module with

- ``unavailable() -> str | None``: why it cannot run here and what fixes it, without side effects that last;
- ``plan_for(pattern, q, k, v) -> Plan``: the plan with the tile shape that its kernels want for these arrays;
- ``forward(q, k, v, plan, scale) -> (out, lse)``; on device arrays also with ``precision``, None or "tf32";
- ``backward(dout, q, k, v, out, lse, plan, scale) -> (dq, dk, dv)`` where it has one;
- ``HOST_ARRAYS``: whether it works on NumPy arrays (True) or on any framework's device arrays (False).
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ._errors import BackendUnavailable

_MODULES = {"cpu": "spattn.cpu", "cuda": "spattn.cuda", "reference": "spattn.reference"}


def names() -> list[str]:
    """All backends, available or not."""
    return list(_MODULES)


def why_unavailable(name: str) -> str | None:
    """None when the backend runs here, otherwise what is missing and the fix."""
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        return f"{error}; build spattn with its compiled core: pip install . in a clone of its repository"
    return module.unavailable()


def available_backends() -> list[str]:
    """Names of the backends that run on this machine.

    Returns
    -------
    list of str
        Among "cpu", "cuda" and "reference".

    Examples
    --------
    >>> import spattn
    >>> "cpu" in spattn.available_backends()
    True
    """
    return [name for name in _MODULES if why_unavailable(name) is None]


def load(name: str) -> ModuleType:
    """The backend's module.

    Raises
    ------
    ValueError
        If there is no backend of this name.
    BackendUnavailable
        If it cannot run here. It never gives way to another one silently.
    """
    if name not in _MODULES:
        raise ValueError(f"backend: expected 'auto' or one of {', '.join(_MODULES)}; got {name!r}")
    reason = why_unavailable(name)
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r} is not available: {reason}")
    return importlib.import_module(_MODULES[name])
