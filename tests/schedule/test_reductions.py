"""Work items that write the output of rows that they share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.planning import positions
from spattn.schedule.reductions import find_reductions, find_sum_reductions
from spattn.schedule.subtiles import Cut, by_keys, by_queries


@pytest.mark.parametrize(
    "pattern, length",
    [
        (patterns.strided(16), 512),
        (patterns.longformer(64, 1, 16), 1024),
        (patterns.Causal(), 700),
        (patterns.Full(), 4000),
    ],
    ids=repr,
)
def test_every_shared_row_is_joined_once(pattern, length):
    """A row's sources are those of the plan, whether the merge kernel or a finishing item joins them."""
    made = plan(pattern, length, tiling=Tiling(tile=(128, 64), workers=40))
    found = find_reductions(made)
    joined = {}
    for number, row in enumerate(found.merges.rows):
        joined[int(row)] = found.merges.sources[slice(*found.merges.indptr[number : number + 2])].tolist()
    for slot, work in zip(found.slots[found.reduces], made.work[found.reduces], strict=True):
        view = made.views[made.components["query_view"][work["component"]]]
        position, valid = positions(view, np.array([work["query_tile"]]))
        priors = found.priors[-2 - slot]
        for cell in np.nonzero(valid[0])[0]:
            assert int(position[0, cell]) not in joined
            joined[int(position[0, cell])] = [int(priors[cell]), int(work["slot"]) * 128 + int(cell)]
        assert (priors[~valid[0]] == -1).all()
    expected = {
        int(row): made.merge_sources[slice(*made.merge_indptr[number : number + 2])].tolist()
        for number, row in enumerate(made.merge_rows)
    }
    assert joined == expected
    if pattern.name == "strided":
        assert found.reduces.any() and not len(found.merges.rows)


def test_the_other_source_comes_first():
    """A reduction reads what another work item wrote; the slots of the others are the plan's."""
    made = plan(patterns.strided(16), 512, tiling=Tiling(tile=(128, 64), workers=40))
    found = find_reductions(made)
    np.testing.assert_array_equal(found.slots[~found.reduces], made.work["slot"][~found.reduces])
    assert sorted(found.slots[found.reduces]) == list(range(-1 - len(found.priors), -1))
    written = set(found.slots[~found.reduces].tolist())
    assert set((found.priors[found.priors >= 0] // made.block_q).tolist()) <= written


def sums_of(merges):
    """The sources of each row of each variant, in the order in which they are added."""
    variant = np.repeat(np.arange(len(merges.variants) - 1), np.diff(merges.variants))
    lists = np.split(merges.sources, merges.indptr[1:-1]) if len(merges.rows) else []
    return {(v, row): own.tolist() for v, row, own in zip(variant.tolist(), merges.rows.tolist(), lists, strict=True)}


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize(
    ("pattern", "length", "finish"),
    [
        (patterns.strided(16), 512, True),
        (patterns.fixed(128, 8), 4096, None),
        (patterns.Neighborhood((32, 32), 5) | patterns.Columns(9, 3, 5), 1024, None),
        (patterns.PerHead((patterns.strided(16), patterns.strided(32))), 512, True),
        (patterns.longformer(64, global_tokens=range(8)), 20000, False),
        (patterns.Causal(), 700, False),
    ],
    ids=repr,
)
def test_every_row_of_a_gradient_is_summed_once(pattern, length, finish, keyed):
    """In the order of its sources, by a reduction, which is the first of them, or by the sums that are left."""
    made = plan(pattern, length, tiling=Tiling(tile=(128, 64), workers=40))
    cut, heads = Cut.consecutive(made, 64), made.variant.shape[1]
    own = by_keys(made, 1, heads, heads, cut, 2, 40) if keyed else by_queries(made, cut)
    found = find_sum_reductions(own.work["slot"], own.work_indptr, own.merges, 128, length)
    reduces = found.slots <= -2
    np.testing.assert_array_equal(found.slots[~reduces], own.work["slot"][~reduces])
    assert sorted(found.slots[reduces]) == list(range(-1 - reduces.sum(), -1))
    expected, got = sums_of(own.merges), sums_of(found.merges)
    first = {(key[0], sources[0]): key for key, sources in expected.items() if sources}
    written = set()
    for item in np.nonzero(reduces)[0]:
        variant = int(np.searchsorted(own.work_indptr, item, side="right")) - 1
        for row in range(128):
            place = (-2 - found.slots[item]) * 128 + row
            rest = found.rest_sources[slice(*found.rest_indptr[place : place + 2])].tolist()
            key = first.get((variant, int(own.work["slot"][item]) * 128 + row))
            if key is None:
                assert not rest
            else:
                assert key not in got
                got[key] = [int(own.work["slot"][item]) * 128 + row, *rest]
            written |= {(variant, source // 128) for source in rest}
    assert got == expected
    assert written <= {
        (int(np.searchsorted(own.work_indptr, item, side="right")) - 1, int(found.slots[item]))
        for item in np.nonzero(~reduces)[0]
    }
    if finish is not None:
        of_variant = [reduces[begin:end].any() for begin, end in itertools.pairwise(own.work_indptr)]
        assert all(of_variant) if finish else not any(of_variant)
