"""Sinks in every CUDA kernel, forward and backward, against a dense float64 formula."""

from __future__ import annotations

import fcntl
import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import spattn
from spattn import Tiling, cuda, patterns
from spattn.arrays import to_host
from spattn.arrays.operand import Operand, row_major
from spattn.choose.specializations import ARCH, build, variant
from spattn.cuda.driver import compile, device
from spattn.cuda.host import execute, sinks
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.host.score import IDENTITY, BoundScore
from spattn.cuda.sm80 import params as portable_params
from spattn.cuda.sm80.variants import backward_variants, forward_variants, tile_within
from spattn.cuda.sm80.variants import variant as portable_variant
from spattn.cuda.sm90.backward import params as backward_params
from spattn.cuda.sm90.backward import specializations as backward_table
from spattn.cuda.sm90.forward import group, launches, prepared
from spattn.cuda.sm90.forward import params as hopper_params
from spattn.planning.contract.validated import validated
from spattn.request.call import Call
from spattn.request.score import ScoreOperands
from spattn.schedule import compiler
from spattn.schedule.tensor_maps import MAPS
from spattn.testing import assert_within_bound, count_orders, dense_mask, inputs, random

from ..sink_formula import NAMES, dense, lossy
from .sm90.test_dynamic_masks import SELECTIONS, on_gpu

HEADS, HEADS_KV, SCALE = 4, 2, 0.4
SINKS = (0.5, -3.0, 2.0, -np.inf)  # the last head has none
KERNELS = {  # (family, dtype, precision)
    "wgmma float16": ("sm90", "float16", None),
    "wgmma bfloat16": ("sm90", "bfloat16", None),
    "mma float16": ("sm80", "float16", None),
    "mma bfloat16": ("sm80", "bfloat16", None),
    "three TF32 products": ("sm80", "float32", None),
    "one TF32 product": ("sm80", "float32", "tf32"),
    "FFMA": ("sm80", "float64", None),
}
each_kernel = pytest.mark.parametrize(
    ("family", "dtype", "precision"), KERNELS.values(), ids=KERNELS, indirect=["family"]
)
NINTH = np.broadcast_to(np.arange(300)[:, None] % 9 == 0, (300, 300))
CASES = {  # (pattern, q_len, kv_len)
    "more keys": (patterns.Causal(), 130, 291),
    "partials": (patterns.strided(16) & ~patterns.Mask(NINTH), 300, 300),  # every ninth row attends to nothing
    "union": (patterns.longformer(64, global_tokens=(0, 1, 200)), 260, 260),
    "nothing": (patterns.Full() - patterns.Full(), 150, 150),
    "per head": (patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30))), 200, 200),
    "plane": (patterns.Neighborhood((12, 13), 5), 156, 156),
}
hopper = pytest.mark.family("sm90")


def portable_kernels(arch, shared_bytes):
    """(source, architecture, macros, structs) of the portable kernels that the tests run."""
    with_sinks = sinks.sink_macros(1)
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        merge = portable_variant("forward/merge", dtype)
        found = [merge, merge._replace(macros=merge.macros | with_sinks)]
        found += [portable_variant(f"backward/{name}", dtype) for name in ("statistics", "sum")]
        for dim, precision in itertools.product((40, 64, 128, 256), (None, "tf32") if dtype == "float32" else (None,)):
            tile = tile_within(shared_bytes, dtype, dim)
            forward = forward_variants(dtype, precision, dim, dim, tile, True, shared_bytes)
            found += [x._replace(macros=x.macros | with_sinks) for x in forward] + forward * (dim == 64)
            for by_keys in (False, True):
                found += backward_variants(dtype, precision, dim, dim, by_keys, True, shared_bytes)
        yield from ((x.source, arch, x.macros, portable_params.structs_of(x.source)) for x in found)
        yield "common/sink_gradient.cu", arch, {"SPATTN_DTYPE": dtype}, {"SinkGradient": sinks.SINK_GRADIENT}


def hopper_kernels_of(dtype):
    """Those of the Hopper kernels, for most numbers of tensor maps."""
    with_sinks = sinks.sink_macros(1)
    rooms = [(64, MAPS[0]), (64, MAPS[1]), (128, MAPS[0]), (256, MAPS[0])]
    for (dim, room), keys in itertools.product(rooms, (256.0, np.inf)):
        defines, structs = variant(build(128, dim, keys), dtype, room), hopper_params.structs(room)
        for macros in ({}, with_sinks) if dim == 64 else (with_sinks,):
            yield "sm90/forward/attention.cu", ARCH, defines | macros, structs
    for dim in (64, 128, 256):
        defines, structs = variant(build(128, dim), dtype, MAPS[0]), hopper_params.structs(MAPS[0])
        yield from (("sm90/forward/merge.cu", ARCH, defines | macros, structs) for macros in ({}, with_sinks))
    for row, room in itertools.product(backward_table.TABLE, MAPS[:2]):
        if (row.head_dim, room) not in rooms:
            continue
        names = ("backward", "statistics", "sum", "convert") if room == MAPS[0] else ("backward",)
        for name in names:
            defines = backward_table.variant(row, dtype, room)
            yield f"sm90/backward/{name}.cu", ARCH, defines, backward_params.structs(room)


@pytest.fixture(scope="module")
def compiled():
    """Compile the kernels of this module in parallel, one process at a time; the calls find them in the cache."""
    gpu = device.get()
    found = list(portable_kernels(gpu.arch, gpu.shared_bytes))
    if gpu.capability == (9, 0):
        found += [*hopper_kernels_of("float16"), *hopper_kernels_of("bfloat16")]
    lock = Path(tempfile.gettempdir()) / f"spattn-test-sinks-{os.getuid()}.lock"
    with lock.open("w") as file, ThreadPoolExecutor() as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert all(pool.map(lambda one: compile.cubin(*one), found))


@pytest.fixture(autouse=True)
def compiled_on_a_gpu(request):
    """Tests on a GPU find their kernels compiled."""
    if request.node.get_closest_marker("gpu") is not None and compile.find_nvcc() is not None:
        request.getfixturevalue("compiled")


def wide(dtype):
    """The dtype of lse and of the sinks."""
    return "float64" if dtype == "float64" else "float32"


def problem(dtype, q_len, kv_len, head_dim=64, batch=2):
    q, k, v = inputs(batch, HEADS, HEADS_KV, q_len, kv_len, head_dim, dtype=dtype)
    dout = random((batch, HEADS, q_len, head_dim), dtype, seed=9)
    return q, k, v, dout, random((batch, HEADS, q_len), wide(dtype), seed=8)


def score_of(values, dtype):
    return ScoreOperands(None, sinks=np.array(values, wide(dtype)))


def call_of(q, k, v, score, precision=None, scale=SCALE):
    return replace(Call.of(q, k, v, scale=scale, precision=precision), score=score)


def run(values, plan, q, k, v, dout, dlse, precision=None, scale=SCALE):
    """Results and gradients, which are the same bits again; None as `values` is a call without ScoreOperands."""
    score = None if values is None else score_of(values, q.dtype.name)
    call, own = call_of(q, k, v, score, precision, scale), () if score is None else (score,)
    out, lse = cuda.prepare(call, plan)(q, k, v, scale, *own)
    backward = cuda.prepare_backward(call, plan)
    gradients, again = (backward(dout, q, k, v, out, lse, dlse, scale, *own) for _ in range(2))
    if score is not None:
        assert gradients[3] == again[3] == ()
        gradients, again = (*gradients[:3], gradients[4]), (*again[:3], again[4])
    for x, twin in zip(gradients, again, strict=True):
        assert_same(x, twin)
    return out, lse, *gradients


def assert_same(x, y, name=""):
    """The same values; NaN of bfloat16 compares as such in float64."""
    np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64), name)


def planned(pattern, q, k, v, workers=1):
    """A plan for the chosen kernels; with `workers`, of lists in pieces."""
    tile = cuda.tile(q.dtype.name, q.shape[3], v.shape[3])
    return spattn.plan(pattern, q.shape[2], k.shape[2], tiling=Tiling(tile=tile, workers=workers), heads=HEADS, batch=2)


class Expected:
    """The formula's results for a problem; TF32 has as many bits as float16."""

    def __init__(self, pattern, q, k, v, dout, dlse, values=SINKS, precision=None):
        self.dtype = np.dtype(np.float16) if precision else q.dtype
        mask = dense_mask(pattern, q.shape[0], HEADS, q.shape[2], k.shape[2])
        args = q, k, v, mask, SCALE, np.array(values), dout, dlse
        self.exact = dense(*args, wide=np.longdouble if q.dtype == np.float64 else np.float64)
        # lse comes from approximate exponentials and logarithms.
        self.low = lossy(self.dtype, max(9, count_orders(q, k, mask)), *args, ulps=2)

    def check(self, *got):
        """The results that are there, forward alone or with gradients, are within the bound."""
        for name, x, want, *rounded in zip(NAMES, got, self.exact, *self.low, strict=False):
            assert_within_bound(to_host(x), want, rounded, self.dtype, name)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@each_kernel
def test_calls(family, dtype, precision, case):
    pattern, q_len, kv_len = case
    args = problem(dtype, q_len, kv_len)
    expected = Expected(pattern, *args, precision=precision)
    for workers in (1, 8):
        expected.check(*run(SINKS, planned(pattern, *args[:3], workers), *args, precision))


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "q_len"), [(40, 1), (64, 5), (128, 1), (128, 130), (256, 40)])
@each_kernel
def test_head_dims(family, dtype, precision, head_dim, q_len):
    """Few queries: the Hopper kernels pack the heads of a group, each with its own sink, as rows of one."""
    pattern, args = patterns.Causal(), problem(dtype, q_len, 300, head_dim)
    expected = Expected(pattern, *args, precision=precision)
    for workers in (1, 4):
        expected.check(*run(SINKS, planned(pattern, *args[:3], workers), *args, precision))


@pytest.mark.gpu
@each_kernel
def test_extreme_sinks(family, dtype, precision):
    """A sink far below the scores changes no bit, one far above takes all weight; NaN stays within its head."""
    pattern, q_len, kv_len = CASES["partials"]
    args = problem(dtype, q_len, kv_len)
    plan, some = planned(pattern, *args[:3], 8), dense_mask(pattern, 2, HEADS, q_len, kv_len).any(axis=3)
    plain = run(None, plan, *args, precision)
    low = run((-np.inf, -1e4, -1e4, -np.inf), plan, *args, precision)
    for n in range(3):
        assert_same(plain[n][some], low[n][some], NAMES[n])
    for n in (3, 4):
        assert_same(plain[n], low[n], NAMES[n])
    assert (low[5][[0, 3]] == 0).all()
    high, total = run((1e4, np.inf, np.nan, -1e4), plan, *args, precision), args[4].astype(float).sum(axis=(0, 2))
    for head, sink in ((0, 1e4), (1, np.inf)):
        assert (high[0][:, head] == 0).all() and (high[2][:, head] == 0).all()
        np.testing.assert_array_equal(high[1][:, head], np.full_like(high[1][:, head], sink))
        np.testing.assert_allclose(high[5][head], total[head], rtol=1e-5)
    assert np.isnan(high[0][:, 2].astype(float)).all() and np.isnan(high[1][:, 2]).all() and np.isnan(high[5][2])
    for n in range(3):
        assert_same(high[n][:, 3][some[:, 3]], plain[n][:, 3][some[:, 3]], NAMES[n])


@pytest.mark.gpu
@each_kernel
def test_sinks_above_the_scores(family, dtype, precision):
    """Sinks that take nearly all of the weight leave rows that are small and exact; split lists agree."""
    args = problem(dtype, 150, 201)
    for values in ((5.0, 12.0, 30.0, 43.0), (44.0, 46.0, 60.0, 80.0)):  # 2^64 is e^44.4
        expected = Expected(patterns.SlidingWindow(60, 5), *args, values=values, precision=precision)
        for workers in (1, 8):
            expected.check(*run(values, planned(patterns.SlidingWindow(60, 5), *args[:3], workers), *args, precision))


@pytest.mark.gpu
@each_kernel
def test_rows_without_keys(family, dtype, precision):
    """Their lse is the sink, exactly."""
    for name in ("partials", "nothing"):
        pattern, q_len, kv_len = CASES[name]
        args = problem(dtype, q_len, kv_len)
        none = ~dense_mask(pattern, 2, HEADS, q_len, kv_len).any(axis=3)
        out, lse, dq, *_ = run(SINKS, planned(pattern, *args[:3], 8), *args, precision)
        sinks = np.broadcast_to(np.array(SINKS, wide(dtype))[:, None], lse.shape)
        np.testing.assert_array_equal(lse[none], sinks[none])
        assert (out[none] == 0).all() and (dq[none] == 0).all()


@pytest.mark.gpu
@each_kernel
def test_float64_rows(family, dtype, precision):
    """Rows with a NaN at a hidden key, and with huge scores, take the float64 fallback."""
    pattern = patterns.SlidingWindow(20, 5)
    q, k, v, dout, dlse = problem(dtype, 150, 201)
    seen = dense_mask(pattern, 1, 1, 150, 201)[0, 0].any(axis=0)
    k[:, :, ~seen], v[:, :, ~seen] = 0, 0
    bad = [x.copy() for x in (k, v)]
    for x in bad:
        x[:, :, ~seen] = np.nan
    assert not seen.all()
    plan = planned(pattern, q, k, v)
    Expected(pattern, q, k, v, dout, dlse, precision=precision).check(*run(SINKS, plan, q, *bad, dout, dlse, precision))
    q, k = np.round(2 * q) / 2, np.round(2 * k) / 2  # exact products
    scale, mask = 1e9, dense_mask(pattern, 2, HEADS, 150, 201)
    typical = np.median(dense(q, k, v, mask, scale, np.full(HEADS, -np.inf), dout, dlse)[1])
    score = score_of(
        typical + np.array([1e8, 1.1e9, -0.9e9, 5.1e9]), dtype
    )  # no ties: docs/numerics.rst has their error
    got = cuda.prepare(call_of(q, k, v, score, precision, scale), plan)(q, k, v, scale, score)
    args = q, k, v, mask, scale, score.sinks, dout, dlse
    for name, x, want, low in zip(NAMES, got, dense(*args, wide=np.longdouble), dense(*args), strict=False):
        assert_within_bound(x, want, low.astype(x.dtype).astype(np.float64), q.dtype, name)


@pytest.mark.gpu
@each_kernel
def test_merged_parts(family, dtype, precision):
    """A sink takes part in one part only; the merged parts are the whole."""
    pattern, part = patterns.SlidingWindow(40, 5), patterns.Columns(9, 2, 4)
    args = problem(dtype, 150, 201)
    parts = [
        run(values, planned(own, *args[:3]), *args, precision)[:2]
        for values, own in ((SINKS, pattern & part), (None, pattern & ~part))
    ]
    expected = Expected(pattern, *args, precision=precision)
    expected.check(*spattn.merge_attentions(*zip(*parts, strict=True)))


@hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("name", ["gathered", "ordered"])
def test_looked_up_tokens(name):
    rng = np.random.default_rng(0)
    scattered = patterns.interop.from_pairs(*np.nonzero(rng.random((300, 417)) < 0.05), 300, 417)
    pattern, kv_len = (scattered, 417) if name == "gathered" else (patterns.Clusters(rng.integers(0, 9, 300)), 300)
    q, k, v, dout, dlse = problem("float16", 300, kv_len)
    plan = compiler.plan(pattern, 300, kv_len, batch=2, heads=HEADS, tile=(128, 64), workers=3, **{name: True})
    assert plan.kv_order.size and bool(plan.q_order.size) == (name == "ordered")
    score = score_of(SINKS, "float16")
    got = cuda.prepare(call_of(q, k, v, score), plan)(q, k, v, SCALE, score)
    Expected(pattern, q, k, v, dout, dlse).check(*got)


@hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("name", ["blocks of 128 for all", "padding", "documents of entries", "lines"])
def test_dynamic_masks(torch, arrays, name):
    chosen = patterns.Causal() & SELECTIONS[name](np.random.default_rng(1), 391, on_gpu(torch))
    args = problem("bfloat16", 260, 391)
    *on_device, own = [arrays("torch")(x) for x in (*args[:3], np.array(SINKS, np.float32))]
    score = ScoreOperands(None, sinks=own)
    got = cuda.prepare_masked(call_of(*on_device, score), chosen)(*on_device, SCALE, score)
    Expected(chosen.to_host(391), *args).check(*got)


@hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_groups(torch, arrays):
    """Problems with sinks and without share no launch; each has its own."""
    cases = [CASES[name] for name in ("more keys", "partials", "union", "per head", "plane")]
    values = [SINKS, None, SINKS[::-1], (1e4, -1e4, 0.0, 1.0), None]
    given = [problem("bfloat16", *case[1:]) for case in cases]
    on_device = [[arrays("torch")(x) for x in args[:3]] for args in given]
    scores = [
        None if own is None else ScoreOperands(None, sinks=arrays("torch")(np.array(own, np.float32))) for own in values
    ]
    calls = {n: (call_of(*own, scores[n]), planned(cases[n][0], *given[n][:3], 8)) for n, own in enumerate(on_device)}
    grouped = cuda.prepare_group(calls)
    expected = [
        Expected(pattern, *args, (-np.inf,) * HEADS if own is None else own)
        for (pattern, *_), args, own in zip(cases, given, values, strict=True)
    ]
    for _ in range(2):
        results = grouped([tuple(own) for own in on_device], [SCALE] * len(calls), scores)
        for want, got in zip(expected, results, strict=True):
            want.check(*got)
    with pytest.raises(ValueError, match="score: expected the function that the call was prepared for"):
        grouped([tuple(own) for own in on_device], [SCALE] * len(calls), [scores[0]] * len(calls))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["sm80", "sm90"], indirect=True)
def test_values_of_each_call(family, torch, arrays):
    """Device arrays: other values, addresses and strides of the sinks, and other numbers of keys, in one dispatch."""
    pattern, args = patterns.SlidingWindow(63, 0), problem("bfloat16", 3, 391)
    q, k, v, dout, dlse = [arrays("torch")(x) for x in args]
    zero = torch.zeros(HEADS, device="cuda")
    call = call_of(q, k[:, :, :300], v[:, :, :300], ScoreOperands(None, sinks=zero))
    prepared = cuda.prepare(call, spattn.plan_for(pattern, call.q, call.k, call.v, backend="cuda"))
    for kv_len, own in ((300, zero), (391, zero + 2), (290, torch.arange(2.0 * HEADS, device="cuda")[::2])):
        keys, values, score = k[:, :, :kv_len], v[:, :, :kv_len], ScoreOperands(None, sinks=own)
        out, lse = prepared(q, keys, values, SCALE, score)
        given = args[0], *(x[:, :, :kv_len] for x in args[1:3]), *args[3:]
        expected = Expected(pattern, *given, to_host(own))
        call = call_of(q, keys, values, score)
        backward = cuda.prepare_backward(call, spattn.plan_for(pattern, q, keys, values, backend="cuda"))
        for _ in range(3):  # the first call prepares launches for the others
            *gradients, dtables, dsinks = backward(dout, q, keys, values, out, lse, dlse, SCALE, score)
            assert dtables == ()
            expected.check(out, lse, *gradients, dsinks)


# -- without a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.family("sm80")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_without_queries_or_keys(library, request):
    """Without a key, lse is the sink and a change of it goes to the sink; nothing is launched."""
    of = np.asarray if library == "numpy" else request.getfixturevalue("torch").from_numpy
    for q_len, kv_len in ((5, 0), (0, 5), (0, 0)):
        q, k, v, dout, dlse = (of(x) for x in problem("float32", q_len, kv_len))
        score = ScoreOperands(None, sinks=of(np.array([0.5, -3.0, 2.0, 1e4], np.float32)))
        call, plan = call_of(q, k, v, score), spattn.plan(patterns.Full(), q_len, kv_len, heads=HEADS)
        out, lse = cuda.prepare(call, plan)(q, k, v, SCALE, score)
        assert type(lse) is type(q) and not out.any() and (lse == score.sinks[:, None]).all()
        backward = cuda.prepare_backward(call, plan)
        for given, total in ((dlse, dlse.sum((0, 2))), (None, 0 * score.sinks)):
            *gradients, dtables, dsinks = backward(dout, q, k, v, out, lse, given, SCALE, score)
            assert not any(x.any() for x in gradients) and dtables == () and (dsinks == total).all()
        with pytest.raises(
            ValueError, match=r"sinks: expected an array of float32 and shape \(4,\), got float32, \(2,\)"
        ):
            cuda.prepare(call, plan)(q, k, v, SCALE, score._replace(sinks=score.sinks[:2]))


@pytest.mark.family("sm80")
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_operands(monkeypatch, with_sinks, with_dlse):
    """Sinks are the last bound arrays, their gradients the last results."""
    args, score = problem("float32", 5, 7), score_of(SINKS, "float32") if with_sinks else None
    calls = []
    family = SimpleNamespace(backward=calls.append)
    monkeypatch.setattr(execute.Backward, "_requests", lambda self, call: [])
    dispatch = execute.Backward(call_of(*args[:3], score), None, None, lambda: family)
    names = ["dout", "q", "k", "v", "out", "lse", *["dlse"] * with_dlse, "dq", "dk", "dv", *["dsinks"] * with_sinks]
    bound = dispatch.binder.bind(0, score, [Operand(77, (HEADS,), (1,))] * with_sinks, (1, 1), None)
    dispatch.enqueue(0, [Operand(n, (1,), (1,)) for n in range(len(names))], None, SCALE, None, bound)
    (found,) = calls
    for n, name in enumerate(names):
        own = getattr(found, name)
        assert (own if name == "dsinks" else own.pointer) == n
    assert found.sinks == 77 * with_sinks
    assert with_sinks or (found.sinks, found.dsinks) == (0, 0)
    assert with_dlse or found.dlse is None


class Gpu:
    """The attributes of a GPU that the tables need."""

    ordinal, sm_count, shared_bytes, arch = 0, 132, 227 << 10, "sm_90"


@pytest.fixture
def tables(monkeypatch, tensor_maps):
    """Uploads without a GPU; kernels are their macros."""
    for module in (portable_params, prepared, group):
        monkeypatch.setattr(module, "upload", lambda device, arrays: (None, dict.fromkeys(arrays, 4096)))
    monkeypatch.setattr(launches, "load_kernels", lambda device, requests: requests)


def forward_pass(q_len, kv_len, workers=1, address=77):
    plan = compiler.plan(patterns.Causal(), q_len, kv_len, heads=HEADS, batch=2, tile=(128, 64), workers=workers)
    shapes = (2, HEADS, q_len, 64), (2, HEADS_KV, kv_len, 64), (2, HEADS_KV, kv_len, 64), (2, HEADS, q_len, 64)
    operands = [Operand((1 + n) << 30, shape, row_major(shape)) for n, shape in enumerate(shapes)]
    return ForwardPass(
        Gpu(), 0, validated(plan), *operands, 5 << 30, "bfloat16", SCALE, None, None, BoundScore(sinks=address)
    )


@hopper
@pytest.mark.parametrize(("q_len", "packed"), [(100, 1), (3, 2)])
def test_parameters(tables, q_len, packed):
    """A sink belongs to `sink_rows` rows: those of its head, which may be packed with others of the group."""
    call = forward_pass(q_len, 4000, workers=9)
    ready = prepared.prepare(call)
    assert ready.attention.defines["SPATTN_SINKS"] == 1
    problem = call.q.pointer, call.k.pointer, call.v.pointer, call.out.pointer, 5 << 30
    to = hopper_params.Addresses(*problem, 0, 0, SCALE, sinks=77)
    (found,) = np.frombuffer(ready.template.fill(0, [to]), hopper_params.params_dtype(MAPS[0]))
    (own,) = found["problems"]
    assert (own["sinks"], own["sink_rows"], own["heads_q"]) == (77, q_len, HEADS // packed)
    assert own["q_len"] == q_len * packed
    (merging,) = ready._merges
    (merge,) = np.frombuffer(merging.params(to), hopper_params.MERGE)
    assert merging.kernel.defines["SPATTN_SINKS"] == 1
    assert (merge["sinks"], merge["sink_rows"], merge["q_len"]) == (77, q_len, q_len * packed)
    plain = prepared.prepare(replace(call, score=IDENTITY))
    assert plain is not ready and "SPATTN_SINKS" not in plain.attention.defines | plain._merges[0].kernel.defines


@pytest.mark.family("sm80")
def test_portable_parameters(tables):
    call = forward_pass(300, 700)
    on_device = portable_params.plan_on_device(call.plan, Gpu(), 2, HEADS)
    (found,) = np.frombuffer(portable_params.pack(call, on_device, 111, 222), portable_params.PARAMS)
    assert (found["sinks"], found["partial_lse"], found["q_len"]) == (77, 222, 300)


@hopper
def test_groups_are_cut(tables):
    """Problems with sinks have kernels of their own."""
    parts = [group.part_of(forward_pass(300, 300, address=address)) for address in (0, 77, 0, 99)]
    assert group.cut(parts) == [[0, 2], [1, 3]]
    for own, with_sinks in zip(group.cut(parts), (False, True), strict=True):
        ready = group.prepare([parts[n] for n in own])
        assert ("SPATTN_SINKS" in ready.attention.defines) == with_sinks


NVCC = pytest.mark.skipif(compile.find_nvcc() is None, reason="nvcc was not found")


@NVCC
@pytest.mark.family("sm80")
def test_the_gradient_compiles():
    """The struct is as the host packs it, for both types of sums."""
    for dtype in ("float32", "float64"):
        structs = {"SinkGradient": sinks.SINK_GRADIENT}
        assert compile.cubin("common/sink_gradient.cu", "sm_80", {"SPATTN_DTYPE": dtype}, structs)


@NVCC
@pytest.mark.slow
@pytest.mark.family("sm80")
def test_kernels_compile():
    """With sinks, too."""
    row, macros = build(128, 64), sinks.sink_macros(1)
    for name in ("attention", "merge"):
        defines, structs = variant(row, "bfloat16", MAPS[0]) | macros, hopper_params.structs(MAPS[0])
        assert compile.cubin(f"sm90/forward/{name}.cu", ARCH, defines, structs)
    found = [portable_variant("forward/merge", "float32")]
    for dtype in ("bfloat16", "float32", "float64"):
        found += forward_variants(dtype, None, 64, 64, (64, 64), True, 163 << 10)
    for own in found:
        structs = portable_params.structs_of(own.source)
        assert compile.cubin(own.source, "sm_80", own.macros | macros, structs)
