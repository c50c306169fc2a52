"""The CPU takes boxes of queries where these are cheaper, the default tile elsewhere, and always the same ones."""

import math

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as sp
from spattn.choose import machine_cpu
from spattn.choose.chooser import How, Sizes, best
from spattn.choose.features_cpu import Counts, count_rows
from spattn.choose.machine_cpu import few_of, processor
from spattn.cpu import TILE
from spattn.request.call import Call
from spattn.schedule import compiler

IMAGE, WINDOWS = sp.Neighborhood((56, 56), 7), sp.windowed((56, 56), 7)


def arrays(tokens, dtype=np.float32, heads=2, head_dim=32):
    return np.random.default_rng(0).standard_normal((3, 1, heads, tokens, head_dim)).astype(dtype)


def paid(pattern, tokens, **how):
    return spattn.plan_for(pattern, *tuple(arrays(tokens, **how)), backend="cpu")


@pytest.mark.parametrize(("pattern", "least"), [(IMAGE, 0.7), (WINDOWS, 0.7), (sp.windowed((56, 56), 7, 3), 0.5)])
def test_the_efficiency_that_is_paid_for_an_image(pattern, least):
    """Of a plan whose rows are computed a few at once: the share of what these meet."""
    plan = paid(pattern, 3136)
    few = plan.block_q <= few_of(cpu._default_isa(), "float32")
    computed = count_rows(plan, Sizes(1, 1, 1, 32, 32), lanes=1).weights if few else plan.nnz / plan.efficiency
    assert plan.nnz / computed >= least


@pytest.mark.parametrize(
    "pattern", [sp.SlidingWindow(8), sp.strided(64), sp.axial((56, 56), 0), IMAGE & sp.Causal(), sp.Causal()]
)
def test_other_patterns_have_the_default_tile(pattern):
    assert paid(pattern, 3136).tile == TILE


def test_boxes_that_cost_more_are_not_taken(monkeypatch):
    """The default is priced as the candidates are: where it is free, it stays."""
    spattn.clear_plan_cache()

    def priced(counts, _):
        return counts.gathered if isinstance(counts, Counts) else counts.products

    monkeypatch.setattr(machine_cpu, "predicted_ms", priced)
    assert paid(IMAGE, 3136).tile == TILE
    spattn.clear_plan_cache()  # which keeps the choice


@pytest.mark.parametrize(("kernel", "small"), [(7, True), (37, False)])
def test_small_neighbourhoods_have_small_boxes_in_the_forward_alone(kernel, small):
    """Four queries share most of few keys. The backward computes vectors of queries."""
    pattern, call = sp.Neighborhood((56, 56), kernel), Call.of(*arrays(3136))
    forward, backward = (cpu.plan_for(pattern, call, backward=backward) for backward in (False, True))
    assert backward.block_q >= 17
    assert forward.block_q <= 16 if small else forward is backward


@pytest.mark.parametrize("head_dim", [33, 32])
def test_small_boxes_are_for_rows_of_whole_vectors(head_dim):
    """Others would be copied for each box."""
    assert (paid(IMAGE, 3136, head_dim=head_dim).block_q <= 16) == (head_dim == 32)


@pytest.mark.parametrize(
    ("isa", "kernel", "shape"),
    [
        ("avx512", 3, ((8, 2), 64)),  # in boxes of 2 x 2 queries 1.3 times as long, of 1 x 4 1.6 times
        ("avx512", 5, ((4, 4), 64)),  # of 2 x 2 1.2 to 1.3 times
        ("avx512", 7, ((8, 2), 128)),  # of 2 x 2 1.1 to 1.2 times
        ("avx512", 13, ((1, 4), 64)),
        ("avx2", 3, ((4, 2), 64)),  # of 2 x 2 1.2 times
        ("avx2", 7, ((4, 2), 128)),  # of 2 x 2 1.0 to 1.1 times, of 2 x 4, which meets as many, 1.2 times
    ],
)
@pytest.mark.parametrize("grid", [(56, 56), (24, 24), (16, 16)])
def test_the_boxes_of_few_queries_are_those_that_were_measured_to_be_fast(isa, grid, kernel, shape):
    """Of those that cost the same the largest, if its keys are one tile. Their cost is expected before any is planned;
    beside the borders of narrow grids many meet fewer keys than elsewhere."""
    plan, own = compiler.plan(sp.Neighborhood(grid, kernel), math.prod(grid), tile=TILE), processor(isa, "float32")
    found = own.in_boxes(plan, Sizes(1, 8, 8, 32, 32), workers=1)
    assert [(how.box, how.tile[1]) for how in found if how.tile[0] <= own.few] == [shape]


@pytest.mark.parametrize(
    ("pattern", "tokens", "few", "box"),
    [
        (sp.Neighborhood((64, 64), 13), 4096, False, None),  # 4.0 ms; in boxes of four queries 6.3
        (WINDOWS, 3136, False, (7, 7)),  # 0.92 ms; in boxes of sixteen 1.69
        (sp.windowed((48, 48), 12), 2304, False, (6, 12)),  # 1.55 ms; in boxes of four 2.86
        (sp.Neighborhood((56, 56), 3), 3136, True, None),
    ],
)
def test_what_was_measured_to_be_fast_where_bfloat16_is_multiplied_by_vectors(pattern, tokens, few, box):
    """Two heads, head_dim 64, on a processor that has no better instructions for it."""
    plan, own = compiler.plan(pattern, tokens, heads=2, tile=TILE), processor("avx512bf16", "bfloat16")
    how = best(plan, How(TILE), Sizes(1, 2, 2, 64, 64), own)
    assert (how.box is not None and how.tile[0] <= own.few) == few
    assert box is None or how.box == box


def test_the_gradients_have_the_plan_of_the_backward(monkeypatch):
    asked = []
    own = cpu.plan_for
    monkeypatch.setattr(
        cpu, "plan_for", lambda *a, backward=False, **how: asked.append(backward) or own(*a, backward=backward, **how)
    )
    q, k, v = arrays(3136, head_dim=16)
    spattn.clear_plan_cache()
    out, lse = spattn.attention(q, k, v, IMAGE, return_lse=True)
    spattn.attention_backward(q, q, k, v, out, lse, IMAGE)
    assert asked == [False, True]


def test_large_grids_are_planned_once(monkeypatch):
    made = []
    monkeypatch.setattr(compiler, "_compile", lambda *key, own=compiler._compile: made.append(key) or own(*key))
    spattn.clear_plan_cache()
    paid(sp.Neighborhood((600, 600), 7), 600 * 600, heads=1, head_dim=1)
    assert len(made) == 1
    paid(WINDOWS, 3136)
    assert 2 <= len(made) - 1 <= 4
    before = len(made)
    paid(WINDOWS, 3136)
    assert len(made) == before


@pytest.mark.parametrize("pattern", [IMAGE, WINDOWS])
def test_results_and_gradients_are_those_of_the_default(pattern):
    q, k, v = arrays(3136, np.float64, head_dim=8)
    default = spattn.plan(pattern, 3136, tiling=spattn.Tiling(tile=TILE))
    results = []
    for how in (pattern, default):
        out, lse = spattn.attention(q, k, v, how, return_lse=True, backend="cpu")
        results.append((out, lse, *spattn.attention_backward(q, q, k, v, out, lse, how, backend="cpu")))
    for one, other in zip(*results, strict=True):
        assert np.allclose(one, other, rtol=1e-9, atol=1e-11)
