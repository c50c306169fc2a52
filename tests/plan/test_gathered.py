"""Plans whose query tiles have their keys side by side: the same pairs in fewer tiles, and places that nobody can
break."""

from __future__ import annotations

import dataclasses
import pickle
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.planning import validate
from spattn.planning.contract.validated import validated
from spattn.planning.tiles import listed as _listed
from spattn.planning.tiles._pairs import Gathered
from spattn.request.call import Call
from spattn.schedule import compiler
from spattn.testing import Expectation, GradientExpectation, check_plan, execute, inputs, plan_pairs
from spattn.testing.strategies import compositions

RNG = np.random.default_rng(0)
MASK = RNG.random((150, 210)) < 0.05


def listed(mask):
    return p.interop.from_pairs(*np.nonzero(mask), *mask.shape)


def by_head(masks):
    return p.PerHead(tuple(map(listed, masks)))


def gathered(pattern, q_len, kv_len, **how):
    return compiler.plan(pattern, q_len, kv_len, gathered=True, **how)


def check(pattern, made):
    """The plan visits the pattern's pairs, and is sound."""
    variants, _ = pattern.variants(*made.variant.shape)
    check_plan(made, [own.index_set(made.q_len, made.kv_len) for own in variants])
    validate(dataclasses.replace(made))


def unions(mask, block_q):
    """The keys of each query tile."""
    return [np.nonzero(mask[row : row + block_q].any(axis=0))[0] for row in range(0, len(mask), block_q)]


def places(unions, block_kv):
    """The keys of all places, as the documentation has them."""
    whole = (np.append(own, np.repeat(own[-1:], -len(own) % block_kv)) for own in unions if len(own))
    return np.concatenate([np.zeros(0, np.int64), *whole])


MASKS = st.builds(
    lambda q_len, kv_len, density, seed: np.random.default_rng(seed).random((q_len, kv_len)) < density,
    st.integers(0, 90),
    st.integers(0, 300),
    st.sampled_from([0, 0.01, 0.1, 0.9, 1]),
    st.integers(0, 99),
)
TILES = st.sampled_from([(1, 64), (3, 64), (64, 64), (16, 128)])


@given(mask=MASKS, tile=TILES, workers=st.sampled_from([1, 30]))
def test_pairs_and_tiles_of_any_mask(mask, tile, workers):
    """Each query tile has its keys in tiles of their own, one after the other, in order and without a gap."""
    made = gathered(listed(mask), *mask.shape, tile=tile, workers=workers)
    check(listed(mask), made)
    rows, keys = plan_pairs(made)
    assert np.array_equal(np.column_stack([rows, keys]), np.argwhere(mask))
    own = unions(mask, tile[0])
    assert made.tiles == sum(-(-len(keys) // tile[1]) for keys in own) and made.nnz == mask.sum()
    if not mask.any():
        assert not made.ordered and made.kv_order.shape == (0, 0)
        return
    assert made.ordered and made.q_order.shape == (0, 0)
    assert made.kv_order.shape[0] == 1 and np.array_equal(made.kv_order[0], places(own, tile[1]))
    query, key = made.views
    assert query["extent"].tolist() == [1, 1, len(mask)] and query["box"].tolist() == [1, 1, tile[0]]
    assert key["extent"].tolist() == [1, 1, made.kv_order.size] and key["box"].tolist() == [1, 1, tile[1]]
    ends = np.append(made.indices, key["tiles"])
    assert ends[0] == 0 and np.array_equal(np.diff(ends), np.diff(made.tile_indptr))


@given(
    case=compositions(max_len=120, depth=2),
    tile=st.sampled_from([(48, 64), (3, 64), (1, 64)]),
    workers=st.sampled_from([1, 9]),
    seed=st.integers(0, 99),
)
def test_pairs_of_compositions(case, tile, workers, seed):
    """Lists joined with anything, also with what tells heads apart."""
    sizes = case.sizes
    pattern = case.pattern & listed(np.random.default_rng(seed).random((sizes.q_len, sizes.kv_len)) < 0.3)
    made = gathered(
        pattern, sizes.q_len, sizes.kv_len, batch=sizes.batch, heads=sizes.heads_q, tile=tile, workers=workers
    )
    check(pattern, made)


@given(masks=st.lists(MASKS.map(lambda mask: np.resize(mask, (70, 130))), min_size=2, max_size=4), tile=TILES)
def test_heads_have_places_of_their_own(masks, tile):
    """As many in all as the longest needs."""
    pattern = by_head(masks)
    made = gathered(pattern, 70, 130, heads=len(masks), tile=tile)
    check(pattern, made)
    variants, index = pattern.variants(1, len(masks))
    assert made.variants == len(variants)
    for head, mask in enumerate(masks):
        own = places(unions(mask, tile[0]), tile[1])
        if made.ordered:
            assert np.array_equal(made.kv_order[index[0, head], : len(own)], own)
    longest = max(len(places(unions(mask, tile[0]), tile[1])) for mask in masks)
    assert made.kv_order.shape == ((len(variants), longest) if longest else (0, 0))


@pytest.mark.parametrize("other", [p.Causal(), p.longformer(10, global_tokens=3), p.Stride(3)], ids=repr)
def test_heads_that_list_nothing_have_keys_in_order(other):
    pattern = p.PerHead((listed(MASK), other))
    made = gathered(pattern, *MASK.shape, heads=2, tile=(16, 64))
    check(pattern, made)
    assert made.gathered and np.array_equal(made.kv_order[made.variant[0, 1], :210], np.arange(210))
    assert len(made.kv_order[0]) == max(210, len(places(unions(MASK, 16), 64)))


def test_what_lists_nothing_is_planned_as_ever():
    """And moves, or grows, as ever."""
    ordinary = [spattn.plan(p.Causal(), 3, n, tiling=spattn.Tiling(tile=(64, 64))) for n in (300, 700)]
    made = [gathered(p.Causal(), 3, n, tile=(64, 64)) for n in (300, 700)]
    for one, other in zip(made, ordinary, strict=True):
        assert not one.gathered and not one.ordered
        for field in dataclasses.fields(other):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


def test_runs_and_clusters_are_listed():
    runs = p.authoring.RowRuns(RNG.integers(0, 50, (2, 80, 1)), np.full((2, 80, 1), 7), np.full((2, 80, 1), 9))
    clusters = p.Clusters(RNG.integers(-1, 6, 120))
    for pattern, q_len, kv_len in ((runs, 80, 120), (clusters, 90, 120), (p.Causal() & clusters, 120, 120)):
        made = gathered(pattern, q_len, kv_len, heads=2, tile=(16, 64))
        assert made.gathered
        check(pattern, made)


@pytest.mark.parametrize("density, tiles", [(0.003, (746, 667)), (0.01, (1978, 1501)), (0.03, (3542, 2016))])
def test_numbers_of_tiles_for_scattered_pairs(density, tiles):
    """Those of decisions/027: half of the tiles are left at one pair in a hundred."""
    pattern = listed(np.random.default_rng(0).random((4096, 4096)) < density)
    for block_q, expected in zip((64, 128), tiles, strict=True):
        assert gathered(pattern, 4096, 4096, tile=(block_q, 64)).tiles == expected
        assert spattn.plan(pattern, 4096, tiling=spattn.Tiling(tile=(block_q, 64))).tiles == 4096 * 4096 // (
            block_q * 64
        )


def test_full_tiles_are_full():
    """Keys that all of a query tile attends to make tiles without a bitmask, wherever they stand."""
    mask = np.zeros((100, 300), bool)
    mask[:64, ::2] = mask[64:, 1::3] = True
    made = gathered(listed(mask), 100, 300, tile=(64, 64))
    assert np.diff(made.tile_indptr)[made.mask < 0].tolist() == [2, 1] and made.tiles == 5
    check(listed(mask), made)


def test_long_lists_are_cut_into_items():
    mask = np.random.default_rng(0).random((70, 9000)) < 0.5
    made = gathered(listed(mask), 70, 9000, tile=(64, 64), workers=8)
    assert len(made.work) > 2 and made.slots == len(made.work)
    check(listed(mask), made)


def test_a_plan_executed_as_a_kernel_would():
    q, k, v = inputs(1, 2, q_len=150, kv_len=210, head_dim=8)
    pattern = by_head([MASK, ~MASK])
    made = gathered(pattern, 150, 210, heads=2, tile=(16, 64), workers=9)
    out, lse = execute(made, q, k, v, 0.3)
    Expectation(pattern, q, k, v, 0.3).check(out.astype(np.float32), lse.astype(np.float32))


def test_plans_are_kept_apart():
    """Of all keys, and of those that are gathered; copies are equal, and checked."""
    pattern = listed(MASK)
    made, other = gathered(pattern, 150, 210), spattn.plan(pattern, 150, 210)
    assert made is gathered(pattern, 150, 210) and other is spattn.plan(pattern, 150, 210)
    assert made.gathered and not other.gathered
    again = validate(pickle.loads(pickle.dumps(made)))
    assert again.gathered and np.array_equal(again.kv_order, made.kv_order)


def test_plans_belong_to_one_number_of_keys():
    """Also where a head beside them has its keys at the ends of the sequence, and would move alone."""
    pattern = p.PerHead((p.Sinks(2) | p.SlidingWindow(3), p.interop.from_pairs([0], [7], 1, 300)))
    made = gathered(pattern, 1, 300, heads=2, tile=(16, 64))
    assert made.gathered and validated(made).least is None
    check(pattern, made)
    with pytest.raises(ValueError, match="kv_len: expected 300"):
        gathered(pattern, 1, 301, heads=2, tile=(16, 64))


def test_not_ordered_and_gathered():
    with pytest.raises(ValueError, match="^ordered, gathered: expected at most one of them$"):
        compiler.plan(p.Clusters(np.arange(9) % 3), 9, ordered=True, gathered=True)


def test_calls_ask_for_them():
    """`plan_for` passes it on."""
    q, k, v = inputs(1, 2, q_len=150, kv_len=210, head_dim=8)
    assert compiler.plan_for(listed(MASK), Call.of(q, k, v), gathered=True).gathered


# -- what a plan by hand may be ----------------------------------------------------------------------------------------


def by_hand(**changes):
    """A plan of one query tile, of which queries 0 and 1 attend to key 3 at two places."""
    mask = np.zeros((2, 10), bool)
    mask[0, 3] = mask[1, 4] = mask[:, 5] = True
    made = gathered(listed(mask), 2, 10, tile=(2, 64))
    assert made.kv_order[0, :4].tolist() == [3, 4, 5, 5]
    return dataclasses.replace(made, **changes)


def test_a_key_may_have_several_places():
    order = by_hand().kv_order.copy()
    order[0, 1] = 3
    made = validate(by_hand(kv_order=order, pattern=None))
    assert list(zip(*map(list, plan_pairs(made)), strict=True)) == [(0, 3), (0, 5), (1, 3), (1, 5)]
    mask = np.zeros((2, 10), bool)
    mask[:, [3, 5]] = True
    check(listed(mask), made)


@pytest.mark.parametrize("tiles", [1, 2])
def test_places_in_other_tiles_of_a_list(tiles):
    """Also where a tile is full, and where lists are long."""
    mask = np.ones((2, 64 * tiles + 1), bool)
    made = gathered(listed(mask), *mask.shape, tile=(2, 64))
    order = made.kv_order.copy()
    order[0, -64] = 5
    with pytest.raises(ValueError, match="each pair once in kv_order"):
        validate(dataclasses.replace(made, kv_order=order))


def test_other_query_tiles_may_have_the_same_keys():
    made = gathered(p.interop.from_pairs([0, 1, 2], [0, 0, 0], 3, 1), 3, 1, tile=(1, 64))
    assert validate(dataclasses.replace(made)).tiles == 3


def test_rows_that_are_padding_are_not_looked_at():
    mask = np.array([[True, False], [False, True], [False, True]])
    made = gathered(listed(mask), 3, 2, tile=(2, 64))
    masks, order = made.masks.copy(), made.kv_order.copy()
    masks[made.mask[1], 1] = ~np.uint64(0)
    validate(dataclasses.replace(made, masks=masks))
    masks[made.mask[1], 0] |= np.uint64(2)
    with pytest.raises(ValueError, match="each pair once"):
        validate(dataclasses.replace(made, masks=masks, nnz=made.nnz + 1))
    order[0, 1] = 0
    validate(dataclasses.replace(made, kv_order=order))


def _doubled(order):
    order[0, 1] = 5


def _wide(order):
    return np.concatenate([order, order], axis=1)  # places of no view


@pytest.mark.parametrize(
    "expected, spoil",
    [
        ("each pair once", _doubled),
        (r"keys in \[0, 10\)", lambda order: order + 7),
        (r"keys in \[0, 10\)", lambda order: order - 4),
        ("one row of keys per variant", lambda order: np.concatenate([order, order])),
        ("a 2-D array of int32", lambda order: order[0]),
        ("a 2-D array of int32", lambda order: order.astype(np.int64)),
        (r"positions in \[0, 60\)", lambda order: order[:, :60]),
        (r"positions in \[0, 10\)", lambda order: np.zeros((0, 0), np.int32)),
        ("", _wide),
    ],
)
def test_places_are_checked(expected, spoil):
    order = by_hand().kv_order.copy()
    new = spoil(order)
    plan = by_hand(kv_order=order if new is None else new)
    if not expected:
        assert validate(plan) is plan
        return
    with pytest.raises(ValueError, match=f"^plan: expected {expected} in"):
        validate(plan)


@given(mask=MASKS, tile=TILES, seed=st.integers(0, 99), data=st.data())
def test_pairs_twice_are_found(mask, tile, seed, data):
    """Whatever place names another key: the check agrees with the pairs that the plan visits."""
    made = gathered(listed(mask), *mask.shape, tile=tile)
    if not made.ordered:
        return
    order, rng = made.kv_order.copy(), np.random.default_rng(seed)
    some = rng.integers(0, order.size, data.draw(st.integers(1, 9)))
    order[0, some] = rng.integers(0, made.kv_len, len(some))
    spoiled = dataclasses.replace(made, kv_order=order)
    pairs = np.column_stack(plan_pairs(spoiled))
    if len(np.unique(pairs, axis=0)) == len(pairs):
        validate(spoiled)
    else:
        with pytest.raises(ValueError, match="each pair once"):
            validate(spoiled)


def test_gathered_says_whether_keys_have_one_place():
    """A permutation is an order, whoever made it, also where rows are in order."""
    plain = spattn.plan(p.SlidingWindow(9), 100, tiling=spattn.Tiling(tile=(16, 64)))
    order = np.random.default_rng(0).permutation(100).astype(np.int32)[None]
    assert not plain.gathered and not plain.ordered
    ordered = validate(dataclasses.replace(plain, pattern=None, kv_order=order))
    assert ordered.ordered and not ordered.gathered
    order[0, 0] = order[0, 1]
    assert dataclasses.replace(plain, kv_order=order).gathered
    assert dataclasses.replace(plain, kv_order=np.concatenate([order, order], axis=1)).gathered


def test_the_check_takes_less_than_a_second():
    made = dataclasses.replace(gathered(listed(np.random.default_rng(0).random((4096, 4096)) < 0.03), 4096, 4096))
    start = time.process_time()
    validate(made)
    assert time.process_time() - start < 1


# -- who executes them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepare", [cpu.prepare, cpu.prepare_backward])
def test_the_cpu_refuses_them(prepare):
    call, made = Call.of(*inputs(1, 1, q_len=150, kv_len=210, head_dim=8)), gathered(listed(MASK), 150, 210)
    assert not cpu.accepts(made, call) and cpu.accepts(spattn.plan(listed(MASK), 150, 210), call)
    with pytest.raises(ValueError, match="^plan: gathered KV is not supported on the CPU"):
        prepare(call, made)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_calls_plan_their_pattern_anew(backend):
    q, k, v = inputs(1, 2, q_len=150, kv_len=210, head_dim=8)
    made = gathered(listed(MASK), 150, 210)
    out, lse = spattn.attention(q, k, v, made, scale=0.3, backend=backend, return_lse=True)
    Expectation(listed(MASK), q, k, v, 0.3).check(out, lse)
    gradients = GradientExpectation(listed(MASK), q, k, v, 0.3)
    gradients.check(spattn.attention_backward(gradients.dout, q, k, v, out, lse, made, scale=0.3, backend=backend))


def test_calls_refuse_those_without_a_pattern():
    made = dataclasses.replace(gathered(listed(MASK), 150, 210), pattern=None)
    with pytest.raises(ValueError, match="^pattern: the backend does not support this plan, .* it has gathered"):
        spattn.attention(*inputs(1, 2, q_len=150, kv_len=210, head_dim=8), made, backend="cpu")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("tile", [(48, 64), (4, 64), (1, 64)], ids=str)
def test_the_cpu_executes_an_order_of_keys_alone(dtype, tile):
    q, k, v = inputs(1, 2, q_len=90, kv_len=131, head_dim=32, dtype=dtype)
    order = np.random.default_rng(0).permutation(131).astype(np.int32)
    plain = spattn.plan(p.longformer(10, global_tokens=3), 90, 131, tiling=spattn.Tiling(tile=tile, workers=9), heads=2)
    made = dataclasses.replace(plain, pattern=None, kv_order=order[None])
    mask = np.zeros((90, 131), bool)
    mask[plan_pairs(made)] = True
    results = cpu.forward(q, k, v, made, 0.2)
    Expectation(listed(mask), q, k, v, 0.2).check(*results)
    gradients = GradientExpectation(listed(mask), q, k, v, 0.2)
    gradients.check(cpu.backward(gradients.dout, q, k, v, *results, made, 0.2))


# -- what they cost ----------------------------------------------------------------------------------------------------


def test_a_budget_bounds_places():
    """Of each head as many as of the longest: many in one head cost the others memory, too."""
    masks = np.zeros((6, 2, 64 * 200), bool)
    masks[np.arange(6), 1, np.arange(6)] = masks[0, 0] = True
    bound = 6 * 4 * 201 * 64
    with pytest.raises(ValueError, match=rf"max_bytes = {bound - 1} bytes, got one that needs at least {bound}$"):
        gathered(by_head(masks), 2, masks.shape[2], heads=6, tile=(1, 64), max_bytes=bound - 1)


def test_a_budget_bounds_the_places_of_one_head():
    """Before they are in memory: a key for each query tile, and so a tile of places."""
    pattern = p.interop.from_pairs(np.arange(1 << 16), np.arange(1 << 16), 1 << 16, 1 << 16)
    spattn.plan(pattern, 1 << 16)
    tracemalloc.start()
    bound = 1 << 23
    with pytest.raises(ValueError, match=f"max_bytes = {bound} bytes, got one that needs at least {bound + 256}$"):
        gathered(pattern, 1 << 16, 1 << 16, tile=(1, 64), max_bytes=bound)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    assert gathered(pattern, 1 << 16, 1 << 16, tile=(1, 64)).kv_order.nbytes == 64 * 4 << 16


def test_a_budget_bounds_the_keys_that_are_looked_up():
    pattern = p.interop.from_pairs([0], [0], 1, 1 << 20)
    with pytest.raises(ValueError, match=f"got one that needs at least {4 << 20}$"):
        gathered(pattern, 1, 1 << 20, max_bytes=(4 << 20) - 1)


def test_more_places_than_int32_numbers(monkeypatch):
    """With fewer numbers, as those of int32 take eight gigabytes."""
    monkeypatch.setattr(_listed, "LARGEST", 640)
    pattern = p.interop.from_pairs(np.arange(100), np.arange(100), 100, 100)
    with pytest.raises(ValueError, match="^pattern: expected at most 640 gathered keys, got at least 704$"):
        gathered(pattern, 100, 100, tile=(1, 64))
    assert gathered(pattern, 100, 100, tile=(10, 64)).kv_order.size == 640


def test_an_explanation_is_of_the_pattern_on_the_cpu():
    pattern = listed(MASK)
    made, plain = (
        gathered(pattern, 150, 210, tile=(48, 64)),
        spattn.plan(pattern, 150, 210, tiling=spattn.Tiling(tile=(48, 64))),
    )
    found = spattn.explain(made)
    assert found.predicted_ms == spattn.explain(plain).predicted_ms and "keys: gathered" in str(found)
    assert f"efficiency {made.efficiency:.3g}" in str(found) and "order:" not in str(found)
    with pytest.raises(ValueError, match="^plan: the CPU does not execute gathered plans"):
        spattn.explain(dataclasses.replace(made, pattern=None))


def test_a_picture_has_the_keys_of_an_item():
    pytest.importorskip("matplotlib").use("Agg")
    made = gathered(listed(MASK), 150, 210, tile=(16, 64))
    item, drawn = made.work[len(made.work) // 2], spattn.explain(made).draw().collections[-1].get_offsets()
    own = unions(MASK, 16)[item["query_tile"]]
    assert np.array_equal(np.unique(drawn[:, 0]), own + 0.5) and len(drawn) == len(own) * min(
        16, 150 - 16 * item["query_tile"]
    )


@pytest.mark.parametrize(
    "row, key, expected",
    [
        ([0, 0], [1, 1], "row: expected sorted pairs"),
        ([1, 0], [0, 0], "row: expected sorted pairs"),
        ([0], [9], "key: expected numbers below 9, got 9 at 0"),
        ([0, 1], [3, -1], "key: expected numbers below 9, got -1 at 1"),
        ([0], [3, 4], "key: expected 2 keys|key: expected 1 keys"),
    ],
)
def test_compiled_code_checks_its_pairs(row, key, expected):
    """What it is given indexes its memory."""
    with pytest.raises(ValueError, match=f"^({expected})"):
        Gathered((2, 64), 9).gather(np.array(row, np.int64), np.array(key, np.int64), 64)
