"""Score functions in every Hopper kernel, forward and backward, against a dense float64 formula."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from spattn import cuda, patterns
from spattn.arrays import to_host
from spattn.choose.specializations import ARCH, build, variant
from spattn.cuda.driver import compile, device
from spattn.cuda.host.score import generated
from spattn.cuda.sm90.backward import params as backward_params
from spattn.cuda.sm90.backward import prepared as backward_prepared
from spattn.cuda.sm90.backward import specializations as backward_table
from spattn.cuda.sm90.forward.params import GROUPS, structs
from spattn.request.call import Call
from spattn.schedule import compiler
from spattn.schedule.tensor_maps import MAPS
from spattn.testing import assert_within_bound, dense_mask, inputs, random

from ..score_trees import dense, operands
from .test_dynamic_masks import SELECTIONS, on_gpu

pytestmark = [pytest.mark.family("sm90"), pytest.mark.gpu, pytest.mark.usefixtures("hopper_kernels", "compiled")]

BATCH, HEADS, HEADS_KV, SCALE = 2, 4, 2, 0.4
NAMES = ("out", "lse", "dq", "dk", "dv")


def softcap(*values):
    """One cap per query head."""
    caps = np.array(values, np.float32)
    return operands(lambda s, b, h, q, k: caps[h] * np.tanh(s / caps[h]), wanted=False)


def alibi(*values):
    """One slope per query head."""
    slopes = np.array(values, np.float32)
    return operands(lambda s, b, h, q, k: s + slopes[h] * (k - q), wanted=False)


SCORES = {"softcap": softcap(30.0, 0.5, -2.0, 5.0), "alibi": alibi(0.5, -0.25, 0.0, 2.0**-4)}
DROPOUT = "dropout"
NO_SCORE = operands(lambda s, b, h, q, k: s)
EACH, ALIBI = tuple(SCORES.values()), SCORES["alibi"]
DTYPES, PASSES = ("float16", "bfloat16"), ("two passes", "one pass")
GRID = patterns.Neighborhood((20, 23), 5)
# (pattern, q_len, kv_len): one view, reductions of rows, a union, boxes of a plane and of a volume, heads that differ.
CASES = {
    "more keys": (patterns.Causal(), 260, 391),
    "more queries": (patterns.Causal(), 391, 260),
    "strided": (patterns.strided(16), 400, 400),
    "longformer": (patterns.longformer(64, global_tokens=(0, 1, 200)), 400, 400),
    "plane": (GRID, 460, 460),
    "volume": (patterns.Neighborhood((6, 8, 9), (3, 5, 5)), 432, 432),
    "per head": (patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30))), 260, 260),
}
each_score = pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def text_of(score):
    """The generated C++ of a score function, or of dropout."""
    if score == DROPOUT:
        return generated(None, (), drops=True)[0]
    return "" if score is None else generated(score.program, score.types)[0]


def forward_kernels(dtype, *options, rows=128, dims=(64, 64), keys=256.0, scores=EACH):
    """(source, architecture, macros, structs, text) of a forward kernel with each score function."""
    defines = variant(build(rows, dims, keys), dtype, *(options or MAPS[:1]))
    own = structs(defines["SPATTN_MAPS"], defines["SPATTN_PROBLEMS"])
    return [("sm90/forward/attention.cu", ARCH, defines, own, text_of(score)) for score in scores]


def backward_kernels(dtype, head_dim, scores=EACH, names=("backward",)):
    for row, score, name in itertools.product(backward_table.TABLE, scores, names):
        if row.head_dim == head_dim:
            defines = backward_table.variant(row, dtype, MAPS[0])
            yield f"sm90/backward/{name}.cu", ARCH, defines, backward_params.structs(MAPS[0]), text_of(score)


def kernels():
    """The kernels with a score function that the tests of this module run."""
    for dtype in DTYPES:
        yield from forward_kernels(dtype)
        yield from backward_kernels(dtype, 64)
    for dims in ((128, 128), (192, 128), (256, 256)):
        yield from forward_kernels("bfloat16", dims=dims, scores=[ALIBI])
        yield from backward_kernels("bfloat16", dims[0], [ALIBI])
    for room in MAPS:
        yield from forward_kernels("bfloat16", room, rows=64, scores=[ALIBI])
    yield from forward_kernels("bfloat16", keys=np.inf, scores=[ALIBI])
    yield from forward_kernels("float16", MAPS[0], 1, True, keys=np.inf, scores=[ALIBI])
    problems, room = GROUPS[0]
    yield from forward_kernels("bfloat16", room, problems)
    for rows in (64, 128):  # whose words of dropout take most shared memory
        yield from forward_kernels("bfloat16", rows=rows, dims=(192, 128), scores=[DROPOUT])
    yield from backward_kernels("bfloat16", 192, [DROPOUT])


@pytest.fixture(scope="module")
def compiled():
    """Compile the kernels side by side, not one by one at their first use."""
    found = list(kernels())
    for dtype, head_dim in (("float16", 64), *(("bfloat16", dim) for dim in (64, 128, 192, 256))):
        found += backward_kernels(dtype, head_dim, [None], ("statistics", "sum", "convert"))
    if compile.find_nvcc() is not None and device.get().capability == (9, 0):
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: compile.cubin(*one), found))


def check(got, score, arrays, mask, scale=SCALE, dlse=0.0):
    """Compares the results that are there with the formula: forward alone, or with gradients."""
    expected = dense(score, arrays, mask, scale, dlse)
    dtype = arrays[0].dtype
    low = [dense(score, arrays, mask, scale, np.float32(dlse), dtype, factor) for factor in (1, 1.5)]
    for name, x, want, *lossy in zip(NAMES, got, expected[: len(got)], *low, strict=False):
        # Statistics are in float32, but of approximate exponentials and logarithms.
        assert_within_bound(x, want, lossy, "float16" if name == "lse" else dtype, name)


def call_of(score, q, k, v, scale=SCALE):
    return replace(Call.of(q, k, v, scale=scale, return_lse=True), score=score)


def problem(dtype, q_len, kv_len, head_dim=64, head_dim_v=64):
    q, k, v = inputs(BATCH, HEADS, HEADS_KV, q_len, kv_len, head_dim, head_dim_v, dtype=dtype)
    return q, k, v, random((BATCH, HEADS, q_len, head_dim_v), dtype, seed=99)


def forward(score, plan, q, k, v, scale=SCALE):
    return cuda.prepare(call_of(score, q, k, v, scale), plan)(q, k, v, scale, score)


def attention(score, plan, q, k, v, dout, dlse):
    """Results and gradients, which are the same bits again."""
    out, lse = forward(score, plan, q, k, v)
    backward = cuda.prepare_backward(call_of(score, q, k, v), plan)
    found, again = (backward(dout, q, k, v, out, lse, dlse, SCALE, score)[:3] for _ in range(2))
    for x, twin in zip(found, again, strict=True):
        np.testing.assert_array_equal(x, twin)
    return out, lse, *found


def planned(pattern, q_len, kv_len, tile=(128, 64), **options):
    return compiler.plan(pattern, q_len, kv_len, batch=BATCH, heads=HEADS, tile=tile, **options)


def choose(monkeypatch, one_pass):
    """Choose the passes of backwards; return their device plans, which are not those that other tests have cached."""
    made = {}

    def own(plan, *args):
        if (id(plan), args) not in made:
            made[id(plan), args] = backward_prepared.BackwardPlan(plan, *args)
        return made[id(plan), args]

    monkeypatch.setattr(backward_prepared, "plan_on_device", own)
    monkeypatch.setattr(backward_prepared, "_hardly_wait", lambda *args: one_pass)
    monkeypatch.setattr(backward_prepared, "_SLOWER", 0)
    return made


@pytest.fixture(params=PASSES)
def passes(request, monkeypatch):
    """Separate dK/dV and dQ kernels, or a fused one where the plan has one query view."""
    choose(monkeypatch, request.param == "one pass")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("dtype", "passes"), list(zip(DTYPES, PASSES, strict=True)), indirect=["passes"])
@each_score
def test_calls(passes, score, dtype, case):
    pattern, q_len, kv_len = case
    arrays, dlse = problem(dtype, q_len, kv_len), random((BATCH, HEADS, q_len), "float32", seed=98)
    got = attention(score, planned(pattern, q_len, kv_len), *arrays, dlse)
    check(got, score, arrays, dense_mask(pattern, BATCH, HEADS, q_len, kv_len), dlse=dlse)


RNG = np.random.default_rng(5)
CLIPPED, DISTANCES = RNG.normal(size=(HEADS, 41)).astype("f"), RNG.normal(size=(HEADS, 1200)).astype("f")
SLOPES, HIDDEN = RNG.normal(0, 0.05, HEADS).astype("f"), np.where(np.arange(1200) < 600, np.nan, 0).astype("f")
SUMMED = {
    "clipped": lambda s, b, h, q, k: s + CLIPPED[h, np.minimum(np.maximum(k - q, -20), 20) + 20],
    "distances": lambda s, b, h, q, k: s + DISTANCES[h, 600 + k - q],
    "capped": lambda s, b, h, q, k: 5 * np.tanh((s + DISTANCES[h, (k - q) * 3 % 1000]) / 5),
    "slopes": lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k),
    "two arrays": lambda s, b, h, q, k: s + SLOPES[h] * (k - q) + CLIPPED[0, abs(q - k) // 8 % 41],
    "not a number for hidden pairs": lambda s, b, h, q, k: s + DISTANCES[h, q - k] * 0.5 + HIDDEN[600 + q - k],
}
# (pattern, q_len, kv_len): of tokens that are equally far apart, so that a fused backward sums along diagonals
REGULAR = {
    "more keys": (patterns.Causal(), 460, 591),
    "window": (patterns.SlidingWindow(100, 30) & patterns.Causal(), 591, 591),
    "mask": (patterns.Mask(np.tril(RNG.random((500, 500)) < 0.6)), 500, 500),
}


@pytest.mark.parametrize("case", REGULAR.values(), ids=REGULAR)
@pytest.mark.parametrize("name", SUMMED)
def test_table_gradients(monkeypatch, name, case):
    """Of a fused backward, which sums along diagonals, against the formula and the pass over all pairs."""
    (pattern, q_len, kv_len), score = case, operands(SUMMED[name])
    (q, k, v, dout), dlse = problem("bfloat16", q_len, kv_len), random((BATCH, HEADS, q_len), "float32", seed=98)
    plan, mask = planned(pattern, q_len, kv_len), dense_mask(pattern, BATCH, HEADS, q_len, kv_len)
    call = call_of(score, q, k, v)
    out, lse = forward(score, plan, q, k, v)
    found = {}
    for one_pass in (True, False):
        made = choose(monkeypatch, one_pass)
        results = [cuda.prepare_backward(call, plan)(dout, q, k, v, out, lse, dlse, SCALE, score) for _ in range(2)]
        assert sums_tables(made) == one_pass
        tables = [[x for x in own[3] if x is not None] for own in results]
        for x, twin in zip(*tables, strict=True):
            assert x.tobytes() == twin.tobytes()
        found[one_pass] = [out, lse, *results[0][:3], *tables[0]]
    arrays = q, k, v, dout
    low = {
        fused: [dense(score, arrays, mask, SCALE, np.float32(dlse), q.dtype, factor, fused) for factor in (1, 1.5)]
        for fused in found
    }
    expected = dense(score, arrays, mask, SCALE, dlse)
    wanted = [number for number, one in enumerate(score.wanted) if one]
    chosen = [*range(5), *(5 + number for number in wanted)]
    for one_pass, own in found.items():
        for number, x in zip(chosen, own, strict=True):
            lossy = [one[number] for one in low[one_pass]]
            assert_within_bound(x, expected[number], lossy, "float16" if number == 1 else q.dtype, str(number))


def test_table_gradients_beyond_masked_keys(monkeypatch):
    """NaN at keys that no pair has makes the sums NaN; the pass over all pairs replaces them."""
    mask = dense_mask(patterns.SlidingWindow(70), 1, 1, 300, 300)[0, 0]
    mask[:, 5] = False
    score = operands(SUMMED["distances"])
    q, k, v, dout = problem("bfloat16", 300, 300)
    found = []
    for value in (0, np.nan):
        own = [x.copy() for x in (k, v)]
        for x in own:
            x[:, :, 5] = value
        plan, made = planned(patterns.Mask(mask), 300, 300), choose(monkeypatch, True)
        out, lse = forward(score, plan, q, *own)
        backward = cuda.prepare_backward(call_of(score, q, *own), plan)
        found.append(backward(dout, q, *own, out, lse, np.zeros_like(lse), SCALE, score)[3][0])
        assert sums_tables(made)
    assert np.isfinite(found[0]).all() and np.isfinite(found[1]).all()
    np.testing.assert_allclose(*found, rtol=0, atol=2e-2 * np.abs(found[0]).max())


def sums_tables(made):
    """Whether the backward of the one device plan is fused, and sums the gradients of captured arrays."""
    (own,) = made.values()
    (ready,) = own._ready.values()
    return ready.sums_tables


@pytest.mark.parametrize("dims", [(8, 40), (72, 128), (192, 128), (192, 256)], ids=str)
def test_head_dims(passes, dims):
    pattern, dlse = patterns.Causal(), np.zeros((BATCH, HEADS, 260), np.float32)
    arrays = problem("bfloat16", 260, 391, *dims)
    got = attention(ALIBI, planned(pattern, 260, 391), *arrays, dlse)
    check(got, ALIBI, arrays, dense_mask(pattern, BATCH, HEADS, 260, 391))


def test_pieces():
    """Lists whose pieces the combine kernel merges."""
    arrays, plan = problem("bfloat16", 40, 4000), planned(patterns.Causal(), 40, 4000, workers=9)
    assert plan.slots == 4
    check(forward(ALIBI, plan, *arrays[:3]), ALIBI, arrays, dense_mask(patterns.Causal(), BATCH, HEADS, 40, 4000))


@pytest.mark.parametrize(
    ("pattern", "tile", "box"),
    [
        (GRID, (64, 64), None),
        (GRID, (64, 64), (8, 8)),
        (GRID, (49, 64), (7, 7)),
        (patterns.windowed((21, 28), 7, 3), (49, 64), (7, 7)),  # regions of several shapes
        (patterns.Neighborhood((6, 8, 9), (3, 5, 5)), (36, 64), (3, 4, 3)),
        (patterns.Causal(), (33, 64), None),
    ],
    ids=str,
)
def test_small_tiles(pattern, tile, box):
    n = pattern.grid[0] * pattern.grid[1] * (pattern.grid[2:] or (1,))[0] if box else 460
    arrays, workers = problem("bfloat16", n, n), 1 if box else 7
    plan = planned(pattern, n, n, tile, box=box, workers=workers)
    check(forward(ALIBI, plan, *arrays[:3]), ALIBI, arrays, dense_mask(pattern, BATCH, HEADS, n, n))


@pytest.mark.parametrize("name", ["gathered", "ordered"])
def test_looked_up_tokens(name):
    """Keys gathered for each query tile, and permuted queries and keys."""
    rng = np.random.default_rng(0)
    scattered = patterns.interop.from_pairs(*np.nonzero(rng.random((300, 417)) < 0.05), 300, 417)
    pattern, kv_len = (scattered, 417) if name == "gathered" else (patterns.Clusters(rng.integers(0, 9, 300)), 300)
    arrays = problem("float16", 300, kv_len)
    plan = planned(pattern, 300, kv_len, **{name: True}, workers=3)
    assert plan.kv_order.size and bool(plan.q_order.size) == (name == "ordered")
    check(forward(ALIBI, plan, *arrays[:3]), ALIBI, arrays, dense_mask(pattern, BATCH, HEADS, 300, kv_len))


@each_score
def test_hidden_values(passes, score):
    """NaN and infinities that no pair has send the rows of their tiles to the float64 fallback."""
    mask = dense_mask(patterns.SlidingWindow(70), 1, 1, 300, 300)[0, 0]
    mask[17] = mask[:, 5] = False
    arrays, dlse = problem("bfloat16", 300, 300), np.zeros((BATCH, HEADS, 300), np.float32)
    bad = [x.copy() for x in arrays]
    for x, row, value in zip(bad, (17, 5, 5, 17), (np.nan, np.inf, np.nan, np.inf), strict=True):
        x[:, :, row] = value
    check(attention(score, planned(patterns.Mask(mask), 300, 300), *bad, dlse), score, arrays, mask)


@each_dtype
def test_huge_scores(dtype):
    """Beyond the range of float32 exponents."""
    score = alibi(1e8, -1e8, 3e9, 0.0)
    arrays = problem(dtype, 260, 391)
    got = forward(score, planned(patterns.Causal(), 260, 391), *arrays[:3])
    check(got, score, arrays, dense_mask(patterns.Causal(), BATCH, HEADS, 260, 391))


@pytest.mark.parametrize("scale", [0.0, -0.4])
@each_score
def test_scales(score, scale):
    arrays, pattern = problem("float16", 200, 200), patterns.SlidingWindow(20, 20)
    got = forward(score, planned(pattern, 200, 200), *arrays[:3], scale)
    check(got, score, arrays, dense_mask(pattern, BATCH, HEADS, 200, 200), scale)


def on_gpu_too(arrays, score):
    """The score function with its arrays on the GPU."""
    return None if score is None else score._replace(tables=tuple(arrays("torch")(x) for x in score.tables))


@pytest.mark.parametrize("name", ["blocks of 128 for all", "padding", "documents of entries", "lines"])
@each_score
def test_dynamic_masks(torch, arrays, score, name):
    chosen = patterns.Causal() & SELECTIONS[name](np.random.default_rng(1), 391, on_gpu(torch))
    given = problem("bfloat16", 260, 391)
    on_device = [arrays("torch")(x) for x in given[:3]]
    own = on_gpu_too(arrays, score)
    got = cuda.prepare_masked(call_of(own, *on_device), chosen)(*on_device, SCALE, own)
    check(list(map(to_host, got)), score, given, dense_mask(chosen.to_host(391), BATCH, HEADS, 260, 391))


def test_groups(torch, arrays):
    """Launches have one score function each, whose parameters and lengths are the problems' own."""
    scores = [ALIBI, SCORES["softcap"], alibi(-0.25, 0.125, 0.5, 0.0), None, SCORES["softcap"]]
    cases = [CASES[name] for name in ("more keys", "strided", "longformer", "more queries", "per head")]
    given = [problem("bfloat16", *case[1:]) for case in cases]
    on_device = [[arrays("torch")(x) for x in own[:3]] for own in given]
    given_scores = [on_gpu_too(arrays, score) for score in scores]
    calls = {
        number: (call_of(score, *own), planned(*case))
        for number, (score, own, case) in enumerate(zip(given_scores, on_device, cases, strict=True))
    }
    results = cuda.prepare_group(calls)([tuple(own) for own in on_device], [SCALE] * len(calls), given_scores)
    for got, score, own, (pattern, q_len, kv_len) in zip(results, scores, given, cases, strict=True):
        mask = dense_mask(pattern, BATCH, HEADS, q_len, kv_len)
        check(list(map(to_host, got)), score or NO_SCORE, own, mask)


def test_a_plan_for_all_lengths(torch, arrays):
    """The last query has the position of the last key, whatever number of keys a call has."""
    pattern = patterns.SlidingWindow(63, 0)
    q, k, v, dout = problem("bfloat16", 1, 391)
    on_device = [arrays("torch")(x) for x in (q, k, v)]
    lengths = [(on_device[0], *(x[:, :, :kv_len] for x in on_device[1:])) for kv_len in (300, 391, 290)]
    score = on_gpu_too(arrays, ALIBI)
    prepared = cuda.prepare(call_of(score, *lengths[0]), planned(pattern, 1, 300))
    for own in lengths:
        kv_len = own[1].shape[2]
        given = q, k[:, :, :kv_len], v[:, :, :kv_len], dout
        got = list(map(to_host, prepared(*own, SCALE, score)))
        check(got, ALIBI, given, dense_mask(pattern, BATCH, HEADS, 1, kv_len))
