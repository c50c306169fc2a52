"""Compile a pattern to a plan, through the plan cache.

1. Bind the pattern of each variant to the lengths (:mod:`spattn.patterns`).
2. :func:`spattn.planning.tiles.build.tile_pattern` turns its parts into affine views, tiles and bitmasks: *what* is
   computed.
3. :func:`spattn.schedule.items.share_out` turns tile lists into work items, split-KV partials and combines: *who*
   computes it.

Passes that only some backends need (:mod:`spattn.schedule`) run on demand, and their tables are cached with the plan.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np

from .._util.imports import whole_imports
from .._util.index_checks import check_lengths
from .._util.limits import memory
from .._util.making import note_new_plan
from ..patterns import Pattern
from ..patterns.base.check import integer, integers
from ..planning import Plan
from ..planning.contract.budget import Budget
from ..planning.contract.cache import find, keep
from ..planning.contract.types import AXES, LARGEST_SIDE, TILE
from ..planning.contract.validated import mark_validated, validated
from ..request.call import Call
from .slow import warned

__all__ = ["are_scattered", "plan", "plan_for"]

_FIELDS = {field.name for field in fields(Plan)}


def plan(
    pattern: Pattern,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int | None = None,
    tile: tuple[int, int] | None = None,
    box: tuple[int, ...] | None = None,
    workers: int = 1,
    pieces: int = 0,
    max_bytes: int | None = None,
    ordered: bool = False,
    gathered: bool = False,
    tiled_for: int | None = None,
    tile_by_tile: bool = False,
) -> Plan:
    """Return a cached or new plan for these arguments; :func:`spattn.plan` lists the errors.

    Parameters
    ----------
    pieces : int, optional
        Approximate number of items into which to split the lists of a variant, each of at least a few tiles; 0 means
        about four for each worker.
    ordered : bool, optional
        Permute tokens as the pattern suggests. Heads whose pattern has no permutation keep the token order.
    gathered : bool, optional
        Gather the keys of each query tile, for patterns that list their pairs. Heads with other patterns do not gather.
    tiled_for : int, optional
        Reuse the tiles of the plan for this number of workers, if that plan is cached.
    tile_by_tile : bool, optional
        Whether the backend expands lists tile by tile; `max_bytes` then also limits the expanded lists.

    Raises
    ------
    ValueError
        Also if both `ordered` and `gathered` are set.
    """
    kv_len = q_len if kv_len is None else kv_len
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern: expected a Pattern, got {type(pattern).__name__}")
    check_lengths(q_len, kv_len)
    if tile is None and box is not None:
        tile = TILE  # a box has as many queries as the default tile
    heads = max(1, pattern.sizes()[1]) if heads is None else _at_least(0, "heads", heads)
    key = (
        pattern,
        int(q_len),
        int(kv_len),
        _at_least(0, "batch", batch),
        heads,
        None if tile is None else _check_tile(tile),
        None if tile is None or box is None else _check_box(box, tile),
        _at_least(1, "workers", workers),
        pieces,
        ordered,
        gathered,
    )
    if ordered and gathered:
        raise ValueError("ordered, gathered: expected at most one of them")
    if max_bytes is not None:
        _at_least(0, "max_bytes", max_bytes)
    made = _found_or_made(key, max_bytes, tiled_for)
    if tile_by_tile:
        Budget(memory() if max_bytes is None else max_bytes).need_tiles(made.tiles)
    return made


def _found_or_made(key: tuple[Any, ...], max_bytes: int | None, tiled_for: int | None) -> Plan:
    kept = find(key)
    if kept is None:
        note_new_plan()
        other = None if tiled_for is None else find((*key[:7], tiled_for, 0, *key[9:]))
        if other is not None and other.validated.growth is None:  # tiles do not depend on kv_len
            return keep(key, _shared_anew(other.at(key[2]), *key[7:9]), other.needed)
        budget = Budget(memory() if max_bytes is None else max_bytes)
        return keep(key, _compile(budget, *key), budget.needed)
    if max_bytes is not None:  # the limit applies to cached plans as to new ones
        Budget(max_bytes).need(kept.needed)
    return kept.at(key[2])


def plan_for(
    pattern: Pattern,
    call: Call,
    tile: tuple[int, int] | None = None,
    workers: int = 1,
    max_bytes: int | None = None,
    **options: Any,
) -> Plan:
    """Return the plan of a call, with the backend's tile, workers and other `options` of :func:`plan`."""
    sizes: dict[str, Any] = {"batch": call.batch, "heads": call.heads_q, "tile": tile, "workers": workers}
    return warned(pattern, lambda: plan(pattern, call.q_len, call.kv_len, max_bytes=max_bytes, **sizes, **options))


def are_scattered(pattern: Pattern, q_len: int, kv_len: int, batch: int, heads: int, tile: tuple[int, int]) -> bool:
    """Return whether the pattern lists its pairs, no permutation clusters them, and sampled tiles hold few pairs.

    A plan in token order would then be large, and slower than gathered keys or one-query tiles.
    """
    if not pattern._has_order or q_len < tile[0]:  # no full query tile to sample
        return False
    variants, _ = pattern.variants(batch, heads)
    bound = [variant.bind(q_len, kv_len) for variant in variants]
    if len(bound) != 1 or not bound[0]._lists_pairs:
        return False
    with whole_imports:  # imported late: few patterns need it
        from ..planning.tiles import listed as _listed

    return _listed.are_scattered(bound[0], q_len, kv_len, tile) and bound[0]._in_order() is None


def _shared_anew(plan: Plan, workers: int, pieces: int) -> Plan:
    """Return the plan with the same tiles, split into items for another number of workers or pieces."""
    with whole_imports:
        from .items import Sharing, share_out

    ends = np.searchsorted(plan.components["variant"], np.arange(plan.variants + 1)).tolist()
    items = share_out(plan, ends, plan.q_len, plan.block_q, Sharing(workers, pieces))
    return mark_validated(replace(plan, **items._asdict()), validated(plan).least, None)


def _compile(
    budget: Budget,
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    tile: tuple[int, int] | None,
    box: tuple[int, ...] | None,
    workers: int,
    pieces: int,
    ordered: bool,
    gathered: bool,
) -> Plan:
    with whole_imports:  # imported late: cached plans do not need it
        from ..planning.tiles.build import tile_pattern
        from .growth import Growth
        from .items import Sharing, share_out

    tiled = tile_pattern(pattern, q_len, kv_len, batch, heads, tile, box, ordered, gathered, budget)
    sharing = Sharing(workers, pieces)
    growth = Growth(tiled, q_len, sharing).fields if len(tiled.growing) else None
    if growth is None:
        changed = share_out(tiled, tiled.variant_components, q_len, tiled.tile[0], sharing)._asdict()
    else:
        changed = growth(kv_len)
    same = {name: value for name, value in vars(tiled).items() if name in _FIELDS}
    made = Plan(pattern=pattern, q_len=q_len, block_q=tiled.tile[0], block_kv=tiled.tile[1], **same | changed)
    budget.need(made.nbytes)
    return mark_validated(made, tiled.least, growth)


def _at_least(least: int, name: str, value: int) -> int:
    return value if type(value) is int and value >= least else integer(name, value, least)


def _check_tile(tile: tuple[int, int]) -> tuple[int, int]:
    known = type(tile) is tuple and len(tile) == 2 and type(tile[0]) is type(tile[1]) is int
    sides: tuple[int, ...] = tile if known else integers("tile", tile)
    if len(sides) != 2 or not 1 <= sides[0] <= LARGEST_SIDE or not 1 <= sides[1] <= LARGEST_SIDE or sides[1] % 64:
        expected = f"(block_q >= 1, a multiple of 64), both up to {LARGEST_SIDE}"
        raise ValueError(f"tile: expected {expected}, got {sides}")
    return sides[0], sides[1]


def _check_box(box: tuple[int, ...], tile: tuple[int, int]) -> tuple[int, ...]:
    sides = integers("box", box, 1)
    if math.prod(sides) != tile[0] or len(sides) > AXES:
        raise ValueError(f"box: expected {tile[0]} queries on up to {AXES} axes, got {sides}")
    return sides
