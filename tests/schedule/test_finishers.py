"""Work items that write the output of rows that they share."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import patterns, plan
from spattn.plan import positions
from spattn.schedule.finishers import find_finishers


@pytest.mark.parametrize(
    "pattern, length",
    [
        (patterns.Strided(16), 512),
        (patterns.Longformer(64, 1, 16), 1024),
        (patterns.Causal(), 700),
        (patterns.Full(), 4000),
    ],
    ids=repr,
)
def test_every_shared_row_is_joined_once(pattern, length):
    """A row's sources are those of the plan, whether the merge kernel or a finishing item joins them."""
    made = plan(pattern, length, tile=(128, 64), workers=40)
    found = find_finishers(made)
    joined = {}
    for number, row in enumerate(found.merges.rows):
        joined[int(row)] = found.merges.sources[slice(*found.merges.indptr[number : number + 2])].tolist()
    for slot, work in zip(found.slots[found.finishes], made.work[found.finishes], strict=True):
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
    if isinstance(pattern, patterns.Strided):
        assert found.finishes.any() and not len(found.merges.rows)


def test_the_other_source_comes_first():
    """What a finisher reads was written by a work item that does not finish; the slots of the others are the plan's."""
    made = plan(patterns.Strided(16), 512, tile=(128, 64), workers=40)
    found = find_finishers(made)
    np.testing.assert_array_equal(found.slots[~found.finishes], made.work["slot"][~found.finishes])
    assert sorted(found.slots[found.finishes]) == list(range(-1 - len(found.priors), -1))
    written = set(found.slots[~found.finishes].tolist())
    assert set((found.priors[found.priors >= 0] // made.block_q).tolist()) <= written
