"""Protocol between the host code and the kernels of a GPU generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...arrays.operand import Operand
from ...choose.group_plans import Member
from ...patterns import Pattern
from ...patterns.dynamic import Form
from ...planning import Plan
from ...request.call import Call
from ...schedule.placement import Placement
from ...schedule.shard import Sharding
from ...schedule.shard_gradients import GradientShare
from ..driver.device import Device
from ..driver.launch import Launch, Request
from .backward_pass import BackwardPass
from .forward_pass import ForwardPass
from .score import TableSums

__all__ = ["CapturedGradients", "Family", "ForwardLaunches", "GradientLaunches", "Launcher", "MaskSource"]


class MaskSource(NamedTuple):
    """A device array of indices, (batch or 1, heads or 1, rows, n), and whether it is int64."""

    operand: Operand
    wide: bool


class ForwardLaunches(Protocol):
    """Kernels and parameters of one forward, or of a group that shares a launch, for any addresses, scales, streams.

    Attributes
    ----------
    computes : int
        Number of attention launches per call, 0 if it only combines partials.
    workspace_bytes : int
        Device memory that a call needs besides its results.
    moves : bool
        True if the launches bind `kv_len` at run time.
    counter : callable
        Returns the address of a task counter that no launch in flight uses.
    """

    computes: int
    workspace_bytes: int
    moves: bool
    counter: Callable[[], int]

    def write(
        self, problems: Sequence[tuple[Any, ...]], workspace: int, stream: int, early: int = 0, moved: int = 0
    ) -> list[Launch]:
        """Return a call's launches in order of dependency, attention first; the context must be current.

        `problems` holds (q, k, v, out, lse, scale, score, sinks) of each problem, addresses and a scale; `score` is
        the address of its ``ScoreArgs``, `sinks` that of its sinks, or 0. The first `early` launches may start before
        the stream's preceding launch ends. `moved` is kv_len minus the plan's kv_len. No other launches may write to
        the same addresses while the results are alive.
        """


class GradientLaunches(Protocol):
    """Kernels and parameters of backwards of fixed shapes and strides, for any addresses, scales and streams."""

    workspace_bytes: int
    counter: Callable[[], int]

    def write(self, call: BackwardPass, workspace: int) -> list[Launch]:
        """Return a call's launches, under the same conditions as for a forward; the context must be current."""


class StepLauncher(Protocol):
    """Makes launches from rows of bits, with the kernels of launches that it knows."""

    def add(self, launches: Any) -> bool:
        """Let later steps use the kernels of these launches, and return whether they can; the context must be
        current."""

    def of_rows(
        self, words: np.ndarray, variant: np.ndarray, k: Operand, v: Operand
    ) -> tuple[int, ForwardLaunches] | None:
        """Return launches, and the number of those whose kernels they use; see
        :meth:`.sm90.forward.steps.Steps.of_rows`."""


class Launcher(Protocol):
    """Prepares launches that PyTorch calls cache by address, grouped launches and launches with dynamic masks. The
    device's context must be current.

    Attributes
    ----------
    alignment : int
        Required alignment of the addresses of all arrays, in bytes.
    """

    alignment: int

    def prepare(self, call: ForwardPass) -> ForwardLaunches | None:
        """Return launches for forwards of these shapes and strides, for any kv_len if the plan is length-polymorphic;
        None if the kernels cannot address such arrays."""

    def prepare_backward(self, call: BackwardPass) -> GradientLaunches | None:
        """Return launches for backwards of these shapes and strides; None if the kernels cannot address such arrays."""

    def placement(self, plan: Plan, sizes: tuple[int, int, int, int, int], sharding: Sharding, /) -> Placement:
        """Return which ranks compute the items of a forward; `sizes` are batch, heads_q, heads_kv, head_dim and
        head_dim_v."""

    def stages(
        self, plan: Plan, sm_count: int, sizes: tuple[int, int, int, int, int], sharding: Sharding, rank: int, /
    ) -> GradientShare:
        """Return a rank's part of a backward."""

    def fuses(self, plan: Plan, device: Device, sizes: tuple[int, int, int], whole: tuple[int, int, int], /) -> bool:
        """Return whether the backward of some heads of a call computes dQ, dK and dV together: sums of dQ then have an
        order, for which heads wait that run at the same time. Sizes are batch, heads_q and heads_kv."""

    def group_key(self, dtype: str, head_dim: int, head_dim_v: int) -> tuple[Any, ...]:
        """Return the key of calls that may share a launch."""

    def plans(self, members: Mapping[int, Member], device: Device) -> dict[int, Plan]:
        """Plan calls with one key: choose their tiles, and which lists to split."""

    def group(self, calls: Mapping[int, ForwardPass]) -> Sequence[tuple[list[int], ForwardLaunches]]:
        """Return launches, in order, each with its call indices; omit calls whose arrays the kernels cannot address."""

    def steps(self, workers: int, staging: Any, /) -> StepLauncher:
        """Return what makes launches of steps of generation; see :class:`.sm90.forward.steps.Steps`."""

    def forward_masked(self, call: ForwardPass, form: Form, sources: tuple[MaskSource, ...]) -> None:
        """Enqueue a forward over the pairs of its plan that a dynamic mask allows; raise ValueError if the kernels
        cannot address its arrays."""


class CapturedGradients(Protocol):
    """Computes gradients of the arrays that a score function captures."""

    @property
    def wanted(self) -> Sequence[int]:
        """The arrays that need a gradient."""

    def begin(self, call: BackwardPass) -> None:
        """Prepare for the backward of a call: set its `table_sums` if a fused backward may compute the gradients."""

    def sums(self, words: int = 0) -> TableSums:
        """Return the `table_sums` of calls, with accumulators at address `words`."""

    def requests(self, call: BackwardPass) -> list[Request]:
        """Return the requests for the kernels that :meth:`enqueue` launches."""

    def enqueue(self, call: BackwardPass, results: Sequence[Operand], nonfinite: int) -> None:
        """Enqueue all kernels; `results` are the gradients of the `wanted` arrays, `nonfinite` is the return value of
        :meth:`Family.backward`. The context must be current."""


class Family(Protocol):
    """Kernels of one GPU generation.

    Attributes
    ----------
    name : str
        Shown in the log.
    launcher : Launcher or None
        None if every call prepares its own launches.
    fewest_queries : int
        Calls with fewer queries run on the portable family.
    """

    name: str
    fewest_queries: int
    launcher: Launcher | None

    def supports(self, device: Device, dtype: str, head_dim: int, head_dim_v: int) -> bool:
        """True if the kernels support a problem, given arrays that they can address."""

    def tile(self, device: Device, dtype: str, head_dim: int) -> tuple[int, int]:
        """Return the tile shape (block_q, block_kv) of plans; `head_dim` is the larger of q's and v's."""

    def accepts(self, plan: Plan, backward: bool = False) -> bool:
        """True if the forward, or the backward, executes the plan: its tiles, permutation and gathered KV."""

    def plan_for(self, pattern: Pattern, call: Call, device: Device, max_bytes: int | None, backward: bool) -> Plan:
        """Plan a call's forward, or its backward, with lists split for the device's SMs."""

    def forward(self, call: ForwardPass) -> None:
        """Enqueue a forward, by another family if these kernels cannot address its arrays; the context is current."""

    def backward(self, call: BackwardPass) -> int:
        """Enqueue a backward; see :meth:`forward`.

        Returns
        -------
        int
            0 if the backward computes no gradients of captured arrays. Otherwise it adds them to the call's
            `table_sums`, and this is the address of a device flag that is 0 if they are finite.
        """

    def backward_requests(self, call: BackwardPass) -> list[Request]:
        """Return the requests for the kernels of a backward, which reads only the alignment of its addresses; the
        context is current."""
