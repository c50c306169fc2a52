"""Write traces as compositions of patterns that have views, permutations or listed pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._util.index_checks import q_offset
from ..base.class_registry import OPERATORS
from ..base.pattern import Ordered, Part, Pattern, whole_part
from ..listed.clusters import Clusters
from ..listed.masks import Mask
from ..sequence.basic import Causal, Stride
from ..sequence.queries_at import QueriesAt
from .traced_rows import KEY, QUERY, SIDES, Rows, is_of_distance

if TYPE_CHECKING:
    from ...trace.trace import Step, Trace

__all__ = ["compares_labels", "composed"]

_OPERATORS = {"bitwise_and": "&", "logical_and": "&", "mul": "&", "bitwise_or": "|", "logical_or": "|", "add": "|"}
_VIEWED = 32  # views of every n-th token are used if they have at least so many tokens
_MIXED = 2  # labels lie in any order if they change at least so many times for each class
_BLOCK = 64  # queries or keys whose labels are compared as a whole
_LISTING = 16  # listing a pair costs as much as evaluating so many cells of tiles


def _joined(trace: Trace, step: Step | None) -> str | None:
    """Return the operator by which a step joins two booleans of pairs, or None."""
    if step is None or step.result.dtype != "bool" or step.result.shape or step.options or len(step.args) != 2:
        return None
    if not all(getattr(x, "dtype", "") == "bool" and not x.shape for x in step.args):
        return None
    return _OPERATORS.get(step.name.split(".")[1])


def _conjuncts(trace: Trace, x: Any) -> list[Step]:
    """Return the steps whose results the trace joins by ``&``."""
    step = trace.made.get(getattr(x, "number", -1))
    if step is None:
        return []
    if _joined(trace, step) != "&":
        return [step]
    return [own for operand in step.args for own in _conjuncts(trace, operand)]


def compares_labels(trace: Trace) -> bool:
    """Return whether a conjunct of the trace compares a number of the query with a number of the key."""
    return any(_is_equality(trace, step) for step in _conjuncts(trace, trace.result))


def _is_equality(trace: Trace, step: Step | None) -> bool:
    """Return whether a step compares a number of the query with a number of the key."""
    if step is None or step.name != "aten.eq.Tensor" or step.result.shape or step.options:
        return False
    sides = [trace.depends.get(getattr(x, "number", -1), frozenset()) & SIDES for x in step.args]
    return {QUERY} in sides and {KEY} in sides


def _is_causal(step: Step | None) -> bool:
    """Return whether a step compares the row with the key as :class:`Causal` does."""
    sides = {"aten.ge.Tensor": [QUERY, KEY], "aten.le.Tensor": [KEY, QUERY]}.get(step.name if step else "")
    return step is not None and sides == [getattr(x, "number", -1) for x in step.args]


@dataclass(frozen=True)
class _Equal(Pattern):
    """Pairs with equal labels: bound :class:`Clusters`, which list their pairs only if that is cheap."""

    clusters: Any
    listed: bool
    _has_order = True

    @property
    def _lists_pairs(self) -> bool:  # type: ignore[override]  # per instance
        return self.listed

    def allows(self, q: Any, k: Any) -> Any:
        return self.clusters.allows(q, k)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return whole_part(self, q_len, kv_len) if self.listed else super().parts(q_len, kv_len)

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        found: tuple[np.ndarray, np.ndarray] = self.clusters._pairs(q, kv_len)
        return found

    def _in_order(self, also: Pattern | None = None) -> Ordered | None:
        found: Ordered | None = self.clusters._in_order(also)
        return found


def composed(trace: Trace, q_len: int, kv_len: int) -> Pattern:
    """Return the bound pattern of a trace: a composition if it has masks, strides or labels that lie in any order."""
    found = _with_labels(trace, q_len, kv_len)
    return _whole(trace, q_len, kv_len) if found is None else found


def _whole(trace: Trace, q_len: int, kv_len: int) -> Pattern:
    if _is_causal(trace.made.get(getattr(trace.result, "number", -1))):
        return Causal() if q_len == kv_len else QueriesAt(Causal(), 0).bind(q_len, kv_len)
    return Rows(trace, q_len, kv_len)


def _with_labels(trace: Trace, q_len: int, kv_len: int, alone: bool = True) -> Pattern | None:
    """Return the composition, or None if the trace has no masks, strides and unordered labels.

    `alone` is False inside a union, where no permutation of the tokens suits all operands.
    """
    step = trace.made.get(getattr(trace.result, "number", -1))
    if step is None:
        return None
    mask = _mask_of(step, q_len, kv_len)
    if mask is not None:
        return Mask(mask).bind(q_len, kv_len)
    if _is_equality(trace, step):
        return _equal(trace, step, q_len, kv_len, alone)
    operator = _joined(trace, step)
    if operator is None:
        return _of_distance(trace, q_len, kv_len) if is_of_distance(trace) else None
    operands = [trace.part(x) for x in step.args]
    found = [_with_labels(x, q_len, kv_len, alone and operator == "&") for x in operands]
    if all(own is None for own in found):
        return None
    each = [_whole(x, q_len, kv_len) if own is None else own for own, x in zip(found, operands, strict=True)]
    if operator == "|" and not all(own.translation_invariant for own in each):
        each.sort(key=lambda own: not isinstance(own, Stride))  # all views of a stride share what they exclude
    composed: Pattern = OPERATORS[operator].of(*each)
    return composed


def _mask_of(step: Step, q_len: int, kv_len: int) -> np.ndarray | None:
    """Return the mask that a step reads at (row, key), or None."""
    if step.name != "aten.index.Tensor" or step.result.dtype != "bool" or len(step.args[1]) < 2:
        return None
    *fixed, query, key = step.args[1]
    table = getattr(step.args[0], "array", None)
    if table is None or [getattr(x, "number", -1) for x in (query, key)] != [QUERY, KEY]:
        return None
    if table.ndim != len(step.args[1]) or not all(hasattr(x, "array") and not x.array.ndim for x in fixed):
        return None
    mask: np.ndarray = table[tuple(int(x.array) for x in fixed)]
    return mask[:q_len, :kv_len] if mask.shape[0] >= q_len and mask.shape[1] >= kv_len else None


def _of_distance(trace: Trace, q_len: int, kv_len: int) -> Pattern | None:
    """Return the Stride of a comparison that depends on the difference of row and key, or None if it is no stride."""
    if not any(step.name.startswith("aten.remainder") for step in trace.steps) or not min(q_len, kv_len):
        return None
    apart = np.arange(1 - kv_len, q_len)
    allowed = trace.evaluate(trace.result, {QUERY: np.maximum(apart, 0), KEY: np.maximum(-apart, 0)})
    at = apart[allowed]
    stride = int(at[1] - at[0]) if len(at) > 1 else 0
    if not _is_viewed(stride, kv_len) or not np.array_equal(allowed, apart % stride == at[0] % stride):
        return None
    return Stride(stride, int(at[0] + q_offset(q_len, kv_len)) % stride)


def _is_viewed(stride: int, kv_len: int) -> bool:
    """Return whether views of every `stride`-th token fill tiles well."""
    return stride > 1 and _VIEWED * stride <= kv_len


def _periodic(queries: np.ndarray, keys: np.ndarray) -> Pattern | None:
    """Return the Stride of labels that repeat, or None."""
    stride = 1 + int(np.argmax(keys[1:] == keys[0])) if len(keys) > 1 else 0
    one = keys[:stride]
    if not _is_viewed(stride, len(keys)) or len(np.unique(one)) < stride or queries[0] not in one:
        return None
    ahead = int(np.argmax(one == queries[0]))
    for labels, first in ((keys, 0), (queries, ahead)):
        if not np.array_equal(labels, one[(np.arange(len(labels)) + first) % stride]):
            return None
    return Stride(stride, (q_offset(len(queries), len(keys)) - ahead) % stride)


def _equal(trace: Trace, step: Step, q_len: int, kv_len: int, alone: bool) -> Pattern | None:
    """Return the pattern of an equality, or None if the labels are sorted or tiles of them alike."""
    sides: dict[int, np.ndarray] = {}
    for x in step.args:
        (side,) = trace.depends[x.number]
        try:
            sides[side] = trace.evaluate(x, {side: np.arange((q_len, kv_len)[side == KEY])})
        except ValueError:  # an index out of range; planning raises it if the pair is needed
            return None
    queries, keys = sides[QUERY], sides[KEY]
    if not all(np.can_cast(labels.dtype, np.int64) for labels in (queries, keys)) or not min(q_len, kv_len):
        return None
    periodic = _periodic(queries, keys)
    if periodic is not None:
        return periodic
    if not any(map(_is_mixed, (queries, keys))):
        return None
    joint = np.unique(np.concatenate([queries, keys]), return_inverse=True)[1]
    queries, keys = joint[:q_len], joint[q_len:]
    pairs = int(np.bincount(queries, minlength=joint.max() + 1) @ np.bincount(keys, minlength=joint.max() + 1))
    listed = _LISTING * pairs < _BLOCK**2 * _distinct_blocks(queries) * _distinct_blocks(keys)
    if not alone and not listed:
        return None
    return _Equal(Clusters(keys, queries).bind(q_len, kv_len), listed)


def _is_mixed(labels: np.ndarray) -> bool:
    """Return whether labels change far more often than there are labels."""
    changes = int(np.count_nonzero(labels[1:] != labels[:-1]))
    return changes >= _MIXED * len(np.unique(labels)) if changes else False


def _distinct_blocks(labels: np.ndarray) -> int:
    """Count the blocks of labels that differ, which the planner evaluates separately."""
    return len(np.unique(labels[: len(labels) // _BLOCK * _BLOCK].reshape(-1, _BLOCK), axis=0))
