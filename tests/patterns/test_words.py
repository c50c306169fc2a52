"""The same window in other libraries' words, and compositions known by name: keys per row, computed their way."""

import numpy as np
import pytest

import spattn
from spattn import patterns as p


def keys(pattern, row, length=40):
    return pattern.index_set(length, length).row(row).tolist()


@pytest.mark.parametrize("row", [0, 3, 20, 39])
def test_windows(row):
    assert keys(p.SlidingWindow(5, 2), row) == [j for j in range(40) if -5 <= j - row <= 2]  # FlashAttention (5, 2)
    assert len(keys(p.SlidingWindow(5, 0), 20)) == 6  # attention-gym's window of 5
    mistral = [j for j in range(40) if row - 5 < j <= row]
    assert keys(p.SlidingWindow(5 - 1, 0), row) == mistral
    assert len(keys(p.Neighborhood(40, 7), row)) == 7  # NATTEN shifts, a sliding window truncates
    assert keys(p.Neighborhood(40, 7), 20) == keys(p.SlidingWindow(3), 20)
    assert keys(p.Neighborhood(40, 6), 0) == list(range(6))


def test_window_of_one_argument_is_symmetric():
    assert p.SlidingWindow(3) == p.SlidingWindow(3, 3)
    assert p.DilatedWindow(3, dilation=2) == p.DilatedWindow(3, 3, 2)
    assert p.PeriodicWindow(9, 3) == p.PeriodicWindow(9, 3, 3)
    assert p.SlidingWindow(-1) == p.SlidingWindow(-1, -1)


def test_windows_serialized_before_minus_one_meant_unbounded():
    for left, right in (("null", 0), (4, "null"), ("null", "null"), (2, 5)):
        read = p.from_json(f'{{"pattern":"sliding_window","left":{left},"right":{right}}}')
        want = p.SlidingWindow(*(-1 if side == "null" else side for side in (left, right)))
        assert read == want and repr(read) == repr(want)


def test_an_unbounded_side_is_minus_one():
    with pytest.raises(TypeError, match="^left: expected an integer, got None"):
        p.SlidingWindow(None, 0)
    with pytest.raises(ValueError, match="^right: expected an integer >= -1, got -2"):
        p.SlidingWindow(0, -2)


def test_longformer_window_counts_both_sides():
    assert len(keys(p.longformer(6), 20)) == 7


def test_longformer_is_its_composition():
    whole = p.longformer(6, 3, (0, 17)).index_set(40, 40)
    assert whole == (p.DilatedWindow(3, 3, 3) | p.GlobalTokens((0, 17))).index_set(40, 40)


def test_compositions():
    assert keys(p.chunked_causal(8), 19) == [16, 17, 18, 19]
    assert keys(p.chunked_causal(8, 5), 19) == keys(p.chunked_causal(8, 13), 19) == [13, 14, 15, 16, 17, 18, 19]
    assert keys(p.chunked_causal(8, 5), 3) == [0, 1, 2, 3] and keys(p.chunked_causal(2**70, 2**69), 2) == [0, 1, 2]
    assert keys(p.QueriesAt(p.BlockLocal(2**70, 2**70 - 2), -4), 1) == [] and keys(p.BlockLocal(2**70, 30), 31)[0] == 30
    assert keys(p.a_shape(2, 3), 19) == [0, 1, 16, 17, 18, 19]
    assert keys(p.tri_shape(2, 3, 3, 40), 36) == [0, 1, 33, 34, 35, 36]
    assert keys(p.tri_shape(2, 3, 3, 40), 37) == list(range(38))
    assert keys(p.shared_prefix(4, (10, 10)), 16) == [0, 1, 2, 3, 14, 15, 16]


def test_periodic_window_is_planned_by_places():
    """Video tokens with the same surroundings in each frame, behind a prompt."""
    prompt, frame, width = 14, 96, 8
    pattern = p.GlobalTokens(prompt) | p.PeriodicWindow(frame, width, offset=prompt)
    assert keys(pattern, 20, 14 + 2 * 96) == [*range(14), *range(14, 29), *range(110, 125)]
    plan = spattn.plan(p.PeriodicWindow(frame, width), 32 * frame)
    assert plan.efficiency > 0.5 and plan.nnz == 32**2 * (frame * (2 * width + 1) - width * (width + 1))


def test_swin_labels():
    """Swin builds its mask by numbering regions of the rolled image; the same numbers here."""
    length, w, s = 12, 4, 2
    region = np.zeros((length, length), dtype=int)
    slices = (slice(0, -w), slice(-w, -s), slice(-s, None))
    for number, (a, b) in enumerate((a, b) for a in slices for b in slices):
        region[a, b] = number
    window = np.arange(length) // w
    rolled = region * 100 + window[:, None] * 10 + window
    label = np.roll(rolled, (s, s), axis=(0, 1)).reshape(-1)
    dense = p.windowed((length, length), w, s).index_set(length**2, length**2).to_dense()
    assert np.array_equal(dense, label[:, None] == label)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_mask(causal):
    """FlashMask's intervals are rows of a square; fewer queries are its last rows (docs/decisions/008)."""
    start, stop = np.random.default_rng(0).integers(0, 13, (2, 12))
    i, j = np.ogrid[:12, :12]
    square = ~((start <= i) & (i < stop)) & (j <= i if causal else True)
    pattern = p.ColumnIntervals(start, stop, causal=causal)
    for q_len in (12, 5, 1):
        assert np.array_equal(pattern.index_set(q_len, 12).to_dense(), square[12 - q_len :])
