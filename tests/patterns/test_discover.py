"""From bits or pairs to structure: always the same pairs, and regular patterns where there are any."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spattn import Tiling, plan
from spattn import patterns as p
from spattn.patterns.discovery import blocks as boxes
from spattn.testing.strategies import cases

N = 1024


def bits(pattern, q_len=N, kv_len=N):
    return pattern.index_set(q_len, kv_len).to_dense()


def far(distance):
    """The diagonal of keys so far before the query."""
    return p.SlidingWindow(distance, 0) - p.SlidingWindow(distance - 1, 0)


# What is handed over as bits, and what is found: the same where there is no second name.
FOUND = {
    "full": (p.Full(), None),
    "nothing": (~p.Full(), p.CSR(np.zeros(N + 1, int), [], N)),
    "causal": (p.Causal(), None),
    "window": (p.SlidingWindow(128), None),
    "window behind": (p.SlidingWindow(90, 0) - p.SlidingWindow(40, 0), None),
    "window ahead": (p.SlidingWindow(0, 90) - p.SlidingWindow(0, 40), None),
    "unbounded": (p.SlidingWindow(-1, 40), None),
    "far diagonal": (far(500), None),
    "dilated": (p.DilatedWindow(32, 20, 4), None),
    "stride": (p.Stride(16, 5), None),
    "strided": (p.strided(32), p.SlidingWindow(32, 0) | (p.Causal() & p.Stride(32))),
    "fixed": (p.fixed(32, 4), p.Causal() & (p.BlockLocal(32) | p.Columns(32, 28, 32))),
    "columns": (p.Columns(32, 3, 7), None),
    "sinks": (p.Causal() & (p.SlidingWindow(64, 0) | p.Sinks(4)), p.SlidingWindow(64, 0) | (p.Causal() & p.Sinks(4))),
    "keys": (p.SlidingWindow(9) | p.GlobalTokens((5, 99, 200), queries=False), None),
    "queries": (p.SlidingWindow(9) | p.GlobalTokens((5, 99, 200), keys=False), None),
    "longformer": (p.longformer(64, global_tokens=(0, 1, 2)), p.SlidingWindow(32) | p.GlobalTokens(3)),
    "spaced tokens": (p.SlidingWindow(32) | p.GlobalTokens((100, 300, 500, 700)), None),
    "documents": (p.Documents((300, 50, 600)), None),
    "causal documents": (p.Causal() & p.Documents((300, 50, 674)), None),
    "blocks": (p.BlockLocal(96), None),
    "prefix": (p.prefix_lm(100), p.Causal() | p.Sinks(100)),
    "diagonals": (p.VerticalSlash((), (0, 7, 90, 144, 300, 410)), None),
    "two dilations": (
        p.DilatedWindow(30, dilation=4) | p.SlidingWindow(10),
        p.SlidingWindow(10) | p.DilatedWindow(30, dilation=4),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_names(name):
    pattern, expected = FOUND[name]
    assert p.discover(bits(pattern)) == (pattern if expected is None else expected)


GRID = (32, 32)
ON_GRIDS = {
    "neighbourhood": p.Neighborhood(GRID, 7),
    "dilated neighbourhood": p.Neighborhood(GRID, (5, 3), (3, 1), causal=(True, False)),
    "axial": p.axial((8, 8, 16), 1),
    "windows": p.windowed(GRID, 8, 4),
    "cut off": p.PerAxis(GRID, (p.SlidingWindow(3), p.SlidingWindow(2, 5))),
    "dilated and cut off": p.PerAxis(GRID, (p.DilatedWindow(3, dilation=4), p.SlidingWindow(3))),
    "global": p.GlobalTokens(4) | p.Neighborhood(GRID, 7),
    "three axes": p.Neighborhood((8, 8, 16), (3, 5, 5)),
    "four axes": p.PerAxis((4, 4, 8, 8), (p.SlidingWindow(1), p.Full(), p.SlidingWindow(2), p.SlidingWindow(1))),
}


@pytest.mark.parametrize("name", ON_GRIDS)
def test_names_on_grids(name):
    pattern = ON_GRIDS[name]
    (grid,) = pattern.grids()
    assert p.discover(bits(pattern), grid) == pattern


def test_four_axes():
    """More than neighbourhoods have."""
    pattern = p.PerAxis((3, 4, 5, 6), (p.Neighborhood(3, 2), p.Neighborhood(4, 3), p.Causal(), p.Neighborhood(6, 3)))
    assert p.discover(bits(pattern, 360, 360), (3, 4, 5, 6)).index_set(360, 360) == pattern.index_set(360, 360)


@pytest.mark.parametrize("q_len", [30, 70])
def test_fewer_and_more_queries_than_a_grid_has_tokens(q_len):
    mask = bits(p.PerAxis((8, 8), (p.SlidingWindow(2), p.SlidingWindow(1))), 64, 64)
    mask = mask[64 - q_len :] if q_len < 64 else np.vstack([mask[:6], mask])
    assert np.array_equal(bits(p.discover(mask, (8, 8)), q_len, 64), mask)


def test_boxes_of_more_runs_than_an_array_holds(monkeypatch):
    """Every second token along each axis: each key is a run. They are found as long as an array holds them."""
    pattern = p.PerAxis((24, 24, 2), (p.Stride(2), p.Stride(2), p.SlidingWindow(1)))
    index_set = pattern.index_set(1152, 1152)
    whole = p.Neighborhood((24, 24, 2), (12, 12, 2), (2, 2, 1))
    assert p.discover(index_set, (24, 24, 2)) == whole
    monkeypatch.setattr(boxes, "_MOST_RUNS", 1152)
    other = p.discover(index_set, (24, 24, 2))
    assert other != whole and other.index_set(1152, 1152) == index_set


def test_a_table_along_an_axis_that_is_no_window():
    irregular = (np.arange(32)[:, None] * 7 + np.arange(32) ** 2) % 5 < 2
    found = p.discover(bits(p.PerAxis(GRID, (p.Mask(irregular), p.SlidingWindow(2)))), GRID)
    assert found == p.PerAxis(GRID, (p.Mask(irregular), p.SlidingWindow(2)))


TARGETS = {
    "window": p.SlidingWindow(128),
    "dilated": p.DilatedWindow(128, dilation=4),
    "strided": p.strided(64),
    "fixed": p.fixed(64, 8),
    "wide summaries": p.fixed(128, 32),
    "longformer": p.longformer(128, global_tokens=tuple(range(0, 4096, 256))),
    "bigbird": p.BigBird(64).at(0, 0),
    "neighbourhood": p.Neighborhood((64, 64), 13),
}


@pytest.mark.parametrize("name", TARGETS)
def test_plans_are_as_efficient_as_those_of_the_pattern_itself(name):
    pattern = TARGETS[name]
    found = p.discover(bits(pattern, 4096, 4096), *pattern.grids())
    made = plan(found, 4096)
    assert made.nnz == pattern.index_set(4096, 4096).nnz
    assert made.efficiency >= 0.95 * plan(pattern, 4096).efficiency
    assert not any(isinstance(each, p.CSR) for each in getattr(found, "operands", (found,)))


@pytest.mark.parametrize("dilation", [1, 2, 3, 16, 40, 150, 300, 500])
def test_views_are_no_worse_than_consecutive_tokens(dilation):
    """Residue classes of a few tokens each would take a tile each."""
    mask = bits(p.DilatedWindow(16, dilation=dilation))
    assert plan(p.discover(mask), N).tiles <= plan(p.Mask(mask), N).tiles


@given(case=cases(max_len=100))
def test_any_registered_pattern(case):
    pattern, (_, _, _, q_len, kv_len) = case.pattern.at(0, 0), case.sizes
    index_set = pattern.index_set(q_len, kv_len)
    grid = next(iter(pattern.grids()), None)
    found = p.discover(index_set.to_dense(), grid)
    assert found.index_set(q_len, kv_len) == index_set
    assert p.discover(index_set, grid) == found


@st.composite
def masks(draw):
    """Unions and differences of regular pieces, with noise, of any shape."""
    q_len, kv_len = draw(st.integers(0, 90)), draw(st.integers(0, 90))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q, k = np.ogrid[kv_len - q_len : kv_len, :kv_len]
    pieces = {
        "band": lambda a, b: abs(q - k - a) <= b,
        "stride": lambda a, b: ((q - k) % (b + 1) == 0) & (abs(q - k) <= 4 * a),
        "blocks": lambda a, b: q // (a + 1) == k // (a + 1),
        "layout": lambda a, b: rng.random((20, 20))[q // (a + 8) % 20, k // (a + 8) % 20] < 0.3,
        "columns": lambda a, b: (k % (a + b + 1) < b) & (q == q),
        "rows": lambda a, b: (rng.random(q.shape) < 0.1) & (k == k),
        "keys": lambda a, b: (rng.random(k.shape) < 0.1) & (q == q),
        "noise": lambda a, b: rng.random((q_len, kv_len)) < a / 30,
        "causal": lambda a, b: q < k,
    }
    mask = np.zeros((q_len, kv_len), bool)
    for name in draw(st.lists(st.sampled_from(sorted(pieces)), max_size=4)):
        piece = pieces[name](draw(st.integers(0, 30)), draw(st.integers(0, 9)))
        mask = mask & ~piece if name == "causal" else mask ^ piece if name == "noise" else mask | piece
    return mask[rng.permutation(q_len)] if draw(st.integers(0, 9)) == 9 else mask


@given(mask=masks(), grid=st.sampled_from([None, (2, -1), (-1, 3), (2, 3, -1)]))
def test_any_mask(mask, grid):
    kv_len = mask.shape[1]
    shape = grid and tuple(-(kv_len // np.prod(grid)) if n < 0 else n for n in grid)
    fits = shape is not None and 0 < np.prod(shape) == kv_len
    found = p.discover(mask, shape if fits else None)
    assert np.array_equal(found.index_set(*mask.shape).to_dense(), mask)
    if 0 < mask.size <= 4000:
        assert plan(found, *mask.shape, tiling=Tiling(tile=(16, 64))).nnz == mask.sum()


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1), (1, 700), (700, 1), (3, 500), (500, 3)])
@pytest.mark.parametrize("value", [False, True])
def test_extreme_shapes(shape, value):
    mask = np.full(shape, value)
    assert np.array_equal(p.discover(mask).index_set(*shape).to_dense(), mask)


@pytest.mark.parametrize("share", [0.01, 0.002])
@pytest.mark.parametrize(
    "pattern",
    [p.SlidingWindow(64), p.DilatedWindow(40, dilation=4), p.BlockLocal(128), p.Columns(64, 3, 7), p.Causal()],
    ids=str,
)
def test_noise_is_listed(pattern, share):
    """The regular part is what it was; what noise has taken away is excluded, what it has added is listed."""
    clean = bits(pattern)
    noisy = clean ^ (np.random.default_rng(0).random(clean.shape) < share)
    missing, extra = (p.interop.from_pairs(*np.nonzero(pairs), N, N) for pairs in (clean & ~noisy, noisy & ~clean))
    assert p.discover(noisy) == (pattern - missing) | extra


def test_noise_on_a_grid():
    pattern = p.Neighborhood(GRID, 9)
    noisy = bits(pattern) ^ (np.random.default_rng(0).random((N, N)) < 0.002)
    found = p.discover(noisy, GRID)
    assert found.operands[0].operands[0] == pattern and np.array_equal(bits(found), noisy)


def test_what_later_patterns_cover_is_not_there_twice():
    """The columns cover most at first, until the grid's boxes are found, which the columns make no smaller."""
    pattern = p.GlobalTokens(4) | p.Neighborhood(GRID, 9)
    assert p.discover(bits(pattern), GRID) == pattern


def every_kind(mask):
    """The same pairs, in all forms in which they may come."""
    scipy_sparse, torch = pytest.importorskip("scipy.sparse"), pytest.importorskip("torch")
    pairs = p.interop.from_pairs(*np.nonzero(mask), *mask.shape)
    yield from (mask, np.asfortranarray(mask), mask[::-1][::-1], p.Mask(mask), pairs, pairs.index_set(*mask.shape))
    yield from (scipy_sparse.csr_array(mask), scipy_sparse.coo_matrix(mask.astype(float)))
    yield from (torch.tensor(mask), torch.tensor(mask).to_sparse())


def test_all_kinds_of_masks():
    mask = bits(p.longformer(32, global_tokens=3), 100, 300)
    mask[50, 7] ^= True
    assert {p.discover(each) for each in every_kind(mask)} == {p.discover(mask)}


def test_heads_and_batch_entries():
    window, dilated = bits(p.SlidingWindow(9), 90, 100), bits(p.DilatedWindow(9, dilation=4), 90, 100)
    two = p.discover(np.stack([window, dilated]))
    assert two == p.PerHead((p.discover(window), p.discover(dilated)))
    assert p.discover(np.stack([window, window])) == p.discover(window)
    four = np.stack([[window, dilated], [dilated, dilated]])
    assert p.discover(four) == p.PerBatch((two, p.discover(dilated)))
    assert p.discover(p.Mask(four)) == p.discover(four)
    for batch in range(2):
        for head in range(2):
            found = p.discover(four).index_set(90, 100, batch=batch, head=head)
            assert np.array_equal(found.to_dense(), four[batch, head])


ERRORS = [
    (np.zeros((3, 3), int), None, TypeError, "^mask: expected bool, an index set, .*, got an array of int64"),
    ("causal", None, TypeError, "^mask: expected bool, an index set, .*, got "),
    (p.Causal(), None, TypeError, "^mask: expected bool, an index set, .*, got Causal"),
    (np.ma.masked_array(np.ones((3, 3), bool)), None, TypeError, "^mask: expected a plain array"),
    (np.zeros(3, bool), None, ValueError, "^mask: expected 2-D, 3-D or 4-D"),
    (np.zeros((0, 3, 3), bool), None, ValueError, r"^mask: expected .* at least one head .*, got \(0, 3, 3\)"),
    (np.zeros((6, 6), bool), (2, 4), ValueError, r"^grid: expected a grid of 6 tokens \(kv_len\), got 2 × 4"),
    (np.zeros((6, 6), bool), (0, 6), ValueError, "^grid: expected an integer >= 1, got 0"),
    (np.zeros((1, 1), bool), (), ValueError, r"^grid: expected at least one axis, got \(\)"),
    (np.zeros((6, 6), bool), (1.5, 4), TypeError, "^grid: expected an integer, got 1.5"),
]


@pytest.mark.parametrize("mask, grid, error, message", ERRORS)
def test_errors(mask, grid, error, message):
    with pytest.raises(error, match=message):
        p.discover(mask, grid)


def peak(function, *arguments):
    tracemalloc.start()
    try:
        function(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_follows_the_pairs():
    """A few bytes a pair where runs are long, and a few times a mask's own where each pair is a run."""
    i, j = np.ogrid[:2048, :2048]
    p.discover(np.ones((2, 2), bool))  # what is imported late
    assert peak(p.discover, abs(i - j) < 100) < 2 * 2048**2
    assert peak(p.discover, i >= j) < 8 * 2048**2
    assert peak(p.discover, (i + j) % 2 == 0) < 16 * 2048**2


def test_long_sequences_of_few_pairs():
    """A million tokens, of which no dense mask fits anywhere."""
    window = p.SlidingWindow(2, 0).index_set(1 << 20, 1 << 20)
    assert p.discover(window) == p.SlidingWindow(2, 0)
