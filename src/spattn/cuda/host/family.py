"""What a kernel family provides: the protocol between the host code and the kernels of a GPU generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ...arrays.operand import Operand
from ...choose.group_plans import Member
from ...patterns import Pattern
from ...patterns.dynamic import Form
from ...planning import Plan
from ...request.call import Call
from ..driver.device import Device
from ..driver.launch import Launch
from .backward_pass import BackwardPass
from .forward_pass import ForwardPass

__all__ = ["Family", "ForwardLaunches", "GradientLaunches", "Launcher", "MaskSource"]


class MaskSource(NamedTuple):
    """A device array of indices, (batch or 1, heads or 1, rows, n), and whether it is int64."""

    operand: Operand
    wide: bool


class ForwardLaunches(Protocol):
    """Kernels and parameters of forwards that share a launch, one or a group, for any addresses, scales and streams.

    Attributes
    ----------
    computes : int
        Attention launches per call, 0 if only partials are combined.
    workspace_bytes : int
        Device memory that a call needs beside its results.
    moves : bool
        Whether the launches bind `kv_len` at run time.
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
        """The launches of a call, in order of dependency, the attention launches first; the context must be current.

        `problems` are addresses and scale, (q, k, v, out, lse, scale), of each problem. The first `early` launches may
        start before the preceding launch of the stream ends. `moved` is kv_len minus the plan's. The launches are
        exclusive to a call: no others write to the same addresses while its results are alive.
        """


class GradientLaunches(Protocol):
    """Kernels and parameters of backwards of fixed shapes and strides, for any addresses, scales and streams."""

    workspace_bytes: int
    counter: Callable[[], int]

    def write(self, call: BackwardPass, workspace: int) -> list[Launch]:
        """The launches of a call, exclusive to it as those of a forward; the context must be current."""


class Launcher(Protocol):
    """Launches that PyTorch calls cache by address, grouped launches, and dynamic masks; the device's context is
    current."""

    def prepare(self, call: ForwardPass) -> ForwardLaunches | None:
        """The launches of forwards of these shapes and strides, for any kv_len if the plan is length-polymorphic; None
        if the kernels cannot address such arrays."""

    def prepare_backward(self, call: BackwardPass) -> GradientLaunches | None:
        """The launches of backwards of these shapes and strides; None if the kernels cannot address such arrays."""

    def group_key(self, dtype: str, head_dim: int, head_dim_v: int) -> tuple[Any, ...]:
        """Key of the calls that may share a launch."""

    def plans(self, members: Mapping[int, Member], device: Device) -> dict[int, Plan]:
        """Plans of calls with one key: their tiles, and which lists are split."""

    def group(self, calls: Mapping[int, ForwardPass]) -> Sequence[tuple[list[int], ForwardLaunches]]:
        """Launches of calls with one key, each with the numbers of its calls, in launch order; without the calls whose
        arrays a grouped launch cannot address."""

    def forward_masked(self, call: ForwardPass, form: Form, sources: tuple[MaskSource, ...]) -> None:
        """Enqueue a forward over the pairs of its plan that a dynamic mask allows; raises ValueError if the kernels
        cannot address its arrays."""


class Family(Protocol):
    """The kernels of one GPU generation.

    Attributes
    ----------
    name : str
        In the log.
    launcher : Launcher or None
        None if each call writes its launches anew.
    """

    name: str
    launcher: Launcher | None

    def supports(self, device: Device, dtype: str, head_dim: int, head_dim_v: int) -> bool:
        """Whether the kernels support a problem, if they can address its arrays."""

    def tile(self, device: Device, dtype: str, head_dim: int) -> tuple[int, int]:
        """Tile shape (block_q, block_kv) of plans; `head_dim` is the larger of q's and v's."""

    def accepts(self, plan: Plan, backward: bool = False) -> bool:
        """Whether the forward, or the backward, executes such a plan: its tile shape, ordered and gathered or not."""

    def plan_for(self, pattern: Pattern, call: Call, device: Device, max_bytes: int | None, backward: bool) -> Plan:
        """Plan for the forward of a call, or for its backward, with lists split for the SMs of the device."""

    def forward(self, call: ForwardPass) -> None:
        """Enqueue a forward, with the kernels of another family if these cannot address its arrays; the device's
        context must be current."""

    def backward(self, call: BackwardPass) -> None:
        """Enqueue a backward, as :meth:`forward`."""
