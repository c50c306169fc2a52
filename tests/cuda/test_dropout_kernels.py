"""Attention dropout in every CUDA kernel, forward and backward: the pairs of the definition, and dense float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import spattn
from spattn import Tiling, cuda, patterns
from spattn.arrays import to_host
from spattn.cuda.driver import device
from spattn.cuda.host.dropout import launch_words
from spattn.dispatch.scores import read
from spattn.request.call import Call
from spattn.request.dropout import DeviceSeed, Dropout, words
from spattn.request.score import ScoreOperands
from spattn.schedule import compiler
from spattn.score import relative_bias
from spattn.testing import dense_mask, dropout_mask, inputs, random

from ..test_dropout import SEED, SHARE, formula, function
from .sm90.test_dynamic_masks import SELECTIONS, on_gpu
from .test_sinks import each_kernel

pytestmark = pytest.mark.gpu
HEADS, HEADS_KV, Q_LEN, KV_LEN = 4, 2, 100, 136
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
NINTH = np.broadcast_to(np.arange(Q_LEN)[:, None] % 9 == 0, (Q_LEN, KV_LEN))
CASES = {
    "union": patterns.Stride(5) | patterns.SlidingWindow(9, 3) | patterns.GlobalTokens([0, 40]),
    "clusters": patterns.Clusters(np.random.default_rng(0).integers(-1, 4, (HEADS, KV_LEN))),
    "empty rows": patterns.Causal() & ~patterns.Mask(NINTH),
    "per head": patterns.PerHead([patterns.Causal(), patterns.SlidingWindow(7), patterns.Full(), patterns.Stride(3)]),
    "scattered": patterns.interop.from_pairs(
        *np.nonzero(np.random.default_rng(1).random((Q_LEN, KV_LEN)) < 0.05), Q_LEN, KV_LEN
    ),
}
NAMES = ("out", "lse", "dq", "dk", "dv", "dtable", "dsinks")
hopper = pytest.mark.family("sm90")


def tolerance(dtype, precision=None):
    return 3e-3 if precision else TOLERANCES[dtype]


def run(operands, plan, q, k, v, dout, dlse=None, precision=None):
    """Out, lse and all gradients."""
    call = replace(Call.of(q, k, v, precision=precision), score=operands._replace(tables=()))
    out, lse = cuda.prepare(call, plan)(q, k, v, call.scale, operands)
    backward = cuda.prepare_backward(call, plan)
    found, again = (backward(dout, q, k, v, out, lse, dlse, call.scale, operands) for _ in range(2))
    for x, twin in zip(found[:3], again[:3], strict=True):
        np.testing.assert_array_equal(x.astype(np.float64), twin.astype(np.float64))
    return out, lse, *found


def planned(pattern, q, k, v, workers=1, **options):
    tile = cuda.tile(q.dtype.name, q.shape[3], v.shape[3])
    lengths = q.shape[2], k.shape[2]
    if options:
        return compiler.plan(pattern, *lengths, heads=HEADS, batch=2, tile=tile, workers=workers, **options)
    return spattn.plan(pattern, *lengths, tiling=Tiling(tile=tile, workers=workers), heads=HEADS, batch=2)


def assert_close(got, want, most, names=NAMES):
    for name, x, exact in zip(names, got, want, strict=True):
        x, finite = to_host(x).astype(np.float64), np.isfinite(exact)
        assert np.array_equal(np.isfinite(x), finite), name
        error = np.abs(x[finite] - exact[finite]).max(initial=0)
        assert error <= most * np.abs(exact[finite]).max(initial=1e-30), (name, error)


@pytest.mark.family("sm80")
def test_words(family, torch):
    """Those of the definition, for many heads and positions before 0."""
    gpu = device.get()
    for batch, heads, q_len, kv_len, seed in ((2, 3, 300, 700, SEED), (1, 2, 90, 20, 2**64 - 1), (1, 1, 1, 5000, 0)):
        memory = torch.zeros(batch * heads * (2 * q_len + kv_len), dtype=torch.int32, device="cuda")
        with gpu:
            stream = torch.cuda.current_stream().cuda_stream
            launch_words(gpu, stream, seed, batch, heads, q_len, kv_len, lambda nbytes, x=memory: x.data_ptr())
            again, own = torch.zeros_like(memory), torch.tensor(np.uint64(seed).view(np.int64).item(), device="cuda")
            given = DeviceSeed(own.data_ptr(), own)
            launch_words(gpu, stream, given, batch, heads, q_len, kv_len, lambda nbytes, x=again: x.data_ptr())
        assert torch.equal(memory, again)
        found = memory.cpu().numpy().view(np.uint32)
        rows = found[: 2 * batch * heads * q_len].reshape(batch, heads, q_len, 2)
        own = words(seed, batch, heads, q_len, "query", kv_len - q_len)
        assert np.array_equal(np.moveaxis(rows, 3, 0), own)
        keys = found[2 * batch * heads * q_len :].reshape(batch, heads, kv_len)
        assert np.array_equal(keys, words(seed, batch, heads, kv_len, "key"))


@pytest.mark.parametrize("case", CASES)
@each_kernel
def test_every_kernel_drops_the_pairs_of_the_mask(family, dtype, precision, case):
    """Equal scores and unit vectors show the weight of each pair: in out, and in dv, which sums over a group."""
    pattern = CASES[case]
    q, k, _ = inputs(2, HEADS, HEADS_KV, Q_LEN, KV_LEN, 64, dtype=dtype)
    v = np.array(np.broadcast_to(np.eye(KV_LEN, dtype=q.dtype), (2, HEADS_KV, KV_LEN, KV_LEN)))
    dout = np.zeros((2, HEADS, Q_LEN, KV_LEN), q.dtype)
    dout[..., range(Q_LEN), range(Q_LEN)] = 1
    allowed = dense_mask(pattern, 2, HEADS, Q_LEN, KV_LEN)
    kept = allowed & dropout_mask(SEED, SHARE, 2, HEADS, Q_LEN, KV_LEN)
    counts = np.maximum(allowed.sum(axis=3, keepdims=True), 1)
    operands = ScoreOperands(None, dropout=Dropout.of(SHARE, SEED))
    for workers in (1, 6):
        plan = planned(pattern, q, k, v, workers)
        out, _, _, _, dv, *_ = run(operands, plan, q * q.dtype.type(0), k, v, dout, precision=precision)
        assert np.array_equal(out != 0, kept), workers
        assert np.allclose(out.astype(float) * counts * (1 - SHARE), kept, atol=2e-2)
        each = (kept / counts).reshape(2, HEADS_KV, -1, Q_LEN, KV_LEN).sum(axis=2).swapaxes(2, 3)
        assert np.abs(dv[..., :Q_LEN].astype(float) * (1 - SHARE) - each).max() < 2e-2 * each.max(), workers
        assert np.array_equal(dv[..., :Q_LEN] != 0, each != 0) and not dv[..., Q_LEN:].any()


@pytest.mark.parametrize("modified", [False, True], ids=["plain", "score and sinks"])
@pytest.mark.parametrize("case", ["union", "empty rows", "per head"])
@each_kernel
def test_gradients_as_dense_attention(family, dtype, precision, case, modified):
    q, k, v = inputs(2, HEADS, HEADS_KV, Q_LEN, KV_LEN, 64, dtype=dtype)
    dout = random((2, HEADS, Q_LEN, 64), dtype, seed=9)
    wide = "float64" if dtype == "float64" else "float32"
    dlse = random((2, HEADS, Q_LEN), wide, seed=8)
    table, sinks = random((HEADS, 7, 5), wide, seed=7), np.array([0.5, -3, 2, 0], wide)
    given = (function(table), sinks) if modified else (None, None)
    operands = read(*given, Dropout.of(SHARE, SEED), q, k, v, "cpu", "bhsd", backward=True).operands
    allowed = dense_mask(CASES[case], 2, HEADS, Q_LEN, KV_LEN)
    kept = dropout_mask(SEED, SHARE, 2, HEADS, Q_LEN, KV_LEN)
    named = {"table": table, "sinks": sinks} if modified else {}
    want = formula(q, k, v, dout, dlse, allowed, kept, SHARE, **named)
    for workers in (1, 6):
        plan = planned(CASES[case], q, k, v, workers)
        *got, dtables, dsinks = run(operands, plan, q, k, v, dout, dlse, precision)
        found = [*got, *dtables, dsinks] if modified else got
        assert_close(found, want[: len(found)], tolerance(dtype, precision), NAMES[: len(found)])


@pytest.mark.parametrize(("head_dim", "q_len"), [(40, 1), (64, 5), (128, 1), (128, 130), (192, 130), (256, 40)])
@each_kernel
def test_head_dims(family, dtype, precision, head_dim, q_len):
    head_dim_v = 128 if head_dim == 192 else head_dim
    q, k, v = inputs(2, HEADS, HEADS_KV, q_len, 300, head_dim, head_dim_v, dtype=dtype)
    dout = random((2, HEADS, q_len, head_dim_v), dtype, seed=9)
    operands = ScoreOperands(None, dropout=Dropout.of(SHARE, SEED))
    allowed = dense_mask(patterns.Causal(), 2, HEADS, q_len, 300)
    kept = dropout_mask(SEED, SHARE, 2, HEADS, q_len, 300)
    want = formula(q, k, v, dout, np.zeros(()), allowed, kept, SHARE)[:5]
    for workers in (1, 4):
        plan = planned(patterns.Causal(), q, k, v, workers)
        got = run(operands, plan, q, k, v, dout, precision=precision)[:5]
        assert_close(got, want, tolerance(dtype, precision), NAMES[:5])


@each_kernel
def test_nan_at_hidden_keys(family, dtype, precision):
    pattern = patterns.Causal() & patterns.KeyPadding(np.arange(KV_LEN)[None] % 10 != 7)
    q, k, v = inputs(2, HEADS, HEADS_KV, Q_LEN, KV_LEN, 64, dtype=dtype)
    dout = random((2, HEADS, Q_LEN, 64), dtype, seed=9)
    operands = ScoreOperands(None, dropout=Dropout.of(SHARE, SEED))
    allowed = dense_mask(pattern, 2, HEADS, Q_LEN, KV_LEN)
    hidden = ~allowed.any(axis=(0, 1, 2))
    kept = dropout_mask(SEED, SHARE, 2, HEADS, Q_LEN, KV_LEN)
    want = formula(q, k, v, dout, np.zeros(()), allowed, kept, SHARE)[:5]
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[:, :, hidden], bad_v[:, :, hidden] = np.nan, np.inf
    got = run(operands, planned(pattern, q, k, v), q, bad_k, bad_v, dout, precision=precision)[:5]
    assert_close(got, want, tolerance(dtype, precision), NAMES[:5])


@hopper
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("name", ["gathered", "ordered"])
def test_looked_up_tokens(name):
    pattern = CASES["scattered" if name == "gathered" else "clusters"]
    q_len = Q_LEN if name == "gathered" else KV_LEN
    q, k, v = inputs(2, HEADS, HEADS_KV, q_len, KV_LEN, 64, dtype="bfloat16")
    plan = planned(pattern, q, k, v, 3, **{name: True})
    operands = ScoreOperands(None, dropout=Dropout.of(SHARE, SEED))
    call = replace(Call.of(q, k, v), score=operands)
    out, lse = cuda.prepare(call, plan)(q, k, v, call.scale, operands)
    allowed, kept = (
        dense_mask(pattern, 2, HEADS, q_len, KV_LEN),
        dropout_mask(SEED, SHARE, 2, HEADS, q_len, KV_LEN),
    )
    want = formula(q, k, v, out, np.zeros(()), allowed, kept, SHARE)
    assert_close((out, lse), want[:2], TOLERANCES["bfloat16"], NAMES[:2])


@hopper
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("name", ["blocks of 128 for all", "padding", "documents of entries"])
def test_dynamic_masks(torch, arrays, name):
    chosen = patterns.Causal() & SELECTIONS[name](np.random.default_rng(1), 391, on_gpu(torch))
    q, k, v = inputs(2, HEADS, HEADS_KV, 260, 391, 64, dtype="bfloat16")
    on_device = [arrays("torch")(x) for x in (q, k, v)]
    with torch.no_grad():
        out, lse = spattn.attention(*on_device, chosen, return_lse=True, dropout_p=SHARE, seed=SEED)
    allowed = dense_mask(chosen.to_host(391), 2, HEADS, 260, 391)
    kept = dropout_mask(SEED, SHARE, 2, HEADS, 260, 391)
    want = formula(q, k, v, to_host(out), np.zeros(()), allowed, kept, SHARE)
    assert_close((out, lse), want[:2], TOLERANCES["bfloat16"], NAMES[:2])


@pytest.mark.parametrize("family", ["sm90", "sm80"], indirect=True)
def test_autograd(torch, arrays, family):
    """Cached launches; other seeds and shares; a table whose gradient the fused backward sums; the CPU's pairs."""
    q, k, v = inputs(2, HEADS, HEADS_KV, 300, 300, 64, dtype="bfloat16")
    dout = random((2, HEADS, 300, 64), "bfloat16", seed=9)
    table = random((HEADS, 2 * 300 - 1), "float32", seed=3)
    pattern = patterns.SlidingWindow(100, 40) | patterns.GlobalTokens([3])
    leaves = [arrays("torch")(x).requires_grad_() for x in (q, k, v, table)]
    upstream = arrays("torch")(dout)
    allowed = dense_mask(pattern, 2, HEADS, 300, 300)
    host = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in (q, k, v, table)]
    for seed, share in itertools.product((SEED, 1, SEED), (0.1, 0.5)):
        options = {"dropout_p": share, "seed": seed}
        out = spattn.attention(*leaves[:3], pattern, score=relative_bias(leaves[3]), **options)
        got = torch.autograd.grad(out, leaves, upstream)
        exact = spattn.attention(*host[:3], pattern, score=relative_bias(host[3]), backend="reference", **options)
        want = torch.autograd.grad(exact, host, torch.tensor(np.asarray(dout, np.float64)))
        for x, y in zip((out, *got), (exact, *want), strict=True):
            error = torch.linalg.norm(x.detach().double().cpu() - y.detach())
            assert error <= 2e-2 * torch.linalg.norm(y.detach()), (seed, share)
    units = np.ascontiguousarray(np.broadcast_to(np.eye(300, 256, dtype=q.dtype), (2, HEADS_KV, 300, 256)))
    with torch.no_grad():
        shown = spattn.attention(*map(arrays("torch"), (0 * q, k, units)), pattern, dropout_p=SHARE, seed=SEED)
    kept = allowed & dropout_mask(SEED, SHARE, 2, HEADS, 300, 300)
    assert np.array_equal(to_host(shown) != 0, kept[..., :256])


@pytest.mark.parametrize("family", ["sm90", "sm80"], indirect=True)
def test_seeds_in_device_memory(torch, arrays, family):
    """The kernels read them, not the host; a replayed CUDA graph drops the pairs of the seed's value at that time."""
    leaves = [arrays("torch")(x).requires_grad_() for x in inputs(2, HEADS, HEADS_KV, 200, 200, 64, dtype="bfloat16")]

    def step(seed):
        out = spattn.attention(*leaves, CASES["union"], dropout_p=SHARE, seed=seed)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)

    wanted = {seed: step(seed) for seed in (3, SEED, 2**63 - 1)}
    seed = torch.tensor(3, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(seed)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(map(torch.equal, got, wanted[3]))
    assert all(map(torch.equal, step(torch.tensor(2**64 - 1, dtype=torch.uint64, device="cuda")), step(2**64 - 1)))
    out = spattn.attention(*leaves, CASES["union"], dropout_p=SHARE, seed=seed)
    seed += 1  # the backward has a copy
    got = torch.autograd.grad(out.float().square().sum(), leaves)
    assert all(map(torch.equal, got, wanted[3][1:]))
    del out  # its graph would make the capture wait for the default stream, where it was recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(seed)
    for value, want in wanted.items():
        seed.fill_(value)
        graph.replay()
        assert all(map(torch.equal, got, want)), value
    with pytest.raises(TypeError, match="^seed: expected an integer, got Tensor"):
        step(torch.tensor(1.5, device="cuda"))


@pytest.mark.parametrize("family", ["sm90", "sm80"], indirect=True)
def test_groups_streams_and_graphs(torch, arrays, family):
    problems, wanted = [], []
    for n, pattern in ((130, CASES["union"]), (200, patterns.Causal()), (300, patterns.SlidingWindow(20, 3))):
        q, k, v = inputs(1, HEADS, HEADS_KV, n, n, 64, dtype="bfloat16")
        problems.append((*(arrays("torch")(x) for x in (q, k, v)), pattern))
        allowed, kept = dense_mask(pattern, 1, HEADS, n, n), dropout_mask(SEED, SHARE, 1, HEADS, n, n)
        wanted.append(formula(q, k, v, q, np.zeros(()), allowed, kept, SHARE)[0])
    options = {"dropout_p": SHARE, "seed": SEED}
    side = torch.cuda.Stream()
    with torch.no_grad():
        for _ in range(3):
            for got, want in zip(spattn.grouped_attention(problems, **options), wanted, strict=True):
                assert_close([got], [want], TOLERANCES["bfloat16"], NAMES[:1])
        for (*given, pattern), want in zip(problems, wanted, strict=True):
            with torch.cuda.stream(side):
                for _ in range(3):
                    out = spattn.attention(*given, pattern, **options)
            side.synchronize()
            assert_close([out], [want], TOLERANCES["bfloat16"], NAMES[:1])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = spattn.attention(*given, pattern, **options)
            for _ in range(2):
                out.zero_()
                graph.replay()
                torch.cuda.synchronize()
                assert_close([out], [want], TOLERANCES["bfloat16"], NAMES[:1])


@pytest.mark.parametrize("family", ["sm90", "sm80"], indirect=True)
def test_decoding_steps(torch, arrays, family):
    """A plan of any length; each step drops the pairs of the last row of the whole call."""
    q, k, v = inputs(2, HEADS, HEADS_KV, 90, 90, 64, dtype="bfloat16")
    pattern = patterns.SlidingWindow(60, 0)
    given = [arrays("torch")(x) for x in (q, k, v)]
    for kv_len in range(70, 91):
        some = given[0][:, :, kv_len - 1 : kv_len], given[1][:, :, :kv_len], given[2][:, :, :kv_len]
        with torch.no_grad():
            got = spattn.attention(*some, pattern, dropout_p=SHARE, seed=SEED)
        mask = dropout_mask(SEED, SHARE, 2, HEADS, kv_len, kv_len)[:, :, -1:]
        allowed = dense_mask(pattern, 2, HEADS, 1, kv_len)
        host = q[:, :, kv_len - 1 : kv_len], k[:, :, :kv_len], v[:, :, :kv_len]
        want = formula(*host, host[0], np.zeros(()), allowed, mask, SHARE)[0]
        assert_close([got], [want], TOLERANCES["bfloat16"], NAMES[:1])


@pytest.mark.parametrize("family", ["sm90", "sm80"], indirect=True)
def test_off_and_float16(torch, arrays, family):
    """A share of 0 gives the bits of a call without dropout; float16 refuses factors that it cannot hold."""
    given = [arrays("torch")(x) for x in inputs(1, HEADS, HEADS_KV, 130, 130, 64, dtype="float16")]
    with torch.no_grad():
        plain = spattn.attention(*given, CASES["union"])
        assert torch.equal(spattn.attention(*given, CASES["union"], dropout_p=0.0, seed=3), plain)
        with pytest.raises(ValueError, match="^dropout_p: must not exceed 1 - 2"):
            spattn.attention(*given, CASES["union"], dropout_p=1 - 2.0**-20, seed=3)
