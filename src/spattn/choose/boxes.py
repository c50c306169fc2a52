"""Boxes of queries that a plan might have: how many there are, and how many keys they meet, before any is planned."""

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

__all__ = ["Met", "met_by_boxes"]


class Met(NamedTuple):
    """The queries of a part along each axis; and, by the side of boxes, how many boxes meet so many keys along it."""

    queries: list[int]
    along: list[dict[int, dict[int, int]]]

    def boxes(self, sides: tuple[int, ...]) -> tuple[int, ...]:
        """How many along each axis."""
        return grid_of(self.queries, sides)

    def keys_along(self, sides: tuple[int, ...]) -> list[int]:
        """What all boxes along each axis meet, each with its own keys. Of a box of keys along all axes all boxes meet
        the product."""
        found = (own[side] for own, side in zip(self.along, sides, strict=True))
        return [sum(keys * count for keys, count in each.items()) for each in found]

    def kinds(self, sides: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        """The sides of the boxes of keys that are met, and by how many boxes of queries each."""
        for each in itertools.product(*(own[side].items() for own, side in zip(self.along, sides, strict=True))):
            keys, counts = zip(*each, strict=True)
            yield keys, math.prod(counts)

    def candidates(self, cells: range, most: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """The boxes of so many cells, and how many of each there are, if these are at most so many."""
        for box in _boxes(self.along, max(cells, default=0)):
            if math.prod(box) in cells and (boxes := math.prod(self.boxes(box))) <= most:
                yield box, boxes


def _boxes(along: Sequence[Collection[int]], most: int) -> Iterator[tuple[int, ...]]:
    """All boxes of up to so many cells of these sides, which ascend."""
    if not along:
        yield ()
        return
    for side in itertools.takewhile(lambda side: side <= most, along[0]):
        for rest in _boxes(along[1:], most // side):
            yield side, *rest


def met_by_boxes(plan: Plan, batch: int, heads: int, longest: int) -> Met | None:
    """What boxes meet whose sides are up to `longest`, by the spans of the part that has the most queries; None where
    no part has spans."""
    variants = [] if plan.pattern is None else plan.pattern.variants(batch, heads)[0]
    bound = (variant.bind(plan.q_len, plan.kv_len) for variant in variants)
    parts = [part for own in bound for part in own.parts(plan.q_len, plan.kv_len)]
    spans = [part.spans for part in parts if part.spans is not None]
    if not spans:
        return None
    largest = max(spans, key=lambda axes: math.prod(len(span.first) for span in axes))
    return Met([len(span.first) for span in largest], [_keys_along(span, longest) for span in largest])


def _keys_along(span: Span, longest: int) -> dict[int, dict[int, int]]:
    """By the side of boxes: how many of them meet so many keys along an axis."""
    first, last = np.array(span.first), np.array(span.last)
    found = {}
    for side in range(1, min(len(first), longest) + 1):
        starts = np.arange(0, len(first), side)
        keys = np.maximum.reduceat(last, starts) + 1 - np.minimum.reduceat(first, starts)
        found[side] = dict(Counter(keys.tolist()))
    return found
