"""Attention dropout: the definition of the pairs, on every CPU path, forward and backward, and their statistics."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.arrays import namespace_of
from spattn.dispatch.scores import read
from spattn.request.call import Call
from spattn.request.dropout import Dropout, words
from spattn.request.score import ScoreOperands
from spattn.schedule import compiler
from spattn.testing import DTYPES, dense_mask, dropout_mask, inputs, random

HEADS, HEADS_KV, Q_LEN, KV_LEN = 4, 2, 90, 131
SHARE, SEED = 0.3, (5 << 40) + 11
UNION = p.Stride(5) | p.SlidingWindow(9, 3) | p.GlobalTokens([0, 40])
CLUSTERS = p.Clusters(np.random.default_rng(0).integers(-1, 4, (HEADS, KV_LEN)))
NINTH = np.broadcast_to(np.arange(Q_LEN)[:, None] % 9 == 0, (Q_LEN, KV_LEN))
HOLLOW = p.Causal() & ~p.Mask(NINTH)  # every ninth row attends to nothing
TILES = {"vectors": (48, 64), "AMX": (64, 128), "decode": (8, 64), "pairs": (1, 64)}
TOLERANCES = {"float64": 1e-12, "float32": 5e-6, "float16": 4e-3, "bfloat16": 3e-2}
each_tile = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_backend = pytest.mark.parametrize("backend", ["cpu", "reference"])


def philox(seed, *counter):
    """Philox4x32-10 in Python's integers."""
    x, key = [c % 2**32 for c in counter], [seed % 2**32, seed >> 32]
    for _ in range(10):
        left, right = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [right >> 32 ^ x[1] ^ key[0], right % 2**32, left >> 32 ^ x[3] ^ key[1], left % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return x


def keeps(seed, share, b, h, q, k):
    """The definition, for one pair of positions."""
    offset, multiplier, *_ = philox(seed, q, h, b, 0)
    return (philox(seed, k, h, b, 1)[0] * (multiplier | 1) + offset) % 2**32 >= round(share * 2**32)


def test_known_answers():
    """The vectors of Random123's kat_vectors."""
    for seed, counter, answer in (
        (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        assert " ".join(f"{x:08x}" for x in philox(seed, *counter)) == answer


@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (3, 11), (11, 3)])
@pytest.mark.parametrize("seed", [0, SEED, 2**64 - 1])
def test_mask_is_the_definition(seed, q_len, kv_len):
    mask = dropout_mask(seed, 0.4, 2, 3, q_len, kv_len)
    assert mask.shape == (2, 3, q_len, kv_len) and mask.dtype == bool
    for b, h, i, k in np.ndindex(mask.shape):
        assert mask[b, h, i, k] == keeps(seed, 0.4, b, h, i + kv_len - q_len, k)


def test_words():
    """In blocks of 64 positions; positions have 32 bits."""
    for first in (0, -70, 2**32 - 5):
        keys, queries = (words(SEED, 2, 3, 150, which, first) for which in ("key", "query"))
        assert keys.dtype == queries.dtype == np.uint32 and queries.shape == (2, 2, 3, 150)
        for b, h, i in np.ndindex(keys.shape):
            assert keys[b, h, i] == philox(SEED, first + i, h, b, 1)[0]
            offset, multiplier, *_ = philox(SEED, first + i, h, b, 0)
            assert queries[:, b, h, i].tolist() == [offset, multiplier | 1]
    assert words(SEED, 0, 3, 5, "key").size == words(SEED, 2, 3, 0, "query").size == 0
    with pytest.raises(ValueError, match="^which: expected 'query' or 'key', got 'row'"):
        words(SEED, 1, 1, 3, "row")


def test_mask_of_few_queries():
    assert np.array_equal(dropout_mask(3, 0.5, 1, 2, 1, 50), dropout_mask(3, 0.5, 1, 2, 50, 50)[:, :, -1:])
    assert dropout_mask(3, 0.0, 1, 2, 5, 6).all() and dropout_mask(3, 2.0**-34, 1, 2, 5, 6).all()


# -- kernels -----------------------------------------------------------------------------------------------------------


def run(operands, plan, isa, q, k, v, dout, dlse=None):
    """Out, lse and all gradients of one instruction set."""
    call = replace(Call.of(q, k, v), score=operands._replace(tables=()))
    out, lse = cpu.prepare(call, plan, isa=isa)(q, k, v, call.scale, operands)
    return out, lse, *cpu.prepare_backward(call, plan, isa=isa)(dout, q, k, v, out, lse, dlse, call.scale, operands)


def planned(pattern, tile, workers=1, q_len=Q_LEN, kv_len=KV_LEN):
    plan = compiler.plan(pattern, q_len, kv_len, heads=HEADS, tile=tile, workers=workers)
    assert plan.tile == tile
    return plan


@each_tile
@each_dtype
@pytest.mark.parametrize("pattern", [UNION, CLUSTERS, HOLLOW], ids=["union", "permuted", "empty rows"])
def test_every_kernel_drops_the_pairs_of_the_mask(pattern, dtype, tile):
    """Equal scores and unit vectors show the weight of each pair: in out, and in dv, which sums over a group."""
    q, k, _ = inputs(2, HEADS, HEADS_KV, Q_LEN, KV_LEN, 16, dtype=dtype)
    v = np.broadcast_to(np.eye(KV_LEN, dtype=q.dtype), (2, HEADS_KV, KV_LEN, KV_LEN))
    dout = np.zeros((2, HEADS, Q_LEN, KV_LEN), q.dtype)
    dout[..., range(Q_LEN), range(Q_LEN)] = 1
    allowed = dense_mask(pattern, 2, HEADS, Q_LEN, KV_LEN)
    kept = allowed & dropout_mask(SEED, SHARE, 2, HEADS, Q_LEN, KV_LEN)
    counts = np.maximum(allowed.sum(axis=3, keepdims=True), 1)
    operands = ScoreOperands(None, dropout=Dropout.of(SHARE, SEED))
    for isa, workers in itertools.product(cpu.instruction_sets(), (1, 3)):
        plan = planned(pattern, tile, workers)
        out, _, _, _, dv, *_ = run(operands, plan, isa, q * q.dtype.type(0), k, v, dout)
        assert np.array_equal(out != 0, kept), (isa, workers)
        assert np.allclose(out.astype(float) * counts * (1 - SHARE), kept, atol=2e-2)
        each = (kept / counts).reshape(2, HEADS_KV, -1, Q_LEN, KV_LEN).sum(axis=2).swapaxes(2, 3)
        assert np.abs(dv[..., :Q_LEN].astype(float) * (1 - SHARE) - each).max() < 2e-2 * each.max(), (isa, workers)
        assert np.array_equal(dv[..., :Q_LEN] != 0, each != 0) and not dv[..., Q_LEN:].any()


def function(table):
    return lambda s, b, h, q, k: 6 * np.tanh(s / 6) + table[h, q % 7, k % 5]


def formula(q, k, v, dout, dlse, allowed, kept, share, sinks=None, table=None, scale=None):
    """Out, lse and all gradients by dense float64 formulas."""
    group = q.shape[1] // k.shape[1]
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    s, slope = scale * (q @ k.swapaxes(2, 3)), 1.0
    at = np.ix_(range(q.shape[1]), (np.arange(q.shape[2]) + k.shape[2] - q.shape[2]) % 7, np.arange(k.shape[2]) % 5)
    if table is not None:
        slope = 1 - np.tanh(s / 6) ** 2
        s = 6 * np.tanh(s / 6) + table[at]
    s = np.where(allowed, s, -np.inf)
    sink = np.full(q.shape[1], -np.inf) if sinks is None else sinks.astype(float)
    sink = sink[:, None, None]
    largest = np.maximum(s.max(axis=3, keepdims=True), sink)
    largest = np.where(largest == -np.inf, 0, largest)
    weights, of_sink = np.exp(s - largest), np.exp(sink - largest)
    total = weights.sum(axis=3, keepdims=True) + of_sink
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0]
    weights, of_sink = (x / np.where(total == 0, 1, total) for x in (weights, of_sink))
    factor = kept / (1 - round(share * 2**32) / 2**32)
    out = (weights * factor) @ v
    delta = ((dout * out).sum(axis=3) - np.where(lse == -np.inf, 0, dlse))[..., None]
    ds = weights * (factor * (dout @ v.swapaxes(2, 3)) - delta)
    dtable = np.zeros((HEADS, 7, 5))
    np.add.at(dtable, at, ds.sum(axis=0))
    ds = ds * slope

    def over_group(x):
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)

    dk, dv = over_group(scale * ds.swapaxes(2, 3) @ q), over_group((weights * factor).swapaxes(2, 3) @ dout)
    dsinks = -(of_sink * delta).sum(axis=(0, 2, 3))
    return out, lse, scale * ds @ k, dk, dv, dtable, dsinks


def assert_close(got, want, dtype, names=("out", "lse", "dq", "dk", "dv", "dtable", "dsinks")):
    for name, x, exact in zip(names, got, want, strict=True):
        finite = np.isfinite(exact)
        assert np.array_equal(np.isfinite(x), finite), name
        error = np.abs(np.asarray(x, np.float64)[finite] - exact[finite]).max()
        assert error <= TOLERANCES[str(dtype)] * np.abs(exact[finite]).max(), (name, error)


@each_tile
@each_dtype
@pytest.mark.parametrize("modified", [False, True], ids=["plain", "score and sinks"])
def test_gradients_as_dense_attention(dtype, tile, modified):
    q, k, v = inputs(2, HEADS, HEADS_KV, Q_LEN, KV_LEN, 16, 24, dtype=dtype)
    dout = random((2, HEADS, Q_LEN, 24), dtype, seed=9)
    wide = "float64" if dtype == "float64" else "float32"
    dlse = random((2, HEADS, Q_LEN), wide, seed=8)
    table, sinks = random((HEADS, 7, 5), wide, seed=7), np.array([0.5, -3, 2, 0], wide)
    score = (function(table), sinks) if modified else (None, None)
    operands = read(*score, Dropout.of(SHARE, SEED), q, k, v, "cpu", "bhsd", backward=True).operands
    allowed = dense_mask(HOLLOW, 2, HEADS, Q_LEN, KV_LEN)
    kept = dropout_mask(SEED, SHARE, 2, HEADS, Q_LEN, KV_LEN)
    named = {"table": table, "sinks": sinks} if modified else {}
    want = formula(q, k, v, dout, dlse, allowed, kept, SHARE, **named)
    for isa in cpu.instruction_sets():
        plan = planned(HOLLOW, tile, 3)
        *got, dtables, dsinks = run(operands, plan, isa, q, k, v, dout, dlse)
        assert len(dtables) == modified and (dsinks is not None) == modified
        assert_close(
            [*got, *dtables, *([dsinks] if modified else [])],
            want[: 7 if modified else 5],
            dtype,
            ("out", "lse", "dq", "dk", "dv", "dtable", "dsinks")[: 7 if modified else 5],
        )
        plain = operands._replace(dropout=None)
        call = replace(Call.of(q, k, v), score=plain._replace(tables=()))
        assert np.array_equal(got[1], cpu.prepare(call, plan, isa=isa)(q, k, v, call.scale, plain)[1]), isa


@each_backend
@each_dtype
@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [((2, 4, 2, 18, 23, 8), UNION), ((1, 4, 1, 1, 77, 16), p.Full()), ((1, 4, 4, 130, 130, 32), p.Causal()),
     ((1, 4, 2, 9, 5, 8), p.SlidingWindow(3))],
    ids=["union", "decode", "causal", "more queries"],
)  # fmt: skip
def test_public_calls(backend, dtype, sizes, pattern):
    batch, heads, _, q_len, kv_len, _ = sizes
    q, k, v = inputs(*sizes, dtype=dtype)
    dout = inputs(*sizes, dtype=dtype, seed=9)[0]
    options = {"dropout_p": 0.6, "seed": SEED, "backend": backend}
    out, lse = spattn.attention(q, k, v, pattern, return_lse=True, **options)
    gradients = spattn.attention_backward(dout, q, k, v, out, lse, pattern, **options)
    allowed = dense_mask(pattern, batch, heads, q_len, kv_len)
    kept = dropout_mask(SEED, 0.6, batch, heads, q_len, kv_len)
    want = formula(q, k, v, dout, np.zeros(()), allowed, kept, 0.6)
    assert_close((out, lse, *gradients), want[:5], dtype, ("out", "lse", "dq", "dk", "dv"))


def test_rows_of_which_all_weights_are_dropped():
    q, k, v = inputs(1, 4, 4, 60, 60, 16)
    out, lse = spattn.attention(q, k, v, p.SlidingWindow(2, 0), return_lse=True, dropout_p=0.9, seed=1)
    allowed = dense_mask(p.SlidingWindow(2, 0), 1, 4, 60, 60)
    none = ~(allowed & dropout_mask(1, 0.9, 1, 4, 60, 60)).any(axis=3)
    assert none.mean() > 0.5 and np.array_equal((out == 0).all(axis=3), none) and np.isfinite(lse).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("tile", [(48, 64), (1, 64)], ids=["tiles", "pairs"])
def test_large_scores(dtype, tile):
    """Rows of the float64 fallback, whose lse is too large for the backward of tiles; equal keys share their weight."""
    sizes = 1, HEADS, HEADS_KV, 50, 70, 16
    q, k, v = inputs(*sizes, dtype=dtype)
    q, k = (np.round(4 * x.astype(float)).astype(q.dtype) for x in (q, k))  # small integers: products are exact
    k[:, :, 1:] = k[:, :, np.arange(1, 70) // 3 * 3]
    dout, scale = inputs(*sizes, dtype=dtype, seed=9)[0], 2.0**40 if dtype == "float64" else 2.0**11
    allowed, kept = dense_mask(p.Causal(), 1, HEADS, 50, 70), dropout_mask(4, SHARE, 1, HEADS, 50, 70)
    plan = compiler.plan(p.Causal(), 50, 70, heads=HEADS, tile=tile)
    tied = np.full(HEADS, 80 * scale, np.float32)  # float64 has too few digits of the difference from lse
    for sinks in (None,) if dtype == "float64" else (None, tied):
        options = {"dropout_p": SHARE, "seed": 4, "scale": scale, "sinks": sinks}
        out, lse = spattn.attention(q, k, v, plan, return_lse=True, **options)
        got = spattn.attention_backward(dout, q, k, v, out, lse, plan, **options)
        assert (np.abs(lse.astype(float)) > (2**43 if dtype == "float64" else 2**14)).mean() > 0.9
        want = formula(q, k, v, dout, np.zeros(()), allowed, kept, SHARE, sinks=sinks, scale=scale)
        assert_close((out, lse, *got[:3]), want[:5], dtype, ("out", "lse", "dq", "dk", "dv"))


@each_tile
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan(dtype, tile):
    """NaN at keys that no query attends to has no effect; at others it makes their rows NaN, dropped or not."""
    pattern = p.Stride(2)
    q, k, v = inputs(1, HEADS, HEADS_KV, Q_LEN, KV_LEN, 16, dtype=dtype)
    dout = random((1, HEADS, Q_LEN, 16), dtype, seed=9)
    allowed = dense_mask(pattern, 1, HEADS, Q_LEN, KV_LEN)
    hidden = ~allowed.any(axis=(0, 1, 2))
    assert not hidden.any()
    pattern = pattern & p.KeyPadding(np.arange(KV_LEN)[None] % 10 != 7)
    allowed = dense_mask(pattern, 1, HEADS, Q_LEN, KV_LEN)
    hidden = ~allowed.any(axis=(0, 1, 2))
    assert hidden.any()
    operands = ScoreOperands(None, dropout=Dropout.of(SHARE, SEED))
    for isa in cpu.instruction_sets():
        plan = compiler.plan(pattern, Q_LEN, KV_LEN, heads=HEADS, tile=tile)
        want = run(operands, plan, isa, q, k, v, dout)[:5]
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[:, :, hidden], bad_v[:, :, hidden] = np.nan, np.inf
        for x, y in zip(run(operands, plan, isa, q, bad_k, bad_v, dout)[:5], want, strict=True):
            assert np.array_equal(x, y), isa
        bad_v = v.copy()
        bad_v[:, :, 40] = np.nan
        out, _, dq, *_ = run(operands, plan, isa, q, k, bad_v, dout)
        for x, y in ((out, want[0]), (dq, want[2])):
            assert np.array_equal(np.isnan(x.astype(float)).all(axis=3), allowed[..., 40]), isa
            assert np.array_equal(x[~allowed[..., 40]], y[~allowed[..., 40]]), isa


def test_decoding_steps():
    """A plan of any length; each step drops the pairs of the last row of the whole call."""
    q, k, v = inputs(2, 4, 2, 80, 80, 16, dtype="float64")
    for kv_len in range(70, 81):
        mask = dropout_mask(SEED, SHARE, 2, 4, kv_len, kv_len)
        some = q[:, :, kv_len - 1 : kv_len], k[:, :, :kv_len], v[:, :, :kv_len]
        got = spattn.attention(*some, p.SlidingWindow(60, 0), dropout_p=SHARE, seed=SEED)
        allowed = dense_mask(p.SlidingWindow(60, 0), 2, 4, 1, kv_len)
        want = formula(*some, got, np.zeros(()), allowed, mask[:, :, -1:], SHARE)[0]
        assert np.abs(got - want).max() < 1e-13


def test_packed_sequences():
    """Positions are those of the whole packed sequence."""
    lengths = np.array([0, 30, 41, 90])
    pattern = p.Documents.from_cu_seqlens(lengths) & p.Causal()
    q, k, v = (x[0].swapaxes(0, 1) for x in inputs(1, 4, 2, 90, 90, 16, dtype="float64"))
    got = spattn.attention(q, k, v, pattern, layout="thd", dropout_p=SHARE, seed=SEED)
    whole = tuple(x.swapaxes(0, 1)[None] for x in (q, k, v))
    allowed, kept = dense_mask(pattern, 1, 4, 90, 90), dropout_mask(SEED, SHARE, 1, 4, 90, 90)
    want = formula(*whole, whole[0], np.zeros(()), allowed, kept, SHARE)[0]
    assert np.abs(got.swapaxes(0, 1)[None] - want).max() < 1e-13


@each_dtype
def test_threads_and_plans(dtype):
    """Bitwise the same results for any number of threads; the same pairs for any plan."""
    sizes = 2, 4, 2, 300, 300, 32
    q, k, v = inputs(*sizes, dtype=dtype)
    dout = inputs(*sizes, dtype=dtype, seed=9)[0]
    options = {"dropout_p": SHARE, "seed": SEED}

    def results(pattern):
        out, lse = spattn.attention(q, k, v, pattern, return_lse=True, **options)
        return out, lse, *spattn.attention_backward(dout, q, k, v, out, lse, pattern, **options)

    found = []
    for tile, workers in (((48, 64), 1), ((16, 128), 5)):
        plan = compiler.plan(UNION, 300, 300, heads=4, tile=tile, workers=workers)
        for threads in (1, 4):
            with spattn.threads(threads):
                found.append(results(plan))
    for x, y in itertools.chain(zip(*found[:2], strict=True), zip(*found[2:], strict=True)):
        assert np.array_equal(x, y)
    assert_close(found[0], [np.asarray(x, np.float64) for x in found[2]], dtype, ("out", "lse", "dq", "dk", "dv"))


@each_backend
def test_off(backend):
    """A share of 0, or below 2^-33, gives the bits of a call without dropout."""
    q, k, v = inputs(1, 4, 2, 100, 100, 16)
    plain = spattn.attention(q, k, v, UNION, backend=backend)
    for share, seed in ((0, None), (0.0, 5), (2.0**-34, 5)):
        assert np.array_equal(spattn.attention(q, k, v, UNION, backend=backend, dropout_p=share, seed=seed), plain)


def test_groups_and_layouts():
    problems = [(*inputs(1, 4, 2, n, n, 16), pattern) for n, pattern in ((70, UNION), (50, p.Causal()))]
    options = {"dropout_p": SHARE, "seed": SEED}
    for problem, got in zip(problems, spattn.grouped_attention(problems, **options), strict=True):
        want = spattn.attention(*problem, **options)
        assert np.array_equal(got, want)
        q, k, v = (x.swapaxes(1, 2) for x in problem[:3])
        assert np.array_equal(spattn.attention(q, k, v, problem[3], layout="bshd", **options).swapaxes(1, 2), want)


# -- statistics --------------------------------------------------------------------------------------------------------

SHARES = (0.1, 0.5, 1 / 3, 0.9)


def standardized(share, seed=SEED, batch=2, heads=4, length=360):
    """Dropped pairs as numbers of mean 0 and variance 1 if the share is right: 10^6 of them."""
    share = round(share * 2**32) / 2**32
    return (~dropout_mask(seed, share, batch, heads, length, length) - share) / np.sqrt(share * (1 - share))


def errors(x):
    """The mean in units of its standard error, if the numbers are uncorrelated and have variance 1."""
    return abs(x.mean()) * np.sqrt(x.size)


@pytest.mark.parametrize("share", SHARES)
def test_rate(share):
    """Over all pairs, and the variance of the sums of rows and of columns."""
    x = standardized(share)
    assert x.size > 10**6 and errors(x) < 4
    for axis in (2, 3):
        sums = x.sum(axis=axis) / np.sqrt(x.shape[axis])
        assert abs((sums**2).mean() - 1) * np.sqrt(sums.size / 2) < 4


@pytest.mark.parametrize("share", SHARES)
def test_no_correlation(share):
    """Between rows, columns, heads, batch entries and seeds, at several lags; nor between the corners of rectangles."""
    x = standardized(share)
    for lag in (1, 2, 3, 16, 64, 128):
        assert errors(x[:, :, lag:] * x[:, :, :-lag]) < 4
        assert errors(x[..., lag:] * x[..., :-lag]) < 4
        assert errors(x[:, :, lag:, lag:] * x[:, :, :-lag, :-lag]) < 4
    for a, b in itertools.combinations(range(4), 2):
        assert errors(x[:, a] * x[:, b]) < 4
    assert errors(x[0] * x[1]) < 4
    assert errors(x * x.swapaxes(2, 3)) < 6  # each product twice: 4 times the root of 2
    for seed in (SEED + 1, SEED + 2**32, SEED ^ 1 << 63, 0):
        assert errors(x * standardized(share, seed)) < 4
    for rows, columns in itertools.product((1, 2, 16, 64), (1, 2, 16, 64)):
        pairs = x[:, :, rows:] * x[:, :, :-rows]
        assert errors(pairs[..., columns:] * pairs[..., :-columns]) < 4


def test_expectation_and_variance_of_attention():
    """Over seeds, out has the mean of the call without dropout and the variance of independent weights."""
    q, k, v = inputs(1, 2, 2, 20, 30, 8, dtype="float64")
    plain, lse = spattn.attention(q, k, v, return_lse=True)
    many = np.stack([spattn.attention(q, k, v, dropout_p=0.25, seed=seed) for seed in range(2000)])
    weights = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(8) - lse[..., None])
    variance = weights**2 @ v**2 * (0.25 / 0.75)
    z = (many.mean(axis=0) - plain) / np.sqrt(variance / len(many))
    assert abs((z**2).mean() - 1) < 4 * np.sqrt(2 / 40)  # columns of v share weights: at least 40 independent rows
    assert np.abs(many.var(axis=0) / variance - 1).max() < 4 * 2.5 * np.sqrt(2 / len(many))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dropout_p": 0.1}, ValueError, "^seed: required if dropout_p > 0"),
        ({"dropout_p": 1.0, "seed": 1}, ValueError, "^dropout_p: must be at least 0 and less than 1, got 1.0"),
        ({"dropout_p": 1 - 2.0**-40, "seed": 1}, ValueError, r"^dropout_p: must not exceed 1 - 2\*\*-32"),
        ({"dropout_p": -0.1, "seed": 1}, ValueError, "^dropout_p: must be at least 0 and less than 1, got -0.1"),
        ({"dropout_p": float("nan"), "seed": 1}, ValueError, "^dropout_p: must be at least 0 and less than 1, got nan"),
        ({"dropout_p": "0.1", "seed": 1}, TypeError, "^dropout_p: expected a float, got str"),
        ({"dropout_p": None, "seed": 1}, TypeError, "^dropout_p: expected a float, got NoneType"),
        ({"dropout_p": True, "seed": 1}, TypeError, "^dropout_p: expected a float, got bool"),
        ({"dropout_p": 0.1, "seed": 1.0}, TypeError, "^seed: expected an integer, got float"),
        ({"dropout_p": 0.1, "seed": True}, TypeError, "^seed: expected an integer, got bool"),
        ({"dropout_p": 0.1, "seed": -1}, ValueError, r"^seed: must be in \[0, 2\*\*64\), got -1"),
        ({"dropout_p": 0.1, "seed": 2**64}, ValueError, r"^seed: must be in \[0, 2\*\*64\), got 18446744073709551616"),
        ({"dropout": 0.1}, TypeError, "'dropout'; write dropout_p= and seed= in training"),
    ],
)
def test_refusals(options, error, words):
    q, k, v = inputs(1, 2, 2, 5, 5, 8)
    with pytest.raises(error, match=words.replace("'dropout'", r".*'dropout'")):
        spattn.attention(q, k, v, **options)
    if "dropout_p" in options:
        out, lse = spattn.attention(q, k, v, return_lse=True)
        with pytest.raises(error, match=words):
            spattn.attention_backward(out, q, k, v, out, lse, **options)


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def test_seeds_for_kernels():
    """A copy of 64 bits; None unless the tensor is one integer."""
    torch = pytest.importorskip("torch")
    kind = namespace_of(torch.zeros(1))
    for value, dtype in ((7, "uint8"), (-5, "int16"), (-(2**63), "int64"), (2**64 - 1, "uint64")):
        given = torch.full((), value, dtype=getattr(torch, dtype))
        address, owner = kind.seed(given)
        given.zero_()
        assert ctypes.c_uint64.from_address(address).value == value % 2**64 and owner.numel() == 1
    for given in (torch.tensor(1.0), torch.tensor(1j), torch.tensor(True), torch.arange(2)):
        assert kind.seed(given) is None


def test_autograd():
    torch = pytest.importorskip("torch")
    leaves = [torch.from_numpy(x).requires_grad_() for x in inputs(1, 4, 2, 9, 12, 4, dtype="float64")]
    sinks = torch.tensor([0.5, 1.0, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    table = torch.from_numpy(random((4, 7, 5), "float64", seed=7)).requires_grad_()

    def call(q, k, v, sinks, table):
        score = lambda s, b, h, q, k: 6 * torch.tanh(s / 6) + table[h, q % 7, k % 5]  # noqa: E731
        options = {"score": score, "sinks": sinks, "dropout_p": SHARE, "seed": torch.tensor(7)}
        return spattn.attention(q, k, v, UNION, return_lse=True, **options)

    assert torch.autograd.gradcheck(call, (*leaves, sinks, table))
    assert torch.autograd.gradcheck(
        lambda *qkv: spattn.attention(*qkv, p.Causal(), dropout_p=0.5, seed=2), tuple(leaves)
    )


def test_layer():
    """Training mode draws a seed from PyTorch's generator; evaluation drops nothing; checkpoints repeat the pairs."""
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    from spattn.torch import SparseAttention

    layer = SparseAttention(32, 4, p.SlidingWindow(9), dropout=0.4)
    plain = SparseAttention(32, 4, p.SlidingWindow(9))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 30, 32)
    padding = torch.zeros(2, 30, dtype=torch.bool).index_fill_(1, torch.tensor([3]), True)

    def drawn(run, *more):
        torch.manual_seed(5)
        return run(x, x, x, *more)[0]

    first, second = drawn(layer), layer(x, x, x)[0]
    assert torch.equal(first, drawn(layer)) and not torch.equal(first, second)
    assert not torch.equal(drawn(layer, padding), drawn(plain, padding))
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(drawn(compiled), first)

    def gradient(run):
        layer.zero_grad()
        drawn(run).square().sum().backward()
        return layer.in_proj_weight.grad.clone()

    again = gradient(lambda *qkv: (checkpoint(lambda *given: layer(*given)[0], *qkv, use_reentrant=False),))
    assert torch.equal(again, gradient(layer))
    assert torch.equal(drawn(layer.eval()), drawn(plain))
    for share, error in ((1.5, ValueError), ("0.1", TypeError)):
        with pytest.raises(error, match="^dropout_p: "):
            SparseAttention(32, 4, dropout=share)
