"""Boxes of few queries against the oracle, on every instruction set."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import spattn
from spattn import cpu, patterns
from spattn.testing import DTYPES, LAYOUTS, Expectation, at_protected_page, inputs

ISAS = cpu.instruction_sets()
IMAGE = patterns.Neighborhood((9, 13), 5)


def planned(pattern, tokens, box=(2, 2), block_kv=64):
    return spattn.plan(pattern, tokens, tiling=spattn.Tiling(tile=(math.prod(box), block_kv), box=box), heads=2)


def check(q, k, v, pattern, box=(2, 2), block_kv=64):
    """The forward of every instruction set is within its error bound."""
    made, scale = planned(pattern, q.shape[2], box, block_kv), q.shape[3] ** -0.5
    assert len(made.components) > 1, "keys of their own for each box"
    expectation = Expectation(pattern, q, k, v, scale)
    for isa in ISAS:
        expectation.check(*cpu.forward(q, k, v, made, scale, isa=isa), isa)


@pytest.mark.parametrize("head_dim", [1, 16, 40, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dtype, head_dim):
    """Rows of whole vectors are read in place, others copied; K and V are not alike."""
    check(*inputs(1, 2, 1, q_len=117, head_dim=head_dim, head_dim_v=80 - head_dim, dtype=dtype), IMAGE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype, layout):
    check(*inputs(1, 2, q_len=117, head_dim=32, dtype=dtype, layout=layout), IMAGE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_nothing_beyond_the_arrays(dtype):
    for head_dim in (64, 18):
        arrays = inputs(1, 2, q_len=117, head_dim=head_dim, dtype=dtype)
        check(*map(at_protected_page, arrays), IMAGE)
        check(*(at_protected_page(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1] for x in arrays), IMAGE)
    odd = inputs(1, 2, q_len=112, head_dim=64, dtype=dtype)
    check(*(at_protected_page(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1] for x in odd), patterns.Neighborhood((8, 14), 7))


@pytest.mark.parametrize("side", [(3, 3), (5, 5), (7, 7), (9, 9), (11, 11), (7, 1), (5, 3)])
@pytest.mark.parametrize("box", [(4, 2), (2, 2), (2, 1), (1, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lines_that_only_some_queries_of_a_box_reach(dtype, box, side):
    """Lines of whole vectors of keys and of less, at even and at odd keys, with and without room between them."""
    pattern = patterns.Neighborhood((12, 21), side)
    check(*inputs(1, 2, q_len=252, head_dim=24, dtype=dtype), pattern, box, 192)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lines_shorter_than_a_vector_that_follow_each_other(dtype):
    """What a line's last vector has more lanes than keys lies on the cells of a line that not all queries reach."""
    pattern = patterns.Neighborhood((24, 6), (19, 1))
    assert [1, 32, 2] in planned(pattern, 144).views["box"].tolist()
    check(*inputs(1, 2, q_len=144, head_dim=24, dtype=dtype), pattern)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "large"), [("float32", 1.0), ("float64", 0.5)])
def test_sums_out_of_range(dtype, large, isa):
    """A sum of weights times V is infinite before it is divided, in some rows of those that are computed together.
    `large`: a share of the largest number; the sum of float64 that is done again, divided first, may round up."""
    q, k, v = inputs(1, 2, q_len=117, head_dim=32, dtype=dtype)
    v[:, :, 30:32] = large * np.finfo(dtype).max
    out, lse = cpu.forward(q, k, v, planned(IMAGE, 117), 0.01, isa=isa)
    assert np.isfinite(out).all()
    Expectation(IMAGE, q, k, v, 0.01).check(out, lse, isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_boxes_whose_rows_attend_to_other_tiles_too(dtype):
    """What is computed for them are parts of results."""
    pattern = IMAGE | patterns.GlobalTokens([5])
    work = planned(pattern, 117).work
    assert np.any((work["end"] - work["begin"] == 1) & (work["slot"] >= 0))
    check(*inputs(1, 2, q_len=117, head_dim=32, dtype=dtype), pattern)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_attend_to_nothing(dtype, isa):
    """Of the boxes whose queries are in the fifth and the sixth line the latter see no key of the first three."""
    pattern = IMAGE & patterns.Columns(117, 0, 39)
    made, arrays = planned(pattern, 117), inputs(1, 2, q_len=117, head_dim=32, dtype=dtype)
    assert np.all(made.work["end"] - made.work["begin"] == 1)
    Expectation(pattern, *arrays, 0.2).check(*cpu.forward(*arrays, made, 0.2, isa=isa), isa)


@settings(deadline=None)
@given(st.data())
def test_any_grid(data):
    """Tiles of keys with padding along every axis, in one or several tiles, and rows of queries that are padding."""
    axes = data.draw(st.integers(2, 3))
    grid = tuple(data.draw(st.integers(3, 9 if axes == 2 else 6)) for _ in range(axes))
    box = tuple(data.draw(st.integers(1, 4 if axes == 2 else 2)) for _ in range(axes))
    dilation = data.draw(st.integers(1, 2))
    fitting = [side for side in (1, 3, 5, 7) if side * dilation <= min(grid)]
    pattern = patterns.Neighborhood(grid, data.draw(st.sampled_from(fitting)), dilation=dilation)
    arrays = inputs(
        1,
        2,
        q_len=math.prod(grid),
        head_dim=data.draw(st.sampled_from([3, 16, 32])),
        dtype=data.draw(st.sampled_from(sorted(DTYPES))),
    )
    made = planned(pattern, math.prod(grid), box, data.draw(st.sampled_from([64, 128])))
    expectation = Expectation(pattern, *arrays, 0.3)
    for isa in ISAS:
        expectation.check(*cpu.forward(*arrays, made, 0.3, isa=isa), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_hidden_values_reach_no_row(isa):
    """What is NaN reaches the rows that may attend to it: not the others of their box, and none by way of padding."""
    q, k, v = inputs(1, 2, q_len=117, head_dim=32)
    made, clean = planned(IMAGE, 117), cpu.forward(q, k, v, planned(IMAGE, 117), 0.2, isa=isa)
    for key in (0, 12, 60, 116):
        poisoned = v.copy()
        poisoned[:, :, key] = np.nan
        out, lse = cpu.forward(q, k, poisoned, made, 0.2, isa=isa)
        sees = np.array([IMAGE.bind(117, 117).allows(np.array(row), np.array(key)) for row in range(117)])
        assert np.isnan(out[:, :, sees]).all()
        for found, expected in zip((out, lse), clean, strict=True):
            assert np.array_equal(found[:, :, ~sees], expected[:, :, ~sees])


@pytest.mark.parametrize(
    "pattern",
    [
        patterns.Neighborhood((9, 40), 9),
        patterns.Neighborhood((9, 13), 3),
        patterns.Neighborhood((16, 16), 5, dilation=2),
    ],
    ids=["over blocks of keys", "with gaps", "no neighbours"],
)
def test_lines(pattern):
    arrays = inputs(1, 2, q_len=math.prod(pattern.grid), head_dim=32)
    check(*arrays, pattern)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [100, 333])
def test_lines_of_several_tiles(dtype, tokens):
    """Long lines whose tiles follow each other; heads that share them."""
    arrays = inputs(1, 4, 2, q_len=tokens, head_dim=20, head_dim_v=32, dtype=dtype)
    pattern = patterns.SlidingWindow(70, 50)
    made = spattn.plan(pattern, tokens, tiling=spattn.Tiling(tile=(4, 64)), heads=4)
    expectation = Expectation(pattern, *arrays, 0.3)
    for isa in ISAS:
        expectation.check(*cpu.forward(*arrays, made, 0.3, isa=isa), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_hidden_keys_reach_no_row(isa):
    """The same of K, where keys that are neighbours share vectors."""
    q, k, v = inputs(1, 2, q_len=117, head_dim=32)
    made, clean = planned(IMAGE, 117), cpu.forward(q, k, v, planned(IMAGE, 117), 0.2, isa=isa)
    for key, value in ((0, np.nan), (12, np.inf), (63, np.nan), (64, -np.inf), (116, np.nan)):
        poisoned = k.copy()
        poisoned[:, :, key] = value
        out, lse = cpu.forward(q, poisoned, v, made, 0.2, isa=isa)
        sees = np.array([IMAGE.bind(117, 117).allows(np.array(row), np.array(key)) for row in range(117)])
        assert np.isnan(lse[:, :, sees]).all() or not np.isnan(value)
        for found, expected in zip((out, lse), clean, strict=True):
            assert np.array_equal(found[:, :, ~sees], expected[:, :, ~sees])


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
@pytest.mark.parametrize("isa", ISAS)
def test_thread_count_does_not_change_the_result(isa):
    arrays = inputs(1, 6, 3, q_len=40 * 30, head_dim=64)
    made, results = (
        spattn.plan(patterns.Neighborhood((40, 30), 7), 1200, tiling=spattn.Tiling(tile=(4, 64), box=(2, 2)), heads=6),
        [],
    )
    for threads in (1, 2, 3):
        with threadpool_limits(threads, user_api="openmp"):
            results.append(cpu.forward(*arrays, made, 0.1, isa=isa))
    for out, lse in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(lse, results[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "box"),
    [(7, (8, 2)), (5, (4, 4)), (5, (8, 2)), (5, (2, 8)), (3, (8, 2)), (3, (1, 16)), (7, (4, 2)), (7, (3, 2))],
    ids=str,
)
def test_rows_meet_the_keys_that_they_reach(dtype, kernel, box):
    """Rows that are computed at once reach some lines of a tile: lines of whole runs of keys, and others."""
    arrays = inputs(1, 2, 1, q_len=12 * 19, head_dim=32, dtype=dtype)
    check(*arrays, patterns.Neighborhood((12, 19), kernel), box, 128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_reach_the_end_of_lines_with_gaps(dtype):
    """Queries of two windows: the keys of the second one begin a vector and more behind the beginning of a line."""
    arrays = inputs(1, 2, 1, q_len=240, head_dim=32, dtype=dtype)
    check(*arrays, patterns.windowed((6, 40), (3, 20)), (1, 16), 256)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("box", [(8, 2), (4, 4), (2, 8), (2, 2)])
def test_hidden_values_of_a_larger_box_reach_no_row(isa, box):
    """What lies beyond the keys that some rows reach is not read for them; nor is what one box reaches for others."""
    pattern, bound = patterns.Neighborhood((16, 14), 5), patterns.Neighborhood((16, 14), 5).bind(224, 224)
    q, k, v = inputs(1, 2, q_len=224, head_dim=32)
    made = planned(pattern, 224, box, 128)
    clean = cpu.forward(q, k, v, made, 0.2, isa=isa)
    for key in (0, 40, 113, 223):
        poisoned = [x.copy() for x in (k, v)]
        for x in poisoned:
            x[:, :, key] = np.nan
        found = cpu.forward(q, *poisoned, made, 0.2, isa=isa)
        sees = np.array([bound.allows(np.array(row), np.array(key)) for row in range(224)])
        assert np.isnan(found[0][:, :, sees]).all()
        for one, expected in zip(found, clean, strict=True):
            assert np.array_equal(one[:, :, ~sees], expected[:, :, ~sees])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [32, 64, 200])
def test_where_rows_lie_does_not_change_the_result(isa, head_dim):
    """Rows of Q, V and O in place or copied: features that are no neighbours, and rows that lie on odd addresses."""
    q, k, v = inputs(1, 2, q_len=117, head_dim=head_dim)
    made = planned(IMAGE, 117, (4, 2), 128)
    expected = cpu.forward(q, k, v, made, 0.2, isa=isa)
    apart = [np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (q, k, v)]
    odd = [np.frombuffer(b"-" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape) for x in (q, k, v)]
    for copies in (apart, odd, (apart[0], k, v), (odd[0], k, v), (q, k, apart[2])):
        for found, one in zip(cpu.forward(*copies, made, 0.2, isa=isa), expected, strict=True):
            assert np.array_equal(found, one)


def test_boxes_that_see_fewer_lines_follow_others():
    """Ten boxes side by side, four of which are computed together: two inside the image, and two at its last line."""
    check(*inputs(1, 2, q_len=320, head_dim=32), patterns.Neighborhood((16, 20), 7), (4, 2), 128)
