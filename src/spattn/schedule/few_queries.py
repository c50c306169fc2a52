"""Plans of a few queries, made from the bits of their rows instead of tiles that are searched.

A step of generation has one query, or a few, for each batch entry, and other keys in every step. Its plan is cheaper to
make than to look for: one key view over the sequence, and the tiles of 64 keys of which a row allows any.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from .._util.bit_rows import distinct_rows, list_tiles
from .._util.frozen import frozen
from .._util.index_checks import q_offset
from .._util.ragged import offsets, ramp
from ..patterns import Pattern
from ..patterns.base.rows import AskedRows
from ..planning import Plan
from ..planning.contract.budget import Budget
from ..planning.contract.cache import find, keep
from ..planning.contract.types import AXES, COMPONENT, NO_ORDER, VIEW, WORK
from ..planning.contract.validated import mark_validated
from ..request.call import Call
from .proof import Writers, prove

__all__ = ["fields_of_rows", "plan_for", "plan_rows", "serves"]

_MOST_QUERIES = 8
_MOST_CELLS = 1 << 26  # of all rows of a call: bytes of memory
_BITS = 64  # keys of a tile
_FEW_PAIRS = 16  # allowed pairs of a tile and row below which they are computed one by one
_MERGES = "merge_rows", "merge_indptr", "merge_sources", "merge_variants"
_ONE = frozen(np.zeros((1, 1), np.int32))  # the index of a single variant
_SHORTEST_PIECE = 1024  # allowed pairs of a work item; shorter ones cost more than they share


def serves(pattern: Pattern, q_len: int, kv_len: int, batch: int, heads: int) -> bool:
    """Return whether :func:`plan_rows` is the way to plan a call: plans that move or grow with kv_len are better."""
    if not 0 < q_len <= _MOST_QUERIES or not kv_len or not batch or not heads:
        return False
    own_batch, own_heads = pattern.sizes()
    entries = (batch if own_batch != 1 else 1) * (heads if own_heads != 1 else 1)
    if entries * q_len << kv_len.bit_length() > _MOST_CELLS:  # the same for nearly all steps
        return False
    if type(pattern).ends is Pattern.ends:  # it declares none
        return True
    places = itertools.product(range(own_batch or 1), range(own_heads or 1))
    return any(pattern.at(*place).ends(q_len) is None for place in places)


def plan_for(pattern: Pattern, call: Call, workers: int, max_bytes: int | None) -> Plan:
    """Return the plan of a call that :func:`serves` accepts, through the plan cache."""
    sizes = call.q_len, call.kv_len, call.batch, call.heads_q
    key = pattern, *sizes, "rows", None, workers, 0, False, False
    kept = find(key)
    plan = keep(key, plan_rows(pattern, *sizes, workers), 0) if kept is None else kept.plan
    if max_bytes is not None:
        Budget(max_bytes).need(plan.nbytes)
    return plan


def plan_rows(pattern: Pattern, q_len: int, kv_len: int, batch: int, heads: int, workers: int) -> Plan:
    """Return a plan for `q_len` queries at the end of the keys; at most `workers` items share the keys of a row."""
    _, index = pattern.variants(batch, heads)
    made = Plan(pattern, **fields_of_rows(pattern, q_len, kv_len, batch, heads, workers, index))
    return mark_validated(made, None, None)


def fields_of_rows(
    pattern: Pattern, q_len: int, kv_len: int, batch: int, heads: int, workers: int, index: np.ndarray | None = None
) -> dict[str, Any]:
    """Return the fields of :func:`plan_rows`, other than the pattern.

    Variants are those of :func:`_distinct` or, if `index` is given, distinct patterns, which it numbers.
    """
    pattern._sizes_in(batch, heads)
    words, variant = _distinct(_words(pattern, q_len, kv_len, batch, heads), heads)
    bits = np.bitwise_count(words)
    pairs = bits.sum(axis=2, dtype=np.uint32).astype(np.int64)  # (variants, queries)
    tiles = np.count_nonzero(bits.any(axis=1) if q_len > 1 else bits)
    by_pairs = int(pairs.sum()) <= _FEW_PAIRS * q_len * int(tiles)
    if index is not None:
        first = np.unique(np.broadcast_to(index, (batch, heads)), return_index=True)[1]
        own = np.broadcast_to(variant, (batch, heads)).reshape(-1)[first]
        words, pairs, variant = words[own], pairs[own], index
    variants = len(words)
    lists = _lists(words, by_pairs)
    made = {
        "q_len": q_len,
        "kv_len": kv_len,
        "block_kv": _BITS,
        "views": _views(q_len, kv_len, lists.block_q),
        "components": _components(variants, q_len, lists.block_q),
        "variant": variant,
        "nnz": int(pairs.sum()),
        "q_order": NO_ORDER,
        "kv_order": NO_ORDER,
        **lists._asdict(),
        **_items(lists, pairs if by_pairs else pairs.sum(axis=1), q_len, variants, workers),
    }
    _prove(made)
    return made


class _Lists(NamedTuple):
    """The tile lists of all variants; fields as in :class:`~spattn.Plan`."""

    block_q: int
    indptr: np.ndarray
    tile_indptr: np.ndarray
    indices: np.ndarray
    key_view: np.ndarray
    mask: np.ndarray
    masks: np.ndarray


def _words(pattern: Pattern, q_len: int, kv_len: int, batch: int, heads: int) -> np.ndarray:
    """Return the bits of the rows of a call: (batch or 1, a divisor of heads, queries, words), C-contiguous."""
    q = np.arange(q_offset(q_len, kv_len), kv_len)[None, None]
    words = np.ascontiguousarray(AskedRows(q, q_len, kv_len, batch, heads).of(pattern))
    if kv_len % _BITS:
        words = words if words.flags.writeable else words.copy()
        words[..., -1] &= np.uint64((1 << kv_len % _BITS) - 1)
    return words


def _distinct(words: np.ndarray, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, (variants, queries, words), and their index for each batch entry and head.

    Equal rows are one variant if there are many.
    """
    own_batch, own_heads, q_len, count = words.shape
    flat = words.reshape(-1, q_len, count)
    if len(flat) == 1:
        return flat, _ONE
    index = distinct_rows(flat.reshape(len(flat), -1))
    if 2 * int(index.max()) < len(flat):
        flat = flat[np.unique(index, return_index=True)[1]]
    else:  # no group of heads shares all rows: a copy would cost more than it saves
        index = np.arange(len(flat), dtype=np.int32)
    return flat, _by_head(index.reshape(own_batch, own_heads), heads)


def _by_head(index: np.ndarray, heads: int) -> np.ndarray:
    return index if index.shape[1] in (1, heads) else np.repeat(index, heads // index.shape[1], axis=1)


def _lists(words: np.ndarray, by_pairs: bool) -> _Lists:
    """List the tiles of which a row allows any key, in runs of full tiles and single partial tiles."""
    variants, q_len, count = words.shape
    if by_pairs:  # kernels compute tiles of one query pair by pair
        words = words.reshape(variants * q_len, 1, count)
    block_q = 1 if by_pairs else max(q_len, 2)
    indptr, tile_indptr, indices, mask, masks = list_tiles(words, block_q)
    return _Lists(block_q, indptr, tile_indptr, indices, np.zeros(len(indices), np.int32), mask, masks)


def _items(lists: _Lists, pairs: np.ndarray, q_len: int, variants: int, workers: int) -> dict[str, Any]:
    """Split lists of many pairs into items; `pairs` has those of each list."""
    ends = lists.tile_indptr[lists.indptr]
    begin, end, pairs = ends[:-1], ends[1:], pairs.reshape(-1)
    query_tiles = _query_tiles(q_len, lists.block_q)
    length = end - begin
    many = workers > 1 and int(pairs.max()) >= 2 * _SHORTEST_PIECE
    if query_tiles == 1 and not many and length.all():  # each variant has one list, and one item
        work = _whole_lists(variants).copy()
        work["begin"], work["end"] = begin, end
        return {"work": work, **_nothing_merged(variants)}
    pieces = np.minimum(np.clip(pairs // _SHORTEST_PIECE, 1, workers), length)
    owner, piece = np.repeat(np.arange(len(pieces)), pieces), ramp(pieces)
    shared = np.where(pieces > 1, pieces, 0).reshape(variants, query_tiles)
    slot = (np.cumsum(shared, axis=1) - shared).reshape(-1)  # of the first piece
    work = np.zeros(len(owner), WORK)
    work["component"], work["query_tile"] = np.divmod(owner, query_tiles)
    work["begin"] = begin[owner] + length[owner] * piece // pieces[owner]
    work["end"] = begin[owner] + length[owner] * (piece + 1) // pieces[owner]
    work["slot"] = np.where(pieces[owner] > 1, slot[owner] + piece, -1)
    if query_tiles > 1:
        work = work[np.lexsort((work["begin"] - work["end"], work["component"]))]
    cells = 1 if query_tiles > 1 else q_len
    merged = np.flatnonzero(pieces != 1)
    sources = np.repeat(pieces[merged], cells)
    first = (slot[merged, None] * lists.block_q + np.arange(cells)).reshape(-1)
    rows = (merged[:, None] % query_tiles * lists.block_q + np.arange(cells)).reshape(-1)
    each = np.repeat(first, sources) + ramp(sources) * lists.block_q
    by_variant = np.arange(variants + 1)
    merges = rows, offsets(sources), each, np.searchsorted(merged // query_tiles, by_variant) * cells
    return {
        "work": work,
        "work_indptr": np.searchsorted(work["component"], by_variant).astype(np.int32),
        "slots": int(shared.sum(axis=1).max()),
        **{name: array.astype(np.int32) for name, array in zip(_MERGES, merges, strict=True)},
    }


@functools.lru_cache(maxsize=64)
def _whole_lists(variants: int) -> np.ndarray:
    """Return one item for each variant, without its tiles."""
    work = np.zeros(variants, WORK)
    work["component"], work["slot"] = np.arange(variants), -1
    return frozen(work)


@functools.lru_cache(maxsize=64)
def _nothing_merged(variants: int) -> dict[str, Any]:
    """Return the fields of items and combines where each variant has one item."""
    one_each, none = frozen(np.arange(variants + 1, dtype=np.int32)), frozen(np.zeros(variants + 1, np.int32))
    merges = dict(zip(_MERGES, (none[:0], none[:1], none[:0], none), strict=True))
    return {"work_indptr": one_each, "slots": 0, **merges}


def _query_tiles(q_len: int, block_q: int) -> int:
    return -(-q_len // block_q)


@functools.lru_cache(maxsize=64)
def _components(variants: int, q_len: int, block_q: int) -> np.ndarray:
    """Return one component for each variant, with the query view 0 and the key view 1."""
    found, query_tiles = np.zeros(variants, COMPONENT), _query_tiles(q_len, block_q)
    found["key_view"], found["query_tiles"], found["variant"] = 1, query_tiles, np.arange(variants)
    found["first_row"] = found["variant"] * query_tiles
    return frozen(found)


def _views(q_len: int, kv_len: int, block_q: int) -> np.ndarray:
    """Return the view of all queries and that of all keys."""
    views = _views_of(q_len, block_q).copy()
    keys = views[1]
    keys["tiles"] = tiles = -(-kv_len // _BITS)
    keys["extent"][-1], keys["grid"][-1] = kv_len, tiles
    return views


@functools.lru_cache(maxsize=64)
def _views_of(q_len: int, block_q: int) -> np.ndarray:
    """Return the view of all queries and that of no keys."""
    views = np.zeros(2, VIEW)
    for view, length, block in zip(views, (q_len, 0), (block_q, _BITS), strict=True):
        tiles = -(-length // block)
        view["stride"], view["tiles"] = (0,) * (AXES - 1) + (1,), tiles
        for name, last in (("extent", length), ("box", block), ("grid", tiles)):
            view[name] = (1,) * (AXES - 1) + (last,)
    return frozen(views)


def _prove(plan: dict[str, Any]) -> None:
    """Raise RuntimeError unless each row is written once."""
    work = plan["work"]
    owner, tile, slot = (work[name] for name in ("component", "query_tile", "slot"))
    query_view = np.ascontiguousarray(plan["components"]["query_view"])
    rest: list[Any] = [plan[name] for name in ("work_indptr", "slots", *_MERGES, "q_len", "block_q")]
    prove(Writers(plan["views"], query_view, owner, tile, slot, *rest))
