"""Grouped launches of PyTorch calls: one launch per query tile size.

Everything that depends only on plans, shapes, strides and dtypes is computed once; launches are cached by address, as
for single calls (:mod:`spattn.cuda.host.repeat`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..._util.cached import BoundedCache
from ..._util.limits import environment
from ...planning.contract.types import Plan
from ...request.call import Call
from ...request.score import ScoreOperands
from ..driver.buffer import keep_if_captured, out_of_memory
from ..driver.device import Device, require_owner
from ..driver.launch import Launch, start
from .family import Family, ForwardLaunches, Launcher
from .repeat import LAUNCHES_KEPT, Results, pass_of
from .score import Binder, BoundScore

if TYPE_CHECKING:
    from ...arrays.torch import Torch

__all__ = ["Group", "OneLaunch", "say_alone", "why_alone"]

_SUBSETS_KEPT = 8  # subsets of calls with addresses that TMA can read
_log = logging.getLogger("spattn.cuda")

Computed = list[tuple[Any, Any] | None]


def why_alone(call: Call, plan: Plan | None, family: Family | None) -> str | None:
    """Return why a call cannot join a group, or None. `plan` is None if the group may choose another; `family` is None
    for arrays that are not on a GPU."""
    if call.kind.name != "torch" or family is None:
        return f"a group requires PyTorch tensors on a GPU, got {call.kind.name} arrays on {call.device}"
    if 0 in call.out_shape or call.kv_len == 0:
        return "nothing to compute"
    if family.launcher is None:
        return f"the {family.name} kernels, which run {call.dtype} on this device, have no grouped launches"
    if plan is not None and plan.ordered:
        return "its plan is ordered or gathered"
    if plan is not None and not family.accepts(plan):
        return f"the {family.name} kernels do not support tiles of {plan.block_q} × {plan.block_kv}"
    return None


class OneLaunch:
    """Computes calls with one launch and its combines; the device's context must be current.

    `beside` is True if the preceding launch belongs to the same group, so that both may run concurrently.
    """

    def __init__(
        self, numbers: Sequence[int], results: Sequence[Results], launches: ForwardLaunches, torch: Torch, beside: bool
    ):
        self.numbers, self._results, self._torch = numbers, results, torch.module
        self.ready, self._early, self._launches = launches, int(beside), BoundedCache(LAUNCHES_KEPT)
        self._workspace = (launches.workspace_bytes,) if launches.workspace_bytes else None

    def write(
        self,
        operands: Sequence[tuple[Any, Any, Any]],
        scale: Sequence[float],
        scores: Sequence[BoundScore],
        stream: int,
        device: Device,
    ) -> tuple[Computed, Any, list[Launch], list[Launch]]:
        """Allocate results and workspace; return both, the first attention launch, and the launches after it."""
        wide, computed = self._torch.float32, []
        key: list[Any] = []
        try:
            for number, results in zip(self.numbers, self._results, strict=True):
                shape, strides, like_q, rows, row_strides, return_lse = results
                q, k, v = operands[number]
                out = self._torch.empty_like(q) if like_q else q.new_empty_strided(shape, strides)
                lse = q.new_empty_strided(rows, row_strides, dtype=wide) if return_lse else None
                computed.append((out, lse))
                lse_at = 0 if lse is None else lse.data_ptr()
                key.append(
                    (
                        q.data_ptr(),
                        k.data_ptr(),
                        v.data_ptr(),
                        out.data_ptr(),
                        lse_at,
                        scale[number],
                        scores[number].address,
                        scores[number].sinks,
                    )
                )
            workspace = self._workspace
            rest = q.new_empty_strided(workspace, (1,), dtype=self._torch.uint8) if workspace else None
        except self._torch.OutOfMemoryError as error:
            needed = sum(2 * math.prod(one.shape) for one in self._results) + self.ready.workspace_bytes
            with device:
                raise out_of_memory(device, needed) from error
        key += 0 if rest is None else rest.data_ptr(), stream
        found = tuple(key)
        first, following = self._launches.get(found) or self._write(found, device)
        return cast(Computed, computed), rest, first, following

    def _write(self, key: tuple[Any, ...], device: Device) -> list[list[Launch]]:
        *problems, workspace, stream = key
        with device.made_current():
            keep_if_captured(device, stream, self.ready)
            written = self.ready.write(problems, workspace, stream, self._early)
        first = min(self.ready.computes, 1)
        return cast("list[list[Launch]]", self._launches.keep(key, [written[:first], written[first:]]))


class Group:
    """Cached dispatch of grouped calls that differ only in values, addresses, stream and scale.

    `calls`, all on one device, are keyed by their index in the log.
    """

    def __init__(self, calls: Mapping[int, tuple[Call, Plan]], launcher: Launcher, device: Device):
        self._names, self._launcher, self._device = list(calls), launcher, device
        self._torch = cast("Torch", next(iter(calls.values()))[0].kind)
        runs = [pass_of(call, plan, device) for call, plan in calls.values()]
        self._binders = [Binder(call, device) for call, _ in calls.values()]
        self._runs, self._results = [run for run, _ in runs], [results for _, results in runs]
        self._subsets = BoundedCache(_SUBSETS_KEPT)
        self._whole = self._launches(range(len(runs)))
        together = {number for launch in self._whole for number in launch.numbers}
        for number, name in enumerate(self._names):
            if number not in together:
                say_alone(name, "TMA cannot address its arrays, or the call needs too many tensor maps")
        _log.debug("grouped launch of problems %s: %d launches", self._names, len(self._whole))

    def __call__(
        self,
        operands: Sequence[tuple[Any, Any, Any]],
        scales: Sequence[float],
        scores: Sequence[ScoreOperands | None] | None = None,
    ) -> Computed:
        """Return (out, lse) per call; None for calls that the caller must run separately. `scores` are the calls' score
        functions, None for calls without any."""
        require_owner()
        results: Computed = [None] * len(operands)
        if environment.get(b"SPATTN_CUDA_KERNEL", b"auto") != b"auto":
            return results
        alignment = self._launcher.alignment
        odd = [
            number
            for number, (q, k, v) in enumerate(operands)
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % alignment or q.is_neg() or k.is_neg() or v.is_neg()
        ]
        stream = self._torch.raw_stream(self._device.ordinal)
        launches = self._without(odd) if odd else self._whole
        given = scores or [None] * len(operands)
        bound = [
            binder.bound(stream, score, q, k)
            for binder, score, (q, k, _) in zip(self._binders, given, operands, strict=True)
        ]
        # Write all before starting any: concurrent launches must not reuse memory that one of them has freed.
        written = [launch.write(operands, scales, bound, stream, self._device) for launch in launches]
        with self._device.made_current():
            for launch, (_, _, first, _) in zip(launches, written, strict=True):
                start(first, launch.ready.counter)
            for launch, (_, _, _, following) in zip(launches, written, strict=True):
                start(following, launch.ready.counter)
        for launch, (computed, *_) in zip(launches, written, strict=True):
            for number, found in zip(launch.numbers, computed, strict=True):
                results[number] = found
        return results

    def _without(self, odd: list[int]) -> list[OneLaunch]:
        """Return launches without the calls `odd`, whose current tensors TMA cannot read or are negated views."""
        key = tuple(odd)
        found = self._subsets.get(key)
        if found is None:
            for number in odd:
                say_alone(
                    self._names[number],
                    "an array starts at an address that TMA cannot read, or has its negative bit set",
                )
            left = [number for number in range(len(self._runs)) if number not in odd]
            found = self._subsets.keep(key, self._launches(left))
        return cast("list[OneLaunch]", found)

    def _launches(self, numbers: Iterable[int]) -> list[OneLaunch]:
        made: list[OneLaunch] = []
        with self._device:
            groups = self._launcher.group({number: self._runs[number] for number in numbers})
        for own, ready in groups:
            beside = any(launch.ready.computes for launch in made)
            made.append(OneLaunch(own, [self._results[number] for number in own], ready, self._torch, beside))
        return made


def say_alone(name: int, why: str) -> None:
    """Log that a call is not grouped, and why."""
    _log.debug("problems[%d] is not grouped: %s", name, why)
