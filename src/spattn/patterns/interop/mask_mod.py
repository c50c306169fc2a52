"""Patterns of traced mask functions of FlexAttention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._util.imports import whole_imports
from ..._util.index_checks import q_offset
from ..._util.making import shared
from ..base.check import integer
from ..base.class_registry import OPERATORS
from ..base.content import ByContent
from ..base.pattern import Ordered, Part, Pattern, whole_part
from ..base.predicate import apply
from ..hints.table import BlockTable, NumberTable
from ..listed.clusters import Clusters
from ..listed.masks import Mask
from ..sequence.basic import Causal, Stride
from ..sequence.queries_at import QueriesAt

if TYPE_CHECKING:
    from ...trace.trace import Constant, Ref, Step, Trace

__all__ = ["BATCH", "HEAD", "MaskMod"]

BATCH, HEAD, QUERY, KEY = range(4)  # arguments of a mask_mod
_SIDES = {QUERY, KEY}
_OPERATORS = {"bitwise_and": "&", "logical_and": "&", "mul": "&", "bitwise_or": "|", "logical_or": "|", "add": "|"}
_OF_DIFFERENCES = {f"aten.{name}.Tensor" for name in ("sub", "eq", "ne", "lt", "le", "gt", "ge")}
_VIEWED = 32  # views of every n-th token are used if they have at least so many tokens
_MOST_ELEMENTS = 1 << 24  # of a temporary tensor
_MOST_NUMBERS = 1 << 20  # larger tables of numbers with two axes have no minima and maxima
_MIXED = 2  # labels lie in any order if they change more than so many times for each class
_BLOCK = 64  # queries or keys whose labels are compared as a whole
_LISTING = 16  # listing a pair costs as much as evaluating so many cells of tiles


@dataclass(frozen=True, eq=False, repr=False)
class MaskMod(ByContent, Pattern):
    """A traced mask_mod over query rows; `batch` and `heads` are its :meth:`sizes`."""

    trace: Trace
    batch: int
    heads: int

    def sizes(self) -> tuple[int, int]:
        return self.batch, self.heads

    def at(self, batch: int, head: int) -> Pattern:
        one = self.trace
        for argument, number, of in ((BATCH, batch, self.batch), (HEAD, head, self.heads)):
            name = "batch" if argument == BATCH else "head"
            one = one.fix(argument, integer(name, number, 0, of - 1 if of else None) if of != 1 else 0)
        return self if one is self.trace else replace(self, trace=one, batch=1, heads=1)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if not self.trace.used <= _SIDES:
            raise ValueError("MaskMod: the mask_mod depends on the batch entry or head; use .at(batch, head)")
        return shared((self, q_len, kv_len), lambda: _composed(self.trace, q_len, kv_len))

    def allows(self, q: Any, k: Any) -> Any:
        raise ValueError("MaskMod: its rows depend on the lengths; use .bind(q_len, kv_len)")

    @property
    def _has_order(self) -> bool:  # type: ignore[override]  # per instance
        return any(_is_equality(self.trace, step) for step in _conjuncts(self.trace, self.trace.result))

    def __repr__(self) -> str:
        return f"<{self.trace.name}>"

    def _description(self) -> dict[str, Any]:
        raise TypeError("to_json(): expected a pattern of parameters, got a mask_mod, which is a function")


@dataclass(frozen=True, repr=False)
class _Rows(Pattern):
    """A boolean of a trace for bound lengths."""

    trace: Trace
    q_len: int
    kv_len: int
    tables: dict[Any, Any] = field(default_factory=dict, compare=False)
    """Look-up tables of captured tensors, and the values of operands for all rows or all keys."""

    @property
    def translation_invariant(self) -> bool:  # type: ignore[override]  # per instance
        return _is_of_distance(self.trace)

    def allows(self, q: Any, k: Any) -> Any:
        with whole_imports:
            from ...trace.trace import Ref

        result = self.trace.result
        if not isinstance(result, Ref):
            return result.array[()]
        first = q_offset(self.q_len, self.kv_len)
        if hasattr(q, "map"):
            return self._on_tiles(q - first, k)
        return self._on_cells(np.asarray(q) - first, np.asarray(k))

    def _element(self, wanted: Ref, side: int, at: tuple[int, ...], positions: np.ndarray) -> np.ndarray:
        """Evaluate an element of an operand of one side; once for all its positions, if none is out of range."""
        positions, length = np.asarray(positions), (self.q_len, self.kv_len)[side == KEY]
        inside = positions.size and positions.min() >= 0 and positions.max() < length
        if inside and wanted.number not in self.tables:
            try:
                self.tables[wanted.number] = self._evaluated(wanted, side, np.arange(length))
            except ValueError:  # an index out of range, maybe at another position
                inside = False
        if not inside:
            return self._evaluated(wanted, side, positions)[at]
        return self.tables[wanted.number][at].take(positions)

    def _evaluated(self, wanted: Ref, side: int, positions: np.ndarray) -> np.ndarray:
        """Evaluate an operand of one side with PyTorch; its own axes come first."""
        found = self.trace.evaluate(wanted, {side: positions})
        found = found.astype(np.int64) if found.dtype.kind in "iu" else found
        axes = range(positions.ndim, found.ndim)
        return np.ascontiguousarray(np.moveaxis(found, axes, range(len(axes))))

    def _on_cells(self, q: np.ndarray, k: np.ndarray) -> Any:
        """Evaluate the trace for positions that broadcast; by PyTorch alone if a step has no rule."""
        with whole_imports:
            from ...trace.rules import by_rule

        trace, value = self.trace, _Values(self, q, k)
        with np.errstate(all="ignore"):
            for step in trace.steps:
                if _is_two_sided(trace, step.result):
                    found = by_rule(step, value, _element)
                    if found is NotImplemented:
                        return self._by_torch(q, k)
                    value.known[step.result.number] = found
        return value(trace.result)

    def _by_torch(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Evaluate the trace by PyTorch, in parts whose temporary tensors fit into memory."""
        trace, shape = self.trace, np.broadcast_shapes(q.shape, k.shape)
        largest = max((math.prod(s.result.shape) for s in trace.steps if _is_two_sided(trace, s.result)), default=1)
        count = min(-(-math.prod(shape) * largest // _MOST_ELEMENTS), shape[0] if shape else 1)
        if count < 2:
            return trace.evaluate(trace.result, {QUERY: q, KEY: k})
        parts = zip(*(_split(x, shape, count) for x in (q, k)), strict=True)
        return np.concatenate([trace.evaluate(trace.result, {QUERY: own_q, KEY: own_k}) for own_q, own_k in parts])

    def _on_tiles(self, q: Any, k: Any) -> Any:
        """Evaluate the trace for the planner's symbolic positions."""
        with whole_imports:
            from ...trace.rules import by_rule
            from ...trace.trace import refs

        trace, value = self.trace, _Values(self, q, k)
        made = {step.result.number: step for step in trace.steps}

        def operands_of(step: Step) -> list[Any]:
            """Return the known values on which a step depends."""
            found: list[Any] = []
            for x in refs(step[2:]):
                own = value(x)
                if own is not NotImplemented:
                    found += own.flat if isinstance(own, np.ndarray) else [own]
                elif x.number in made:
                    found += operands_of(made[x.number])
            return found

        for step in trace.steps:
            if not _is_two_sided(trace, step.result):
                continue
            q.pairs.source[:] = [trace.lines.get(step.result.number, "")]
            try:
                found = by_rule(step, value, self._looked_up)
            except (TypeError, OverflowError):  # operands outside the planner's rules
                found = NotImplemented
            if found is NotImplemented and step.result.dtype and not step.result.shape:
                dtype = np.dtype(np.int64 if step.result.dtype.startswith(("int", "uint")) else step.result.dtype)
                found = q.unknown(operands_of(step), dtype, f"{step.name} in an expression of query and key")
            value.known[step.result.number] = found
        return value(trace.result)

    def _looked_up(self, constant: Constant, indices: Sequence[Any]) -> Any:
        """Look elements of a captured tensor up; symbolic indices may be negative, as in PyTorch."""
        fixed = tuple(slice(None) if hasattr(x, "read") else int(x) for x in indices)
        symbols = [x for x in indices if hasattr(x, "read")]
        key = constant, str(fixed)
        if key not in self.tables:
            self.tables[key] = _table_of(constant.array[fixed])
        table = self.tables[key]
        if table is not None and len(symbols) == 1:
            symbols = [symbols[0] + table.shape[0] // 2]
        return NotImplemented if table is None else symbols[0].read(table, symbols)

    def __repr__(self) -> str:
        return f"<{self.trace.name}>"


def _element(constant: Constant, indices: Sequence[Any]) -> np.ndarray:
    """Look elements of a captured tensor up; indices may be negative."""
    array, code = constant.array, np.int64(0)
    for axis, (index, length) in enumerate(zip(indices, array.shape, strict=True)):
        least, most = np.min(index, initial=0), np.max(index, initial=-1)
        if least < -length or most >= length:
            wrong = least if least < -length else most
            raise ValueError(
                f"mask_mod: index out of range: index {wrong} is out of bounds for dimension {axis} with size {length}"
            )
        code = code * length + (np.where(index < 0, index + length, index) if least < 0 else index)
    values = array.reshape(-1).take(code)
    return values.astype(np.int64) if values.dtype.kind in "iu" else values


def _split(x: np.ndarray, shape: tuple[int, ...], count: int) -> list[np.ndarray]:
    """Split an array that broadcasts to `shape` along the first axis of `shape`."""
    if x.ndim < len(shape) or x.shape[0] == 1:
        return [x] * count
    return np.array_split(x, count)


def _table_of(array: np.ndarray) -> BlockTable | NumberTable | None:
    """Return the table with the extremes of boxes of an array; with one axis twice in a row, for negative indices."""
    if array.dtype.kind not in "biuf" or array.dtype == np.uint64 or not array.size or array.ndim > 2:
        return None
    if array.dtype.kind in "iu":
        array = array.astype(np.int64)
    if array.ndim == 1:
        return NumberTable(np.concatenate([array, array]))
    if array.dtype == bool:
        return BlockTable(array)
    return NumberTable(array) if array.size <= _MOST_NUMBERS else None


class _Values:
    """The values of a trace's operands for arrays or symbols of positions; NotImplemented for those without a value."""

    def __init__(self, rows: _Rows, q: Any, k: Any):
        self.rows, self.known = rows, {QUERY: q, KEY: k}

    def __call__(self, operand: Any) -> Any:
        with whole_imports:
            from ...trace.rules import constant_value
            from ...trace.trace import Ref

        if not isinstance(operand, Ref):
            return constant_value(operand)
        if operand.number not in self.known:
            two_sided = _is_two_sided(self.rows.trace, operand)
            self.known[operand.number] = NotImplemented if two_sided else self._look_up(operand)
        return self.known[operand.number]

    def _look_up(self, wanted: Ref) -> Any:
        """Evaluate an operand that depends on the query or on the key alone with PyTorch."""
        with whole_imports:
            from ...trace.rules import each_element

        (side,) = self.rows.trace.depends[wanted.number]
        return each_element(
            wanted.shape, lambda at: apply(lambda x: self.rows._element(wanted, side, at, x), self.known[side])
        )


def _is_two_sided(trace: Trace, x: Any) -> bool:
    return trace.depends[x.number] >= _SIDES


# -- labels and strides ------------------------------------------------------------------------------------------------


def _joined(trace: Trace, step: Step | None) -> str | None:
    """Return the operator by which a step joins two booleans of pairs, or None."""
    if step is None or step.result.dtype != "bool" or step.result.shape or len(step.args) != 2:
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


def _is_equality(trace: Trace, step: Step | None) -> bool:
    """Return whether a step compares a number of the query with a number of the key."""
    if step is None or step.name != "aten.eq.Tensor" or step.result.shape or step.options:
        return False
    sides = [trace.depends.get(getattr(x, "number", -1), frozenset()) & _SIDES for x in step.args]
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


def _composed(trace: Trace, q_len: int, kv_len: int) -> Pattern:
    """Return the bound pattern of a trace, a composition if it compares labels that lie in any order."""
    found = _with_labels(trace, q_len, kv_len)
    return _whole(trace, q_len, kv_len) if found is None else found


def _whole(trace: Trace, q_len: int, kv_len: int) -> Pattern:
    if _is_causal(trace.made.get(getattr(trace.result, "number", -1))):
        return QueriesAt(Causal(), 0).bind(q_len, kv_len)
    return _Rows(trace, q_len, kv_len)


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
        return _of_distance(trace, q_len, kv_len) if _is_of_distance(trace) else None
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


def _is_of_distance(trace: Trace) -> bool:
    """Return whether the result is known to depend on the difference of row and key alone."""
    with whole_imports:
        from ...trace.trace import refs

    known: set[int] = set()
    for step in trace.steps:
        numbers = {x.number for x in refs(step[2:])}
        if (numbers == _SIDES and step.name in _OF_DIFFERENCES and not step.options) or (numbers and numbers <= known):
            known.add(step.result.number)
    return getattr(trace.result, "number", -1) in known


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
    if not (queries.dtype.kind in "biu" and keys.dtype.kind in "biu") or not min(q_len, kv_len):
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
