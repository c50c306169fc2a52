"""A plan in words: what was chosen, what it costs, and when attention over all pairs costs less."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..backends import PredictingBackend, module_of
from ..patterns.base.check import choice, integer
from ..patterns.show import draw
from ..planning import Plan, positions
from ..schedule import compiler

__all__ = ["Explanation", "explain"]

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_DEVICES = {"cpu": "one thread of the CPU", "cuda": "an H200"}
_LARGEST_PICTURE = 4096  # tokens of a side


@dataclass(frozen=True, eq=False)
class Explanation:
    """What :func:`spattn.explain` returns.

    Parameters
    ----------
    plan : Plan
        What is explained.
    predicted_ms : float
        What a forward takes on one thread of the CPU, or on a GPU, in milliseconds; on the CPU that of a gathered plan,
        which is for GPUs, is of the plan of the same pattern and tiles whose keys are in order.
    dense_ms : float
        The same of attention over all pairs.
    cheaper : Plan or None
        A plan of the same pattern that is predicted to take less time.
    cheaper_ms : float or None
        How much it takes.
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
            f"work items: {len(plan.work)}, {splits} of which share rows; {len(plan.merge_rows)} rows are merged",
            f"pairs: {plan.nnz} allowed, {computed} in the tiles (efficiency {plan.efficiency:.3g}); "
            f"density {plan.density:.3g}",
            f"predicted: {self.predicted_ms:.3g} ms on {_DEVICES[self.device]}",
            self._comparison(),
        ]
        if plan.gathered:
            instead = "" if self._own else ", which a GPU executes; predicted are tiles of all keys"
            lines.insert(3, f"keys: gathered for each query tile{instead}")
        elif plan.ordered:
            lines.insert(3, "order: tokens that attend to each other are taken together, wherever they stand")
        if self.cheaper is not None:
            box = _sides(self.cheaper.views["box"][self.cheaper.components["query_view"][0]].tolist())
            lines.append(f"cheaper: {self.cheaper_ms:.3g} ms with tile={self.cheaper.tile} in boxes of {box} queries")
        return "\n".join(lines)

    @property
    def _own(self) -> bool:
        """Whether it is this plan that is predicted, and none in its place."""
        return self.device == "cuda" or not self.plan.gathered

    def _comparison(self) -> str:
        own = "this plan" if self._own else "the plan of all keys"
        faster = "dense attention" if self.dense_ms < self.predicted_ms else own
        return f"all pairs: {self.dense_ms:.3g} ms; {faster} is faster by a factor of {self._factor():.3g}"

    def _factor(self) -> float:
        return max(self.dense_ms, self.predicted_ms) / max(min(self.dense_ms, self.predicted_ms), 1e-9)

    def draw(self, ax: Any = None) -> Any:
        """Draws the allowed pairs, and around them the tiles of the first work items.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; a new figure when left out.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ModuleNotFoundError
            If matplotlib is missing.
        ValueError
            If the plan has no pattern, or more than 4096 tokens on a side.
        """
        plan = self.plan
        if plan.pattern is None or max(plan.q_len, plan.kv_len) > _LARGEST_PICTURE:
            raise ValueError(f"plan: expected one of a pattern at up to {_LARGEST_PICTURE} tokens, got {plan!r}")
        ax = draw(plan.pattern, plan.q_len, plan.kv_len, ax=ax, title=f"efficiency {plan.efficiency:.2f}")
        item = plan.work[len(plan.work) // 2] if len(plan.work) else None
        if item is not None:
            ax.scatter(*_computed(plan, item), s=1, marker="s", color="#e07a5f", alpha=0.25, linewidths=0)
        return ax


def explain(
    plan: Plan, *, batch: int = 1, heads: int = 1, head_dim: int = 64, dtype: str = "float32", device: str = "cpu"
) -> Explanation:
    """Explain a plan: what was chosen, and the predicted time on this machine's CPU or on a GPU.

    Parameters
    ----------
    plan : Plan
    batch, heads, head_dim : int, optional
        Sizes of a call; batch entries and heads must suit the plan.
    dtype : {"float32", "float64", "float16", "bfloat16"}, optional
        Dtype of its arrays; float16 or bfloat16 for a GPU.
    device : {"cpu", "cuda"}, optional
        One thread of this machine's CPU, or an H200, which need not be present. GPU predictions exist for tiles of 128
        or at most 64 queries and `head_dim` of at most 128.

    Returns
    -------
    Explanation
        ``print()`` shows its text; its method ``draw()`` makes a picture.

    Raises
    ------
    TypeError
        If a size is not an integer.
    ValueError
        If a size is less than 1, `dtype` or `device` is unknown, the plan is made for other batch entries or heads, or
        gathered without a pattern; if the GPU's time is not known.

    Examples
    --------
    >>> import spattn
    >>> found = spattn.explain(spattn.plan("causal", 1024))
    >>> found.predicted_ms < found.dense_ms
    True
    """
    given = {"batch": batch, "heads": heads, "head_dim": head_dim}
    batch, heads, head_dim = (integer(name, value, 1) for name, value in given.items())
    choice("dtype", dtype, _DTYPES)
    choice("device", device, tuple(_DEVICES))
    own = plan.variant.shape
    if own[0] not in (1, batch) or own[1] not in (1, heads):
        raise ValueError(f"plan: expected {batch} batch entries and {heads} heads, got one for {own[0]} and {own[1]}")
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
    """The plan of a gathered one's pattern that the CPU executes, with the same tiles."""
    if plan.pattern is None:
        raise ValueError("plan: expected one that the CPU executes, or that knows its pattern, got a gathered one")
    return compiler.plan(plan.pattern, plan.q_len, plan.kv_len, batch=batch, heads=heads, tile=plan.tile)


def _computed(plan: Plan, item: np.void) -> tuple[np.ndarray, np.ndarray]:
    """(keys, queries) of all pairs that a work item computes."""
    component = plan.components[item["component"]]
    row, valid = positions(plan.views[component["query_view"]], np.array([item["query_tile"]]))
    number = np.arange(item["begin"], item["end"])
    run = np.searchsorted(plan.tile_indptr, number, side="right") - 1
    key = [np.zeros(0, np.int64)]
    for view, tile in zip(plan.key_view[run], plan.indices[run] + number - plan.tile_indptr[run], strict=True):
        place, real = positions(plan.views[component["key_view"] + view], np.array([tile]))
        key.append(place[real])
    q, k = row[valid], np.concatenate(key)
    if plan.q_order.size:
        q = plan.q_order[component["variant"], q]
    if plan.kv_order.size:
        k = np.unique(plan.kv_order[component["variant"], k])  # each once, whatever its places
    queries, keys = np.meshgrid(q, k, indexing="ij")
    return keys.ravel() + 0.5, queries.ravel() + 0.5


def _sides(box: list[int]) -> str:
    return " × ".join(str(side) for side in box if side > 1) or "1"
