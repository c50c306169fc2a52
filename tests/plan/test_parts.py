"""Users write ``parts()``: what leaves the sequence or visits a position twice is refused before int64 can wrap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import spattn
from spattn import patterns as p

N = 20

pytestmark = pytest.mark.usefixtures("unchecked_plans")  # most parts here are not all that allows() allows


@dataclass(frozen=True)
class Mine(p.Pattern):
    """Allows everything, in parts that somebody wrote."""

    given: object

    def allows(self, q, k):
        return (q == q) & (k == k)

    def parts(self, q_len, kv_len):
        return self.given


def part(lattice=None, shifts=((0, 0),), side="key"):
    return (p.authoring.Part(p.Full(), **{side: lattice}, shifts=shifts),)


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize(
    "lattice",
    [
        p.authoring.Lattice(-1, (1,), (5,)),
        p.authoring.Lattice(0, (1,), (N + 1,)),
        p.authoring.Lattice(N, (1,), (1,)),
        p.authoring.Lattice(0, (-1,), (2,)),
        p.authoring.Lattice(0, (3, -3), (3, 3)),
        p.authoring.Lattice(0, (10**9, -(10**9)), (3, 3)),
        p.authoring.Lattice(2**64, (1,), (1,)),
        p.authoring.Lattice(0, (0x5555555555555556,), (4,)),
        p.authoring.Lattice(0, (2**62, -(2**62)), (3, 3)),
        p.authoring.Lattice(0, (np.int64(2**62),), (np.int64(5),)),
        p.authoring.Lattice(0, (1,), (2**64,)),
    ],
    ids=str,
)
def test_positions_outside(lattice, side):
    with pytest.raises(ValueError, match=r"^parts\(\): expected positions in \[0, 20\), got -?\d+ to \d+ from Lattice"):
        spattn.plan(Mine(part(lattice, side=side)), N)


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("shift", [-6, 6, 2**64])
def test_every_shift_counts(shift, side):
    """The first shift stays inside, a later one does not."""
    lattice = p.authoring.Lattice(5, (1,), (10,))
    pairs = [(0, 0), (shift, 0) if side == "query" else (0, shift), (1, 1)]
    with pytest.raises(ValueError, match=r"^parts\(\): expected positions in"):
        spattn.plan(Mine((p.authoring.Part(p.Full(), lattice, lattice, tuple(pairs)),)), N)
    inside = tuple((5 * np.sign(a), 5 * np.sign(b)) for a, b in pairs)
    made = spattn.plan(Mine((p.authoring.Part(p.Full(), lattice, lattice, inside),)), N)
    assert made.nnz == 300 and len(made.components) == 3


def test_only_the_shifted_lattices_count():
    """Where the lattices would be without a shift is nowhere: beyond int64."""
    far = 2**70
    one = p.authoring.Part(
        p.Full(),
        p.authoring.Lattice(far, (1,), (5,)),
        p.authoring.Lattice(-far, (1,), (4,)),
        ((-far, far), (9 - far, 3 + far)),
    )
    made = spattn.plan(Mine((one,)), N)
    assert made.nnz == 40 and made.views["offset"].tolist() == [0, 0, 9, 3]


def test_queries_before_the_first_key():
    """Query positions begin at kv_len - q_len."""
    with pytest.raises(ValueError, match=r"^parts\(\): expected positions in \[10, 20\), got 9 to 19"):
        spattn.plan(Mine(part(p.authoring.Lattice(9, (1,), (11,)), side="query")), 10, N)


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("strides, extents", [((0,), (2,)), ((1, 1), (2, 5)), ((2, 3), (4, 3)), ((4, 8, 1), (3, 2, 2))])
def test_positions_twice(strides, extents, side):
    with pytest.raises(ValueError, match=r"^parts\(\): expected lattices that visit no position twice"):
        spattn.plan(Mine(part(p.authoring.Lattice(0, strides, extents), side=side)), N)


def test_axes_that_interleave_without_meeting():
    """0, 4, 6, 9, 10, 13, 15 and 19."""
    made = spattn.plan(Mine(part(p.authoring.Lattice(0, (4, 6, 9), (2, 2, 2)))), N)
    assert made.nnz == 8 * N


@pytest.mark.parametrize(
    "given, message",
    [
        (None, "expected a tuple of Part from Mine.*, got None"),
        ((None,), "got one with None"),
        (part(shifts=((0, 0.5),)), "shifts: expected an integer, got 0.5"),
        (part((0, (1,), (5,))), "expected a Lattice"),
        ((p.authoring.Part(3),), r"got one with Part\(pattern=3"),
        (part(p.authoring.Lattice(0.0, (1,), (5,))), "offset: expected an integer"),
        (part(p.authoring.Lattice(0, (1.5,), (5,))), "strides: expected an integer"),
    ],
)
def test_other_types(given, message):
    with pytest.raises(TypeError, match=rf"^parts\(\): .*{message}"):
        spattn.plan(Mine(given), N)


@pytest.mark.parametrize(
    "given",
    [
        part(shifts=()),
        part(shifts=((0, 0), (0, 0))),
        part(shifts=((0,),)),
        part(p.authoring.Lattice(0, (1, 2), (3,))),
        part(p.authoring.Lattice(0, (), ())),
        part(p.authoring.Lattice(0, (1,) * 4, (1,) * 4)),
        part(p.authoring.Lattice(0, (1,), (-1,))),
    ],
    ids=str,
)
def test_shifts_and_axes(given):
    with pytest.raises(ValueError, match=r"^parts\(\):"):
        spattn.plan(Mine(given), N)


def test_a_stride_that_leads_nowhere_may_be_any_integer():
    made = spattn.plan(Mine(part(p.authoring.Lattice(3, (10**30,), (1,)))), N)
    assert made.nnz == N


def test_a_lattice_without_points_is_nothing():
    assert spattn.plan(Mine(part(p.authoring.Lattice(-5, (1,), (0,)))), N).nnz == 0
