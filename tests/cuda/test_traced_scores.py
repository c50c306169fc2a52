"""Random and chosen score functions in the kernels of both families: results, gradients, and gradients of arrays."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from spattn import cuda, patterns
from spattn.cuda.driver import compile
from spattn.cuda.sm80.backward import captured as captured_gradients
from spattn.request.call import Call
from spattn.testing import assert_within_bound, dense_mask, inputs, random

from .score_trees import dense, operands, random_score

pytestmark = pytest.mark.gpu

BATCH, HEADS, HEADS_KV, DIM, SCALE = 2, 4, 2, 64, 0.3
TREES, PORTABLE_TREES = 60, 24  # each compiles about four kernels
# (family, dtype, precision)
SM90 = [("sm90", "bfloat16", None), ("sm90", "float16", None)]
SM80 = [("sm80", "bfloat16", None), ("sm80", "float32", None), ("sm80", "float32", "tf32"), ("sm80", "float64", None)]
KERNELS = [SM90[0], *SM80]
OF_TREE = [
    *((SM90[seed % 2], seed) for seed in range(TREES)),
    *((SM80[seed % 4], seed) for seed in range(PORTABLE_TREES)),
]
each_kernel = pytest.mark.parametrize(("family", "dtype", "precision"), KERNELS, indirect=["family"])

RNG = np.random.default_rng(7)
SLOPES, CAPS = RNG.normal(0, 0.05, HEADS).astype("f"), np.array([5, 0.5, -2, 30], "f")
RELATIVE, SCALAR, ROWS = RNG.normal(size=(HEADS, 99)), np.array(0.75, "f"), RNG.normal(1, 0.3, (2, 13))
COLUMNS, SMALL = RNG.normal(size=(2, 7)), RNG.normal(size=11)
OF_HEAD, PLANE = RNG.normal(size=(HEADS, 1)).astype("e"), RNG.normal(size=(HEADS, 19, 23)).astype("f")
BIAS, SHARED_BIAS = RNG.normal(size=(BATCH, HEADS, 270, 270)).astype("f"), RNG.normal(size=(270, 270)).astype("f")
ALIBI = operands(lambda s, b, h, q, k: s + SLOPES[h] * (k - q))
# By the index of the captured array.
INDICES = {
    "none": lambda s, b, h, q, k: s * SCALAR,
    "head": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "cap": lambda s, b, h, q, k: CAPS[h] * np.tanh(s / CAPS[h]),
    "query": lambda s, b, h, q, k: s * ROWS[b, q % 13],
    "key": lambda s, b, h, q, k: s + COLUMNS[b, k % 7],
    "diagonal": lambda s, b, h, q, k: s + RELATIVE[h, np.maximum(np.minimum(k - q, 49), -49)],
    "bucket": lambda s, b, h, q, k: s + RELATIVE[h, np.minimum(abs(q - k) // 3, 40)],
    "pair": lambda s, b, h, q, k: s + SMALL[(q * 7 + k * 3) % 11],
    "plane": lambda s, b, h, q, k: s + PLANE[h, q // 23 - k // 23, q % 23 - k % 23],
    "bias": lambda s, b, h, q, k: s + BIAS[b, h, q, k],
    "bias by row": lambda s, b, h, q, k: s + BIAS[b, h, q - 70, k],
    "bias of all heads": lambda s, b, h, q, k: s + SHARED_BIAS[q, k],
    "two uses": lambda s, b, h, q, k: (
        s * RELATIVE[h, 3] + RELATIVE[1, (k - q) % 5] * RELATIVE[h, k % 9] + OF_HEAD[h, 0]
    ),
}
HIDDEN = np.where(np.arange(801) < 400, np.nan, 0).astype("f")  # of keys after the query
REMOVED = np.where(np.arange(30) % 7 == 3, -np.inf, 0).astype("f")
REMOVING = operands(lambda s, b, h, q, k: s + HIDDEN[400 + q - k] + REMOVED[k % 30])
CHOSEN = {name: operands(function) for name, function in INDICES.items()}
GRID = patterns.Neighborhood((14, 18), 7)
# (pattern, q_len, kv_len): other numbers of keys, tiles whose tokens are not consecutive, several views
CASES = {
    "more keys": (patterns.Causal(), 200, 270),
    "plane": (GRID, 252, 252),
    "strided": (patterns.strided(16), 260, 260),
    "per head": (patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30))), 200, 200),
}
CASE_OF_TREE = ("more keys", "plane", "strided", "per head")


@functools.cache
def tree(seed):
    return random_score(seed, smooth=True)


def problem(dtype, q_len, kv_len):
    """q, k, v, dout and dlse."""
    q, k, v = inputs(BATCH, HEADS, HEADS_KV, q_len, kv_len, DIM, DIM, dtype=dtype)
    dlse = random((BATCH, HEADS, q_len), "float64" if dtype == "float64" else "float32", seed=98)
    return q, k, v, random((BATCH, HEADS, q_len, DIM), dtype, seed=99), dlse


def planned(pattern, q, k, v):
    return cuda.plan_for(pattern, Call.of(q, k, v), backward=True)


def run(score, precision, plan, q, k, v, dout, dlse):
    """Results, gradients and gradients of arrays; the gradients are the same bits again."""
    call = replace(Call.of(q, k, v, scale=SCALE, precision=precision, return_lse=True), score=score)
    out, lse = cuda.prepare(call, plan)(q, k, v, SCALE, score)
    backward = cuda.prepare_backward(call, plan)
    found, again = (backward(dout, q, k, v, out, lse, dlse, SCALE, score) for _ in range(2))
    assert found[4] is None and [x is not None for x in found[3]] == list(score.wanted)
    for x, twin in zip((*found[:3], *found[3]), (*again[:3], *again[3]), strict=True):
        assert x is None or x.tobytes() == twin.tobytes()
    return [out, lse, *found[:3]], found[3]


def check(score, precision, case, dtype):
    pattern, q_len, kv_len = CASES[case]
    q, k, v, dout, dlse = problem(dtype, q_len, kv_len)
    results, tables = run(score, precision, planned(pattern, q, k, v), q, k, v, dout, dlse)
    compare(score, precision, pattern, (q, k, v, dout), dlse, results, tables)


def compare(score, precision, pattern, arrays, dlse, results, tables):
    """All results within the bound that the formula in low precision gives."""
    dtype, (q, k, *_) = arrays[0].dtype, arrays
    mask = dense_mask(pattern, BATCH, HEADS, q.shape[2], k.shape[2])
    low_dtype = np.dtype(np.float16) if precision else dtype
    expected = dense(score, arrays, mask, SCALE, dlse)
    low = [dense(score, arrays, mask, SCALE, np.float32(dlse), low_dtype, factor) for factor in (1, 1.5)]
    wider = 4 if dtype == np.float32 else 1  # the formula has one order of summation
    names = "out", "lse", "dq", "dk", "dv", *(f"table {number}" for number in range(len(tables)))
    for name, got, want, *lossy in zip(names, [*results, *tables], expected, *low, strict=True):
        if got is None:
            continue
        assert not name.startswith("table") or got.dtype == results[1].dtype
        if dtype == np.float64:
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-11 * max(1, np.abs(want).max()), err_msg=name)
        else:
            spread = [want + wider * (np.asarray(one, np.float64) - want) for one in lossy]
            assert_within_bound(got, want, spread, np.float16 if name == "lse" else low_dtype, name)


@pytest.mark.parametrize(
    ("family", "dtype", "precision", "seed"),
    [(*kernel, seed) for kernel, seed in OF_TREE],
    indirect=["family"],
)
def test_random_trees(family, dtype, precision, seed):
    check(tree(seed), precision, CASE_OF_TREE[seed // 4 % 4], dtype)


@pytest.mark.parametrize("name", INDICES)
@each_kernel
def test_index_classes(family, dtype, precision, name):
    check(CHOSEN[name], precision, "more keys", dtype)


@pytest.mark.parametrize("case", list(CASES)[1:])
@pytest.mark.parametrize("name", ["diagonal", "query", "key", "plane"])
@pytest.mark.parametrize(("family", "dtype", "precision"), [SM90[0], SM80[1]], indirect=["family"])
def test_tiles(family, dtype, precision, name, case):
    """Diagonals of tiles whose tokens are not consecutive."""
    if name == "plane" and case != "plane":
        pytest.skip("its array is of the positions of that grid")
    check(CHOSEN[name], precision, case, dtype)


@pytest.mark.parametrize(("family", "dtype", "precision"), [SM90[0], SM80[1]], indirect=["family"])
def test_slices(monkeypatch, family, dtype, precision):
    """Accumulators of a part of the elements at a time give the same bits."""
    pattern, q_len, kv_len = CASES["more keys"]
    args = problem(dtype, q_len, kv_len)
    plan = planned(pattern, *args[:3])
    for name in ("two uses", "diagonal", "bias of all heads"):
        _, whole = run(CHOSEN[name], precision, plan, *args)
        monkeypatch.setattr(captured_gradients, "_MOST", 30_000 if "bias" in name else 37)
        _, parts = run(CHOSEN[name], precision, plan, *args)
        monkeypatch.undo()
        for x, y in zip(whole, parts, strict=True):
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize(("family", "dtype", "precision"), [SM90[0], SM80[0]], indirect=["family"])
def test_values_change_without_compilation(monkeypatch, family, dtype, precision):
    """Numbers, elements and sizes of arrays are read at every call."""
    pattern, q_len, kv_len = CASES["per head"]
    args = problem(dtype, q_len, kv_len)
    plan = planned(pattern, *args[:3])

    def function(slope, table):
        return operands(lambda s, b, h, q, k: s + slope * table[h, abs(q - k) % 5])

    scores = [function(0.1, RELATIVE[:, :5]), function(0.7, 1 + RELATIVE[:, 7:12]), function(0.2, RELATIVE[:, :50])]
    for number, score in enumerate(scores):
        if number == 1:
            monkeypatch.setattr(compile, "run_nvcc", lambda *_: pytest.fail("a kernel was compiled"))
        results, tables = run(score, precision, plan, *args)
        compare(score, precision, pattern, args[:4], args[4], results, tables)


@pytest.mark.parametrize(("family", "dtype", "precision"), [SM90[0], SM80[1]], indirect=["family"])
def test_one_dispatch_reads_values_at_each_call(family, dtype, precision):
    pattern, q_len, kv_len = CASES["per head"]
    q, k, v, dout, dlse = problem(dtype, q_len, kv_len)
    call = replace(Call.of(q, k, v, scale=SCALE, return_lse=True), score=ALIBI)
    forward = cuda.prepare(call, planned(pattern, q, k, v))
    results = []
    for slopes in (SLOPES, 2 * SLOPES, SLOPES):
        out, lse = forward(q, k, v, SCALE, ALIBI._replace(tables=(slopes,)))
        results.append((out.tobytes(), lse.tobytes()))
    assert results[0] == results[2] != results[1]


@each_kernel
def test_hidden_and_removed_pairs(family, dtype, precision):
    """A function that is NaN or infinite where the pattern forbids has no effect, and -inf removes allowed pairs."""
    pattern, q_len, kv_len = CASES["more keys"]
    args = problem(dtype, q_len, kv_len)
    results, tables = run(REMOVING, precision, planned(pattern, *args[:3]), *args)
    compare(REMOVING, precision, pattern, args[:4], args[4], results, tables)
    assert all(np.isfinite(x).all() for x in (*results, *tables))


@pytest.mark.parametrize(("family", "dtype", "precision"), [SM90[0]], indirect=["family"])
def test_cuda_graphs(torch, arrays, family, dtype, precision):
    """A captured graph keeps the values of its capture, whatever later calls use."""
    pattern, q_len, kv_len = CASES["per head"]
    q, k, v, dout, dlse = (arrays("torch")(x) for x in problem(dtype, q_len, kv_len))
    score = ALIBI._replace(tables=(arrays("torch")(SLOPES),))
    call = replace(Call.of(q, k, v, scale=SCALE, return_lse=True), score=score)
    plan = planned(pattern, q, k, v)
    forward, backward = cuda.prepare(call, plan), cuda.prepare_backward(call, plan)

    def step(own):
        out, lse = forward(q, k, v, SCALE, own)
        *gradients, tables, _ = backward(dout, q, k, v, out, lse, dlse, SCALE, own)
        return [out, lse, *gradients, *tables]

    before = [x.clone() for x in step(score)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(score)
    for number in range(300):  # more blocks than are kept
        forward(q, k, v, SCALE, score._replace(tables=(arrays("torch")(SLOPES * (number + 2)),)))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(results, before, strict=True))
