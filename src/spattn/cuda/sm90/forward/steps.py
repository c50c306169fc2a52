"""Launches of steps of generation, whose tables are made from the bits of rows by one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...._util.cached import BoundedCache
from ....arrays.operand import Operand
from ....choose.specializations import TILE
from ....schedule.few_queries import RowTables, StepTables
from ....schedule.pack_heads import variant_of_groups
from ....schedule.tensor_maps import VIEW, joint_heads
from ...driver.buffer import copy_in_order
from ...driver.launch import Kernel, Launch, StepLaunch, load_kernels
from ...driver.structs import fields
from ...host.forward_pass import fold_scale, partial_bytes
from ..maps import readable
from .heads import packing
from .launches import ROWS_PER_BLOCK, Launches, Merging, counters, merge_request, merging
from .params import PLAN_POINTERS, pack_merge, step_params

__all__ = ["Steps"]

_COUNTERS = 64  # task counters of a step: consecutive launches of one stream use different ones
_KEPT = 64
_LAST_AXIS = 8  # bytes from the first of three int32


class Steps:
    """Launches of steps for a q of fixed shape and strides, and any kv_len and strides of k and v.

    At most `workers` items share the keys of a row. Tables are copied in the order of the current stream of PyTorch,
    the module `staging`.
    """

    def __init__(self, workers: int, staging: Any):
        self._workers, self._staging = workers, staging
        self._known: list[Known] = []
        self._packed = 1  # heads in a query tile if they have the same rows
        self._tables: dict[int, StepTables] = {}  # by the number of heads in a query tile

    def add(self, launches: Launches) -> bool:
        """Let later steps use the kernels of these launches, of a plan by rows with one tile; return False for plans
        without keys, which need no kernel."""
        if not launches.computes:
            return False
        known = Known(launches)
        self._packed = packing(known.call)
        self._known.append(known)
        self._tables.setdefault(known.packed, step_tables(launches, self._workers))
        return True

    def of_rows(self, words: np.ndarray, variant: np.ndarray, k: Operand, v: Operand) -> tuple[int, Step] | None:
        """Return launches for rows of bits, (variants, queries, words), and the number of those whose kernels they use.

        Return None if the rows or these k and v need other kernels or maps. The device's context must be current.
        """
        packed = self._packed
        if packed not in self._tables and variant_of_groups(variant, packed) is not None:
            return None
        tables = self._tables[packed].of(words, variant, k.shape[2]) if packed in self._tables else None
        if tables is None and packed > 1 and 1 in self._tables:  # heads of a group differ
            packed, tables = 1, self._tables[1].of(words, variant, k.shape[2])
        if tables is None or not tables.tasks:
            return None
        for number, known in enumerate(self._known):
            if known.packed == packed and known.suits(tables.longest, k, v):
                return number, known.step(tables, k, v, self._staging)
        return None


class Known:
    """Kernels and parameters that steps share with `launches`."""

    def __init__(self, launches: Launches):
        self._first, (layout, self.call) = launches, launches.part
        self.packed = self.call.packed
        self._ctas = launches.ctas
        self.kernel = launches.attention
        self._params = step_params(launches.template, self.kernel, layout, self.call)
        self._suited = BoundedCache(_KEPT)
        self._merge: Kernel | None = None
        self._heads = self.call.q.shape[0] * self.call.q.shape[1]

    def suits(self, longest: int, k: Operand, v: Operand) -> bool:
        """Return whether the attention kernel suits work items of at most `longest` tiles, and these arrays."""
        key = longest, k.strides, v.strides, k.shape[2] > 1
        found: bool | None = self._suited.get(key)
        if found is None:
            executes = self._first.executes(float(TILE[1] * longest))
            found = self._suited.keep(key, executes and self.addresses(k, v))
        return found

    def addresses(self, k: Operand, v: Operand) -> bool:
        """Return whether TMA can address these arrays, and batch and heads are one axis of all arrays, or of none, as
        in the first launches."""
        call = self.call
        joint = [all(map(joint_heads, (call.q, call.out, *keys))) for keys in ((k, v), (call.k, call.v))]
        return readable(k) and readable(v) and joint[0] == joint[1]

    def step(self, tables: RowTables, k: Operand, v: Operand, staging: Any) -> Step:
        """Copy the tables of a step and return its launches."""
        call, plan = self.call, self.call.plan
        owner, address = copy_in_order(call.device, tables.nbytes, tables.write, staging)
        at, tasks, rows = tables.addresses(address), tables.tasks, tables.slots * plan.block_q
        pointers, blocks = at[: len(PLAN_POINTERS)], min(self._ctas, tasks)
        launch, merge = self._params.of(k, v, pointers, tasks, rows, plan.q_len, blocks), None
        if tables.merges:
            if self._merge is None:
                (self._merge,) = load_kernels(call.device, [merge_request(call)])
            blocks = -(-tables.merges // ROWS_PER_BLOCK)
            merge = merging(call, at[len(PLAN_POINTERS) : -1], self._merge, blocks, rows)
        partials = partial_bytes(self._heads * rows, call.v.shape[3], 4)
        return Step(launch, partials, merge, at, owner)


class Step:
    """:class:`~spattn.cuda.host.family.ForwardLaunches` of a step; `owner` has its tables, at `addresses`."""

    moves, computes = False, 1

    def __init__(
        self,
        launch: StepLaunch,
        partials: tuple[int, int],
        merge: Merging | None,
        addresses: tuple[int, ...],
        owner: Any,
    ):
        self._launch, self._merge, self.addresses = launch, merge, addresses
        self.counter = counters(addresses[-1], _COUNTERS)
        self._of_rows, self.workspace_bytes = partials
        self._owner = owner  # of the tables

    def write(
        self, problems: Sequence[tuple[Any, ...]], workspace: int, stream: int, early: int = 0, moved: int = 0
    ) -> list[Launch]:
        """See :class:`~spattn.cuda.host.family.ForwardLaunches`; there is one problem."""
        ((q, k, v, out, lse, scale, score, sinks),) = problems
        arrays = q, k, v, out, lse, workspace, workspace + self._of_rows, sinks
        found = [self._launch.launch(arrays, *fold_scale(scale), score, stream, early > 0)]
        if self._merge is not None:
            kernel, blocks, head, tail = self._merge
            found.append(Launch(kernel, blocks, pack_merge(*head, *arrays[5:7], out, lse, sinks, *tail), stream))
        return found


def step_tables(launches: Launches, workers: int) -> StepTables:
    """Return what makes the tables of steps that share kernels with `launches`."""
    layout, call = launches.part
    plan, (batch, heads), group = call.plan, call.q.shape[:2], call.packed
    _, extent_at = fields(VIEW)["extent"]
    length_at = VIEW.itemsize + extent_at + _LAST_AXIS  # of the key view, which follows the query view
    of_heads = batch, heads * group, plan.q_len // group, group, heads // call.k.shape[1]
    views = plan.views.tobytes(), layout.query_views.tobytes(), layout.key_views.tobytes()
    return StepTables(*of_heads, plan.block_q, workers, *views, length_at, _COUNTERS)
