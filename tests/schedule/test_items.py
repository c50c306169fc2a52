"""The work list: who computes which tiles, in which order, and what is merged from whom."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import spattn
from spattn import Tiling, cpu, plan
from spattn import patterns as p
from spattn.planning.contract.types import WORK
from spattn.schedule import compiler
from spattn.schedule._items import cut
from spattn.testing import check_plan, inputs


def test_lists_are_in_the_order_of_views_and_tiles():
    """One query view, several key views: backends find a tile's neighbours beside it."""
    made = plan(p.longformer(40, global_tokens=(0, 150, 300)), 2000, tiling=Tiling(tile=(64, 64)))
    assert len(np.unique(made.key_view)) == 2
    for begin, end in zip(made.indptr[:-1], made.indptr[1:], strict=True):
        order = np.lexsort((made.indices[begin:end], made.key_view[begin:end]))
        assert (order == np.arange(end - begin)).all()


def test_items_of_a_variant_are_sorted_by_falling_cost():
    for pattern in (p.Causal(), p.PerHead((p.Causal(), p.SlidingWindow(300)))):
        made = plan(pattern, 2000, tiling=Tiling(tile=(64, 64)))
        length = made.work["end"] - made.work["begin"]
        for first, last in zip(made.work_indptr[:-1], made.work_indptr[1:], strict=True):
            assert (np.diff(length[first:last]) <= 0).all() and length[first] > length[last - 1]


@pytest.mark.parametrize("tiles", [200, 201, 255, 256, 257, 313])
@pytest.mark.parametrize("pieces", [1, 2, 7, 12])
def test_lists_are_cut_into_so_many_pieces(tiles, pieces):
    made = compiler.plan(p.Full(), 64, 64 * tiles, tile=(64, 64), pieces=pieces)
    length = made.work["end"] - made.work["begin"]
    assert len(made.work) == pieces and length.sum() == tiles and length.max() - length.min() <= 1
    assert compiler.plan(p.Full(), 64, 64 * tiles, tile=(64, 64), pieces=pieces, tiled_for=1) is made
    again = compiler.plan(p.Full(), 64, 64 * tiles, tile=(64, 64), workers=3, tiled_for=1)
    assert len(again.work) == len(plan(p.Full(), 64, 64 * tiles, tiling=Tiling(tile=(64, 64), workers=3)).work)


def test_more_workers_get_more_pieces():
    few, many = (plan(p.Full(), 64, 20_000, tiling=Tiling(tile=(64, 64), workers=workers)) for workers in (1, 64))
    longest = [int((made.work["end"] - made.work["begin"]).max()) for made in (few, many)]
    assert longest[1] < longest[0] and len(many.work) > len(few.work)


def test_pieces_of_a_long_list_are_merged():
    pattern = p.Full()
    made = plan(pattern, 70, 5000, tiling=Tiling(tile=(64, 64), workers=8))
    assert made.slots > 2 and (np.diff(made.merge_indptr) > 1).all()
    check_plan(made, [pattern.index_set(70, 5000)])


def test_rows_without_keys_are_merged_from_nothing():
    """Those of tiles that have no list, beside others whose items write their rows alone."""
    pattern = p.RowIntervals(np.zeros(70, int), np.repeat([0, 70], [64, 6]))
    made = plan(pattern, 70, tiling=Tiling(tile=(16, 64)))
    assert made.merge_rows.tolist() == list(range(64)) and len(made.merge_sources) == made.slots == 0
    check_plan(made, [pattern.index_set(70, 70)])


def test_rows_that_no_view_has_are_merged_from_nothing():
    """Where the one list that there is has all of its view, and its view not all rows."""

    @dataclasses.dataclass(frozen=True)
    class Some(p.Pattern):
        def allows(self, q, k):
            return (q < 64) & (k < 64)

        def parts(self, q_len, kv_len):
            return (p.authoring.Part(self, query=p.authoring.Lattice(0, (1,), (64,))),)

    made = plan(Some(), 100, tiling=Tiling(tile=(64, 64)))
    assert made.merge_rows.tolist() == list(range(64, 100)) and len(made.work) == 1
    check_plan(made, [Some().index_set(100, 100)])


@given(
    tiles=st.lists(st.one_of(st.integers(1, 40), st.integers(1, 1 << 34)), max_size=20),
    longest=st.sampled_from([5, 1000, 1 << 33, 1 << 35]),
    least=st.integers(1, 4),
    meeting=st.booleans(),
)
def test_items_are_pieces_of_lists_by_falling_length(tiles, longest, least, meeting):
    """Those of one length in order; slots of shared lists are in order, too."""
    longest = max(longest, max(tiles, default=1) // 50)
    end = np.cumsum(tiles, dtype=np.int64)
    number, begin = np.arange(len(tiles)), end - np.array(tiles, np.int64)
    shared = number % 2 == 0 if meeting else np.zeros(len(tiles), bool)
    at_least = None if least == 1 else np.full(len(tiles), least)
    lists = number, 7 * number, begin, end
    work, pieces, slots = cut(lists, longest, at_least, shared.view(np.uint8) if meeting else None, WORK)
    expected, slot = [], 0
    for n, length in enumerate(tiles):
        count = max(-(-length // longest), min(least, length))
        assert pieces[n] == count
        for piece in range(count):
            ends = begin[n] + length * piece // count, begin[n] + length * (piece + 1) // count
            has_slot = count > 1 or shared[n]
            expected.append((n, 7 * n, *map(int, ends), slot if has_slot else -1))
            slot += bool(has_slot)
    assert slots == slot and work.tolist() == sorted(expected, key=lambda item: item[2] - item[3])


def test_lists_without_tiles_are_refused():
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    with pytest.raises(ValueError, match="lists: a list must have at least one tile, got 0"):
        cut((zero, zero, zero, zero), 5, None, None, WORK)
    for lists, least in (((zero, zero, zero, np.ones(2, np.int64)), None), ((zero, zero, zero, one), np.ones(2, int))):
        with pytest.raises(ValueError, match="lists: all arrays must have length 1"):
            cut(lists, 5, least, None, WORK)


@pytest.mark.parametrize("pattern", [p.Full(), p.longformer(40, global_tokens=(0, 150)), p.strided(32)], ids=repr)
def test_sources_are_in_the_order_of_slots(pattern):
    """The order of a merge's sum is part of the result's bits."""
    made = plan(pattern, 3000, tiling=Tiling(tile=(64, 64), workers=64))
    slot = made.merge_sources // made.block_q
    inside = np.ones(len(slot), dtype=bool)
    inside[made.merge_indptr[:-1][np.diff(made.merge_indptr) > 0]] = False  # the first source of each merge
    assert inside.any() and (np.diff(slot)[inside[1:]] > 0).all()


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
def test_plans_do_not_depend_on_the_number_of_threads():
    arrays = inputs(1, 1, 1, 64, 9000, 16)
    made = []
    for threads in (1, 2, 64):
        with threadpool_limits(threads, user_api="openmp"):
            made.append(spattn.plan_for(p.Full(), *arrays, backend="cpu"))
    assert made[0].slots > 1
    for other in made[1:]:
        assert np.array_equal(other.work, made[0].work) and np.array_equal(other.merge_sources, made[0].merge_sources)
