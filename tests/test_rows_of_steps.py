"""Steps of generation with any pattern: equal to a prefill's rows, without a search for tiles."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.schedule import compiler
from spattn.testing import DTYPES, inputs

ROOM, HEADS, HEADS_KV = 330, 4, 2
RANDOM = np.random.default_rng(4)
LAYOUT = RANDOM.random((6, 6)) < 0.4


@dataclass(frozen=True)
class SquareDistances(p.Pattern):
    """A predicate without hints, with a parameter."""

    most: int

    def allows(self, q, k):
        return (np.abs(q - k) * (q - k) % 7 == 2) & (q - k < self.most)


PATTERNS = {
    "strided": p.strided(16),
    "fixed": p.fixed(16, 3),
    "dilated": p.DilatedWindow(12, 0, 5),
    "wide dilation": p.DilatedWindow(3, 2, 70),
    "blocks": p.BlockLocal(48),
    "BigBird": p.Causal() & p.BigBird(16, seed=1),
    "BigBird of one head": p.BigBird(16, seed=2, head=3, causal=True),
    "complement": ~p.DilatedWindow(20, 0, 3),
    "difference": p.Causal() - p.Sinks(40),
    "layout": p.BlockLayout(LAYOUT, 64) & p.Causal(),
    "documents": p.Causal() & p.Documents((100, 130, ROOM - 230)),
    "predicate": SquareDistances(200),
    "window of a predicate": p.SlidingWindow(90, 3) & SquareDistances(1000),
    "none": p.Causal() & ~p.Causal(),
    "all": p.Full() | p.Stride(3),
    "union of 2": p.strided(32) | p.DilatedWindow(7, 0, 9),
    "union of 3": (p.Sinks(5) | p.SlidingWindow(30, 0) | p.Stride(50)) & p.Causal(),
    "union with a predicate": (p.BlockLocal(20) | SquareDistances(90)) & p.Causal(),
    "by head": p.PerHead((p.strided(8), p.strided(8), p.Stride(31), p.SlidingWindow(20, 0))),
    "by head, in a union": p.PerHead((p.strided(8), p.Stride(31))) | p.Sinks(2),
    "by entry": p.PerBatch((p.strided(11), p.fixed(64, 2))),
    "by entry and head": p.PerBatch((p.PerHead((p.Stride(5), p.Stride(6))), p.BlockLocal(70))),
}


@pytest.fixture(autouse=True)
def empty():
    spattn.clear_plan_cache()


@pytest.fixture
def searched(monkeypatch):
    """The searches for tiles."""
    calls, own = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *options: calls.append(options) or own(*options))
    return calls


def allowed(pattern, length, positions, keys):
    """(batch, heads, queries, keys): rows of the dense mask of a prefill of `length` tokens."""
    q, k = np.asarray(positions), np.arange(keys)
    batch, heads = pattern.sizes()
    found = np.empty((2, HEADS, len(q), keys), bool)
    for b, h in np.ndindex(2, HEADS):
        own = pattern.at(b if batch != 1 else 0, h if heads in (0, HEADS) else h * heads // HEADS)
        found[b, h] = np.broadcast_to(own.bind(length, length).allows(q[:, None], k), found.shape[2:])
    return found


def dense(q, k, v, mask):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.where(mask, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]), -np.inf)
    top = scores.max(axis=3, keepdims=True, initial=-1e300)
    weights = np.where(mask, np.exp(scores - top), 0)
    total = weights.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
    return weights / np.where(total > 0, total, 1) @ v, lse


def check(result, q, k, v, mask, tolerance=1e-5):
    out, lse = result
    expected, expected_lse = dense(q, k, v, mask)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_cache_that_grows(name, q_len, searched):
    pattern = PATTERNS[name]
    q, k, v = inputs(2, HEADS, HEADS_KV, q_len=q_len, kv_len=ROOM, head_dim=16)
    lengths = (ROOM,) if name in ("layout", "documents") else (ROOM - 9, ROOM - 8, 64, 65, ROOM)
    for length in lengths:
        own = k[:, :, :length], v[:, :, :length]
        result = spattn.attention(q, *own, pattern, return_lse=True)
        check(result, q, *own, allowed(pattern, length, np.arange(length - q_len, length), length))
    # Plans of patterns that declare their ends move from length to length.
    assert len(searched) <= (3 if name in ("difference", "none") else 0)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_cache_of_fixed_size(name, searched):
    """The queries are at one position for all entries, or at one for each."""
    pattern = PATTERNS[name]
    q, k, v = inputs(2, HEADS, HEADS_KV, q_len=2, kv_len=ROOM, head_dim=16)
    for first in (0, 100, ROOM - 2):
        result = spattn.attention(q, k, v, p.QueriesAt(pattern, first), return_lse=True)
        check(result, q, k, v, allowed(pattern, ROOM, (first, first + 1), ROOM))
    places = np.array([[40, 41], [300, 7]])
    mask = np.stack([allowed(pattern, ROOM, own, ROOM)[b] for b, own in enumerate(places)])
    check(spattn.attention(q, k, v, p.QueriesAt(pattern, places), return_lse=True), q, k, v, mask)
    assert not searched
    if pattern.sizes()[0] == 1:
        entries = p.PerBatch(tuple(p.QueriesAt(pattern, int(first)) for first in (17, 250)))
        mask = np.stack([allowed(pattern, ROOM, (n, n + 1), ROOM)[b] for b, n in enumerate((17, 250))])
        check(spattn.attention(q, k, v, entries, return_lse=True), q, k, v, mask)
        assert not searched


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head", [None, 2])
def test_random_blocks_of_entries_far_apart(head, causal):
    """BigBird's blocks are drawn for several block rows at once; entries have rows of one such group, or of many."""
    pattern, length = p.BigBird(4, 3, 1, 3, seed=5, head=head, causal=causal), 211
    places = np.random.default_rng(1).integers(0, length - 2, (12, 1)) + np.arange(2)
    for at in (places, places[:1], places % 8):
        q, k, v = inputs(len(at), HEADS, HEADS_KV, q_len=2, kv_len=length, head_dim=8)
        each = (pattern.at(0, h).bind(length, length) for h in range(HEADS))
        mask = np.stack([one.allows(at[:, :, None], np.arange(length)) for one in each], axis=1)
        found = spattn.attention(q, k, v, p.QueriesAt(pattern | p.Sinks(2), at), return_lse=True)
        check(found, q, k, v, mask | (np.arange(length) < 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["strided", "union of 3", "by head"])
def test_dtypes(name, dtype):
    pattern = PATTERNS[name]
    q, k, v = inputs(2, HEADS, HEADS_KV, q_len=1, kv_len=ROOM, head_dim=24, dtype=dtype)
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    result = spattn.attention(q, k, v, pattern, return_lse=True)
    check(result, q, k, v, allowed(pattern, ROOM, [ROOM - 1], ROOM), tolerance)


def test_entries_of_different_lengths(searched):
    """Row intervals, padding masks and documents of each entry, alone and in compositions."""
    q, k, v = inputs(2, HEADS, HEADS_KV, q_len=2, kv_len=ROOM, head_dim=16)
    ends, keys = np.array([[120, 121], [ROOM, 9]]), np.arange(ROOM)
    window = (keys >= ends[..., None] - 50) & (keys < ends[..., None])
    intervals = p.RowIntervals(ends[:, None] - 50, ends[:, None])
    check(spattn.attention(q, k, v, intervals, return_lse=True), q, k, v, window[:, None])
    valid = RANDOM.random((2, ROOM)) < 0.7
    check(spattn.attention(q, k, v, p.KeyPadding(valid), return_lse=True), q, k, v, valid[:, None, None])
    stride = (np.arange(ROOM - 2, ROOM)[:, None] - keys) % 9 == 0
    both = (valid[:, None, None] & stride) | window[:, None]
    result = spattn.attention(q, k, v, (p.KeyPadding(valid) & p.Stride(9)) | intervals, return_lse=True)
    check(result, q, k, v, both)
    assert not searched


def test_many_keys_are_split_among_threads():
    """Results have the same bits with any number of threads, and those of the public plan."""
    q, k, v = inputs(1, 2, 1, q_len=1, kv_len=9000, head_dim=16)
    pattern = p.Full() - p.Stride(100)
    keys = np.arange(9000)
    results = []
    for threads in (1, 2):
        with cpu.threads(threads):
            results.append(spattn.attention(q, k, v, pattern, return_lse=True))
    plan = spattn.plan_for(pattern, q, k, v, backend="cpu")
    assert len(plan.work) > 1
    results.append(spattn.attention(q, k, v, plan, return_lse=True))
    for one in results[1:]:
        assert all(map(np.array_equal, one, results[0]))
    check(results[0], q, k, v, ((8999 - keys) % 100 != 0)[None, None, None])


def test_more_patterns_than_are_remembered():
    """In turns and in threads: each call computes its own pattern, also an equal copy of it, at its own length."""
    q, k, v = inputs(2, HEADS, HEADS_KV, q_len=1, kv_len=ROOM, head_dim=16)
    cases, expected = [], []
    for length in (64, 200, ROOM):
        for name in ("strided", "BigBird", "difference", "union of 3", "by head, in a union", "by entry"):
            for at in (length - 1, [[5], [length - 1]]):
                pattern, own = p.QueriesAt(PATTERNS[name], at), (k[:, :, :length], v[:, :, :length])
                places = np.broadcast_to(np.reshape(at, (-1, 1)), (2, 1))
                mask = np.stack([allowed(PATTERNS[name], length, one, length)[b] for b, one in enumerate(places)])
                check(spattn.attention(q, *own, pattern, return_lse=True), q, *own, mask)
                cases.append((own, pattern))
                expected.append(spattn.attention(q, *own, pattern))
    wrong = []

    def work(seed):
        for number in np.random.default_rng(seed).permutation(len(cases)).tolist():
            own, pattern = cases[number]
            copied = p.QueriesAt(pattern.inner, pattern.positions)
            for one in (pattern, copied):
                if not np.array_equal(spattn.attention(q, *own, one), expected[number]):
                    wrong.append((number, one))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_lengths_are_checked_in_every_step():
    q, k, v = inputs(1, 2, 1, q_len=1, kv_len=60, head_dim=16)
    spattn.attention(q, k, v, p.KeyPadding(np.ones(60, bool)))
    with pytest.raises(ValueError, match=r"^valid: expected 60 keys \(kv_len\), got 61"):
        spattn.attention(q, k, v, p.KeyPadding(np.ones(61, bool)))
    with pytest.raises(ValueError, match="^pattern: expected one for 1 batch entries, got one for 2"):
        spattn.attention(q, k, v, p.QueriesAt(p.strided(4), [[3], [4]]))


def test_no_array_of_a_caller_is_kept_alive():
    import weakref

    q, k, v = inputs(1, 2, 1, q_len=1, kv_len=60, head_dim=16)
    spattn.attention(q, k, v, p.strided(4))
    kept = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    assert not any(one() is not None for one in kept)


def test_large_masks_of_steps_are_forgotten():
    """Cached dispatches keep the last few patterns of any size, and of others only small ones."""
    q, k = np.zeros((1, 1, 1, 8), np.float32), np.zeros((1, 1, 1 << 17, 8), np.float32)
    masks = []
    for key in range(24):
        pattern = p.Mask(np.arange(1 << 17)[None] == key)
        masks.append(weakref.ref(pattern))
        spattn.attention(q, k, k, pattern)
    del pattern
    gc.collect()
    assert sum(mask() is not None for mask in masks) <= cpu._MAX_LENGTHS


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9])
def test_positions_of_one_entry_beyond_the_keys(count):
    """Positions (1, queries) mean what (queries,) do, also below 0 and beyond the keys."""
    rng = np.random.default_rng(count)
    k, v = rng.standard_normal((1, 2, 13, 8), np.float32), np.eye(13, dtype=np.float32)[None, None].repeat(2, 1)
    inner = [
        (lambda q, k: k <= q, p.Causal()),
        (lambda q, k: (q - k <= 4) & (k <= q) | (k <= q) & (k < 2), p.Causal() & (p.SlidingWindow(4, 0) | p.Sinks(2))),
        (
            lambda q, k: (q - k >= 0) & (q - k <= 6) & ((q - k) % 3 == 0) | (k == q - 1),
            p.DilatedWindow(2, 0, 3) | (p.SlidingWindow(1, 0) & p.Causal()),
        ),
    ]
    for allowed, pattern in inner:
        for _ in range(20):
            at = rng.integers(-3, 20, count)
            q = rng.standard_normal((1, 2, count, 8), np.float32)
            out = spattn.attention(q, k, v, p.QueriesAt(pattern, at[None]), backend="cpu")
            # A row of v for each key: weights are positive at the allowed keys alone.
            assert ((out > 0) == allowed(at[:, None], np.arange(13))).all(), (pattern, at)
            assert np.array_equal(out, spattn.attention(q, k, v, p.QueriesAt(pattern, at), backend="cpu"))
