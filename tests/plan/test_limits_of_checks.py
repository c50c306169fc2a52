"""The last number that each check accepts and the first that it refuses."""

import dataclasses

import numpy as np
import pytest

import spattn
from spattn import Tiling, plan
from spattn import patterns as p
from spattn.patterns.authoring import Lattice, Part
from spattn.planning import validate
from spattn.testing import check_plan, inputs


@dataclasses.dataclass(frozen=True)
class Placed(p.Pattern):
    """All pairs of two lattices, moved by shifts. The 20 queries before 30 keys stand at the positions from 10 on."""

    query: tuple
    key: tuple
    shifts: tuple = ((0, 0),)

    def allows(self, q, k):
        return p.authoring.member(self.positions(0), q) & p.authoring.member(self.positions(1), k)

    def positions(self, side):
        offset, strides, extents = (self.query, self.key)[side]
        steps = sum(s * c for s, c in zip(strides, np.indices(extents), strict=True))
        return np.unique([offset + steps.ravel() + shift[side] for shift in self.shifts])

    def parts(self, q_len, kv_len):
        return (Part(p.Full(), Lattice(*self.query), Lattice(*self.key), self.shifts),)


WHOLE = (10, (1,), (20,)), (0, (1,), (30,))


@pytest.mark.parametrize(
    "query, key, shifts",
    [
        (*WHOLE, ((0, 0),)),
        ((12, (6,), (3,)), (0, (29,), (2,)), ((0, 0),)),
        ((10, (10, 1), (2, 10)), WHOLE[1], ((0, 0),)),
        ((10, (2,), (10,)), (0, (1,), (30,)), ((0, 0), (1, 0))),
        ((10, (1,), (10,)), (0, (1,), (10,)), ((10, 20), (0, 3))),
        ((29, (-1,), (20,)), (29, (-1,), (30,)), ((0, 0),)),
    ],
)
@pytest.mark.usefixtures("unchecked_plans")
def test_lattices_that_reach_the_ends(query, key, shifts):
    pattern = Placed(query, key, shifts)
    if len(shifts) > 1 and key != WHOLE[1]:  # pairs of lattices, not of all their positions
        made = plan(pattern, 20, 30, tiling=Tiling(tile=(16, 64)))
        assert made.nnz == 200
    else:
        check_plan(plan(pattern, 20, 30, tiling=Tiling(tile=(16, 64))), [pattern.index_set(20, 30)])


@pytest.mark.parametrize(
    "query, key, shifts",
    [
        ((11, (1,), (20,)), WHOLE[1], ((0, 0),)),
        ((9, (1,), (20,)), WHOLE[1], ((0, 0),)),
        (WHOLE[0], (1, (1,), (30,)), ((0, 0),)),
        (WHOLE[0], (-1, (1,), (30,)), ((0, 0),)),
        (WHOLE[0], (0, (15, 1), (2, 16)), ((0, 0),)),
        (WHOLE[0], (0, (29,), (3,)), ((0, 0),)),
        (WHOLE[0], (0, (1,), (30,)), ((0, 0), (0, 1))),
        (WHOLE[0], (0, (1,), (29,)), ((0, 0), (0, -1))),
        ((10, (1,), (10,)), (0, (1,), (10,)), ((11, 0), (0, 0))),
        ((10, (1,), (10,)), (0, (1,), (10,)), ((-1, 0), (0, 0))),
        (WHOLE[0], (28, (-1,), (30,)), ((0, 0),)),
        (WHOLE[0], (0, (2**62,), (5,)), ((0, 0),)),
        (WHOLE[0], (0, (1, 2), (4, 4)), ((0, 0),)),
        (WHOLE[0], (0, (0,), (2,)), ((0, 0),)),
        (WHOLE[0], (0, (8, 4, 2, 1), (2, 2, 2, 2)), ((0, 0),)),
    ],
)
def test_lattices_that_leave_the_sequence_or_meet_themselves(query, key, shifts):
    with pytest.raises(ValueError, match=r"^parts\(\): expected"):
        plan(Placed(query, key, shifts), 20, 30, tiling=Tiling(tile=(16, 64)))


def changed(made, name, at, by):
    array = getattr(made, name).copy()
    field, index = at
    array[field][index] += by
    return dataclasses.replace(made, **{name: array})


@pytest.fixture
def made():
    """60 × 70 tokens: the last key tile has six real keys, the last query tile twelve queries."""
    return plan(p.SlidingWindow(30, 30), 60, 70, tiling=Tiling(tile=(16, 64)))


def test_views_one_position_further(made):
    for number in range(len(made.views)):
        with pytest.raises(ValueError, match="^plan: expected positions in"):
            validate(changed(made, "views", ("offset", number), 1))


def test_padding_keys_that_are_allowed_and_counted(made):
    """``nnz`` does not give them away."""
    masks = made.masks.copy()
    for number in range(len(masks)):
        for row in range(made.block_q):
            bad = masks.copy()
            bad[number, row, 0] |= np.uint64(1) << np.uint64(63)
            uses = int((made.mask == number).sum())
            if (bad == masks).all():
                continue
            for extra in range(uses + 1):
                broken = dataclasses.replace(made, masks=bad, nnz=made.nnz + extra)
                try:
                    validate(broken)
                except ValueError:
                    continue
                rows, keys = spattn.testing.plan_pairs(broken)
                assert len(rows) == broken.nnz and keys.max() < 70


def test_pairs_that_are_not_counted(made):
    for by in (-1, 1):
        with pytest.raises(ValueError, match="^plan: expected .* nnz$"):
            validate(dataclasses.replace(made, nnz=made.nnz + by))


def test_more_plans_than_are_kept():
    """Those used last stay; which ones are kept is seen by nobody but a clock."""
    often = plan(p.Causal(), 17, tiling=Tiling(tile=(16, 64)))
    results = spattn.attention(*inputs(q_len=17), often)
    for width in range(600):
        plan(p.SlidingWindow(width, 1), 17, tiling=Tiling(tile=(16, 64)))
        assert plan(p.Causal(), 17, tiling=Tiling(tile=(16, 64))) is often
    assert spattn.plan_cache_info().plans < 600
    assert np.array_equal(
        spattn.attention(*inputs(q_len=17), plan(p.Causal(), 17, tiling=Tiling(tile=(16, 64)))), results
    )
