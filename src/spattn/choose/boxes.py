"""Candidate query boxes of a plan: their number and their keys, before planning any."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..patterns.hints.lattice import Span
from ..planning import Plan
from ..planning.contract.types import grid_of

__all__ = ["Overlap", "overlap_of_boxes"]


class Overlap(NamedTuple):
    """Queries of a part along each axis and, by box side, a histogram of the boxes' key ranges along it."""

    queries: list[int]
    along: list[dict[int, dict[int, int]]]

    def boxes(self, sides: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of boxes along each axis."""
        return grid_of(self.queries, sides)

    def keys_along(self, sides: tuple[int, ...]) -> list[int]:
        """Return, per axis, the sum of the boxes' key ranges; the product over axes is the total."""
        found = (own[side] for own, side in zip(self.along, sides, strict=True))
        return [sum(keys * count for keys, count in each.items()) for each in found]

    def mean_keys(self, sides: tuple[int, ...]) -> tuple[int, ...]:
        """Return, per axis, the mean key range of a box, rounded up."""
        return tuple(-(-keys // count) for keys, count in zip(self.keys_along(sides), self.boxes(sides), strict=True))

    def kinds(self, sides: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the sides of the key boxes, and the number of query boxes with each."""
        for each in itertools.product(*(own[side].items() for own, side in zip(self.along, sides, strict=True))):
            keys, counts = zip(*each, strict=True)
            yield keys, math.prod(counts)

    def candidates(self, cells: range, most: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield boxes whose size is in `cells`, with their number if that is at most `most`."""
        for box in _boxes(self.along, max(cells, default=0)):
            if math.prod(box) in cells and (boxes := math.prod(self.boxes(box))) <= most:
                yield box, boxes


def _boxes(along: Sequence[Collection[int]], most: int) -> Iterator[tuple[int, ...]]:
    """Yield all boxes of up to `most` cells with these sides, which ascend."""
    if not along:
        yield ()
        return
    for side in itertools.takewhile(lambda side: side <= most, along[0]):
        for rest in _boxes(along[1:], most // side):
            yield side, *rest


def overlap_of_boxes(plan: Plan, batch: int, heads: int, longest: int) -> Overlap | None:
    """Return the key ranges of boxes in the part with the most queries; None if no part has spans."""
    variants = [] if plan.pattern is None else plan.pattern.variants(batch, heads)[0]
    bound = (variant.bind(plan.q_len, plan.kv_len) for variant in variants)
    parts = [part for own in bound for part in own.parts(plan.q_len, plan.kv_len)]
    spans = [part.spans for part in parts if part.spans is not None]
    if not spans:
        return None
    largest = max(spans, key=lambda axes: math.prod(len(span.first) for span in axes))
    return Overlap([len(span.first) for span in largest], [_keys_along(span, longest) for span in largest])


def _keys_along(span: Span, longest: int) -> dict[int, dict[int, int]]:
    """Return, by box side, the histogram of the boxes' key ranges along an axis."""
    first, last = np.array(span.first), np.array(span.last)
    found = {}
    for side in range(1, min(len(first), longest) + 1):
        starts = np.arange(0, len(first), side)
        keys = np.maximum.reduceat(last, starts) + 1 - np.minimum.reduceat(first, starts)
        found[side] = dict(Counter(keys.tolist()))
    return found
