"""The portable kernels as a family: compute capability 8.0 and later, all dtypes."""

from __future__ import annotations

from ...choose.machine_gpu import workers_of
from ...patterns import Pattern
from ...planning import Plan
from ...request.call import Call
from ...schedule import compiler
from ..driver.device import Device
from ..driver.launch import Request
from ..host.backward_pass import BackwardPass
from ..host.family import Launcher
from ..host.forward_pass import ForwardPass
from . import backward, forward

__all__ = ["FAMILY"]


class _Portable:
    """See :class:`~spattn.cuda.host.family.Family`."""

    name = forward.NAME
    launcher: Launcher | None = None
    fewest_queries = 0

    def supports(self, device: Device, dtype: str, head_dim: int, head_dim_v: int) -> bool:
        return all(1 <= dim <= forward.LARGEST_HEAD_DIM for dim in (head_dim, head_dim_v))

    def tile(self, device: Device, dtype: str, head_dim: int) -> tuple[int, int]:
        return forward.tile(device, dtype, head_dim)

    def accepts(self, plan: Plan, backward: bool = False) -> bool:
        return not plan.ordered and forward.accepts(plan.block_q, plan.block_kv)

    def plan_for(self, pattern: Pattern, call: Call, device: Device, max_bytes: int | None, backward: bool) -> Plan:
        tile = self.tile(device, call.dtype, max(call.head_dim, call.head_dim_v))
        each = workers_of(call.batch, call.heads_q, device.sm_count)
        return compiler.plan_for(pattern, call, tile, each, max_bytes, tile_by_tile=True)

    def forward(self, call: ForwardPass) -> None:
        forward.forward(call)

    def backward(self, call: BackwardPass) -> int:
        backward.backward(call)
        return 0

    def backward_requests(self, call: BackwardPass) -> list[Request]:
        return backward.requests(call)


FAMILY = _Portable()
