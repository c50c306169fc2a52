"""Rows of steps of generation: those of the mask of a prefill, for random compositions in any kind of cache.

One to eight queries are at the end of a cache that grows, at a place in a cache of fixed size, or at places of their
own in each batch entry. The masks are those of :mod:`.oracle`.
"""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.schedule import few_queries
from spattn.testing import check_plan

from . import draws, oracle
from .test_host_tables import forward_tables

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be evaluated on whole tiles")

EXAMPLES = 40  # of each kind of cache: all three take 3 s


def draw_step(source, kinds):
    """A composition and sizes; by head or batch entry now and then."""
    sizes = draws.draw_sizes(source, source.choice([100, 300]))
    sizes = sizes._replace(q_len=source.choice([1, 1, 1, source.integer(2, 8)]), batch=source.choice([1, 3]))
    way = source.integer(0, 4)
    if way < 2:
        number = sizes.heads_q if way else sizes.batch
        pairs = [draws.draw_term(source, sizes, 3, kinds) for _ in range(number)]
        patterns, masks = zip(*pairs, strict=True)
        join, of = (p.PerHead, lambda m: oracle.per_head(m, sizes.heads_q)) if way else (p.PerBatch, oracle.per_batch)
        return draws.Case(join(patterns), of(masks), sizes)
    return draws.Case(*draws.draw_term(source, sizes, 4, kinds), sizes)


def rows_of(pattern, sizes, kv_len):
    """(batch, heads, q_len, kv_len): what the words of a step say."""
    words = few_queries._words(pattern, sizes.q_len, kv_len, sizes.batch, sizes.heads_q)
    assert words.shape[1] in (1, sizes.heads_q) or sizes.heads_q % words.shape[1] == 0
    rows = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    assert not rows[..., kv_len:].any()
    rows = rows if rows.shape[1] == 1 else rows.repeat(sizes.heads_q // rows.shape[1], axis=1)
    return np.broadcast_to(rows[..., :kv_len], (sizes.batch, sizes.heads_q, sizes.q_len, kv_len))


def check_step(source, pattern, sizes, kv_len, expected):
    """The words, and the plan of the backend with one variant for each pattern."""
    found = rows_of(pattern, sizes, kv_len)
    wrong = np.argwhere(found != expected)
    assert not len(wrong), f"{pattern!r:.500}, {sizes}, {kv_len} keys: {wrong[:4].tolist()} {source.notes}"
    if source.integer(0, 2):
        return
    workers = source.choice([1, 1, 4])
    tile = source.choice([0, 0, 16, 64])  # on a GPU, 16 or more
    plan = few_queries.plan_rows(pattern, sizes.q_len, kv_len, sizes.batch, sizes.heads_q, workers, tile)
    variants, index = pattern.variants(sizes.batch, sizes.heads_q)
    assert np.array_equal(plan.variant, index)
    check_plan(plan, [own.index_set(sizes.q_len, kv_len) for own in variants])
    visits, variant = forward_tables(plan), np.broadcast_to(index, expected.shape[:2])
    for b, h in np.ndindex(*variant.shape):  # a GPU executes the same plan
        assert np.array_equal(visits[variant[b, h]], expected[b, h])


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_rows_in_a_cache_that_grows(seed):
    source = draws.Seeded(1, seed)
    case = draw_step(source, draws.ANYWHERE)
    for kv_len in (case.sizes.kv_len, case.sizes.kv_len + 1, 64, 129):
        check_step(source, case.pattern, case.sizes, kv_len, case.allowed(kv_len))


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_rows_at_a_length(seed):
    """Masks, layouts, documents and other patterns of one length."""
    source = draws.Seeded(2, seed)
    sizes = draws.draw_sizes(source)._replace(q_len=source.integer(1, 8))
    case = draws.Case(*draws.draw_term(source, sizes, 3, draws.TERMS), sizes)
    check_step(source, case.pattern, sizes, sizes.kv_len, case.allowed())


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_rows_at_places(seed):
    """Of all entries, or of each; as an array, or as patterns of the entries."""
    source = draws.Seeded(3, seed)
    case = draw_step(source, draws.ANYWHERE)
    sizes, room = case.sizes, case.sizes.kv_len
    whole = oracle.whole(case.mask, sizes.batch, sizes.heads_q, room, room)
    last = max(room - sizes.q_len, 0)
    if room < sizes.q_len:
        return
    at = source.integer(0, last)
    check_step(source, p.QueriesAt(case.pattern, at), sizes, room, whole[:, :, at : at + sizes.q_len])
    places = np.array([[source.integer(0, room - 1) for _ in range(sizes.q_len)] for _ in range(sizes.batch)])
    each = np.stack([whole[b, :, own] for b, own in enumerate(places)]).swapaxes(1, 2)
    check_step(source, p.QueriesAt(case.pattern, places), sizes, room, each)
    first = [source.integer(0, last) for _ in range(sizes.batch)]
    each = np.stack([whole[b, :, own : own + sizes.q_len] for b, own in enumerate(first)])
    if case.pattern.sizes()[0] == 1:
        by_entry = p.PerBatch(tuple(p.QueriesAt(case.pattern, own) for own in first))
        check_step(source, by_entry, sizes, room, each)


def test_arrays_that_change_between_steps_are_read_again():
    """A mask, padding and bounds of rows that the caller overwrites in place, one step after another."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, n, 8)) for n in (1, 90, 90))
    mask, padding = np.zeros((2, 1, 1, 90), bool), np.zeros((2, 90), bool)
    start, stop = np.zeros((2, 1, 1), np.int64), np.zeros((2, 1, 1), np.int64)
    for step in range(4):
        mask[...], padding[...] = rng.random(mask.shape) < 0.5, rng.random(padding.shape) < 0.5
        start[...], stop[...] = rng.integers(0, 40, start.shape), rng.integers(40, 90, stop.shape)
        inside = (np.arange(90) >= start[..., None]) & (np.arange(90) < stop[..., None])
        for pattern, options, allowed in (
            (mask, {}, mask),
            ("full", {"key_padding": padding}, padding[:, None, None]),
            (p.RowIntervals(start, stop), {"key_padding": padding}, inside & padding[:, None, None]),
        ):
            out = spattn.attention(q, k, v, pattern, backend="cpu", **options)
            scores = np.where(allowed, q @ k.swapaxes(2, 3) / np.sqrt(8), -np.inf)
            weights = np.exp(scores - scores.max(axis=3, keepdims=True))
            expected = weights / weights.sum(axis=3, keepdims=True) @ v
            np.testing.assert_allclose(out, expected, atol=1e-12, err_msg=f"step {step}")
