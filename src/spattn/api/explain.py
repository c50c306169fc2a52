"""Explain a plan: tiling, efficiency, and predicted times of sparse and dense attention; or a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, overload

import numpy as np

from ..arrays import namespace_of
from ..backends import PredictingBackend, module_of
from ..patterns import Pattern
from ..patterns.base.check import choice, integer
from ..patterns.show import draw
from ..planning import Plan, positions
from ..schedule import compiler
from .explain_call import CallExplanation, explain_call

__all__ = ["CallExplanation", "Explanation", "explain"]

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_DEVICES = {"cpu": "one CPU thread", "cuda": "an H200"}
_LARGEST_PICTURE = 4096  # maximum number of queries and of keys


@dataclass(frozen=True, eq=False)
class Explanation:
    """Result of :func:`spattn.explain`.

    Parameters
    ----------
    plan : Plan
        The explained plan.
    predicted_ms : float
        Predicted time of a forward pass in milliseconds, on one CPU thread or on an H200. Gathered KV runs on GPUs
        only; for a gathered plan on the CPU, the prediction is for the same pattern and tile size without gathering.
    dense_ms : float
        Predicted time of dense attention in milliseconds.
    cheaper : Plan or None
        A plan of the same pattern with a lower predicted time, if one was found.
    cheaper_ms : float or None
        Predicted time of `cheaper` in milliseconds.
    device : str
        "cpu" or "cuda".
    """

    plan: Plan
    predicted_ms: float
    dense_ms: float
    cheaper: Plan | None
    cheaper_ms: float | None
    device: str = "cpu"

    def __str__(self) -> str:
        plan, computed = self.plan, self.plan.tiles * math.prod(self.plan.tile)
        boxes = np.unique(plan.views["box"][plan.components["query_view"]], axis=0).tolist()
        splits = int((plan.work["slot"] >= 0).sum())
        lines = [
            f"{plan.pattern!r}, {plan.q_len} × {plan.kv_len} tokens",
            f"tile: {plan.block_q} queries × {plan.block_kv} keys, "
            f"in boxes of {' and '.join(map(_sides, boxes))} queries",
            f"views: {len(plan.views)} in {len(plan.components)} components",
            f"work items: {len(plan.work)}, {splits} of which are split-KV; {len(plan.merge_rows)} rows are combined",
            f"pairs: {plan.nnz} allowed, {computed} in the tiles (efficiency {plan.efficiency:.3g}); "
            f"density {plan.density:.3g}",
            f"predicted: {self.predicted_ms:.3g} ms on {_DEVICES[self.device]}",
            self._comparison(),
        ]
        if plan.gathered:
            instead = "" if self._own else " (GPU only); the prediction is without gathering"
            lines.insert(3, f"keys: gathered per query tile{instead}")
        elif plan.ordered:
            lines.insert(3, "order: tokens are permuted to group those that attend to each other")
        if self.cheaper is not None:
            box = _sides(self.cheaper.views["box"][self.cheaper.components["query_view"][0]].tolist())
            lines.append(f"cheaper: {self.cheaper_ms:.3g} ms with tile={self.cheaper.tile} in boxes of {box} queries")
        return "\n".join(lines)

    @property
    def _own(self) -> bool:
        """Whether the prediction is for this plan itself."""
        return self.device == "cuda" or not self.plan.gathered

    def _comparison(self) -> str:
        own = "this plan" if self._own else "the plan without gathering"
        faster = "dense attention" if self.dense_ms < self.predicted_ms else own
        return f"all pairs: {self.dense_ms:.3g} ms; {faster} is faster by a factor of {self._factor():.3g}"

    def _factor(self) -> float:
        return max(self.dense_ms, self.predicted_ms) / max(min(self.dense_ms, self.predicted_ms), 1e-9)

    def draw(self, ax: Any = None) -> Any:
        """Draw the allowed pairs, and the pairs that one work item computes.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default those of a new figure.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ModuleNotFoundError
            If matplotlib is not installed.
        ValueError
            If the plan has no pattern, or more than 4096 queries or keys.
        """
        plan = self.plan
        if plan.pattern is None or max(plan.q_len, plan.kv_len) > _LARGEST_PICTURE:
            raise ValueError(f"plan: drawing requires a pattern and at most {_LARGEST_PICTURE} tokens, got {plan!r}")
        ax = draw(plan.pattern, plan.q_len, plan.kv_len, ax=ax, title=f"efficiency {plan.efficiency:.2f}")
        item = plan.work[len(plan.work) // 2] if len(plan.work) else None
        if item is not None:
            ax.scatter(*_computed(plan, item), s=1, marker="s", color="#e07a5f", alpha=0.25, linewidths=0)
        return ax


@overload
def explain(
    plan: Plan, /, *, batch: int = 1, heads: int = 1, head_dim: int = 64, dtype: str = "float32", device: str = "cpu"
) -> Explanation: ...


@overload
def explain(
    q: Any,
    k: Any,
    v: Any,
    pattern: Pattern | Plan | str | Any = "full",
    /,
    *,
    scale: float | None = None,
    backend: str = "auto",
    precision: str | None = None,
    layout: str = "bhsd",
    score: Callable[..., Any] | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    key_padding: Any = None,
    backward: bool = False,
) -> CallExplanation: ...


def explain(plan: Any, /, *operands: Any, **options: Any) -> Explanation | CallExplanation:
    """Explain a plan: its tiling and predicted time. Or explain a call: what it runs, and what bounds its time.

    ``explain(plan, batch=1, heads=1, head_dim=64, dtype="float32", device="cpu")`` executes nothing.
    ``explain(q, k, v, pattern, backward=False, ...)`` takes the arguments of :func:`spattn.attention` and runs the call
    for about a second.

    Parameters
    ----------
    plan : Plan
        The plan to explain, or `q` of a call.
    *operands
        `k`, `v` and `pattern` of a call.
    **options
        For a plan:

        batch, heads, head_dim : int, optional
            Sizes of the call. `batch` and `heads` must match the plan.
        dtype : {"float32", "float64", "float16", "bfloat16"}, optional
            Dtype of the arrays; on a GPU, float16 or bfloat16.
        device : {"cpu", "cuda"}, optional
            Device of the prediction: one CPU thread of the benchmark machine with this machine's instruction set, or an
            H200; no GPU needs to be present. GPU predictions support tiles of 64 keys and of 192, 128 or at most 64
            queries, and `head_dim` up to 128.

        For a call:

        scale, backend, precision, layout, score, sinks, dropout_p, seed, key_padding
            As for :func:`spattn.attention`.
        backward : bool, optional
            Also measure :func:`spattn.attention_backward`.

    Returns
    -------
    Explanation or CallExplanation
        ``print()`` shows a summary. The method ``draw()`` of an Explanation plots the plan. A CallExplanation has the
        fields ``backend``, ``backend_reason``, ``execution`` (kernels, arithmetic, threads), ``plan``, ``plan_source``,
        ``planning_ms``, ``predicted_ms``, ``measured_ms``, ``host_ms``, ``memory_ms``, ``bound_by``, ``advice``, and
        ``backward_ms``.

    Raises
    ------
    TypeError
        If a size is not an integer; if an option is not one of those above; for a call, as :func:`spattn.attention`.
    ValueError
        If a size is less than 1; if `dtype` or `device` is unknown; if `batch` or `heads` does not match the plan; if
        a gathered plan has no pattern and `device` is "cpu"; if the cost model does not support the GPU call; for a
        call, as :func:`spattn.attention`.

    Notes
    -----
    Advice on speed states the measured time of the call and of the alternative, which ran in turns: two threads,
    contiguous arrays, the patterns that :func:`spattn.patterns.discover` finds in a mask, attention over all pairs.

    Examples
    --------
    >>> import numpy as np, spattn
    >>> found = spattn.explain(spattn.plan("causal", 1024))
    >>> found.predicted_ms < found.dense_ms
    True
    >>> q = k = v = np.zeros((1, 2, 256, 32), np.float32)
    >>> found = spattn.explain(q, k, v, "causal", backend="cpu")
    >>> found.backend, found.backend_reason, found.measured_ms > 0
    ('cpu', 'named by the caller', True)
    """
    if operands or namespace_of(plan) is not None:
        return explain_call(plan, *operands, **options)
    return _explain_plan(plan, **options)


def _explain_plan(
    plan: Plan, *, batch: int = 1, heads: int = 1, head_dim: int = 64, dtype: str = "float32", device: str = "cpu"
) -> Explanation:
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan: expected a Plan, as spattn.plan() returns it, or q, k, v and a pattern, got {type(plan).__name__}"
        )
    given = {"batch": batch, "heads": heads, "head_dim": head_dim}
    batch, heads, head_dim = (integer(name, value, 1) for name, value in given.items())
    choice("dtype", dtype, _DTYPES)
    choice("device", device, tuple(_DEVICES))
    own = plan.variant.shape
    if own[0] not in (1, batch) or own[1] not in (1, heads):
        raise ValueError(
            f"plan: expected a plan for batch={batch} and heads={heads}, got batch={own[0]} and heads={own[1]}"
        )
    backend = cast(PredictingBackend, module_of(device))
    sizes = batch, heads, head_dim, head_dim, dtype
    executed = _of_all_keys(plan, batch, heads) if plan.gathered and device == "cpu" else plan
    predicted = backend.predicted_ms(executed, *sizes)
    cheaper = backend.cheaper(executed, *sizes)
    return Explanation(
        plan,
        predicted,
        backend.dense_ms(plan.q_len, plan.kv_len, *sizes),
        cheaper,
        None if cheaper is None else backend.predicted_ms(cheaper, *sizes),
        device,
    )


def _of_all_keys(plan: Plan, batch: int, heads: int) -> Plan:
    """Replan the pattern of a gathered plan without gathering, at the same tile size."""
    if plan.pattern is None:
        raise ValueError("plan: the CPU does not execute gathered plans; pass a plan with a pattern, or device='cuda'")
    return compiler.plan(plan.pattern, plan.q_len, plan.kv_len, batch=batch, heads=heads, tile=plan.tile)


def _computed(plan: Plan, item: np.void) -> tuple[np.ndarray, np.ndarray]:
    """Return the picture coordinates (key, query) of all pairs that a work item computes, at the centers of cells."""
    component = plan.components[item["component"]]
    row, valid = positions(plan.views[component["query_view"]], np.array([item["query_tile"]]))
    number = np.arange(item["begin"], item["end"])
    run = np.searchsorted(plan.tile_indptr, number, side="right") - 1
    key = [np.zeros(0, np.int64)]
    for view, tile in zip(plan.key_view[run], plan.indices[run] + number - plan.tile_indptr[run], strict=True):
        position, real = positions(plan.views[component["key_view"] + view], np.array([tile]))
        key.append(position[real])
    q, k = row[valid], np.concatenate(key)
    if plan.q_order.size:
        q = plan.q_order[component["variant"], q]
    if plan.kv_order.size:
        k = np.unique(plan.kv_order[component["variant"], k])  # a gathered key may occur several times
    queries, keys = np.meshgrid(q, k, indexing="ij")
    return keys.ravel() + 0.5, queries.ravel() + 0.5


def _sides(box: list[int]) -> str:
    return " × ".join(str(side) for side in box if side > 1) or "1"
