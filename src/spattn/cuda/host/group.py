"""Grouped launches of PyTorch calls on the Hopper kernels: one launch per query tile size.

Everything that depends on plans, shapes, strides and dtypes only is computed once; launches are cached by address, as
for single calls (:mod:`spattn.cuda.host.repeat`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..._util.cached import Recent
from ..._util.limits import environment
from ...arrays.operand import memory_order, row_major
from ...planning.contract.types import Plan
from ...request.call import Call
from ..driver.buffer import keep_if_captured, out_of_memory
from ..driver.device import Device, require_owner
from ..driver.launch import Launch, start
from ..sm90 import forward as hopper
from ..sm90.forward.group import GroupOnDevice, Part, cut, part_of
from ..sm90.forward.params import Addresses
from .forward_pass import ForwardPass

if TYPE_CHECKING:
    from ...arrays.torch import Torch

__all__ = ["Group", "OneLaunch", "say_alone", "why_alone"]

_LAUNCHES_KEPT = 64  # recent address tuples; allocators reuse addresses
_SUBSETS_KEPT = 8  # subsets of calls with addresses that TMA can read
_ALIGNMENT = 16  # bytes, required by TMA
_log = logging.getLogger("spattn.cuda")

Results = list[tuple[Any, Any] | None]


def why_alone(call: Call, plan: Plan | None, on_hopper: bool) -> str | None:
    """Why a call cannot join a group, or None if it can. Its plan may not exist yet."""
    if call.kind.name != "torch" or call.kind.ordinal(call.q) is None:
        return f"a group requires PyTorch tensors on a GPU, got {call.kind.name} arrays on {call.device}"
    if 0 in call.out_shape or call.kv_len == 0:
        return "nothing to compute"
    tile = hopper.TILE if plan is None else plan.tile
    if not on_hopper or not hopper.accepts(*tile):
        return f"the Hopper kernels do not support {call.dtype} in tiles of {tile[0]} × {tile[1]} on this device"
    if plan is not None and plan.ordered:
        return "its plan is ordered or gathered"
    return None


class _Member(NamedTuple):
    """State of one position of a group, constant over calls."""

    part: Part
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    like_q: bool  # whether q has this shape and these strides
    rows: tuple[int, ...]
    row_strides: tuple[int, ...]
    return_lse: bool
    partial_bytes: int  # of the partial rows, then of the whole workspace
    workspace: int

    @classmethod
    def of(cls, call: Call, plan: Plan, device: Device) -> _Member | None:
        """None for arrays that TMA cannot address."""
        kind, sizes = call.kind, [0]
        operands = kind.operand(call.q), kind.operand(call.k), kind.operand(call.v)
        out = kind.operand(kind.empty(call.q, call.out_shape, call.dtype, memory_order(operands[0])))

        def note(nbytes: int) -> int:
            sizes.append(nbytes)
            return 0

        part = part_of(ForwardPass(device, 0, plan, *operands, out, 0, call.dtype, call.scale, note, score=call.score))
        if part is None:
            return None
        partial_bytes = part.call.workspace()[1]
        like_q = call.out_shape == tuple(call.q.shape) and out.strides == operands[0].strides
        rows = call.rows
        wants = call.return_lse
        return cls(part, call.out_shape, out.strides, like_q, rows, row_major(rows), wants, partial_bytes, sizes[-1])


class _Written(NamedTuple):
    """A call of OneLaunch, ready to start."""

    results: Results
    first: list[Launch]  # independent of other launches
    rest: list[Launch]
    workspace: Any


class OneLaunch:
    """Calls computed by one launch and its combines; the device's context must be current.

    `beside`: the preceding launch belongs to the same group, so that both may run concurrently.
    """

    def __init__(self, numbers: Sequence[int], members: Sequence[_Member], torch: Torch, device: Device, beside: bool):
        self.numbers, self._members, self._torch, self._device = numbers, members, torch.module, device
        self._on_device, self._beside = GroupOnDevice([member.part for member in members], device), beside
        self._workspace_at, total = [], 0
        for member in members:
            self._workspace_at.append(total)
            total += -(-member.workspace // 256) * 256
        self._workspace = (total,) if total else None
        self._launches = Recent(_LAUNCHES_KEPT)

    @property
    def computes(self) -> bool:
        """Whether it has an attention launch."""
        return self._on_device.computes

    def write(self, operands: Sequence[tuple[Any, Any, Any]], scale: Sequence[float], stream: int) -> _Written:
        """Allocate the results; look up or make the launches that compute them."""
        numbers, wide, results = self.numbers, self._torch.float32, []
        key: list[Any] = [stream]
        try:
            for number, member in zip(numbers, self._members, strict=True):
                q, k, v = operands[number]
                out = self._torch.empty_like(q) if member.like_q else q.new_empty_strided(member.shape, member.strides)
                lse, lse_at = None, 0
                if member.return_lse:
                    lse = q.new_empty_strided(member.rows, member.row_strides, dtype=wide)
                    lse_at = lse.data_ptr()
                results.append((out, lse))
                key += q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_at, scale[number]
            workspace = self._workspace
            rest = q.new_empty_strided(workspace, (1,), dtype=self._torch.uint8) if workspace else None
        except self._torch.OutOfMemoryError as error:
            with self._device:
                raise out_of_memory(self._device, self._needed()) from error
        key.append(0 if rest is None else rest.data_ptr())
        found = tuple(key)
        first, following = self._launches.get(found) or self._write(found)
        return _Written(cast(Results, results), first, following, rest)

    def start(self, launches: list[Launch]) -> None:
        """Start some of the written launches; the device's context must be current."""
        start(launches, self._on_device.counter)

    def _write(self, key: tuple[Any, ...]) -> list[list[Launch]]:
        """Launches for these addresses, exclusive to one call: no other writes to them while its results are alive."""
        stream, *of_members, workspace = key
        to = []
        for number, (member, at) in enumerate(zip(self._members, self._workspace_at, strict=True)):
            q, k, v, out, lse, scale = of_members[6 * number : 6 * number + 6]
            partial = workspace + at
            to.append(Addresses(q, k, v, out, lse, partial, partial + member.partial_bytes, scale))
        with self._device.made_current():
            keep_if_captured(self._device, stream, self._on_device)
            written = self._on_device.write(to, stream, self._beside)
            return cast("list[list[Launch]]", self._launches.keep(key, written))

    def _needed(self) -> int:
        """Bytes that a call needs."""
        return sum(2 * math.prod(member.shape) + member.workspace for member in self._members)


class Group:
    """Cached dispatch of grouped calls that differ in values, addresses, stream and scale only.

    `calls`, all on one device, are keyed by their index in the log.
    """

    def __init__(self, calls: Mapping[int, tuple[Call, Plan]], device: Device):
        self._names, self._device = list(calls), device
        self._torch = cast("Torch", next(iter(calls.values()))[0].kind)
        with device:
            self._members = [_Member.of(call, plan, device) for call, plan in calls.values()]
            self._subsets = Recent(_SUBSETS_KEPT)
            self._whole = self._launches([n for n, member in enumerate(self._members) if member is not None])
        for name, member in zip(self._names, self._members, strict=True):
            if member is None:
                say_alone(name, "TMA cannot address its arrays, or the call needs too many tensor maps")
        _log.debug("grouped launch of problems %s: %d launches", self._names, len(self._whole))

    def __call__(self, operands: Sequence[tuple[Any, Any, Any]], scales: Sequence[float]) -> Results:
        """(out, lse) per call; None for calls that the caller must run separately."""
        require_owner()
        results: Results = [None] * len(operands)
        if environment.get(b"SPATTN_CUDA_KERNEL", b"auto") != b"auto":
            return results
        odd = [
            number
            for number, (q, k, v) in enumerate(operands)
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % _ALIGNMENT or q.is_neg() or k.is_neg() or v.is_neg()
        ]
        stream = self._torch.raw_stream(self._device.ordinal)
        launches = self._without(odd) if odd else self._whole
        # All are written before any starts: concurrent launches must not share memory that one of them has freed.
        written = [launch.write(operands, scales, stream) for launch in launches]
        with self._device.made_current():
            for launch, own in zip(launches, written, strict=True):
                launch.start(own.first)
            for launch, own in zip(launches, written, strict=True):
                launch.start(own.rest)
        for launch, own in zip(launches, written, strict=True):
            for number, found in zip(launch.numbers, own.results, strict=True):
                results[number] = found
        return results

    def _without(self, odd: list[int]) -> list[OneLaunch]:
        """Launches without the calls `odd`, whose arrays TMA cannot read at their current addresses."""
        key = tuple(odd)
        found = self._subsets.get(key)
        if found is None:
            for number in odd:
                say_alone(
                    self._names[number],
                    "an array starts at an address that TMA cannot read, or has its negative bit set",
                )
            left = [n for n, member in enumerate(self._members) if member is not None and n not in odd]
            with self._device:
                found = self._subsets.keep(key, self._launches(left))
        return cast("list[OneLaunch]", found)

    def _launches(self, numbers: list[int]) -> list[OneLaunch]:
        members = {n: member for n in numbers if (member := self._members[n]) is not None}
        made: list[OneLaunch] = []
        for places in cut([member.part for member in members.values()]):
            own = [numbers[place] for place in places]
            beside = any(launch.computes for launch in made)
            made.append(OneLaunch(own, [members[n] for n in own], self._torch, self._device, beside))
        return made


def say_alone(name: int, why: str) -> None:
    """Log that a call is not grouped, and why."""
    _log.debug("problems[%d] is not grouped: %s", name, why)
