"""Clusters: attention among tokens with equal labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._util.cached import cached_property
from ..._util.imports import whole_imports
from ..._util.index_checks import q_offset
from ..._util.ragged import ramp
from ..base.class_registry import register
from ..base.composition import And
from ..base.content import ArrayPattern, Bound
from ..base.pattern import Ordered, Part, Pattern, whole_part
from ..base.predicate import apply, row_or_last
from ..sequence.intervals import RowIntervals

__all__ = ["Clusters"]


@register(
    "clusters", example=lambda: ((np.arange(32) ** 2 % 7,), 32), typical=lambda: ((np.arange(4096) ** 2 % 61,), 4096)
)
@dataclass(frozen=True, eq=False, repr=False)
class Clusters(ArrayPattern):
    """Cluster attention: each query attends to the keys with its cluster label, at any position.

    For tokens grouped by content (k-means, hashing), optionally per head; usually as ``Causal() & Clusters(...)``.

    Parameters
    ----------
    labels : int array (kv_len,), (heads, kv_len) or (batch, heads, kv_len)
        Cluster of each key; negative = none. Copied.
    q_labels : int array (q_len,), (heads, q_len) or (batch, heads, q_len), optional
        Cluster of each query, with the same leading axes; by default, the label of the key at the query's position.

    Notes
    -----
    The CPU backend and the 16-bit forward kernels for Hopper can permute tokens by cluster: tiles are then dense, and
    the cost of the forward pass is proportional to the number of pairs. They can also do so for intersections with
    patterns that have one key interval per query, such as :class:`Causal`, :class:`SlidingWindow` and
    :class:`Documents`.

    References
    ----------
    Kitaev et al. Reformer. arXiv:2001.04451. Roy et al. Routing Transformer. arXiv:2003.05997.

    Examples
    --------
    >>> Clusters([0, 1, 0, 1]).index_set(4, 4).to_dense().astype(int)
    array([[1, 0, 1, 0],
           [0, 1, 0, 1],
           [1, 0, 1, 0],
           [0, 1, 0, 1]])
    """

    labels: np.ndarray
    q_labels: np.ndarray | None = None

    own_axes = 1
    _has_order = True

    def __post_init__(self) -> None:
        self._freeze(np.int64, "labels")
        if self.q_labels is not None:
            self._freeze(np.int64, "q_labels")
        if self.q_labels is not None and self.q_labels.shape[:-1] != self.labels.shape[:-1]:
            expected = (*self.labels.shape[:-1], "q_len")
            raise ValueError(f"q_labels: expected shape {expected}, got {self.q_labels.shape}")

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        for name, array, length in (("labels", self.labels, kv_len), ("q_labels", self.q_labels, q_len)):
            if array is not None and array.shape[-1] != length:
                raise ValueError(f"{name}: expected shape (..., {length}), got {array.shape}")
        return _BoundClusters(self, q_offset(q_len, kv_len))

    def allows(self, q: Any, k: Any) -> Any:
        self._only(self.labels)
        raise ValueError("Clusters: its rows depend on the lengths; use .bind(q_len, kv_len)")

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        leading, most = cls._leading(draw, sizes, sizes.heads_q), draw.integer(0, 4)
        labels = draw.integers((*leading, sizes.kv_len), -1, most)
        return cls(labels, draw.integers((*leading, sizes.q_len), -1, most) if draw.flag() else None), sizes


@dataclass(frozen=True, repr=False)
class _BoundClusters(Bound):
    given: Clusters
    _lists_pairs = True
    _has_order = True

    @property
    def _kv_len(self) -> int:
        return self.given.labels.shape[-1]

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return whole_part(self, q_len, kv_len)

    @cached_property
    def _labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels of queries and keys, each with -1 appended for rows out of range."""
        keys, queries = self.given._only(self.given.labels), self.given.q_labels
        if queries is None:
            before = np.full(max(-self.first, 0), -1)
            queries = np.concatenate([before, keys[max(self.first, 0) :]])
        else:
            queries = self.given._one(queries)
        return np.maximum(np.append(queries, -1), -1), np.maximum(np.append(keys, -1), -1)

    def allows(self, q: Any, k: Any) -> Any:
        queries, keys = self._labels
        of_query = apply(lambda p: queries[row_or_last(p - self.first, len(queries) - 1)], q)
        return (of_query >= 0) & (of_query == apply(lambda p: keys[row_or_last(p, len(keys) - 1)], k))

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the keys sorted by cluster, the non-empty clusters, and each sorted key's (cluster, key) code."""
        labels = self._labels[1][:-1]
        order = np.argsort(labels, kind="stable")
        clusters, number = np.unique(labels[order], return_inverse=True)
        return order, clusters, number * (self._kv_len + 1) + order

    def _spans(self, row: np.ndarray, first: Any, stop: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return, per row, the interval of sorted keys that are in its cluster and at positions ``[first, stop)``."""
        (_, clusters, code), label = self._sorted, self._labels[0][row]
        own = np.searchsorted(clusters, label)
        present = (label >= 0) & (np.append(clusters, -1)[own] == label)
        bounds = (
            np.searchsorted(code, own * (self._kv_len + 1) + np.clip(at, 0, self._kv_len)) for at in (first, stop)
        )
        start, end = (np.where(present, bound, 0) for bound in bounds)
        return start, np.maximum(start, end)

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        row, q_len = q - self.first, self._kv_len - self.first
        start, stop = self._spans(row_or_last(row, q_len), 0, self._kv_len)
        count = stop - start
        return np.repeat(np.arange(len(q)), count), self._sorted[0][np.repeat(start, count) + ramp(count)]

    def _in_order(self, also: Pattern | None = None) -> Ordered:
        with whole_imports:  # late: few plans need them
            from ..hints.order import InOrder

        q_order, kv_order = np.argsort(self._labels[0][:-1], kind="stable"), self._sorted[0]
        spans = None if also is None else also.runs(q_order + self.first, self._kv_len)
        if spans is not None and (spans.start.shape[1] != 1 or (spans.step != 1).any()):
            spans = None
        bounds = (0, self._kv_len) if spans is None else (spans.start[:, 0], (spans.start + spans.count)[:, 0])
        pattern = RowIntervals(*self._spans(q_order, *bounds)).bind(len(q_order), self._kv_len)
        if also is not None and spans is None:
            pattern = And.of(pattern, InOrder(also, q_order, kv_order, self.first))
        return Ordered(pattern, q_order, kv_order)
