"""Candidate query boxes of a pattern: their number and their keys, computed without planning."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..patterns.hints.closed_forms import Span
from ..planning import Plan
from ..planning.contract.types import grid_of

__all__ = ["Overlap", "overlap_of_boxes"]


class Overlap(NamedTuple):
    """The key ranges of query boxes in a part of a pattern."""

    queries: list[int]  # number of queries along each axis
    along: list[dict[int, dict[int, int]]]  # for each axis and box side, a histogram of the boxes' key ranges

    def boxes(self, sides: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of boxes along each axis."""
        return grid_of(self.queries, sides)

    def keys_along(self, sides: tuple[int, ...]) -> list[int]:
        """Return the sum of the boxes' key ranges along each axis; the product of the sums is the keys of all boxes."""
        found = (own[side] for own, side in zip(self.along, sides, strict=True))
        return [sum(keys * count for keys, count in each.items()) for each in found]

    def mean_keys(self, sides: tuple[int, ...]) -> tuple[int, ...]:
        """Return the mean key range of a box along each axis, rounded up."""
        return tuple(-(-keys // count) for keys, count in zip(self.keys_along(sides), self.boxes(sides), strict=True))

    def kinds(self, sides: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield each shape of a key box, and the number of query boxes that have it."""
        for each in itertools.product(*(own[side].items() for own, side in zip(self.along, sides, strict=True))):
            keys, counts = zip(*each, strict=True)
            yield keys, math.prod(counts)

    def candidates(self, cells: range, most: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield (shape, number of boxes) for each box shape with a cell count in `cells` and at most `most` boxes."""
        for box in _boxes(self.along, max(cells, default=0)):
            if math.prod(box) in cells and (boxes := math.prod(self.boxes(box))) <= most:
                yield box, boxes


def _boxes(along: Sequence[Collection[int]], most: int) -> Iterator[tuple[int, ...]]:
    """Yield all boxes of up to `most` cells with a side from each of `along`, whose sides ascend."""
    if not along:
        yield ()
        return
    for side in itertools.takewhile(lambda side: side <= most, along[0]):
        for rest in _boxes(along[1:], most // side):
            yield side, *rest


def overlap_of_boxes(plan: Plan, batch: int, heads: int, longest: int) -> Overlap | None:
    """Return the key ranges of query boxes in the pattern's largest part with spans; None if no part has spans."""
    variants = [] if plan.pattern is None else plan.pattern.variants(batch, heads)[0]
    bound = (variant.bind(plan.q_len, plan.kv_len) for variant in variants)
    parts = [part for own in bound for part in own.parts(plan.q_len, plan.kv_len)]
    spans = [part.spans for part in parts if part.spans is not None]
    if not spans:
        return None
    largest = max(spans, key=lambda axes: math.prod(len(span.first) for span in axes))
    return Overlap([len(span.first) for span in largest], [_keys_along(span, longest) for span in largest])


def _keys_along(span: Span, longest: int) -> dict[int, dict[int, int]]:
    """Return a histogram of the key ranges of boxes along an axis, for each side up to `longest`."""
    first, last = np.array(span.first), np.array(span.last)
    found = {}
    for side in range(1, min(len(first), longest) + 1):
        starts = np.arange(0, len(first), side)
        keys = np.maximum.reduceat(last, starts) + 1 - np.minimum.reduceat(first, starts)
        found[side] = dict(Counter(keys.tolist()))
    return found
