"""Backend protocols, and a registry of backends that are imported on demand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from ._util.imports import whole_imports
from .errors import BackendUnavailable
from .patterns import Pattern
from .planning import Plan
from .request.call import Call

if TYPE_CHECKING:
    from .patterns.dynamic import Selected

__all__ = [
    "Backend",
    "GroupingBackend",
    "Limits",
    "PredictingBackend",
    "PreparedBackward",
    "PreparedForward",
    "PreparedGroup",
    "SelectingBackend",
    "available_backends",
    "load",
    "module_of",
    "names",
    "why_unavailable",
]

_MODULES = {"cpu": "spattn.cpu", "cuda": "spattn.cuda", "reference": "spattn.reference"}


class Limits(NamedTuple):
    """Capabilities of a backend.

    Parameters
    ----------
    host_arrays : bool
        Whether it takes NumPy arrays only, to which the dispatcher converts host arrays of every library; otherwise it
        takes arrays of every library unchanged.
    precisions : tuple
        Supported values of `precision` besides None.
    moves : bool
        Whether a cached dispatch is length-polymorphic: it accepts other values of kv_len, at any address, for plans
        whose tiles lie at the two ends of the sequence.
    grows : bool
        Whether this also holds for plans whose full middle run depends on kv_len.
    groups : bool
        Whether it runs several calls in one launch: it is a :class:`GroupingBackend`.
    selects : bool
        Whether it supports dynamic masks: it is a :class:`SelectingBackend`.
    predicts : bool
        Whether it has a cost model for this machine: it is a :class:`PredictingBackend`.
    """

    host_arrays: bool
    precisions: tuple[str, ...] = ()
    moves: bool = False
    grows: bool = False
    groups: bool = False
    selects: bool = False
    predicts: bool = False


class PreparedForward(Protocol):
    """Cached dispatch of calls with one cache key: validated, planned, kernels selected."""

    def __call__(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
        """Return (out, lse); lse may be None if the prepared call has return_lse=False."""


class PreparedBackward(Protocol):
    """Cached dispatch of backward calls with one cache key."""

    def __call__(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, scale: float
    ) -> tuple[Any, ...]:
        """Return (dq, dk, dv); a `dlse` of None means zeros."""


class PreparedGroup(Protocol):
    """Cached dispatch of a group of calls with one cache key each."""

    def __call__(
        self, operands: Sequence[tuple[Any, Any, Any]], scales: Sequence[float]
    ) -> list[tuple[Any, Any] | None]:
        """Return (out, lse) for each call's (q, k, v); None if the addresses of its arrays require a separate call."""


class Backend(Protocol):
    """Module that executes plans."""

    LIMITS: Limits

    def unavailable(self) -> str | None:
        """Return why the backend cannot run here and how to fix it, or None; without lasting side effects."""

    def info(self) -> dict[str, object]:
        """Return facts for :func:`spattn.show_versions`."""

    def memory(self, call: Call) -> int:
        """Return the total bytes of the memory that holds the results of a call."""

    def plan_for(self, pattern: Pattern, call: Call, max_bytes: int | None = None, *, backward: bool = False) -> Plan:
        """Plan the pattern with the best tile size and number of workers for a call, or for its backward."""

    def accepts(self, plan: Plan, call: Call, *, backward: bool = False) -> bool:
        """Whether :meth:`prepare`, or :meth:`prepare_backward`, accepts a valid plan of matching lengths and heads."""

    def prepare(self, call: Call, plan: Plan) -> PreparedForward:
        """Prepare a call; the result serves all calls that differ in values, addresses and scale only."""

    def prepare_backward(self, call: Call, plan: Plan) -> PreparedBackward:
        """Prepare the backward of a call, like :meth:`prepare`."""


class PredictingBackend(Backend, Protocol):
    """Backend with a cost model."""

    def predicted_ms(self, plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> float:
        """Predict the milliseconds of a forward pass, on one CPU thread or on a GPU without host overhead."""

    def dense_ms(
        self, q_len: int, kv_len: int, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str
    ) -> float:
        """Predict the milliseconds of a dense forward pass."""

    def cheaper(self, plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> Plan | None:
        """Return a plan of the same pattern with a lower predicted time, or None."""


class GroupingBackend(Backend, Protocol):
    """Backend that runs several calls in one launch; calls are numbered as in the log."""

    def together(self, calls: Mapping[int, tuple[Call, Plan, bool]]) -> list[dict[int, Plan]]:
        """Partition the calls into groups, and plan each group. Each call comes with its plan for a separate call, and
        whether the group must use that plan."""

    def prepare_group(self, calls: Mapping[int, tuple[Call, Plan]]) -> PreparedGroup:
        """Prepare a group from :meth:`together`, like :meth:`prepare`."""


class SelectingBackend(Backend, Protocol):
    """Backend that supports dynamic masks, read on the device."""

    def prepare_selected(self, call: Call, selected: Selected) -> PreparedForward:
        """Prepare a call with a dynamic mask, like :meth:`prepare`; each execution reads the current mask arrays."""


def names() -> list[str]:
    """Return the names of all backends, available or not."""
    return list(_MODULES)


def why_unavailable(name: str) -> str | None:
    """Return what a backend lacks to run here and how to fix it, or None if it is available."""
    try:
        module = module_of(name)
    except ImportError as error:
        return f"{error}; build the compiled core: run pip install . in a clone of the spattn repository"
    return module.unavailable()


def module_of(name: str) -> Backend:
    """Import the module of a backend, available or not."""
    with whole_imports:
        return cast(Backend, importlib.import_module(_MODULES[name]))


def available_backends() -> list[str]:
    """Return the names of the backends that can run on this machine.

    Returns
    -------
    list of str
        A subset of "cpu", "cuda" and "reference".

    Examples
    --------
    >>> import spattn
    >>> "cpu" in spattn.available_backends()
    True
    """
    return [name for name in _MODULES if why_unavailable(name) is None]


def load(name: str) -> Backend:
    """Import an available backend; raise ValueError for an unknown name, BackendUnavailable if it cannot run here."""
    if name not in _MODULES:
        raise ValueError(f"backend: expected 'auto' or one of {', '.join(_MODULES)}; got {name!r}")
    reason = why_unavailable(name)
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r} is not available: {reason}")
    return module_of(name)
