"""KVCache: what it allocates, refuses and keeps; the rows are in compositions/test_kv_cache_rows.py."""

import copy
import pickle
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch

import spattn
from spattn import patterns as p
from spattn.testing import DTYPES, assert_within_bound, naive, naive_orders

STREAMING = p.Causal() & (p.Sinks(4) | p.SlidingWindow(15, 0))
SIZES = {"batch": 2, "heads_kv": 2, "head_dim": 8}


def draw(*shapes, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def tokens(n, heads=2, dim=8, seed=0, **options):
    return draw(*[(2, heads, n, dim)] * 2, seed=seed, **options)


def filled(pattern=STREAMING, max_len=1000, n=10, **options):
    cache = spattn.KVCache(pattern, max_len, **SIZES, **options)
    cache.append(*tokens(n))
    return cache


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_steps_of_each_dtype(name, library):
    """Grouped heads, and steps of one token behind dropped keys."""
    n, dtype = 120, DTYPES[name]
    q, k, v = draw((2, 4, n, 8), *[(2, 2, n, 8)] * 2, dtype=dtype)
    convert = (
        np.asarray if library == "numpy" else lambda x: torch.from_numpy(x.astype(np.float64)).to(getattr(torch, name))
    )
    cache = spattn.KVCache(STREAMING, 1 << 30, **SIZES, like=convert(q), chunk=1)
    cache.append(convert(k[:, :, :70]), convert(v[:, :, :70]))
    out = []
    for at in range(70, n):
        cache.append(convert(k[:, :, at : at + 1]), convert(v[:, :, at : at + 1]))
        out.append(cache.attention(convert(q[:, :, at : at + 1])))
    got = np.concatenate([np.asarray(x if library == "numpy" else x.double()) for x in out], 2).astype(dtype)
    i, j = np.arange(n)[:, None], np.arange(n)
    mask = (j <= i) & ((j < 4) | (i - j <= 15))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    low = [x[:, :, 70:] for x in naive_orders(q, k, v, mask)[0]]
    assert_within_bound(got, naive(*wide, mask)[0][:, :, 70:], low)


PATTERNS_OF_LENGTHS = {
    "BigBird": (p.Causal() & p.BigBird(4, seed=1), None),
    "mask_mod": (lambda b, h, q, k: (k <= q) & (q - k < 7), None),
    "QueriesAt": (p.QueriesAt(p.SlidingWindow(6, 0), 0), None),
    "Neighborhood": (p.Causal() & p.Neighborhood((8, 8), 3), 64),
    "Mask": (np.tril(np.ones((64, 64), bool)), 64),
}


@pytest.mark.parametrize("name", PATTERNS_OF_LENGTHS)
def test_rows_that_depend_on_the_lengths(name):
    """The rows of all tokens as queries; of `max_len` tokens, if the pattern supports no others."""
    pattern, fixed = PATTERNS_OF_LENGTHS[name]
    q, k, v = draw(*[(1, 2, 64, 8)] * 3, dtype=np.float64)
    cache = spattn.KVCache(pattern, 64, batch=1, heads_kv=2, head_dim=8, dtype="float64")
    for start, stop in ((0, 30), (30, 31), (31, 35), (35, 64)):
        cache.append(k[:, :, start:stop], v[:, :, start:stop])
        out = cache.attention(q[:, :, start:stop])
        whole = spattn.attention(*(x[:, :, : fixed or stop] for x in (q, k, v)), pattern)
        np.testing.assert_allclose(out, whole[:, :, start:stop], atol=1e-12)


def test_storage_of_a_window_is_bounded():
    """Two windows and the sinks, whatever max_len is, and no copy of them in a step."""
    cache = filled(max_len=1 << 30, n=1000)
    columns = 4 + 2 * (15 + 32) + 1
    assert cache.nbytes == 2 * 2 * columns * (8 + 8) * 4
    k, v = tokens(1)
    cache.append(k, v)
    storage = cache._k
    tracemalloc.start()
    for _ in range(20):
        cache.append(k, v)
    assert tracemalloc.get_traced_memory()[1] < cache.nbytes / 4
    tracemalloc.stop()
    for _ in range(200):
        cache.append(k, v)
    assert cache._k is storage and cache.lengths.tolist() == [1221, 1221]


@pytest.mark.parametrize(
    ("pattern", "slides"),
    [
        (STREAMING, True),
        ("sliding_window(8, 0)", True),
        (p.Sinks(3), True),
        (p.PerHead((STREAMING, p.SlidingWindow(3))), True),
        (p.PerBatch((STREAMING, p.SlidingWindow(3))), True),
        ("causal", False),
        (p.Causal() & p.Sinks(2) | p.Stride(3), False),
        (p.PerHead((STREAMING, p.Causal())), False),
        (p.BigBird(4), False),
        (p.DilatedWindow(4, 0, 3), False),
        (STREAMING & p.KeyPadding(np.ones(1000, bool)), False),
        (p.QueriesAt(p.SlidingWindow(4, 0), 0), False),
    ],
    ids=repr,
)
def test_which_caches_drop_keys(pattern, slides):
    cache = spattn.KVCache(pattern, 1000, **SIZES)
    assert (cache.nbytes < 2 * 2 * 1000 * 16 * 4) == slides


def test_a_window_that_follows_the_length_is_kept_whole():
    """Its ends are right, but its predicate depends on the lengths."""

    class Last(p.Pattern):
        kv_len = 0

        def bind(self, q_len, kv_len):
            bound = Last()
            object.__setattr__(bound, "kv_len", kv_len)
            return bound

        def __eq__(self, other):
            return type(other) is Last and self.kv_len == other.kv_len

        __hash__ = p.Pattern.__hash__

        def allows(self, q, k):
            return (k >= self.kv_len - 3) & (q == q)

        def ends(self, q_len):
            return p.authoring.Ends(0, 3)

    cache = spattn.KVCache(Last(), 1000, **SIZES)
    assert cache.nbytes == 2 * 2 * 1000 * 16 * 4


SCORES = {
    "alibi": lambda n: spattn.score.alibi(),
    "softcap": lambda n: spattn.score.softcap(3.0),
    "bias": lambda n: spattn.score.bias(draw((2, 1, 1, n), seed=5)[0]),
    "rows": lambda n: spattn.score.bias(draw((2, 4, 2, 1), seed=6)[0]),
    "positions": lambda n: lambda s, b, h, q, k: s + 0.01 * (q % 7) * (k % 5) + 0.1 * b,
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("pattern", [STREAMING, "causal"], ids=["window", "causal"])
def test_score_functions_get_positions(name, pattern):
    n = 300
    q, k, v = draw((2, 4, 2, 8), *[(2, 2, n, 8)] * 2)
    cache = spattn.KVCache(pattern, n, **SIZES, chunk=2)
    cache.append(k, v)
    score = SCORES[name](n)
    expected = spattn.attention(q, k, v, pattern, score=score)
    np.testing.assert_allclose(cache.attention(q, score=score), expected, atol=1e-6)


@pytest.mark.parametrize("name", SCORES)
def test_score_functions_of_a_mask_of_all_tokens(name):
    """The cache is not full."""
    q, k, v = draw((2, 4, 2, 8), *[(2, 2, 20, 8)] * 2)
    mask = np.tril(np.random.default_rng(0).random((30, 30)) < 0.7)
    cache = spattn.KVCache(mask, 30, **SIZES)
    cache.append(k, v)
    score = SCORES[name](20)
    expected = spattn.attention(q, k, v, mask[18:20, :20], score=score)
    np.testing.assert_allclose(cache.attention(q, score=score), expected, atol=1e-6)


def test_ends_are_those_of_longer_sequences():
    """Of a pattern whose first key is seen by later queries only, at the shortest length that its ends allow."""

    class Late(p.Pattern):
        def allows(self, q, k):
            return ((k == 0) & (q >= 8)) | ((q - k >= 0) & (q - k < 2))

        def ends(self, q_len):
            return p.authoring.Ends(1, 6 + q_len)

    q, k, v = draw(*[(2, 2, 60, 8)] * 3)
    cache = spattn.KVCache(Late(), 60, **SIZES, chunk=1)
    expected = spattn.attention(q, k, v, Late())
    for at in range(60):
        new = slice(at, at + 1)
        cache.append(k[:, :, new], v[:, :, new])
        np.testing.assert_allclose(cache.attention(q[:, :, new]), expected[:, :, new], atol=1e-6)


def test_ragged_steps_of_a_window_become_one_call(monkeypatch):
    """Entries that drop keys have equally many columns, whatever their lengths are."""
    from spattn.api import cached_rows

    cache, calls, attention = filled(n=0, chunk=1), [], spattn.attention
    cache.append(*tokens(500), lengths=[300, 500])
    monkeypatch.setattr(cached_rows, "attention", lambda *args, **named: calls.append(1) or attention(*args, **named))
    for _ in range(50):
        cache.append(*tokens(1))
        cache.attention(tokens(1)[0])
    assert len(calls) == 50


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_beam_search(convert):
    """Entries of different lengths change places; what was copied does not follow the original."""
    k, v = map(convert, tokens(9))
    cache = spattn.KVCache("causal", 12, **SIZES, like=k)
    cache.append(k, v, lengths=[5, 9])
    cache.reorder([1, 1])
    assert cache.lengths.tolist() == [9, 9]
    more = list(map(convert, tokens(1, seed=2)))
    cache.append(*more)
    (q,) = map(convert, draw((2, 2, 1, 8), seed=3))
    keys = [np.concatenate([np.asarray(x)[[1, 1]], np.asarray(y)], 2) for x, y in zip((k, v), more, strict=True)]
    expected = spattn.attention(np.asarray(q), *keys, "causal")
    np.testing.assert_allclose(np.asarray(cache.attention(q)), expected, atol=1e-6)


def test_rejected_tokens_are_removed():
    """Speculative decoding: of four tokens an entry keeps one, the other all."""
    k, v = tokens(300)
    cache = filled(n=0, chunk=4)
    cache.append(k[:, :, :290], v[:, :, :290])
    for x in (tokens(4, seed=7), tokens(4, seed=8)):
        cache.append(*x)
        cache.crop([290, 290])
    cache.append(k[:, :, 290:294], v[:, :, 290:294])
    cache.crop([291, 294])
    (q,) = draw((2, 2, 1, 8), seed=3)
    out = cache.attention(q)
    for entry, n in enumerate((291, 294)):
        own = slice(entry, entry + 1)
        expected = spattn.attention(q[own], k[own, :, :n], v[own, :, :n], STREAMING)
        np.testing.assert_allclose(out[own], expected, atol=1e-6)


def test_the_caller_may_change_its_arrays():
    k, v = tokens(10)
    cache = filled(n=0)
    index, lengths = np.array([0, 1]), np.array([10, 10])
    cache.append(k, v, lengths=lengths)
    (q,) = draw((2, 2, 1, 8), seed=3)
    before = cache.attention(q)
    k[:], v[:], lengths[:] = np.nan, np.nan, 3
    cache.reorder(index)
    cache.lengths[:] = 1
    assert np.array_equal(cache.attention(q), before)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_copies_share_no_memory(duplicate, convert):
    """Requests with one prefix."""
    k, v = map(convert, tokens(50))
    cache = spattn.KVCache(STREAMING, 100, **SIZES, like=k, chunk=1)
    cache.append(k, v)
    before = np.asarray(cache.attention(k[:, :, :1]))
    other = duplicate(cache)
    other.append(*map(convert, tokens(30, seed=1)))
    assert (cache.lengths.tolist(), other.lengths.tolist()) == ([50, 50], [80, 80])
    assert np.array_equal(np.asarray(cache.attention(k[:, :, :1])), before)


def test_nothing_but_present_keys_is_seen():
    """Old keys that are NaN stay behind after a crop and a reset."""
    k, v = tokens(40)
    cache = filled("full", 64, n=0)
    cache.append(k * np.nan, v * np.nan)
    cache.crop([0, 2])
    cache.reset(1)
    cache.append(k[:, :, :5], v[:, :, :5])
    expected = spattn.attention(k[:, :, :1], k[:, :, :5], v[:, :, :5])
    np.testing.assert_allclose(cache.attention(k[:, :, :1]), expected, atol=1e-6)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_rows_without_queries(convert):
    k, v = map(convert, tokens(3))
    cache = spattn.KVCache("causal", 1, **SIZES, like=k)
    out, lse = cache.attention(k[:, :, :0], return_lse=True)
    assert out.shape == (2, 2, 0, 8) and lse.shape == (2, 2, 0)
    cache.append(k[:, :, :0], v[:, :, :0])
    cache.append(k[:, :, :1], v[:, :, :1], lengths=np.array([0, 1], np.int8))
    out, lse = cache.attention(k, lengths=[0, 1], return_lse=True)
    assert not np.asarray(out[0]).any() and not np.asarray(out[1, :, 1:]).any()
    assert np.isneginf(np.asarray(lse[0])).all() and np.isfinite(np.asarray(lse[1, :, 0])).all()
    np.testing.assert_allclose(np.asarray(out[1, :, 0]), np.asarray(v[1, :, 0]), rtol=1e-6)


@pytest.mark.parametrize("crop", [0, 5, [0, 7]], ids=repr)
def test_crop_of_entries(crop):
    cache = filled(n=7)
    cache.crop(crop)
    assert cache.lengths.tolist() == np.minimum(7, np.broadcast_to(crop, 2)).tolist()


BAD = [
    (lambda c: spattn.KVCache("causal", 0, **SIZES), ValueError, "max_len: expected an integer in"),
    (lambda c: spattn.KVCache("causal", 9, **SIZES, chunk=0), ValueError, "chunk: expected an integer in"),
    (lambda c: spattn.KVCache("causal", 9, **SIZES | {"batch": True}), TypeError, "batch: expected an integer"),
    (lambda c: spattn.KVCache("causal", 9, **SIZES, dtype="int8"), TypeError, "dtype: expected one of"),
    (lambda c: spattn.KVCache("causal", 9, **SIZES, like=[1.0]), TypeError, "like: expected a NumPy"),
    (lambda c: spattn.KVCache("causal", 9, **SIZES, like=torch.zeros(1, device="meta")), TypeError, "like: expected a"),
    (lambda c: spattn.KVCache(spattn.plan("causal", 9), 9, **SIZES), TypeError, "pattern: a Plan has fixed lengths"),
    (lambda c: spattn.KVCache(p.Mask(np.ones((8, 8), bool)), 9, **SIZES), ValueError, "mask: expected shape"),
    (lambda c: c.append(*tokens(1000)), ValueError, "k: batch entry 0 has 10 of 1000 tokens"),
    (lambda c: c.append(*tokens(991), lengths=[990, 991]), ValueError, "k: batch entry 1 has 10 of 1000 tokens"),
    (lambda c: c.append(tokens(2)[0], tokens(3)[1]), ValueError, r"v: expected shape \(2, 2, 2, 8\)"),
    (lambda c: c.append(tokens(2)[0][0], tokens(2)[1]), ValueError, r"k: expected shape \(2, 2, new, 8\)"),
    (lambda c: c.append(*tokens(2, heads=1)), ValueError, r"k: expected shape \(2, 2, new, 8\)"),
    (lambda c: c.append(*tokens(2, dtype=np.float64)), TypeError, "k: expected dtype float32 like the cache"),
    (lambda c: c.append(*map(torch.from_numpy, tokens(2))), TypeError, "k: expected a numpy array like the cache"),
    (lambda c: c.append([1.0], [1.0]), TypeError, "k: expected a numpy array like the cache, got list"),
    (lambda c: c.append(*tokens(2), lengths=[1]), ValueError, r"lengths: expected shape \(2,\)"),
    (lambda c: c.append(*tokens(2), lengths=[1, 3]), ValueError, r"lengths: expected integers in \[0, 2\], got 1 to 3"),
    (lambda c: c.append(*tokens(2), lengths=[1, -1]), ValueError, r"lengths: expected integers in \[0, 2\]"),
    (lambda c: c.append(*tokens(2), lengths=[1.0, 1.0]), TypeError, "lengths: expected an array of integers"),
    (lambda c: c.append(np.ma.array(tokens(1)[0]), tokens(1)[1]), TypeError, "k: expected a plain array"),
    (lambda c: c.attention(tokens(11)[0]), ValueError, "q: expected at most 10 queries for batch entry 0"),
    (lambda c: c.attention(tokens(1, dim=4)[0]), ValueError, r"q: expected shape \(2, heads_q, new, 8\)"),
    (lambda c: c.attention(tokens(1, heads=3)[0]), ValueError, "k: expected a number of heads that divides q's 3"),
    (lambda c: c.attention(tokens(1)[0], backend="tpu"), ValueError, "backend: expected .auto. or one of"),
    (lambda c: c.reorder([0, 2]), ValueError, r"index: expected batch entries in \[0, 1\], got 0 to 2"),
    (lambda c: c.reorder([]), ValueError, r"index: expected shape \(n,\) with n >= 1, got \(0,\)"),
    (lambda c: c.reorder([0.0, 1.0]), TypeError, "index: expected an array of integers"),
    (lambda c: c.crop(-1), ValueError, "lengths: expected integers >= 0"),
    (lambda c: c.crop([1, 2, 3]), ValueError, "lengths: expected integers >= 0, one or 2"),
    (lambda c: c.reset(2), ValueError, "entries: expected an integer in"),
    (lambda c: c.reset(-1), ValueError, "entries: expected an integer in"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_wrong_arguments_of_a_cache(call, error, message):
    """The cache stays as it was."""
    cache = filled()
    with pytest.raises(error, match=f"^{message}"):
        call(cache)
    assert cache.lengths.tolist() == [10, 10]
    (q,) = draw((2, 2, 1, 8), seed=3)
    assert np.array_equal(cache.attention(q), filled().attention(q))


def test_queries_whose_keys_were_dropped():
    cache = filled(n=500, chunk=3)
    k, v = tokens(3, seed=2)
    cache.append(k, v)
    cache.attention(k)
    with pytest.raises(ValueError, match=r"^q: a cache that drops keys keeps those of the newest 3 queries \(chunk\)"):
        cache.attention(tokens(100)[0])
    with pytest.raises(ValueError, match="^lengths: batch entry 0 dropped keys that its token 400 needs"):
        cache.crop([400, 503])
    assert cache.lengths.tolist() == [503, 503]
    cache.crop(0)
    cache.append(k, v)
    np.testing.assert_allclose(cache.attention(k), spattn.attention(k, k, v, STREAMING), atol=1e-6)


def test_gradients_are_not_recorded():
    k, v = (torch.from_numpy(x) for x in tokens(2))
    cache = spattn.KVCache("causal", 9, **SIZES, like=k)
    with pytest.raises(RuntimeError, match=r"^v: KVCache.append\(\) does not record gradients; use torch.no_grad"):
        cache.append(k, v.requires_grad_())
    with torch.no_grad():
        cache.append(k, v)
    with pytest.raises(RuntimeError, match=r"^q, sinks: KVCache.attention\(\) does not record gradients"):
        cache.attention(k.clone().requires_grad_(), sinks=torch.zeros(2, requires_grad=True))
    assert not cache.attention(k).requires_grad
    with torch.inference_mode():
        again = spattn.KVCache("causal", 9, **SIZES, like=k)
        again.append(k, v)
    again.append(k, v.detach())
    assert again.lengths.tolist() == [4, 4]


def test_a_cache_under_vmap():
    k, v = (torch.from_numpy(x) for x in tokens(1))
    cache = spattn.KVCache("causal", 9, **SIZES, like=k)
    with pytest.raises(TypeError, match="^KVCache: supported in graphs of torch.compile, not of other tracers"):
        torch.func.vmap(lambda x: cache.append(x, x))(torch.stack([k, k]))
    assert cache.lengths.tolist() == [0, 0]


def test_a_cache_of_bfloat16_in_numpy():
    cache = spattn.KVCache("causal", 9, **SIZES, dtype=ml_dtypes.bfloat16)
    assert cache.nbytes == 2 * 2 * 9 * 16 * 2 and "bfloat16" in repr(cache)
