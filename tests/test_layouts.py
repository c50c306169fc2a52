"""The orders that axes may have, grids of tokens in them, and packed sequences: all are views of one order."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.request.call import Call
from spattn.testing import inputs

torch = pytest.importorskip("torch")
KINDS = {"numpy": lambda x: x, "torch": torch.from_numpy}
GRID = (6, 5)
NEAR = p.Neighborhood(GRID, 3)


def in_layout(x, layout, grid=()):
    """A copy of (batch, heads, length, head_dim) in another layout, as a contiguous array."""
    x = x.swapaxes(1, 2) if layout != "bhsd" else x
    if layout == "thd":
        return np.ascontiguousarray(x[0])
    tokens = grid or (x.shape[2 if layout == "bhsd" else 1],)
    shape = (*x.shape[:2], *tokens, x.shape[3]) if layout == "bhsd" else (x.shape[0], *tokens, *x.shape[2:])
    return np.ascontiguousarray(x).reshape(shape)


def rows_in_layout(x, layout, grid=()):
    """The same of (batch, heads, length)."""
    return x[0] if layout == "thd" else x.reshape(*x.shape[:2], *(grid or x.shape[2:]))


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)
        assert np.asarray(one).flags.c_contiguous


CASES = [("bshd", ()), ("thd", ()), ("bhsd", GRID), ("bshd", GRID)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "grid"), CASES)
@pytest.mark.parametrize("pattern", [NEAR, NEAR & p.Causal(), p.PerHead((NEAR, p.axial(GRID, 0)))], ids=str)
def test_both_passes_have_the_bits_of_the_usual_order(kind, layout, grid, pattern):
    """Results are in the layout of q, and lie in memory as arrays of it do."""
    q, k, v = inputs(1 if layout == "thd" else 2, 4, 2, q_len=30, head_dim=8, head_dim_v=16)
    dout, dlse = inputs(len(q), 4, q_len=30, head_dim=16, seed=1)[0], inputs(len(q), 4, q_len=30, head_dim=1)[0][..., 0]
    usual = spattn.attention(q, k, v, pattern, return_lse=True)
    gradients = spattn.attention_backward(dout, q, k, v, *usual, pattern, dlse=dlse)
    given = [KINDS[kind](in_layout(x, layout, grid)) for x in (q, k, v, dout)]
    dlse = KINDS[kind](np.ascontiguousarray(rows_in_layout(dlse, layout, grid)))
    for _ in range(2):  # the second time it is found
        out, lse = spattn.attention(*given[:3], pattern, layout=layout, return_lse=True)
        assert_same([out], [in_layout(usual[0], layout, grid)])
        assert_same([lse], [rows_in_layout(usual[1], layout, grid)])
        found = spattn.attention_backward(given[3], *given[:3], out, lse, pattern, dlse=dlse, layout=layout)
        assert_same(found, [in_layout(x, layout, grid) for x in gradients])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("layout", "grid"), CASES)
def test_backends_are_given_views(monkeypatch, backend, layout, grid):
    module, seen = {"cpu": cpu, "reference": spattn.reference}[backend], []
    prepare = module.prepare

    def noting(call, plan):
        run = prepare(call, plan)
        return lambda *operands: seen.append(operands[:3]) or run(*operands)

    monkeypatch.setattr(module, "prepare", noting)
    given = [in_layout(x, layout, grid) for x in inputs(1, 2, q_len=30, head_dim=8)]
    spattn.attention(*given, NEAR, layout=layout, backend=backend)
    ((q, k, v),) = seen
    for one, view in zip(given, (q, k, v), strict=True):
        assert view.shape == (1, 2, 30, 8) and np.shares_memory(one, view)


@given(data=st.data())
def test_arrays_of_any_strides(data):
    """Also where the axes of a grid do not follow one another in memory, as in a cropped image."""
    layout, grid = data.draw(st.sampled_from(CASES))
    q, k, v = inputs(1, 2, q_len=30, head_dim=8, seed=data.draw(st.integers(0, 9)))
    usual = spattn.attention(q, k, v, NEAR)
    given = []
    for x in (q, k, v):
        x = in_layout(x, layout, grid)
        order = data.draw(st.permutations(range(x.ndim)))
        large = np.zeros([x.shape[axis] + data.draw(st.integers(0, 2)) for axis in order], x.dtype)
        view = large[tuple(slice(x.shape[axis]) for axis in order)].transpose(np.argsort(order))
        view = view[(slice(None, None, -1),) * x.ndim] if data.draw(st.booleans()) else view
        view[...] = x
        given.append(view)
    out = spattn.attention(*given, NEAR, layout=layout)
    np.testing.assert_array_equal(out, in_layout(usual, layout, grid))


def test_layouts_of_one_shape_are_told_apart():
    """As many heads as tokens: the arrays say nothing of their layout, and what was prepared for one is not taken."""
    q, k, v = inputs(1, 6, q_len=6, head_dim=8)
    swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
    for _ in range(2):
        out = spattn.attention(q, k, v, "causal")
        np.testing.assert_array_equal(spattn.attention(*swapped, "causal", layout="bshd").swapaxes(1, 2), out)
        assert (spattn.attention(q, k, v, "causal", layout="bshd") != out).any()


def test_layouts_are_prepared_once(monkeypatch):
    calls, prepare = [], cpu.prepare
    monkeypatch.setattr(cpu, "prepare", lambda call, plan: calls.append(call) or prepare(call, plan))
    spattn.clear_plan_cache()
    q = np.ones((1, 9, 9, 8), np.float32)  # fewer queries are planned by their rows
    for layout in ("bhsd", "bshd") * 2:
        spattn.attention(q, q, q, "causal", layout=layout)
    assert len(calls) == 2


def test_jax_arrays_in_other_layouts():
    asarray = pytest.importorskip("jax").numpy.asarray
    q, k, v = inputs(1, 2, q_len=30, head_dim=8)
    for layout, grid in CASES:
        out = spattn.attention(*(asarray(in_layout(x, layout, grid)) for x in (q, k, v)), NEAR, layout=layout)
        usual = spattn.attention(q, k, v, NEAR)
        np.testing.assert_array_equal(np.asarray(out), in_layout(usual, layout, grid))


@pytest.mark.parametrize(
    ("layout", "shape", "grid"),
    [("bhsd", (2, 4, 30, 8), ()), ("bshd", (2, 30, 4, 8), ()), ("bshd", (2, *GRID, 4, 8), GRID)],
)
def test_plans_of_arrays_in_other_layouts(layout, shape, grid):
    q = np.zeros(shape, np.float32)
    like = (np.zeros((2, 4, 30, 8), np.float32),) * 3
    assert spattn.plan_for(NEAR, q, q, q, layout=layout) is spattn.plan_for(NEAR, *like)
    assert Call.of(q, q, q, layout=layout).out_shape == (2, 4, 30, 8)


def test_a_plan_as_the_pattern_of_a_grid():
    q, k, v = inputs(1, 2, q_len=30, head_dim=8)
    given = [in_layout(x, "bhsd", GRID) for x in (q, k, v)]
    out = spattn.attention(*given, spattn.plan(NEAR, 30))
    np.testing.assert_array_equal(out, in_layout(spattn.attention(q, k, v, spattn.plan(NEAR, 30)), "bhsd", GRID))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_lens", "kv_lens"), [((5, 1, 24), None), ((3, 7, 0, 2), (9, 7, 4, 2)), ((4,), (6,))])
def test_packed_sequences_are_those_of_single_calls(causal, q_lens, kv_lens):
    """Forward and backward, with other numbers of keys than of queries."""
    kv_lens = q_lens if kv_lens is None else kv_lens
    cu_q, cu_kv = (np.cumsum((0, *lengths)) for lengths in (q_lens, kv_lens))
    q, dout = inputs(1, 4, q_len=int(cu_q[-1]), head_dim=8)[:2]
    k, v = inputs(1, 2, q_len=int(cu_kv[-1]), head_dim=8, seed=1)[:2]
    q, dout, k, v = (in_layout(x, "thd") for x in (q, dout, k, v))
    pattern = p.interop.from_flash_attention(causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_kv)
    if not causal:
        pattern = p.Documents.from_cu_seqlens(cu_q, cu_kv)
    out, lse = spattn.attention(q, k, v, pattern, layout="thd", return_lse=True)
    gradients = spattn.attention_backward(dout, q, k, v, out, lse, pattern, layout="thd")
    for n in range(len(q_lens)):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_kv[n], cu_kv[n + 1])
        one = (q[None, rows], k[None, keys], v[None, keys])
        alone, own = "causal" if causal else "full", {"layout": "bshd", "backend": "reference"}
        expected = spattn.attention(*one, alone, return_lse=True, **own)
        np.testing.assert_allclose(out[rows], expected[0][0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[:, rows], expected[1][0], rtol=1e-4, atol=1e-5)
        found = gradients[0][rows], gradients[1][keys], gradients[2][keys]
        for x, y in zip(found, spattn.attention_backward(dout[None, rows], *one, *expected, alone, **own), strict=True):
            np.testing.assert_allclose(x, y[0], rtol=1e-4, atol=1e-5)


def ones(*shape):
    return np.ones(shape, np.float32)


IMAGE = ones(1, 2, *GRID, 8)


@pytest.mark.parametrize(
    ("operands", "pattern", "layout", "message"),
    [
        (
            (ones(2, 3, 4),) * 3,
            "full",
            "bhsd",
            r"q: expected shape \(batch, heads, length, head_dim\) in layout 'bhsd'",
        ),
        (
            (ones(2, 3, 4),) * 3,
            "full",
            "bshd",
            r"q: expected shape \(batch, length, heads, head_dim\) in layout 'bshd'",
        ),
        ((ones(1, 2, 3, 4),) * 3, "full", "thd", r"q: expected shape \(total, heads, head_dim\) in layout 'thd', got"),
        ((ones(1, 9, 2, 4), ones(9, 2, 4), ones(9, 2, 4)), "full", "bshd", r"k: expected shape \(batch, length, "),
        ((ones(1, 9, 2, 4), ones(1, 9, 2, 5), ones(1, 9, 2, 4)), "full", "bshd", r"k: expected shape \(1, 9, 2, 4\), "),
        ((ones(1, 9, 2, 4), ones(1, 8, 2, 4), ones(1, 9, 2, 4)), "full", "bshd", r"v: expected shape \(1, 8, 2, 4\), "),
        ((ones(9, 2, 4), ones(8, 2, 4), ones(9, 2, 4)), "full", "thd", r"v: expected shape \(8, 2, 4\), got \(9, 2, 4"),
        ((IMAGE, IMAGE[:, :, 1:], IMAGE), NEAR, "bhsd", r"k: expected shape \(1, 2, 6, 5, 8\), got \(1, 2, 5, 5, 8\)"),
        ((IMAGE, IMAGE[:, :, 0], IMAGE), NEAR, "bhsd", r"k: expected shape \(batch, heads, \*grid, head_dim\) in lay"),
        ((IMAGE.swapaxes(2, 3),) * 3, NEAR, "bhsd", r"q: expected the grid of the pattern, \(6, 5\); got \(5, 6\)"),
        ((IMAGE,) * 3, NEAR, "bshd", r"q: expected the grid of the pattern, \(6, 5\); got \(2, 6\)"),
        ((IMAGE,) * 3, "full", "bhsd", "q: expected the grid of the pattern, one axis of tokens, because the pattern "),
        ((IMAGE,) * 3, np.ones((30, 30), bool), "bhsd", "q: expected the grid of the pattern, one axis of tokens, "),
        ((IMAGE,) * 3, p.QueriesAt(NEAR, 0), "bhsd", "q: expected the grid of the pattern, one axis of tokens, "),
        ((IMAGE,) * 3, NEAR | p.axial((5, 6), 0), "bhsd", r"the pattern, \(5, 6\) and \(6, 5\); got \(6, 5\)"),
        ((IMAGE,) * 3, spattn.plan(p.Full(), 30), "bhsd", "q: expected the grid of the pattern, one axis of tokens, "),
        ((IMAGE,) * 3, NEAR, "bdsh", "layout: expected one of 'bhsd', 'bshd', 'thd'; got 'bdsh'"),
        (
            (ones(9, 2, 4),) * 3,
            p.Documents(((4, 5), (9,))),
            "thd",
            "pattern: expected one for 1 batch entries, got one",
        ),
    ],
)
def test_what_does_not_fit_the_layout(operands, pattern, layout, message):
    with pytest.raises(ValueError, match=message):
        spattn.attention(*operands, pattern, layout=layout)
    if isinstance(pattern, p.Pattern):
        with pytest.raises(ValueError, match=message):
            spattn.plan_for(pattern, *operands, layout=layout)


@pytest.mark.parametrize("layout", [None, 3, ["bhsd"], ("b", "n")])
def test_a_layout_that_is_no_name(layout):
    q = np.ones((1, 2, 3, 4), np.float32)
    with pytest.raises(TypeError, match="^layout: expected a name, got "):
        spattn.attention(q, q, q, layout=layout)
    with pytest.raises(TypeError, match="^layout: expected a name, got "):
        spattn.attention_backward(q, q, q, q, q, q[..., 0], layout=layout)
    with pytest.raises(TypeError, match="^layout: expected a name, got "):
        spattn.plan_for(p.Full(), q, q, q, layout=layout)


def test_a_plan_of_lengths_has_no_layout():
    with pytest.raises(TypeError, match="unexpected keyword argument 'layout'"):
        spattn.plan(p.Full(), 10, layout="bshd")


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_results_of_another_shape_are_named_as_they_were_given(name):
    q = in_layout(inputs(1, 2, q_len=30, head_dim=8)[0], "bshd", GRID)
    out, lse = spattn.attention(q, q, q, NEAR, layout="bshd", return_lse=True)
    given = {"dout": out, "out": out, "lse": lse, "dlse": lse}
    shape = given[name].shape
    given[name] = given[name][:, 1:]
    with pytest.raises(ValueError, match=rf"^{name}: expected shape \({', '.join(map(str, shape))}\), got "):
        spattn.attention_backward(
            given["dout"], q, q, q, given["out"], given["lse"], NEAR, dlse=given["dlse"], layout="bshd"
        )


def test_calls_of_no_token():
    for layout, shape in (("bshd", (2, 0, 3, 4)), ("thd", (0, 3, 4)), ("bshd", (0, 5, 3, 4))):
        q = np.ones(shape, np.float32)
        out, lse = spattn.attention(q, q, q, layout=layout, return_lse=True)
        assert out.shape == shape and lse.size == math.prod(shape[:-1])
