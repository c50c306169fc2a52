"""The Hopper backward kernels against the oracle: every pattern, head dimension and layout, and the same bits again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import spattn
from spattn import Tiling, cuda, patterns, plan
from spattn.choose.specializations import TILE
from spattn.cuda.sm80 import backward as portable_backward
from spattn.cuda.sm90.backward import prepared
from spattn.cuda.sm90.backward import tables as layout
from spattn.request.call import Call
from spattn.schedule.tensor_maps import MAPS
from spattn.testing import GradientExpectation, inputs
from spattn.testing.strategies import cases, compositions

pytestmark = [pytest.mark.family("sm90"), pytest.mark.gpu, pytest.mark.usefixtures("hopper_kernels")]

KINDS = ("numpy", "torch", "cupy")  # CuPy last: where it has no bfloat16 it skips the rest


@pytest.fixture(params=["two passes", "one pass"])
def passes(request, monkeypatch):
    """Either way, whatever is faster: a plan with one query view can be computed in both."""
    one = request.param == "one pass"
    monkeypatch.setattr(prepared, "_hardly_wait", lambda *args: one)
    monkeypatch.setattr(prepared, "_SLOWER", 0)
    spattn.clear_plan_cache()
    yield request.param
    spattn.clear_plan_cache()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dims", [(32,), (64,), (96,), (128,), (192, 128), (256,)], ids=str)
def test_patterns(check_gradients, problem, dims, dtype):
    pattern, q_len, kv_len = problem
    batch, heads = (max(own, least) for own, least in zip(pattern.sizes(), (1, 2), strict=True))
    q, k, v = inputs(batch, heads, 1, q_len, kv_len, *dims, dtype=dtype)
    check_gradients(pattern, q, k, v, kinds=KINDS if dims == (64,) else ("torch",))


@given(
    st.one_of(cases(max_len=400), compositions(max_len=400)),
    st.sampled_from(["float16", "bfloat16"]),
    st.integers(0, 99),
    st.sampled_from([(8, 40), (64, 64), (40, 128), (192, 128)]),
)
def test_random(case, dtype, seed, dims):
    """Any pattern or composition, any lengths and groups."""
    q, k, v = inputs(*case.sizes, *dims, dtype=dtype, seed=seed)
    made = cuda.plan_for(case.pattern, Call.of(q, k, v), backward=True)
    assume(layout.lay_out_views(made).maps <= MAPS[-1])  # more of them run on the portable kernels
    expected = GradientExpectation(case.pattern, q, k, v, with_dlse=True)
    out, lse = spattn.attention(q, k, v, made, return_lse=True, backend="cuda")
    got = spattn.attention_backward(expected.dout, q, k, v, out, lse, made, dlse=expected.dlse, backend="cuda")
    expected.check(got)


@pytest.mark.parametrize("dims", [(64, 128), (128, 40), (8, 256), (192, 192), (136, 72), (72, 64)], ids=str)
def test_head_dims_differ(check_gradients, dims):
    q, k, v = inputs(2, 4, 2, 150, 181, *dims, dtype="bfloat16")
    check_gradients(patterns.SlidingWindow(40, 30), q, k, v, kinds=("torch",))


@pytest.mark.parametrize("dims", [(64, 64), (128, 40), (192, 128)], ids=str)
@pytest.mark.parametrize("pattern", [patterns.Full(), patterns.Causal(), patterns.SlidingWindow(70)], ids=repr)
def test_passes(check_gradients, passes, pattern, dims):
    """Long enough for several blocks to add to the same sums."""
    check_gradients(pattern, *inputs(2, 4, 2, 700, 900, *dims, dtype="bfloat16"), kinds=("torch",))


def test_a_warpgroup_that_has_no_pair_in_the_last_step(check_gradients, passes):
    """It adds nothing to dQ then. No other item is there whose sums, if they were not finite, would have dQ computed
    anew."""
    check_gradients(patterns.SlidingWindow(0, 20), *inputs(1, 2, 2, 128, 128, 64, dtype="bfloat16"), kinds=("torch",))


@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize("pattern", [patterns.Causal(), patterns.strided(16)], ids=repr)
def test_groups(check_gradients, passes, pattern, group):
    """dK and dV are sums over the query heads of a group."""
    check_gradients(pattern, *inputs(2, 2 * group, 2, 260, 300, 64, dtype="bfloat16"), kinds=("torch",))


def test_heads_of_a_group_differ(check_gradients):
    per_head = patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30), patterns.strided(12), patterns.Full()))
    check_gradients(per_head, *inputs(2, 4, 2, 260, 260, 64, dtype="float16"), kinds=("torch",))


@pytest.mark.parametrize("pattern", [patterns.Causal(), patterns.strided(16)], ids=repr)
def test_heads_inside_tokens(torch, pattern):
    """(batch, tokens, heads, features) in memory: batch and head are then two axes, with maps of their own."""
    plain = [torch.randn(3, heads, 300, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 4, 2, 2)]
    moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    both = []
    for dout, q, k, v in (plain, moved):
        out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
        both.append(spattn.attention_backward(dout, q, k, v, out, lse, pattern))
    for x, y, like in zip(*both, moved[1:], strict=True):
        assert y.stride() == like.stride()
        assert torch.equal(x, y)


@pytest.mark.parametrize("workers", [1, 16, 132])
def test_split_lists(check_gradients, workers):
    q, k, v = inputs(1, 2, 2, 130, 4000, 64, dtype="bfloat16")
    made = plan(patterns.Causal(), 130, 4000, tiling=Tiling(tile=TILE, workers=workers), heads=2)
    check_gradients(patterns.Causal(), q, k, v, made=made)


def test_long_columns(check_gradients):
    """Keys that all queries see: their lists are cut, and the pieces summed in order."""
    pattern = patterns.longformer(64, global_tokens=(0, 1, 900))
    check_gradients(pattern, *inputs(1, 1, 1, 2300, 2300, 64, dtype="bfloat16"), kinds=("torch",))


@pytest.mark.parametrize("pattern", [patterns.Full(), patterns.fixed(64, 4)], ids=repr)
def test_long_items(check_gradients, passes, pattern):
    """Those that would keep the last SMs busy are cut, and reductions add several parts to some of their rows."""
    check_gradients(pattern, *inputs(1, 2, 2, 2100, 2100, 64, dtype="bfloat16"), kinds=("torch",))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-42, 3.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scale(check_gradients, dtype, scale):
    check_gradients(patterns.SlidingWindow(30, 30), *inputs(1, 2, 2, 150, 200, 64, dtype=dtype), scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", range(4), ids=["dout", "q", "k", "v"])
@pytest.mark.parametrize("pattern", [patterns.SlidingWindow(20, 5), patterns.strided(12)], ids=repr)
@pytest.mark.parametrize("head_dim", [128, 192])
def test_values_that_are_not_allowed(torch, passes, head_dim, pattern, which, bad):
    """What is not finite reaches the gradients that the formula gives it to, and no other."""
    dims = 128, head_dim, head_dim, 128
    arrays = [torch.randn(1, 1, 300, dim, device="cuda", dtype=torch.bfloat16) for dim in dims]

    def gradients(dout, q, k, v):
        out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
        return [x[0, 0].float().cpu().numpy() for x in spattn.attention_backward(dout, q, k, v, out, lse, pattern)]

    clean = gradients(*arrays)
    arrays[which] = arrays[which].clone()
    arrays[which][:, :, [3, 140, 299]] = bad
    rows = np.arange(300)
    mask = np.broadcast_to(pattern.allows(rows[:, None], rows[None]), (300, 300))
    if which < 2:  # queries: their own row, and the keys that they see
        queries = np.isin(rows, [3, 140, 299])
        keys = mask[queries].any(axis=0)
    else:  # keys: the queries that see them, and through these queries all keys that they see
        queries = mask[:, [3, 140, 299]].any(axis=1)
        keys = mask[queries].any(axis=0)
    for got, expected, touched in zip(gradients(*arrays), clean, (queries, keys, keys), strict=True):
        assert np.isfinite(got[~touched]).all()
        np.testing.assert_allclose(got[~touched], expected[~touched], atol=0.05, rtol=0.02)


def test_arrays_that_tma_cannot_read(torch, monkeypatch):
    """An expanded dout, as that of a sum, and odd strides run on the portable kernels."""
    calls = []
    monkeypatch.undo()
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "auto")
    original = portable_backward.backward
    monkeypatch.setattr(portable_backward, "backward", lambda call: (calls.append(call), original(call)))
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    out, lse = spattn.attention(q, k, v, "causal", return_lse=True)
    whole = spattn.attention_backward(torch.ones_like(out), q, k, v, out, lse, "causal")
    assert not calls
    expanded = torch.ones((), device="cuda", dtype=torch.float16).expand(out.shape)
    for x, y in zip(spattn.attention_backward(expanded, q, k, v, out, lse, "causal"), whole, strict=True):
        torch.testing.assert_close(x, y, atol=5e-3, rtol=1e-2)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "pattern", [patterns.Causal(), patterns.longformer(100, global_tokens=(0, 700)), patterns.strided(20)], ids=repr
)
def test_the_same_bits(torch, passes, pattern):
    """Whichever block takes which task, and in whichever order they end."""
    dout, q, k, v = (torch.randn(1, 4, 1500, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
    first = spattn.attention_backward(dout, q, k, v, out, lse, pattern)
    for _ in range(250):
        again = spattn.attention_backward(dout, q, k, v, out, lse, pattern)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [500, 3000])
@pytest.mark.parametrize(
    "pattern", [patterns.Causal(), patterns.longformer(100, global_tokens=5), patterns.strided(20)], ids=repr
)
def test_batch_and_heads_change_no_bit(torch, pattern, tokens, dtype):
    """With one plan, an entry of the batch or a head alone has the bits of the whole call, in both passes."""
    dout, q, k, v = (torch.randn(3, 4, tokens, 64, device="cuda", dtype=getattr(torch, dtype)) for _ in range(4))
    made = spattn.plan_for(pattern, q, k, v, backend="cuda")

    def both(*part):
        dout, q, k, v = part
        out, lse = spattn.attention(q, k, v, made, return_lse=True)
        return out, lse, *spattn.attention_backward(dout, q, k, v, out, lse, made)

    whole = both(dout, q, k, v)
    for index in ((slice(1, 2),), (slice(None), slice(2, 3))):
        alone = both(*(x[index] for x in (dout, q, k, v)))
        assert all(torch.equal(x, y[index]) for x, y in zip(alone, whole, strict=True))
