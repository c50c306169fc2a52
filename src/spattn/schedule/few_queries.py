"""Plans of a few queries, made from the bits of their rows instead of tiles that are searched.

A step of generation has one query, or a few, for each batch entry, and other keys in every step. Its plan is cheaper to
make than to look for: one key view over the sequence, and the tiles of 64 keys of which a row allows any.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from .._util.bit_rows import clear_beyond, distinct_rows
from .._util.frozen import frozen
from .._util.index_checks import q_offset
from ..patterns import Pattern
from ..patterns.base.rows import AskedRows
from ..planning import Plan
from ..planning.contract.budget import Budget
from ..planning.contract.cache import find, keep
from ..planning.contract.types import COMPONENT, NO_ORDER
from ..planning.contract.validated import mark_validated
from ..request.call import Call
from ._few_queries import RowTables, StepTables, by_pairs, tables_of_rows
from .proof import Writers, prove

__all__ = ["RowTables", "StepTables", "fields_of_rows", "plan_for", "plan_rows", "rows_of", "serves"]

_MOST_QUERIES = 8
_MOST_CELLS = 1 << 26  # of all rows of a call: bytes of memory
_BITS = 64  # keys of a tile
_WRITTEN = "work_indptr", "slots", "merge_rows", "merge_indptr", "merge_sources", "merge_variants", "q_len", "block_q"
_ONE = frozen(np.zeros((1, 1), np.int32))  # the index of a single variant


def serves(pattern: Pattern, q_len: int, kv_len: int, batch: int, heads: int) -> bool:
    """Return whether :func:`plan_rows` is the way to plan a call; moving a plan is cheaper, making it grow is not."""
    if not 0 < q_len <= _MOST_QUERIES or not kv_len or not batch or not heads:
        return False
    own_batch, own_heads = pattern.sizes()
    entries = (batch if own_batch != 1 else 1) * (heads if own_heads != 1 else 1)
    if entries * q_len << kv_len.bit_length() > _MOST_CELLS:  # the same for nearly all steps
        return False
    if type(pattern).ends is Pattern.ends:  # it declares none
        return True
    places = itertools.product(range(own_batch or 1), range(own_heads or 1))
    ends = (pattern.at(*place).ends(q_len) for place in places)
    return any(own is None or own.between for own in ends)


def plan_for(pattern: Pattern, call: Call, workers: int, max_bytes: int | None, tile: int = 0) -> Plan:
    """Return the plan of a call that :func:`serves` accepts, through the plan cache."""
    sizes = call.q_len, call.kv_len, call.batch, call.heads_q
    key = pattern, *sizes, "rows", None, workers, tile, False, False
    kept = find(key)
    plan = keep(key, plan_rows(pattern, *sizes, workers, tile), 0) if kept is None else kept.plan
    if max_bytes is not None:
        Budget(max_bytes).need(plan.nbytes)
    return plan


def plan_rows(pattern: Pattern, q_len: int, kv_len: int, batch: int, heads: int, workers: int, tile: int = 0) -> Plan:
    """Return a plan for `q_len` queries at the end of the keys; at most `workers` items share the keys of a row.

    Kernels that compute whole tiles need `tile`, the number of queries of a tile.
    """
    _, index = pattern.variants(batch, heads)
    fields = fields_of_rows(pattern, q_len, kv_len, batch, heads, workers, tile, index)
    del fields["tiles"]
    return mark_validated(Plan(pattern, **fields), None, None)


def fields_of_rows(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    workers: int,
    tile: int = 0,
    index: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return the fields of :func:`plan_rows`, other than the pattern, and its number of tiles.

    Variants are those of :func:`_distinct` or, if `index` is given, distinct patterns, which it numbers.
    """
    words, variant = rows_of(pattern, q_len, kv_len, batch, heads)
    sparse = None
    if index is not None:  # results must not depend on it
        sparse, first = by_pairs(words), np.unique(np.broadcast_to(index, (batch, heads)), return_index=True)[1]
        words, variant = words[np.broadcast_to(variant, (batch, heads)).reshape(-1)[first]], index
    made = tables_of_rows(words, kv_len, workers, sparse, tile)
    components, query_view = _components(len(words), q_len, made["block_q"])
    made |= {"q_len": q_len, "kv_len": kv_len, "block_kv": _BITS, "components": components, "variant": variant}
    made["q_order"] = made["kv_order"] = NO_ORDER
    _prove(made, query_view)
    return made


def rows_of(pattern: Pattern, q_len: int, kv_len: int, batch: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of rows, (variants, queries, words), and their index for each batch entry and head."""
    if pattern._sizes_in(batch, heads)[1] > 1:  # patterns of groups of heads may differ within a group
        pattern = pattern._for_heads(heads)
    return _distinct(_words(pattern, q_len, kv_len, batch, heads), heads)


def _words(pattern: Pattern, q_len: int, kv_len: int, batch: int, heads: int) -> np.ndarray:
    """Return the bits of the rows of a call: (batch or 1, a divisor of heads, queries, words), C-contiguous."""
    q = np.arange(q_offset(q_len, kv_len), kv_len).reshape(1, 1, -1)
    words = np.ascontiguousarray(AskedRows(q, q_len, kv_len, batch, heads).of(pattern))
    rest = kv_len % _BITS
    if rest and not words.flags.writeable:
        if not (words[..., -1] >> np.uint64(rest)).any():
            return words
        words = words.copy()
    if rest:
        clear_beyond(words, kv_len)
    return words


def _distinct(words: np.ndarray, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, (variants, queries, words), and their index for each batch entry and head.

    Equal rows are one variant if there are many.
    """
    own_batch, own_heads, q_len, count = words.shape
    flat = words.reshape(-1, q_len, count)
    if len(flat) == 1:
        return flat, _ONE
    index, first = distinct_rows(flat.reshape(len(flat), -1))
    if 2 * (len(first) - 1) < len(flat):
        flat = flat[first]
    else:  # no group of heads shares all rows: a copy would cost more than it saves
        index = np.arange(len(flat), dtype=np.int32)
    return flat, _by_head(index.reshape(own_batch, own_heads), heads)


def _by_head(index: np.ndarray, heads: int) -> np.ndarray:
    return index if index.shape[1] in (1, heads) else np.repeat(index, heads // index.shape[1], axis=1)


@functools.lru_cache(maxsize=64)
def _components(variants: int, q_len: int, block_q: int) -> tuple[np.ndarray, np.ndarray]:
    """Return one component for each variant, with the query view 0 and the key view 1, and their query views."""
    found, query_tiles = np.zeros(variants, COMPONENT), -(-q_len // block_q)
    found["key_view"], found["query_tiles"], found["variant"] = 1, query_tiles, np.arange(variants)
    found["first_row"] = found["variant"] * query_tiles
    return frozen(found), frozen(found["query_view"])


def _prove(made: dict[str, Any], query_view: np.ndarray) -> None:
    """Raise RuntimeError unless each row is written once."""
    work = made["work"]
    rest: list[Any] = [made[name] for name in _WRITTEN]
    prove(Writers(made["views"], query_view, work["component"], work["query_tile"], work["slot"], *rest))
