"""What a backend is, and which there are by name. None is imported before it is asked for."""

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
    """What a backend takes.

    Parameters
    ----------
    host_arrays : bool
        Whether it works on NumPy arrays, as which arrays of every kind in host memory are handed to it; otherwise on
        arrays of every kind as they come.
    precisions : tuple
        Of the products, beside None, which is that of the dtype.
    moves : bool
        Whether a prepared call goes where its plan moves: to other numbers of keys, wherever these lie in memory.
    grows : bool
        Whether it does so too where the plan grows between the ends of the sequence.
    groups : bool
        Whether it computes calls together: it is a :class:`GroupingBackend`.
    selects : bool
        Whether it computes what selections allow: it is a :class:`SelectingBackend`.
    predicts : bool
        Whether it predicts the time of calls on this machine: it is a :class:`PredictingBackend`.
    """

    host_arrays: bool
    precisions: tuple[str, ...] = ()
    moves: bool = False
    grows: bool = False
    groups: bool = False
    selects: bool = False
    predicts: bool = False


class PreparedForward(Protocol):
    """Computes calls of one signature: checks, plan and choice of kernels lie behind them."""

    def __call__(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
        """(out, lse); the lse may be None where the call that was prepared did not ask for it."""


class PreparedBackward(Protocol):
    """The same of gradients."""

    def __call__(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, scale: float
    ) -> tuple[Any, ...]:
        """(dq, dk, dv); `dlse` may be None, which stands for zeros."""


class PreparedGroup(Protocol):
    """Computes calls of one signature each together."""

    def __call__(
        self, operands: Sequence[tuple[Any, Any, Any]], scales: Sequence[float]
    ) -> list[tuple[Any, Any] | None]:
        """(out, lse) of each call's (q, k, v); None for one that must be made by itself, because of where its arrays
        are now."""


class Backend(Protocol):
    """A module that executes plans."""

    LIMITS: Limits

    def unavailable(self) -> str | None:
        """Why it cannot run here and what fixes it, without side effects that last; None when it can."""

    def info(self) -> dict[str, object]:
        """Facts for :func:`spattn.show_versions`."""

    def memory(self, call: Call) -> int:
        """Bytes of the memory that the results of a call lie in, used or free."""

    def plan_for(self, pattern: Pattern, call: Call, max_bytes: int | None = None, *, backward: bool = False) -> Plan:
        """The plan with the tiles and the number of workers that suit such a call, or its gradients."""

    def accepts(self, plan: Plan, call: Call, *, backward: bool = False) -> bool:
        """Whether :meth:`prepare`, or :meth:`prepare_backward`, takes a sound plan for these lengths and heads."""

    def prepare(self, call: Call, plan: Plan) -> PreparedForward:
        """What computes this call, and every other that differs from it in values, addresses and scale alone."""

    def prepare_backward(self, call: Call, plan: Plan) -> PreparedBackward:
        """The same of its gradients, where the limits say that there are any."""


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
    """One that computes calls together, which it is given by their numbers in the log."""

    def together(self, calls: Mapping[int, tuple[Call, Plan, bool]]) -> list[dict[int, Plan]]:
        """Which of the calls it computes together, with the plans that they have there. Of each is known the plan that
        it would have by itself, and whether it has to keep that."""

    def prepare_group(self, calls: Mapping[int, tuple[Call, Plan]]) -> PreparedGroup:
        """What computes calls that it has put together, and every other that differs from them in values, addresses
        and scale alone."""


class SelectingBackend(Backend, Protocol):
    """One that reads what is allowed on the device."""

    def prepare_selected(self, call: Call, selected: Selected) -> PreparedForward:
        """What computes this call, and every other that differs from it in values, addresses and scale alone, over what
        the selection's arrays allow at that time."""


def names() -> list[str]:
    """All backends, available or not."""
    return list(_MODULES)


def why_unavailable(name: str) -> str | None:
    """None when the backend runs here, otherwise what is missing and the fix."""
    try:
        module = module_of(name)
    except ImportError as error:
        return f"{error}; build spattn with its compiled core: pip install . in a clone of its repository"
    return module.unavailable()


def module_of(name: str) -> Backend:
    """A backend's module, whether it can run here or not."""
    with whole_imports:
        return cast(Backend, importlib.import_module(_MODULES[name]))


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


def load(name: str) -> Backend:
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
    return module_of(name)
