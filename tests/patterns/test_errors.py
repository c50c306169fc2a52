"""Parameters and lengths that do not fit."""

import json

import numpy as np
import pytest

from spattn import patterns as p


def from_data(data):
    return p.from_json(json.dumps(data))


ds = p.deepspeed

VALUES = [
    (lambda: p.longformer(3), "window: expected an even number >= 2, got 3"),
    (lambda: p.longformer(0), "window: expected an even number >= 2, got 0"),
    (lambda: p.SlidingWindow(-2), "left: expected an integer >= -1, got -2"),
    (lambda: p.DilatedWindow(1, 1, 0), "dilation: expected an integer >= 1, got 0"),
    (lambda: p.BlockLocal(0), "block: expected"),
    (lambda: p.BlockLocal(4, -1), "offset: expected an integer >= 0, got -1"),
    (lambda: p.PeriodicWindow(2**31, 1), "period: expected an integer in"),
    (lambda: p.GlobalTokens((1, -2)), "tokens: expected an integer >= 0, got -2"),
    (lambda: p.Stride(4, 4), r"offset: expected an integer in \[0, 3\], got 4"),
    (lambda: p.Columns(4, 2, 2), r"stop: expected an integer in \[3, 4\], got 2"),
    (lambda: p.fixed(4, 5), r"summary: expected an integer in \[1, 4\], got 5"),
    (lambda: p.strided(0), "stride: expected"),
    (lambda: p.prefix_lm(()), "prefix: expected"),
    (lambda: p.BigBird(0), "block: expected"),
    (lambda: p.BigBird(4, seed=-1), "seed: expected"),
    (lambda: p.axial((4, 4), 2), "axis: expected"),
    (lambda: p.axial((), 0), "grid: expected"),
    (lambda: p.windowed((4, 4), 5), "window: expected at most 4"),
    (lambda: p.windowed((4, 4), 2, 2), "shift: expected less than"),
    (lambda: p.windowed((4, 4), (2, 2, 2)), "window: expected one value or 2"),
    (lambda: p.Neighborhood((2, 2, 2, 2), 1), "grid: expected one to three axes, got 4"),
    (lambda: p.Neighborhood((8, 8), 5, dilation=2), "kernel: expected kernel"),
    (lambda: p.Neighborhood((8, 8), 3, stride=4), "stride: expected at most"),
    (lambda: p.Mask(np.ones(3, bool)), "mask: expected 2-D or 3-D or 4-D"),
    (lambda: p.BlockLayout(np.ones((2, 3), bool), 4), "layout: expected as many rows as columns"),
    (lambda: p.KeyBlocks(np.array([[-2]]), 4, 4), "blocks: expected"),
    (lambda: p.ColumnIntervals(np.zeros(3, int), np.zeros(4, int)), "stop: expected shape"),
    (lambda: p.ColumnIntervals(np.zeros(3, int), np.zeros(3, int), np.zeros(3, int)), "start2, stop2: expected both"),
    (lambda: p.PerHead(()), "patterns: expected at least one"),
    (lambda: ds.fixed(num_local_blocks=4, num_global_blocks=3), "num_global_blocks: expected a divisor of 4"),
    (lambda: ds.fixed(attention="unidirectional", horizontal_global_attention=True), "horizontal_global_attention"),
    (lambda: ds.fixed(num_different_global_patterns=5), "num_different_global_patterns: expected at most 4, got 5"),
    (lambda: ds.variable(local_window_blocks=()), "local_window_blocks: expected"),
    (lambda: ds.bslongformer(global_block_indices=(3,), global_block_end_indices=(3,)), "global_block_end_indices"),
    (lambda: ds.dense(0), "block: expected"),
    (lambda: ds.bigbird(attention="both"), "attention: expected one of"),
]
TYPES = [
    lambda: p.SlidingWindow(1.5),
    lambda: p.SlidingWindow("4"),
    lambda: p.SlidingWindow(True),
    lambda: p.GlobalTokens("abc"),
    lambda: p.GlobalTokens(2, queries=1),
    lambda: p.Documents(5),
    lambda: p.Mask(np.ones((2, 2))),
    lambda: p.KeyBlocks(np.ones((2, 2)), 4, 4),
    lambda: p.BlockLayout(np.ones((2, 2), bool), 4.0),
    lambda: p.PerHead(p.Causal()),
    lambda: p.PerHead(("causal",)),
    lambda: p.BigBird(4, causal=1),
    lambda: ds.fixed(attention=None),
    lambda: p.Causal() & np.ones((2, 2)),
]
LENGTHS = [
    (p.axial((4, 4), 0), 17, r"kv_len: expected 16 \(a grid of 4 × 4 tokens\), got 17"),
    (p.windowed((4, 4), 2), 15, "kv_len: expected 16"),
    (p.Neighborhood((4, 4), 3), 15, "kv_len: expected 16"),
    (p.Mask(np.ones((4, 5), bool)), 5, r"mask: expected shape \(..., 5, 5\), got \(4, 5\)"),
    (p.BlockLayout(np.ones((3, 3), bool), 4), 13, r"layout: expected 4 blocks \(13 tokens of 4\), got 3"),
    (p.KeyBlocks(np.zeros((3, 1), int), 4, 4), 13, "blocks: expected 4 query blocks"),
    (p.KeyBlocks(np.full((3, 1), 3), 4, 4), 12, r"blocks: expected numbers below 3 \(key blocks\), got 3"),
    (p.ColumnIntervals(np.zeros(3, int), np.zeros(3, int)), 4, "start: expected shape"),
    *(
        (p.registry.get(f"deepspeed_{n}"), 33, "kv_len: expected a multiple of 16")
        for n in ("dense", "fixed", "variable")
    ),
]


@pytest.mark.parametrize(("make", "message"), VALUES)
def test_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", TYPES)
def test_types(make):
    with pytest.raises(TypeError):
        make()


@pytest.mark.parametrize(("pattern", "length", "message"), LENGTHS)
def test_lengths(pattern, length, message):
    with pytest.raises(ValueError, match=message):
        pattern.bind(length, length)
    with pytest.raises(ValueError, match=message):
        pattern.index_set(length, length)


@pytest.mark.parametrize("pattern", [p.BigBird(4, head=0), ds.dense(), ds.fixed(), ds.variable(), ds.bslongformer()])
def test_unbound(pattern):
    with pytest.raises(ValueError, match=r"\.bind\(q_len, kv_len\)"):
        pattern.allows(np.arange(3), np.arange(3))


@pytest.mark.parametrize("pattern", [p.BigBird(4), ds.bigbird(), ds.fixed(num_different_global_patterns=2)])
def test_headless(pattern):
    with pytest.raises(ValueError, match=r"\.at\(batch, head\)"):
        pattern.bind(32, 32).allows(np.arange(3), np.arange(3))


def test_names():
    with pytest.raises(ValueError, match="expected one of"):
        p.registry.get("windowd")
    with pytest.raises(TypeError):
        p.registry.get("sliding_window", size=3)
    with pytest.raises(TypeError, match="truth value"):
        p.Causal() and p.Full()


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"pattern": 3},
        {"pattern": "nothing"},
        {"pattern": "causal", "x": 1},
        {"pattern": "sinks"},
        {"pattern": "sinks", "count": -1},
        {"pattern": "sinks", "count": 1.5},
        {"pattern": "&", "operands": []},
        {"pattern": "mask", "mask": {"array": "ff", "dtype": "bool", "shape": [3, 99]}},
        {"pattern": "mask", "mask": {"array": "zz", "dtype": "bool", "shape": [1, 1]}},
        {"pattern": "mask", "mask": {"array": "00", "dtype": "object", "shape": [1, 1]}},
        {"pattern": "mask", "mask": {"array": "00", "dtype": "bool", "shape": [1 << 40, 1 << 40]}},
        {"pattern": "mask", "mask": {"array": "00" * 4, "dtype": "int32", "shape": [1, 1]}},
        {"pattern": "per_head", "patterns": 3},
    ],
)
def test_fault_39_untrusted_data(data):
    with pytest.raises(ValueError):
        from_data(data)


def test_arrays_are_copied():
    mask = np.zeros((4, 4), dtype=bool)
    pattern = p.Mask(mask)
    mask[:] = True
    assert not pattern.mask.any()
    with pytest.raises(ValueError, match="read-only"):
        pattern.mask[0, 0] = True
    assert "bool (4, 4)" in repr(pattern)
