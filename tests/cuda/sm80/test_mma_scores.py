"""Score functions in the portable kernels, forward and backward, against a dense float64 formula."""

from __future__ import annotations

import fcntl
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import Tiling, cuda, patterns
from spattn.cuda.driver import compile, device
from spattn.cuda.host.score import generated
from spattn.cuda.sm80.params import structs_of
from spattn.cuda.sm80.variants import backward_variants, forward_variants, tile_within, variant
from spattn.request.call import Call
from spattn.testing import DTYPES, assert_within_bound, count_orders, dense_mask, eps, inputs, random
from spattn.testing.strategies import compositions

from ..score_trees import operands

pytestmark = [pytest.mark.family("sm80"), pytest.mark.gpu]

NAMES = ("out", "lse", "dq", "dk", "dv")
SIZES = _, HEADS, HEADS_KV, Q_LEN, KV_LEN = 1, 4, 2, 150, 201
DIMS, ODD_DIMS = (40, 24), (33, 65)  # of q and k, and of v
SCALE = 0.4


class Score(NamedTuple):
    """A score function with one captured number per query head, of which `dense` has the formula."""

    name: str
    values: tuple[float, ...]

    @property
    def operands(self):
        each = np.array(self.values, np.float32)
        if self.name == "softcap":
            return operands(lambda s, b, h, q, k: each[h] * np.tanh(s / each[h]), wanted=False)
        return operands(lambda s, b, h, q, k: s + each[h] * (k - q), wanted=False)


SCORES = {
    "softcap": Score("softcap", (30.0, 0.5, -2.0, 5.0)),
    "alibi": Score("alibi", (0.5, -0.25, 0.0, 2.0**-4)),
}
KERNELS = [*((dtype, None) for dtype in DTYPES), ("float32", "tf32")]
ODD_KERNELS = ("bfloat16", "float32", "float64")
TANH_ERROR = 2.0**-22  # of score_tanh() in float32: 2 ulp each of exp2f() and __fdividef(), for results near 1
each_score = pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
each_kernel = pytest.mark.parametrize(("dtype", "precision"), KERNELS)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile the kernels of this module in parallel, one process at a time; the calls find them in the cache."""
    gpu = device.get()
    common = "forward/merge", "backward/statistics", "backward/sum"
    found = [(variant(source, dtype), "") for source in common for dtype in DTYPES]
    scored = [(kind, DIMS, score) for kind in KERNELS for score in SCORES.values()]
    scored += [((dtype, None), ODD_DIMS, SCORES["alibi"]) for dtype in ODD_KERNELS]
    for (dtype, precision), dims, score in scored:
        tile, aligned = tile_within(gpu.shared_bytes, dtype, max(dims)), dims == DIMS
        own = forward_variants(dtype, precision, *dims, tile, aligned, gpu.shared_bytes)
        for by_keys in (False, True):
            own += backward_variants(dtype, precision, *dims, by_keys, aligned, gpu.shared_bytes)
        given = score.operands
        text, _ = generated(given.program, given.types)
        found += [(one, text) for one in own]
    lock = Path(tempfile.gettempdir()) / f"spattn-test-scores-{os.getuid()}.lock"
    with lock.open("w") as file, ThreadPoolExecutor() as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        cubins = [
            pool.submit(compile.cubin, x.source, gpu.arch, x.macros, structs_of(x.source), text) for x, text in found
        ]
        assert all(one.result() for one in cubins)


def dense(dtype, precision, score, q, k, v, mask, scale, dout, dlse, *, order=None):
    """Out, lse, dq, dk and dv by the formula, with every step rounded to `dtype`, operands of products to `precision`.

    Unless `order` is None, permute keys and features, change the base, add the error of the kernels' tanh, and take the
    weights and delta of the backward from results with an error of -1, 0 or 1 ulp and scores summed once more.
    """
    wide, group, rng = np.promote_types(dtype, np.float32), q.shape[1] // k.shape[1], np.random.default_rng(order)
    keys = np.arange(k.shape[2]) if order is None else rng.permutation(k.shape[2])
    distance = keys[None, :] - np.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    q, dout, mask = q.astype(wide), dout.astype(wide), mask[..., keys]
    k, v = (np.repeat(x[:, :, keys].astype(wide), group, axis=1) for x in (k, v))
    parameter = np.array(score.values, wide)[:, None, None]

    def rounded(x):
        return x.astype(dtype).astype(wide)

    def product(a, b):
        return rounded(to_tf32(a) @ to_tf32(b) if precision else a @ b)

    def dot(a, b):
        if order is None:
            return product(a, swapped(b))
        features, total = rng.permutation(a.shape[3]), np.zeros((*a.shape[:3], b.shape[2]), wide)
        if order % 2:
            return product(a[..., features], swapped(b[..., features]))
        a, b = map(to_tf32, (a, b)) if precision else (a, b)
        for n in features:  # one after another, as a register accumulates
            total += a[..., n, None] * b[..., None, :, n]
        return rounded(total)

    def scores():
        s = rounded(dot(q, k) * wide.type(scale))
        if score.name == "alibi":
            return np.where(mask, rounded(s + parameter * distance.astype(wide)), -np.inf), np.ones_like(s)
        error = TANH_ERROR if order is not None and wide == np.float32 else 0
        t = rounded(np.tanh(s / parameter) + rng.uniform(-error, error, s.shape).astype(wide))
        return np.where(mask, rounded(parameter * t), -np.inf), rounded(1 - t * t)

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        s, derivative = scores()
        largest = s.max(axis=3, keepdims=True)
        p = s - np.where(largest == -np.inf, 0, largest)
        p = np.exp2(p * wide.type(np.log2(np.e))) if order is not None and order % 4 < 2 else np.exp(p)
        total = p.sum(axis=3, keepdims=True)
        lse = largest + np.log(total)
        p = rounded(p / np.where(total == 0, 1, total))
        out, dp = product(p, v), dot(dout, v)
        delta = (p * dp).sum(3)
        if order is not None:
            ulps, (s, derivative) = order % 3 - 1, scores()
            p = rounded(np.exp(s - np.where(total == 0, 0, lse + ulps * np.spacing(np.where(total == 0, 1, lse)))))
            delta = (dout * (out + ulps * np.spacing(out.astype(dtype)).astype(wide))).sum(3)
    ds = rounded(p * (dp - rounded(delta - dlse)[..., None]) * derivative * wide.type(scale))

    def over_group(x):
        x = x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)
        return x[:, :, np.argsort(keys)].astype(dtype)

    dk, dv = over_group(product(swapped(ds), q)), over_group(product(swapped(p), dout))
    return out.astype(dtype), lse[..., 0], product(ds, k).astype(dtype), dk, dv


def to_tf32(x):
    """The nearest TF32 number, ties away from zero."""
    return ((x.astype(np.float32).view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def swapped(x):
    return x.swapaxes(2, 3)


def problem(dtype, sizes=SIZES, dims=DIMS):
    """q, k, v, dout and dlse."""
    q, k, v = inputs(*sizes, *dims, dtype=dtype)
    dlse = random((*q.shape[:3], 1), "float64" if dtype == "float64" else "float32", seed=98)[..., 0]
    return q, k, v, random((*q.shape[:3], dims[1]), dtype, seed=99), dlse


def run(score, precision, plan, q, k, v, dout, dlse, scale=SCALE):
    given = score.operands
    call = replace(Call.of(q, k, v, scale=scale, precision=precision), score=given)
    out, lse = cuda.prepare(call, plan)(q, k, v, scale, given)
    return out, lse, *cuda.prepare_backward(call, plan)(dout, q, k, v, out, lse, dlse, scale, given)[:3]


def check(score, precision, pattern, plan, q, k, v, dout, dlse, scale=SCALE, given=None):
    """All results within the error bound, of q, k and v or of arrays with other hidden values."""
    exact = np.dtype(np.longdouble if q.dtype == np.float64 else np.float64)
    mask = dense_mask(pattern, *q.shape[:3], k.shape[2])
    args = score, q, k, v, mask, scale, dout, dlse
    orders = range(max(8, count_orders(q, k, mask)))
    low = [dense(q.dtype, precision, *args, order=order) for order in orders]
    results = run(score, precision, plan, *(given or (q, k, v)), dout, dlse, scale)
    dtype = np.dtype(np.float16) if precision else q.dtype  # of TF32's eps
    for name, got, want, *lossy in zip(NAMES, results, dense(exact, None, *args), *low, strict=True):
        assert_within_bound(got, want, lossy, dtype, name)


def planned(pattern, q, k, v, workers=None):
    if workers is None:
        return spattn.plan_for(pattern, q, k, v, backend="cuda")
    tile = cuda.tile(q.dtype.name, q.shape[3], v.shape[3])
    return spattn.plan(pattern, q.shape[2], k.shape[2], tiling=Tiling(tile=tile, workers=workers), heads=q.shape[1])


UNION = patterns.SlidingWindow(40, 30) | patterns.GlobalTokens(3)
EMPTY_ROWS = patterns.BlockLocal(50) & ~patterns.SlidingWindow(20, 90)
PER_HEAD = patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30), patterns.strided(12), EMPTY_ROWS))


@pytest.mark.parametrize("pattern", [UNION, PER_HEAD], ids=["union", "per head"])
@each_kernel
@each_score
def test_patterns(score, dtype, precision, pattern):
    """Positions of queries are those of the last keys; each query head of a group has its own parameter."""
    args = problem(dtype)
    check(score, precision, pattern, planned(pattern, *args[:3]), *args)


@pytest.mark.parametrize("pattern", [patterns.Neighborhood((12, 12), 5), patterns.DilatedWindow(12, 12, 3)], ids=repr)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_positions_of_views(dtype, pattern):
    """Tiles whose tokens are not consecutive: boxes of an image, and every third token."""
    args = problem(dtype, (1, HEADS, HEADS_KV, 144, 144))
    plan = planned(pattern, *args[:3])
    assert (plan.views["stride"][:, 2] > 1).any() or (plan.views["box"][:, 1] > 1).any()
    check(SCORES["alibi"], None, pattern, plan, *args)


@each_kernel
def test_partials(dtype, precision):
    """Items in pieces, which are combined; several batch entries."""
    args, pattern = problem(dtype, (2, HEADS, HEADS_KV, 65, 300)), patterns.strided(16)
    plan = planned(pattern, *args[:3], workers=8)
    assert plan.slots > 0
    check(SCORES["alibi"], precision, pattern, plan, *args)


@pytest.mark.parametrize("dtype", ODD_KERNELS)
def test_odd_head_dims(dtype):
    args, pattern = problem(dtype, dims=ODD_DIMS), patterns.Causal()
    check(SCORES["alibi"], None, pattern, planned(pattern, *args[:3]), *args)


@settings(max_examples=15)
@given(compositions(max_len=150), st.sampled_from(["bfloat16", "float32"]), st.sampled_from(sorted(SCORES)))
def test_compositions(case, dtype, name):
    args, values = problem(dtype, case.sizes), SCORES[name].values
    score = Score(name, (values * case.sizes[1])[: case.sizes[1]])
    check(score, None, case.pattern, planned(case.pattern, *args[:3]), *args)


@pytest.mark.parametrize("scale", [0.0, -0.4, 3.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each_score
def test_scales(score, dtype, scale):
    """The scale is applied before the function, with its sign; large scores saturate a soft-cap."""
    args, pattern = problem(dtype), patterns.SlidingWindow(20, 20)
    check(score, None, pattern, planned(pattern, *args[:3]), *args, scale=scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_huge_scores(dtype):
    """Pairs of equal keys differ by the slope alone, which float32 cannot see beside such scores: the float64 fallback
    computes the rows."""
    q, k, v, dout, dlse = problem(dtype)
    k[:, :, 1::2] = k[:, :, :-1:2]
    pattern, score, scale = patterns.SlidingWindow(20, 20), SCORES["alibi"], 1e9
    mask = dense_mask(pattern, *q.shape[:3], KV_LEN)
    args = score, q, k, v, mask, scale, dout, dlse
    (want, want_lse, *_), (low, low_lse, *_) = (dense(np.dtype(x), None, *args) for x in (np.longdouble, np.float64))
    call = replace(Call.of(q, k, v, scale=scale), score=score.operands)
    out, lse = cuda.prepare(call, planned(pattern, q, k, v))(q, k, v, scale, score.operands)
    assert_within_bound(out, want, low.astype(dtype).astype(np.float64), q.dtype)
    assert_within_bound(lse, want_lse, low_lse.astype(np.float32).astype(np.float64), np.float32, "lse")


@each_kernel
def test_infinite_scores(dtype, precision):
    """A slope beside which all else rounds to nothing: +inf at masked keys, -inf at allowed ones, which it removes."""
    q, k, v, dout, dlse = problem(dtype)
    score = Score("alibi", (float(np.finfo(np.float32).max),) * HEADS)
    if dtype == "float64":  # parameters are float32; in float64 the scores are finite
        k *= 0
    out, lse, dq, dk, dv = run(score, precision, planned(patterns.Causal(), q, k, v), q, k, v, dout, dlse)
    own = np.repeat(v[:, :, -Q_LEN:], HEADS // HEADS_KV, axis=1)
    total = dout.astype(np.float64).reshape(1, HEADS_KV, -1, *dout.shape[2:]).sum(axis=2)
    error = 2.0**-10 if precision else 2 * eps(dtype)
    np.testing.assert_allclose(out.astype(np.float64), own.astype(np.float64), rtol=error)
    error *= (1 + np.abs(lse).max()) * np.abs(total).max()  # lse is rounded
    np.testing.assert_allclose(dv[:, :, KV_LEN - Q_LEN :].astype(np.float64), total, atol=error)
    assert np.isfinite(lse).all() and np.isfinite(dq.astype(np.float64)).all()
    assert all((x[:, :, : KV_LEN - Q_LEN] == 0).all() for x in (dk, dv))


@each_kernel
def test_undefined_scores(dtype, precision):
    """0 · tanh(0 / 0) is NaN at masked keys, and 0 · tanh(x / 0) is 0 at allowed ones."""
    args, pattern = problem(dtype), patterns.SlidingWindow(20, 0)
    args[1][:, :, 100:] = 0
    rows = slice(0, 100 + Q_LEN - KV_LEN)  # these queries see keys below 100
    results = run(Score("softcap", (0.0,) * HEADS), precision, planned(pattern, *args[:3]), *args)
    counts = dense_mask(pattern, 1, HEADS, Q_LEN, KV_LEN).sum(axis=3)
    np.testing.assert_allclose(results[1][:, :, rows], np.log(counts)[:, :, rows], rtol=1e-6)
    assert np.isfinite(results[0][:, :, rows].astype(np.float64)).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@each_kernel
def test_hidden_keys(dtype, precision, bad):
    """NaN and infinities at keys that no query sees reach no result."""
    q, k, v, *upstream = problem(dtype)
    pattern = patterns.SlidingWindow(20, 0)
    plan, seen = planned(pattern, q, k, v), dense_mask(pattern, 1, 1, Q_LEN, KV_LEN)[0, 0].any(axis=0)
    assert not seen.all()
    other_k, other_v = k.copy(), v.copy()
    other_k[:, :, ~seen] = other_v[:, :, ~seen] = bad
    given = q, other_k, other_v
    check(SCORES["softcap"], precision, pattern, plan, q, k, v, *upstream, given=given)
