"""Backend protocol and registry; backends are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from ._util.imports import whole_imports
from .errors import BackendUnavailableError
from .patterns import Pattern
from .planning import Plan
from .request.call import Call

if TYPE_CHECKING:
    from .patterns.dynamic import MaskedPattern
    from .request.score import ScoreOperands

__all__ = [
    "Backend",
    "CompilingBackend",
    "Execution",
    "GroupingBackend",
    "Limits",
    "PredictingBackend",
    "PreparedBackward",
    "PreparedForward",
    "PreparedGroup",
    "RowsBackend",
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
        Whether the backend takes NumPy arrays; the dispatch then converts host arrays of other libraries. Otherwise
        the backend takes the arrays of every library.
    precisions : tuple of str
        Supported values of `precision` in addition to None, the precision of the dtype.
    moves : bool
        Whether a cached dispatch binds ``kv_len`` at run time if its plan is length-polymorphic.
    grows : bool
        Likewise, if the tile lists of its plan grow with ``kv_len``.
    groups : bool
        Whether several calls can share a launch: the backend is a :class:`GroupingBackend`.
    selects : bool
        Whether dynamic masks are supported: the backend is a :class:`DynamicMaskBackend`.
    compiles : bool
        Whether kernels are compiled at first use: the backend is a :class:`CompilingBackend`.
    predicts : bool
        Whether the cost model predicts calls on this machine: the backend is a :class:`PredictingBackend`.
    rows: bool
        Whether calls of few queries are planned by their rows in each call: the backend is a :class:`RowsBackend`.
    """

    host_arrays: bool
    precisions: tuple[str, ...] = ()
    moves: bool = False
    grows: bool = False
    groups: bool = False
    selects: bool = False
    compiles: bool = False
    predicts: bool = False
    rows: bool = False


class Execution(NamedTuple):
    """How a backend executes a call, in words.

    Parameters
    ----------
    kernels : str
        Instruction set or kernel family, and device.
    arithmetic : str
        Arithmetic of the matrix products.
    workers : int
        Threads of the CPU, or SMs of the GPU.
    workers_reason : str
        Unit of `workers`, and the limit on their number.
    advice : str or None
        What would be faster, if the kernels alone determine it.
    """

    kernels: str
    arithmetic: str
    workers: int
    workers_reason: str
    advice: str | None = None


class PreparedForward(Protocol):
    """The cached dispatch of a forward pass, after all checks, the plan and the kernel choice."""

    def __call__(self, q: Any, k: Any, v: Any, scale: float, score: ScoreOperands | None = None) -> tuple[Any, Any]:
        """Return (out, lse); lse may be None if the cached dispatch was prepared without it.

        `score` has the values of a score function, sinks and dropout, for a call that was prepared with them.
        """


class PreparedBackward(Protocol):
    """The cached dispatch of a backward pass."""

    def __call__(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dlse: Any,
        scale: float,
        score: ScoreOperands | None = None,
    ) -> tuple[Any, ...]:
        """Return (dq, dk, dv); None as `dlse` means zeros.

        With `score`, return (dq, dk, dv, the gradient of each captured array or None unless wanted, that of the sinks
        or None).
        """


class PreparedGroup(Protocol):
    """The cached dispatch of several forward passes in one launch."""

    def __call__(
        self, operands: Sequence[tuple[Any, Any, Any]], scales: Sequence[float]
    ) -> list[tuple[Any, Any] | None]:
        """Return (out, lse) for each call, or None if the addresses of its arrays require a launch of its own."""


class Backend(Protocol):
    """A module that executes plans.

    Implementations raise ``ValueError`` for a plan that is invalid, unsupported, or made for another call.
    """

    LIMITS: Limits

    def unavailable(self) -> str | None:
        """Return why the backend cannot run here and how to fix it, or None; have no lasting side effects."""

    def info(self) -> dict[str, object]:
        """Return facts for :func:`spattn.show_versions`."""

    def memory(self, call: Call) -> int:
        """Return the total size in bytes of the memory that holds the results of a call."""

    def plan_for(self, pattern: Pattern, call: Call, max_bytes: int | None = None, *, backward: bool = False) -> Plan:
        """Plan `pattern` with the best tile shape and number of workers for `call`, or for its gradients.

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

    def execution(self, call: Call, plan: Plan) -> Execution:
        """Return how :meth:`prepare` would execute a plan."""

    def prepare(self, call: Call, plan: Plan) -> PreparedForward:
        """Return the cached dispatch of `call`.

        Parameters
        ----------
        call : Call
        plan : Plan
            A plan for the lengths and heads of the call. It is validated unless :func:`spattn.plan` made it.

        Returns
        -------
        callable
            A function from ``(q, k, v, scale)`` to ``(out, lse)``, for arrays with the dtype, shapes and strides of the
            call. With a length-polymorphic plan it accepts other ``kv_len`` too.

        Raises
        ------
        ValueError
            If the plan is invalid, made for another call, or unsupported by the backend.
        """

    def prepare_backward(self, call: Call, plan: Plan) -> PreparedBackward:
        """Return the cached dispatch of the gradients of `call`, if the backend has a backward.

        As :meth:`prepare`, but from ``(dout, q, k, v, out, lse, dlse, scale)`` to ``(dq, dk, dv)``.
        """


class PredictingBackend(Backend, Protocol):
    """A backend with a cost model."""

    def predicted_ms(self, plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> float:
        """Return the predicted milliseconds of a forward pass, on one CPU thread or on a GPU without host time."""

    def dense_ms(
        self, q_len: int, kv_len: int, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str
    ) -> float:
        """Return the predicted milliseconds of a forward pass over all pairs."""

    def cheaper(self, plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> Plan | None:
        """Return a plan of the same pattern with a lower predicted time, or None."""


class CompilingBackend(Backend, Protocol):
    """A backend that compiles kernels at their first use."""

    def compile_backward(self, call: Call, plan: Plan) -> None:
        """Start to compile the kernels of :meth:`prepare_backward` that are in no cache, and wait for none of them.

        The call of a kernel raises the errors of its compilation.
        """


class GroupingBackend(Backend, Protocol):
    """A backend that runs several calls in one launch; log messages have the numbers of the calls."""

    def together(self, calls: Mapping[int, tuple[Call, Plan, bool]]) -> list[dict[int, Plan]]:
        """Partition calls, given as (call, plan, whether the plan is fixed), into groups, each with its plans."""

    def prepare_group(self, calls: Mapping[int, tuple[Call, Plan]]) -> PreparedGroup:
        """Return the cached dispatch of calls that :meth:`together` grouped."""


class DynamicMaskBackend(Backend, Protocol):
    """A backend that reads block masks on the device."""

    def prepare_masked(self, call: Call, selected: MaskedPattern) -> PreparedForward:
        """Return the cached dispatch of `call` over the pairs that the arrays of `selected` allow at launch time."""


class RowsBackend(Backend, Protocol):
    """A backend that plans calls of few queries by their rows, so that all patterns share a cached dispatch."""

    def by_rows(self, pattern: Pattern, call: Call, kv_len: int) -> bool:
        """Return whether the forward pass of `call`, with `kv_len` keys instead of its own, is planned by rows."""

    def prepare_rows(self, call: Call) -> Callable[[Pattern], PreparedForward]:
        """Return a function from any pattern that is planned by rows to its cached dispatch, for any ``kv_len``."""


def names() -> list[str]:
    """Return the names of all backends, available or not."""
    return list(_MODULES)


def why_unavailable(name: str) -> str | None:
    """Return None if the backend runs here, else what is missing and how to fix it."""
    try:
        module = module_of(name)
    except ImportError as error:
        return f"{error}; build the compiled core: run pip install . in a clone of the spattn repository"
    return module.unavailable()


def module_of(name: str) -> Backend:
    """Return a backend's module, whether the backend can run here or not."""
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
