"""The Hopper kernels against the oracle: every pattern, head dimension, layout and way of calling them."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import spattn
from spattn import Tiling, cuda, patterns, plan
from spattn.choose.specializations import TILE
from spattn.cuda.sm90.forward import tables as layout
from spattn.schedule.tensor_maps import MAPS
from spattn.testing import Expectation, inputs
from spattn.testing.strategies import cases, compositions

pytestmark = [pytest.mark.family("sm90"), pytest.mark.gpu, pytest.mark.usefixtures("hopper_kernels")]

DTYPES = ("float16", "bfloat16", "float32")
DIMS = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(lambda x: (8 * x[0], 8 * x[1])) | st.just((192, 128))
KINDS = ("numpy", "torch", "cupy")  # CuPy last: where it has no bfloat16 it skips the rest


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        *itertools.product([(32,), (64,), (96,), (128,), (192, 128), (256,)], ["float16", "bfloat16"]),
        *itertools.product([(32,), (64,), (96,), (128,)], ["float32"]),
    ],
    ids=str,
)
def test_patterns(check, problem, dims, dtype):
    pattern, q_len, kv_len = problem
    batch, heads = (max(own, least) for own, least in zip(pattern.sizes(), (1, 2), strict=True))
    check(pattern, *inputs(batch, heads, 1, q_len, kv_len, *dims, dtype=dtype), kinds=KINDS)


@given(
    st.one_of(cases(max_len=500), compositions(max_len=500)),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
    DIMS,
)
def test_random(case, dtype, seed, dims):
    """Any pattern or composition, any lengths, heads packed or not."""
    assume(dtype != "float32" or max(dims) <= 128)
    q, k, v = inputs(*case.sizes, *dims, dtype=dtype, seed=seed)
    made = spattn.plan_for(case.pattern, q, k, v, backend="cuda")
    assume(layout.make_layout(made).maps <= MAPS[-1])  # more of them run on the portable kernels
    Expectation(case.pattern, q, k, v).check(*cuda.forward(q, k, v, made, q.shape[3] ** -0.5))


@pytest.mark.parametrize("kind", ["torch-cpu", "jax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_arrays(check, kind, dtype):
    check(patterns.strided(24), *inputs(2, 4, 2, 190, 190, 64, dtype=dtype), kinds=(kind,))


@pytest.mark.parametrize("dims", [(64, 128), (128, 40), (8, 256), (192, 192), (136, 72), (72, 64)], ids=str)
def test_head_dims_differ(check, dims):
    q, k, v = inputs(2, 4, 2, 150, 181, *dims, dtype="bfloat16")
    check(patterns.SlidingWindow(40, 30), q, k, v, kinds=("torch",))


@pytest.mark.parametrize("pattern", [patterns.Causal(), patterns.strided(16)], ids=repr)
def test_heads_inside_tokens(torch, attend, pattern):
    """(batch, tokens, heads, features) in memory: batch and head are then two axes, with maps of their own."""
    q, k, v = inputs(3, 4, 2, 300, 300, 64, dtype="bfloat16")
    expected = attend("torch")(q, k, v, pattern)
    moved = [torch.from_numpy(x.astype(np.float32)).cuda().bfloat16().mT.contiguous().mT for x in (q, k, v)]
    moved = [x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in moved]
    out, lse = cuda.forward(*moved, spattn.plan_for(pattern, *moved, backend="cuda"), 0.125)
    np.testing.assert_array_equal(out.float().cpu(), expected[0].astype(np.float32))
    np.testing.assert_array_equal(lse.cpu(), expected[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("workers", "kv_len"), [(1, 4000), (16, 4000), (132, 4000), (132, 20000)])
def test_split_lists(check, workers, kv_len, dtype):
    """The last one has more pieces a row than a row has lanes in the kernel that merges them."""
    q, k, v = inputs(1, 2, 2, 130, kv_len, 64, dtype=dtype)
    made = plan(patterns.Causal(), 130, kv_len, tiling=Tiling(tile=TILE, workers=workers), heads=2)
    check(patterns.Causal(), q, k, v, 0.125, forward=lambda q, k, v, pattern, scale: cuda.forward(q, k, v, made, scale))


@pytest.mark.parametrize("tokens", [384, 640, 1280])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "bfloat16"), (128, "bfloat16"), (192, "bfloat16"), (64, "float32")]
)
def test_more_tasks_than_blocks(check, head_dim, dtype, tokens):
    """No block takes more than two tasks, so that they take turns; or some do, and all draw tickets. Repeated: the
    counter of tickets is zero again."""
    arrays = inputs(3, 16, 16, tokens, tokens, head_dim, min(head_dim, 128), dtype=dtype)
    for pattern in (patterns.Causal(), patterns.SlidingWindow(100, 0), patterns.Causal()):
        check(pattern, *arrays, kinds=("torch",))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-42, 7.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(check, dtype, scale):
    check(patterns.SlidingWindow(30, 30), *inputs(1, 2, 2, 150, 200, 64, dtype=dtype), scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pattern", [patterns.SlidingWindow(20, 5), patterns.strided(12)], ids=repr)
@pytest.mark.parametrize("head_dim", [128, 192])
def test_values_that_are_not_allowed(attend, head_dim, pattern, bad):
    """Every row but those that attend to the bad keys is bitwise what it is without them."""
    q, k, v = inputs(1, 1, 1, 300, 300, head_dim, 128, dtype="bfloat16")
    clean = attend("torch")(q, k, v, pattern)
    for array in (k, v):
        array[:, :, [3, 140, 299]] = bad
    out, lse = attend("torch")(q, k, v, pattern)
    mask = pattern.allows(np.arange(300)[:, None], np.arange(300)[None])
    touched = mask[:, [3, 140, 299]].any(1)
    assert not np.isnan(out[0, 0, ~touched].astype(float)).any()
    np.testing.assert_allclose(out[0, 0, ~touched].astype(float), clean[0][0, 0, ~touched].astype(float), atol=0.02)
    np.testing.assert_allclose(lse[0, 0, ~touched], clean[1][0, 0, ~touched], rtol=1e-5, atol=1e-5)
    if np.isnan(bad):
        assert np.isnan(out[0, 0, touched].astype(float)).all()


def test_one_feature_that_is_not_allowed(attend):
    """Of each head another feature of a key is not finite: whoever holds it computes the row again."""
    q, k, v = inputs(1, 128, 128, 300, 300, 128, dtype="bfloat16")
    pattern, heads = patterns.SlidingWindow(20, 5), np.arange(128)
    clean = attend("torch")(q, k, v, pattern)[0]
    v[0, heads, 140, heads] = np.inf
    out = attend("torch")(q, k, v, pattern)[0]
    untouched = ~pattern.allows(np.arange(300), np.array(140))
    np.testing.assert_allclose(
        out[:, :, untouched].astype(float), clean[:, :, untouched].astype(float), atol=0.02, rtol=0
    )


def test_decoding(check):
    for q_len in (1, 3, 16):
        for dims in ((128,), (192, 128)):
            check(patterns.Causal(), *inputs(2, 8, 2, q_len, 3000, *dims, dtype="bfloat16"), kinds=("torch",))


def test_many_tensor_maps(check):
    """Views that share no map: 25 + 25 of them need the larger parameter block."""
    check(patterns.Neighborhood((30, 35), 3, 5), *inputs(1, 2, 2, 1050, 1050, 64, dtype="bfloat16"), kinds=("torch",))


def test_arrays_that_tma_cannot_read(check, portable_allowed, caplog):
    """Odd addresses and strides run on the portable kernels, which is logged; nothing is copied or refused."""
    caplog.set_level(logging.DEBUG, "spattn.cuda")
    q, k, v = inputs(1, 2, 2, 200, 200, 64, dtype="float16")

    def forward(q, k, v, pattern, scale=None):
        import torch

        padded = torch.zeros(1, 2, 200, 65, device="cuda", dtype=torch.float16)
        padded[..., 1:] = torch.from_numpy(np.array(q)).cuda()
        rest = [torch.from_numpy(np.array(x)).cuda() for x in (k, v)]
        made = spattn.plan_for(pattern, padded[..., 1:], *rest, backend="cuda")
        out, lse = cuda.forward(padded[..., 1:], *rest, made, 0.125)
        return out.cpu().numpy(), lse.cpu().numpy()

    check(patterns.Causal(), q, k, v, forward=forward)
    assert len(portable_allowed) == 1
    chosen, instead = (record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG)
    assert chosen.startswith("hopper kernels: float16, head_dim 64 and 64, tiles of 128 × 64, ")
    assert instead.startswith("fall back to the portable kernels: q starts at 0x")


def test_results_are_repeatable(torch):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 3000, 128, device="cuda", dtype=torch.bfloat16)
    for pattern in (patterns.longformer(128, global_tokens=(0, 5)), patterns.strided(64), patterns.Causal()):
        made = spattn.plan_for(pattern, q, k, v, backend="cuda")
        first = cuda.forward(q, k, v, made, 0.1)
        for _ in range(1000):
            out, lse = cuda.forward(q, k, v, made, 0.1)
            assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


def test_new_addresses(torch):
    """Tensor maps follow the arrays: same shapes, other memory."""
    for seed in range(5):
        torch.manual_seed(seed)
        keep = torch.empty(seed * 12345 + 1, device="cuda")
        q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.float16) for _ in range(3))
        out, _ = cuda.forward(q, k, v, spattn.plan_for(patterns.Causal(), q, k, v, backend="cuda"), 0.125)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(out, expected, rtol=0.01, atol=0.01)
        del keep


def test_graph_capture(torch):
    q, k, v = (torch.randn(1, 4, 1000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    made = spattn.plan_for(patterns.strided(32), q, k, v, backend="cuda")
    cuda.forward(q, k, v, made, 0.125)  # compiles, uploads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cuda.forward(q, k, v, made, 0.125)
    q.copy_(torch.randn_like(q))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    expected = cuda.forward(q, k, v, made, 0.125)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_streams_side_by_side(torch):
    """Calls that run at the same time do not share a work counter."""
    q, k, v = (torch.randn(1, 2, 2000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    made = spattn.plan_for(patterns.strided(32), q, k, v, backend="cuda")
    expected, _ = cuda.forward(q, k, v, made, 0.125)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(cuda.forward(q, k, v, made, 0.125)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_agrees_with_the_portable_kernels(torch, monkeypatch, portable_allowed):
    q, k, v = (torch.randn(2, 4, 777, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    pattern = patterns.longformer(100, global_tokens=4) & patterns.Causal()
    results = []
    for choice, portable_calls in (("auto", 0), ("portable", 1)):
        monkeypatch.setenv("SPATTN_CUDA_KERNEL", choice)
        results.append(cuda.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cuda"), 0.1))
        assert len(portable_allowed) == portable_calls
    torch.testing.assert_close(*(out for out, _ in results), rtol=0.02, atol=0.01)
    torch.testing.assert_close(*(lse for _, lse in results), rtol=1e-4, atol=1e-4)
