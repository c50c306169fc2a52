"""Tiles of up to 64 queries on Hopper: one warpgroup a block, two blocks an SM, boxes of any number of queries."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import cuda, patterns
from spattn.choose.specializations import TILE, executes
from spattn.cuda.families import FAMILIES
from spattn.cuda.sm90.forward.tables import fragment_masks
from spattn.request.call import Call
from spattn.schedule import compiler
from spattn.testing import Expectation, inputs

pytestmark = pytest.mark.family("sm90")

GRID = (20, 23)
NEAR = patterns.Neighborhood(GRID, 5)


@pytest.mark.parametrize("block_q", [1, 49, 64])
def test_masks_are_padded(block_q):
    """Rows that no query fills see no key."""
    words = np.random.default_rng(0).integers(0, 1 << 63, (3, block_q, 1)).astype(np.uint64)
    whole = np.zeros((3, 64, 1), np.uint64)
    whole[:, :block_q] = words
    np.testing.assert_array_equal(fragment_masks(words), fragment_masks(whole))
    assert fragment_masks(words).shape == (3, 1, 128)


def test_shapes():
    assert [n for n in (0, 1, 49, 64, 65, 96, 128, 192, 256) if executes(n, 64)] == [1, 49, 64, 128, 192]
    assert not executes(64, 128)
    plans = [compiler.plan(patterns.Full(), 300, tile=(n, 64)) for n in (49, 64, 128, 192)]
    assert [plan.block_q for plan in plans if FAMILIES[0].accepts(plan, backward=True)] == [128]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("head_dim", [32, 64, 72, 128, 256])
@pytest.mark.parametrize(
    ("tile", "box"),
    [((64, 64), None), ((64, 64), (8, 8)), ((49, 64), (7, 7)), ((20, 64), (4, 5)), ((1, 64), None)],
    ids=str,
)
def test_boxes(tile, box, head_dim):
    """Of queries with keys of their own, and rows of them, whose lists are cut into pieces."""
    arrays = inputs(2, 2, 1, 460, 460, head_dim, dtype="bfloat16")
    made = compiler.plan(NEAR, 460, batch=2, heads=2, tile=tile, box=box, workers=1 if box else 7)
    Expectation(NEAR, *arrays).check(*cuda.forward(*arrays, made, head_dim**-0.5))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("head_dim", [32, 64, 72, 128])
@pytest.mark.parametrize("box", [(6, 32), (24, 8), (3, 64)], ids=str)
def test_boxes_of_three_warpgroups(box, head_dim):
    arrays = inputs(2, 2, 1, 1450, 1450, head_dim, dtype="bfloat16")
    pattern = patterns.Neighborhood((25, 58), 9)
    made = compiler.plan(pattern, 1450, batch=2, heads=2, tile=(192, 64), box=box)
    Expectation(pattern, *arrays).check(*cuda.forward(*arrays, made, head_dim**-0.5))


@pytest.mark.gpu
@pytest.mark.usefixtures("portable_allowed")
@pytest.mark.parametrize(("box", "head_dim"), [((8, 24), 64), (None, 256)], ids=str)
def test_tiles_of_three_warpgroups_that_hopper_cannot_read(box, head_dim):
    """The rows of a warpgroup are no box, or the queries leave no room for keys."""
    arrays = inputs(1, 2, 2, 460, 460, head_dim, dtype="bfloat16")
    made = compiler.plan(NEAR, 460, heads=2, tile=(192, 64), box=box)
    Expectation(NEAR, *arrays).check(*cuda.forward(*arrays, made, head_dim**-0.5))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("block_q", [33, 48, 64, 192])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "pattern", [patterns.Causal(), patterns.longformer(32, global_tokens=3), patterns.strided(13)], ids=repr
)
def test_pieces(assert_alike, pattern, block_q, head_dim):
    """Slots of the workspace have as many rows as a tile has queries, not as many as a warpgroup computes."""
    q, k, v = inputs(1, 4, 2, 400, 400, head_dim, dtype="float16")
    made = compiler.plan(pattern, 400, heads=4, tile=(block_q, 64), workers=9)
    Expectation(pattern, q, k, v).check(*cuda.forward(q, k, v, made, head_dim**-0.5))
    k[:, :, 5], v[:, :, 200], q[:, :, 3] = np.nan, np.inf, 3e4
    usual = compiler.plan(pattern, 400, heads=4, tile=TILE, workers=9)
    assert_alike(*[cuda.forward(q, k, v, own, head_dim**-0.5) for own in (made, usual)])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_few_queries():
    """Heads of a group in one tile of 64."""
    arrays = inputs(2, 8, 2, 4, 500, 64, dtype="bfloat16")
    made = compiler.plan(patterns.Causal(), 4, 500, batch=2, heads=8, tile=(64, 64), workers=16)
    Expectation(patterns.Causal(), *arrays).check(*cuda.forward(*arrays, made, 0.125))


@pytest.mark.gpu
@pytest.mark.usefixtures("portable_allowed")
def test_arrays_that_hopper_cannot_read(torch):
    """The portable kernels have no tiles of 49 queries, and get another plan of the pattern."""
    arrays = inputs(1, 2, 2, 460, 460, 64, dtype="bfloat16")
    made = compiler.plan(NEAR, 460, heads=2, tile=(49, 64), box=(7, 7))
    shifted = []
    for x in arrays:
        x = torch.from_numpy(x.astype(np.float32)).cuda().bfloat16()
        shifted.append(torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x))
    out, lse = cuda.prepare(Call.of(*shifted, return_lse=True), made)(*shifted, 0.125)
    Expectation(NEAR, *arrays).check(out.float().cpu().numpy().astype(arrays[0].dtype), lse.cpu().numpy())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_gradients_have_plans_of_their_own(torch):
    """No backward on Hopper has such tiles: the pattern of a plan is planned anew."""
    q, k, v = (torch.randn(1, 2, 460, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    made = compiler.plan(NEAR, 460, heads=2, tile=(49, 64), box=(7, 7))
    assert not cuda.accepts(made, Call.of(q, k, v), backward=True) and cuda.accepts(made, Call.of(q, k, v))
    gradients = [torch.autograd.grad(spattn.attention(q, k, v, how).sum(), (q, k, v)) for how in (made, NEAR)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
