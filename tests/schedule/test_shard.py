"""The parts of a plan on several ranks give the bits of the whole plan, from the rows that the ranks need alone."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.distributed import simulate
from spattn.distributed._plans import Shape, call_of, key_transfers, row_transfers
from spattn.distributed._shardings import NAMES, named
from spattn.request.call import Call
from spattn.schedule import shard
from spattn.schedule.shard_totals import totals
from spattn.testing import inputs
from spattn.testing.strategies import cases, compositions, problems


def square(drawn):
    return drawn.case.sizes.q_len == drawn.case.sizes.kv_len


@settings(max_examples=40)
@given(
    problems(st.one_of(cases(max_len=300), compositions(max_len=300)), layout=("contiguous",) * 3).filter(square),
    st.sampled_from(NAMES),
    st.integers(2, 5),
)
def test_parts_have_the_bits_of_the_whole(problem, name, world_size):
    """Rows that a rank does not need hold other numbers; they may not matter."""
    sizes, pattern = problem.case.sizes, problem.case.pattern
    shape = Shape(sizes.batch, sizes.heads_q, sizes.heads_kv, sizes.q_len, problem.head_dim, problem.head_dim_v)
    q, k, v = inputs(*problem.shape, dtype=problem.dtype, seed=problem.seed)
    dout = inputs(*problem.shape, dtype=problem.dtype, seed=problem.seed + 1)[2]
    call = Call.of(q, k, v)
    plan, of_gradients = (cpu.plan_for(pattern, call, backward=backward) for backward in (False, True))
    sharding = named(name, shape, world_size, plan)
    out, lse = spattn.attention(q, k, v, pattern, backend="cpu", return_lse=True)
    dout = np.resize(dout, out.shape)
    gradients = spattn.attention_backward(dout, q, k, v, out, lse, pattern, backend="cpu")
    rng = np.random.default_rng(problem.seed)
    for rank in range(world_size):
        rows = sharding.rows(rank)

        def seen(x, transfers, other, rows=rows):
            made = np.full_like(x, other) if other == -np.inf else rng.standard_normal(x.shape).astype(x.dtype)
            flat, of = made.reshape(-1, *x.shape[2:]), x.reshape(-1, *x.shape[2:])
            flat[:, rows] = of[:, rows]
            for transfer in transfers:
                for block in transfer.receive:
                    flat[np.ix_(block.heads, block.rows)] = of[np.ix_(block.heads, block.rows)]
            return made

        of_keys = key_transfers(plan, sharding, rank, sizes.batch, sizes.heads_q, sizes.heads_kv)
        keys, values = seen(k, of_keys, 0), seen(v, of_keys, 0)
        written = np.zeros((plan.variants, sizes.q_len), int)
        for stage in shard.forward_stages(plan, sharding, rank, sides=problem.seed % 2 == 0):
            local = stage.where == shard.LOCAL
            now = (seen(k, (), 0), seen(v, (), 0)) if local else (keys, values)
            mine, of_mine = spattn.attention(seen(q, (), 0), *now, stage.plan, backend="cpu", return_lse=True)
            cells = np.broadcast_to(stage.rows[plan.variant], out.shape[:3])
            assert mine[cells].tobytes() == out[cells].tobytes() and of_mine[cells].tobytes() == lse[cells].tobytes()
            assert not local or np.isin(np.nonzero(stage.keys.mask)[0], rows).all()
            written += stage.rows
        assert (written == np.isin(np.arange(sizes.q_len), rows)).all()
        of_rows = row_transfers(of_gradients, sharding, rank, sizes.batch, sizes.heads_q)
        given = [seen(x, of_rows, 0) for x in (dout, q)], [seen(out, of_rows, 0), seen(lse, of_rows, -np.inf)]
        own = shard.backward_part(of_gradients, sharding, rank)
        for got, want in zip(
            spattn.attention_backward(*given[0], keys, values, *given[1], own, backend="cpu"), gradients, strict=True
        ):
            assert got[:, :, rows].tobytes() == want[:, :, rows].tobytes()


def causal_plan(length=16384, heads=1):
    return cpu.plan_for(p.Causal(), call_of(Shape(1, heads, heads, length, 32, 32), "float32"))


def test_pairs_of_rows_are_the_predicates():
    pattern = p.PerHead((p.Causal(), p.strided(9) | p.GlobalTokens((3, 130)), p.Neighborhood((10, 20), (3, 5))))
    plan = cpu.plan_for(pattern, call_of(Shape(1, 3, 3, 200, 16, 16), "float32"))
    own, index = pattern.variants(1, 3)
    at = np.arange(200)
    want = [x.bind(200, 200).allows(at[:, None], at).sum(axis=1) for x in own]
    assert np.array_equal(shard.pairs_of_rows(plan), want)
    assert shard.pairs_of_rows(plan).sum() == plan.nnz and index.shape == plan.variant.shape


def test_plans_with_splits_and_permutations_are_tested():
    """The cases "split" and "permuted" of tests/distributed/rank_program.py."""
    assert causal_plan(2500).slots
    labels = p.Clusters(np.arange(2000) * 7919 % 9)
    assert cpu.plan_for(labels, call_of(Shape(1, 1, 1, 2000, 16, 16), "float32")).ordered


@pytest.mark.parametrize("name", ["balanced", "head_tail"])
def test_causal_work_is_balanced(name):
    """Within 5 % of the mean at 64 ranks, in tiles."""
    plan = causal_plan(131072, 16)
    shape = Shape(1, 16, 16, 131072, 32, 32)
    tiles = totals(plan, named(name, shape, 64, plan), [], np.ones(1, int), False).tiles
    assert max(tiles) <= 1.05 * np.mean(tiles)
    assert named("contiguous", shape, 64, None).bounds[1] == 2048


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length, world_size", [(1, 3), (7, 2), (100, 7), (1000, 4)])
def test_each_row_is_on_one_rank(name, length, world_size):
    shape = Shape(1, 1, 1, length, 16, 16)
    sharding = named(name, shape, world_size, cpu.plan_for(p.Causal(), call_of(shape, "float32")))
    rows = [sharding.rows(rank) for rank in range(world_size)]
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(length)) and sharding.length == length
    for rank, own in enumerate(rows):
        assert (np.diff(own) > 0).all() and (sharding.owners()[own] == rank).all()


@pytest.mark.parametrize("change", ["work", "merge_rows"])
def test_a_part_without_a_row_is_refused(change):
    plan, owned = causal_plan(2500), np.arange(2500) >= 1250
    spans = shard.spans_of(plan)
    items = np.nonzero(((spans.queries >= 0) & owned[spans.queries]).any(axis=1)[spans.lists])[0]
    work = spans.work[items]
    shard._part(plan, items, work.copy(), owned[None])
    if change == "work":
        with pytest.raises(RuntimeError, match="a part lacks a partial"):
            shard._part(plan, items[:-1], work[:-1].copy(), owned[None])
    else:
        alone, merged = spans.lists[items[work["slot"] < 0]], shard._merged(plan, owned[None])
        shard._prove(plan, alone, merged, owned[None])
        with pytest.raises(RuntimeError, match="no writer or several"):
            shard._prove(plan, alone, merged & (plan.merge_rows < 2499), owned[None])
        with pytest.raises(RuntimeError, match="no writer or several"):
            shard._prove(plan, spans.lists[items], merged, owned[None])


def test_a_part_without_tiles_of_table_gradients_is_refused():
    plan, sharding = causal_plan(2500), named("contiguous", Shape(1, 1, 1, 2500, 32, 32), 2, None)
    for rank in range(2):
        lists = shard.lists_of_tables(plan, sharding, rank)
        assert lists.items(shard.backward_part(plan, sharding, rank)).any()
        with pytest.raises(RuntimeError, match="lacks tiles of table gradients"):
            lists.items(shard.backward_part(plan, sharding, 1 - rank))


def test_the_simulation_has_the_bytes_of_the_transfers():
    """Sums over the transfers of each rank, forward and backward, with grouped heads of different patterns."""
    some = p.PerHead((p.SlidingWindow(30), p.Causal(), p.strided(8), p.longformer(4, global_tokens=(0, 77))))
    shape, world_size = Shape(2, 4, 2, 500, 16, 16), 5
    cases = itertools.product((some, p.longformer(20, global_tokens=range(9))), (False, True), ("head_tail", "striped"))
    for pattern, backward, name in cases:
        found = simulate(pattern, shape[:5], world_size, sharding=name, dtype="float64", backward=backward)
        plan = cpu.plan_for(pattern, call_of(shape, "float64"), backward=backward)
        for rank in range(world_size):
            transfers = (
                row_transfers(plan, found.sharding, rank, 2, 4)
                if backward
                else key_transfers(plan, found.sharding, rank, 2, 4, 2)
            )
            width = 8 * (3 * 16 + 1 if backward else 2 * 16)
            for blocks, total in (("receive", found.received), ("send", found.sent)):
                rows = sum(len(x.heads) * len(x.rows) for transfer in transfers for x in getattr(transfer, blocks))
                assert rows * width == total[rank]
            assert found.messages[rank] == sum(1 for transfer in transfers if transfer.receive)
            parts = [shard.backward_part(plan, found.sharding, rank)]
            if not backward:
                parts = [stage.plan for stage in shard.forward_stages(plan, found.sharding, rank)]
            variant = [np.repeat(np.arange(plan.variants), np.diff(part.work_indptr)) for part in parts]
            tiles = [part.work["end"] - part.work["begin"] for part in parts]
            length = np.bincount(np.concatenate(variant), np.concatenate(tiles), plan.variants)
            heads = np.bincount(np.broadcast_to(plan.variant, (2, 4)).ravel())
            assert totals(plan, found.sharding, [], heads, backward).tiles[rank] == heads @ length


def test_the_simulation_of_a_window():
    """Bytes depend on neither the length nor the number of ranks; other exchanges send all keys."""
    for length, world_size in ((16384, 8), (65536, 16), (65536, 256)):
        shape = 1, 8, 8, length, 64
        found = simulate(p.SlidingWindow(100), shape, world_size, sharding="contiguous", seconds=0.01)
        assert found.received[1:-1].tolist() == [2 * 100 * 8 * 2 * 64 * 4] * (world_size - 2)
        assert found.sent.sum() == found.received.sum() and found.messages.max() == 2
        assert found.balance < 1.3 and found.seconds < min(found.others.values())
        assert ("heads" in found.others) == (world_size == 8)
    one = simulate(p.SlidingWindow(100), shape, 1, seconds=0.01)
    assert one.seconds == 0.01 == one.others["ring"] and one.name == "contiguous" and not one.received.any()


def test_the_least_predicted_time_chooses_the_exchange():
    shape = 1, 2, 2, 8192, 32
    spread = p.BigBird(64, global_blocks=0)
    for pattern, sharding, name in (
        (p.SlidingWindow(50), "contiguous", "point_to_point"),
        (p.Documents((1024,) * 8), "contiguous", "point_to_point"),
        (p.Causal(), "contiguous", "all_gather"),
        (p.Full(), "head_tail", "all_gather"),
        (spread, "contiguous", "all_to_all"),
    ):
        for backward in (False, True):
            found = simulate(pattern, shape, 8, sharding=sharding, seconds=0.1, backward=backward)
            assert found.exchange == name, (pattern, found.exchanges)
            assert found.exchanges[name] == min(found.exchanges.values())
            width = 4 * (32 * 3 + 1 if backward else 32 * 2) * 2
            needed = np.maximum(found.sent, found.received).max()
            if found.messages.any():
                assert found.exchanges["all_to_all"] == 7 * 20e-6 + needed / 25e9
                assert np.isclose(found.exchanges["all_gather"], 3 * 20e-6 + 7 * 1024 * width / 25e9, rtol=1e-12)
            assert found.exchanges["point_to_point"] <= found.exchanges.get("all_to_all", 1)
    slow = simulate(spread, shape, 8, sharding="contiguous", seconds=0.1, latency=1.0)
    assert slow.exchange == "all_gather" and simulate(p.Causal(), shape, 1, seconds=0.1).exchange == "point_to_point"


def test_the_least_predicted_time_chooses_the_sharding():
    shape = 1, 2, 2, 8192, 32
    for pattern, name in ((p.Causal(), "balanced"), (p.SlidingWindow(50), "contiguous")):
        each = {of: simulate(pattern, shape, 8, sharding=of, seconds=0.1).seconds for of in NAMES}
        chosen = simulate(pattern, shape, 8, seconds=0.1)
        assert chosen.name == name and chosen.seconds == min(each.values())
    assert spattn.distributed.shard("causal", shape, 8).bounds == simulate("causal", shape, 8).sharding.bounds
    with pytest.raises(ValueError, match="sharding: expected 'auto' or one of 'contiguous'"):
        spattn.distributed.shard("causal", shape, 8, "ring")
    with pytest.raises(ValueError, match="shape: expected"):
        simulate("causal", (1, 2, 3), 8)


def test_predictions_for_gpus():
    """No tile is computed on the rank of its keys, too; rows travel point-to-point."""
    shape = 1, 4, 4, 4096, 64
    for backward in (False, True):
        found = simulate("causal", shape, 4, sharding="head_tail", seconds=0.1, device="cuda", backward=backward)
        assert list(found.exchanges) == ["point_to_point"] and found.work.sum() < 1.1
        assert np.isclose(found.others["heads"], 0.1 * (2.5 if backward else 1) / 4, rtol=0.05)
    with pytest.raises(ValueError, match="seconds: for device='cuda'"):
        simulate("causal", shape, 4, device="cuda")
    for name, values in {
        "seconds": (-1, math.nan, math.inf, True, "1"),
        "bandwidth": (0, -1.0, math.nan, "fast"),
        "latency": (-1, math.inf),
        "dtype": ("float8", None, "int8"),
        "device": ("tpu", ["cuda"]),
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name}: expected"):
                simulate("causal", shape, 4, **({"seconds": 0.1} | {name: value}))
