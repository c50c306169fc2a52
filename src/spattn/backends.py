"""Backend protocol and registry; backends are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from ._util.imports import whole_imports
from .errors import BackendUnavailableError
from .patterns import Pattern
from .planning import Plan
from .request.call import Call

if TYPE_CHECKING:
    from .patterns.dynamic import MaskedPattern

__all__ = [
    "Backend",
    "GroupingBackend",
    "Limits",
    "PredictingBackend",
    "PreparedBackward",
    "PreparedForward",
    "PreparedGroup",
    "DynamicMaskBackend",
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
        Whether the backend takes NumPy arrays; arrays of other libraries in host memory are then passed as such.
        Otherwise it takes the arrays of every array backend as they are.
    precisions : tuple of str
        Supported values of `precision` besides None, which is the precision of the dtype.
    moves : bool
        Whether a cached dispatch binds ``kv_len`` at run time where its plan is length-polymorphic.
    grows : bool
        The same for plans whose tile lists grow with ``kv_len``.
    groups : bool
        Whether several calls can share a launch: the backend is a :class:`GroupingBackend`.
    selects : bool
        Whether dynamic masks are supported: the backend is a :class:`DynamicMaskBackend`.
    predicts : bool
        Whether the cost model predicts calls on this machine: the backend is a :class:`PredictingBackend`.
    """

    host_arrays: bool
    precisions: tuple[str, ...] = ()
    moves: bool = False
    grows: bool = False
    groups: bool = False
    selects: bool = False
    predicts: bool = False


class PreparedForward(Protocol):
    """Cached dispatch of a forward: all checks, the plan and the kernel choice are done."""

    def __call__(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
        """Return (out, lse); lse may be None if the cached dispatch was prepared without it."""


class PreparedBackward(Protocol):
    """Cached dispatch of a backward."""

    def __call__(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, scale: float
    ) -> tuple[Any, ...]:
        """Return (dq, dk, dv); `dlse` None means zeros."""


class PreparedGroup(Protocol):
    """Cached dispatch of several forwards in one launch."""

    def __call__(
        self, operands: Sequence[tuple[Any, Any, Any]], scales: Sequence[float]
    ) -> list[tuple[Any, Any] | None]:
        """Return (out, lse) of each call; None for a call whose current array addresses require a launch of its own."""


class Backend(Protocol):
    """A module that executes plans.

    Implementations raise ``ValueError`` for a plan that is invalid, made for another call, or unsupported.
    """

    LIMITS: Limits

    def unavailable(self) -> str | None:
        """Return why the backend cannot run here and how to fix it, or None; leaves no lasting side effects."""

    def info(self) -> dict[str, object]:
        """Return facts for :func:`spattn.show_versions`."""

    def memory(self, call: Call) -> int:
        """Return the capacity in bytes, used or free, of the memory that holds the results of a call."""

    def plan_for(self, pattern: Pattern, call: Call, max_bytes: int | None = None, *, backward: bool = False) -> Plan:
        """Plan `pattern` with the tile shape and worker count for `call`, or for its gradients.

        Parameters
        ----------
        pattern : Pattern
        call : Call
        max_bytes : int, optional
            As for :func:`spattn.plan`.
        backward : bool
            Whether the plan is for the gradients.

        Raises
        ------
        ValueError
            If the pattern does not fit the shapes, or the plan exceeds `max_bytes`.
        """

    def accepts(self, plan: Plan, call: Call, *, backward: bool = False) -> bool:
        """Return whether :meth:`prepare`, or :meth:`prepare_backward`, supports a valid plan for this call."""

    def prepare(self, call: Call, plan: Plan) -> PreparedForward:
        """Return the cached dispatch of `call`.

        Parameters
        ----------
        call : Call
        plan : Plan
            For the lengths and heads of the call. Validated at its first use unless :func:`spattn.plan` made it.

        Returns
        -------
        callable
            ``(q, k, v, scale)`` to ``(out, lse)``, for arrays with the dtype, shapes and strides of the call; a
            length-polymorphic plan also accepts other ``kv_len``.

        Raises
        ------
        ValueError
            If the plan is invalid, made for another call, or unsupported by the backend.
        """

    def prepare_backward(self, call: Call, plan: Plan) -> PreparedBackward:
        """Return the cached dispatch of the gradients of `call`, if the backend has a backward.

        As :meth:`prepare`, but ``(dout, q, k, v, out, lse, dlse, scale)`` to ``(dq, dk, dv)``.
        """


class PredictingBackend(Backend, Protocol):
    """A backend with a cost model."""

    def predicted_ms(self, plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> float:
        """Predicted milliseconds of a forward: on one thread of the CPU, or on a GPU without the host's time."""

    def dense_ms(
        self, q_len: int, kv_len: int, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str
    ) -> float:
        """Predicted time of a forward over all pairs in milliseconds."""

    def cheaper(self, plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> Plan | None:
        """A plan of the same pattern with a lower predicted time, or None."""


class GroupingBackend(Backend, Protocol):
    """A backend that runs several calls in one launch; calls are identified by their numbers in the log."""

    def together(self, calls: Mapping[int, tuple[Call, Plan, bool]]) -> list[dict[int, Plan]]:
        """Partition calls, given as (call, plan, whether the plan is fixed), into launches with their plans."""

    def prepare_group(self, calls: Mapping[int, tuple[Call, Plan]]) -> PreparedGroup:
        """Return the cached dispatch of calls that :meth:`together` grouped."""


class DynamicMaskBackend(Backend, Protocol):
    """A backend that reads block masks on the device."""

    def prepare_masked(self, call: Call, selected: MaskedPattern) -> PreparedForward:
        """Return the cached dispatch of `call` over the pairs that the arrays of `selected` allow at launch time."""


def names() -> list[str]:
    """Return the names of all backends, available or not."""
    return list(_MODULES)


def why_unavailable(name: str) -> str | None:
    """Return None if the backend runs here, else what is missing and the fix."""
    try:
        module = module_of(name)
    except ImportError as error:
        return f"{error}; build the compiled core: run pip install . in a clone of the spattn repository"
    return module.unavailable()


def module_of(name: str) -> Backend:
    """A backend's module, whether it can run here or not."""
    with whole_imports:
        return cast(Backend, importlib.import_module(_MODULES[name]))


def available_backends() -> list[str]:
    """Return the names of the backends that run on this machine.

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


def load(name: str) -> Backend:
    """Import and return a backend's module.

    Raises
    ------
    ValueError
        If there is no backend of this name.
    BackendUnavailableError
        If the backend cannot run here. There is no silent fallback to another backend.
    """
    if name not in _MODULES:
        raise ValueError(f"backend: expected 'auto' or one of {', '.join(_MODULES)}; got {name!r}")
    reason = why_unavailable(name)
    if reason is not None:
        raise BackendUnavailableError(f"backend {name!r} is not available: {reason}")
    return module_of(name)
