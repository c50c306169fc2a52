"""Every host backend and every instruction set of this machine against the reference, within the error budget."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import spattn
from spattn import cpu, patterns, reference
from spattn.testing import DTYPES, LAYOUTS, Expectation, assert_within_bound, execute, inputs
from spattn.testing.strategies import Case, Sizes, cases, compositions, problems

ISAS = cpu.instruction_sets()
NAMES = patterns.registry.names()


def fewer(share: int):
    """The profile's number of examples divided by `share`, for what costs more."""
    return settings(max_examples=max(5, settings.default.max_examples // share))


def on(isa):
    """forward(q, k, v, pattern, scale) of one instruction set."""

    def forward(q, k, v, pattern, scale):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return cpu.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cpu"), scale, isa=isa)

    return forward


def check_backend(pattern, q, k, v, scale=None, isas=ISAS, what=""):
    """Every instruction set against one expectation."""
    expectation = Expectation(pattern, q, k, v, scale)
    for isa in isas:
        expectation.check(*on(isa)(q, k, v, pattern, scale), f"{isa} {what}")


def make(problem):
    return inputs(*problem.shape, dtype=problem.dtype, layout=problem.layout, seed=problem.seed)


@pytest.mark.parametrize("dtype", DTYPES)
@fewer(4)
@given(data=st.data())
def test_every_instruction_set_and_dtype(dtype, data):
    problem = data.draw(problems(dtype=dtype))
    check_backend(problem.case.pattern, *make(problem))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@fewer(40)
@given(data=st.data())
def test_every_pattern(name, dtype, data):
    problem = data.draw(problems(cases(name), dtype=dtype))
    check_backend(problem.case.pattern, *make(problem))


@pytest.mark.parametrize("head_dim", [1, 3, 8, 16, 40, 64, 72, 96, 128, 192, 250, 256, 257, 512, 1000])
def test_every_head_dim(head_dim):
    for dtype in DTYPES:
        for head_dim_v in (head_dim, 24):
            q, k, v = inputs(1, 2, 1, 70, 90, head_dim, head_dim_v, dtype=dtype)
            check_backend(patterns.SlidingWindow(17, 5), q, k, v)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    """Strides change nothing but the address: the same values laid out plainly give the same bits."""
    for dtype in DTYPES:
        laid = inputs(2, 4, 2, 50, 66, 24, 16, dtype=dtype, layout=layout)
        plain = [np.ascontiguousarray(x) for x in laid]
        pattern = patterns.DilatedWindow(4, 4, 3)
        check_backend(pattern, *laid, what=layout)
        for isa in ISAS:
            for a, b in zip(on(isa)(*laid, pattern, None), on(isa)(*plain, pattern, None), strict=True):
                assert np.array_equal(a, b)


@fewer(5)
@given(case=cases() | compositions(), scale=st.sampled_from([0.0, -0.5, 1e-3, 3.0]))
@example(case=Case(patterns.DilatedWindow(1, 1, 116), Sizes(2, 2, 1, 73, 119)), scale=3.0)  # 12 rows have two keys
@example(case=Case(patterns.Full(), Sizes(2, 2, 1, 1, 128)), scale=3.0)  # one of four rows is near a tie
def test_any_scale(case, scale):
    q, k, v = inputs(*case.sizes, 16)
    check_backend(case.pattern, q, k, v, scale)


@pytest.mark.parametrize("isa", ISAS)
@fewer(5)
@given(data=st.data())
def test_plans_of_any_tile_shape_and_any_number_of_pieces(isa, data):
    """The contract, not only the plans that the backend asks for: any tile shape, many merges."""
    case = data.draw(cases(max_len=300) | compositions(max_len=300))
    s = case.sizes
    tile = data.draw(st.sampled_from([(128, 64), (64, 128), (16, 64), (7, 192), (1, 64)]))
    made = spattn_plan(case.pattern, s, tile, workers=1000)
    q, k, v = inputs(*s, 16)
    out, lse = cpu.forward(q, k, v, made, 0.4, isa=isa)
    expected = execute(made, q, k, v, 0.4)
    np.testing.assert_allclose(out, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5)


def spattn_plan(pattern, s, tile, workers):
    return spattn.plan(
        pattern, s.q_len, s.kv_len, tiling=spattn.Tiling(tile=tile, workers=workers), batch=s.batch, heads=s.heads_q
    )


@pytest.mark.parametrize("isa", ISAS)
@fewer(5)
@given(case=cases(max_len=100) | compositions(max_len=100), data=st.data())
def test_keys_that_are_not_allowed_change_nothing(isa, case, data):
    """Bit by bit, whatever stands there: NaN, Inf or the largest numbers."""
    q, k, v = inputs(*case.sizes, 16)
    before = on(isa)(q, k, v, case.pattern, None)
    sets = reference_rows(case)
    filler = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, np.finfo(np.float32).max]))
    head, row = data.draw(st.integers(0, case.sizes.heads_q - 1)), data.draw(st.integers(0, case.sizes.q_len - 1))
    batch = data.draw(st.integers(0, case.sizes.batch - 1))
    unseen = np.setdiff1d(np.arange(case.sizes.kv_len), sets[batch, head].row(row))
    kv = head // (case.sizes.heads_q // case.sizes.heads_kv)
    k[batch, kv, unseen], v[batch, kv, unseen] = filler, filler
    after = on(isa)(q, k, v, case.pattern, None)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a[batch, head, row], b[batch, head, row], rtol=2e-5, atol=2e-6)


def reference_rows(case):
    s = case.sizes
    made, index = reference._index_sets(case.pattern, s.batch, s.heads_q, s.q_len, s.kv_len)
    return {(b, h): made[n] for (b, h), n in np.ndenumerate(np.broadcast_to(index, (s.batch, s.heads_q)))}


@pytest.mark.parametrize("isa", ISAS)
@fewer(8)
@given(problem=problems(layout=("contiguous",) * 3))
def test_batch_and_heads_may_be_permuted(isa, problem):
    """Where the pattern does not tell them apart, each head is computed alone: the same bits in any company."""
    pattern = problem.case.pattern
    if pattern.sizes() != (1, 1):
        return
    q, k, v = make(problem)
    out, lse = on(isa)(q, k, v, pattern, None)
    group = q.shape[1] // k.shape[1]
    q = q.reshape(q.shape[0], k.shape[1], group, *q.shape[2:])[::-1, ::-1].reshape(q.shape)
    again = on(isa)(np.ascontiguousarray(q), k[::-1, ::-1], v[::-1, ::-1], pattern, None)
    for a, b in zip(again, (out, lse), strict=True):
        a = a.reshape(a.shape[0], k.shape[1], group, *a.shape[2:])[::-1, ::-1].reshape(a.shape)
        assert np.array_equal(a, b, equal_nan=False)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_bit_by_bit(isa, dtype):
    q, k, v = inputs(2, 4, 2, 500, 500, 32, dtype=dtype)
    pattern = patterns.longformer(40, global_tokens=(0, 1, 200))
    first = on(isa)(q, k, v, pattern, None)
    for _ in range(3):
        assert all(np.array_equal(a, b) for a, b in zip(on(isa)(q, k, v, pattern, None), first, strict=True))


def test_long_lists_are_split_and_merged():
    """One query block over many keys: more pieces than threads, and a merge of each row."""
    q, k, v = inputs(1, 1, 1, 40, 6000, 32)
    made = spattn.plan_for(patterns.Full(), q, k, v, backend="cpu")
    assert made.slots > 1
    check_backend(patterns.Full(), q, k, v)


def test_unknown_instruction_set():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="isa|instruction"):
        on("mmx")(q, k, v, patterns.Full(), None)


@fewer(4)
@given(problem=problems())
def test_reference_backend_is_within_its_own_budget(problem):
    q, k, v = make(problem)
    pattern = problem.case.pattern
    Expectation(pattern, q, k, v).check(*spattn.attention(q, k, v, pattern, backend="reference", return_lse=True))


def test_budget_can_be_exceeded():
    """The judge itself: one wrong value in a row is noticed."""
    q, k, v = inputs(1, 1, 1, 40, 40, 16)
    out64, _ = reference.attend(q, k, v, patterns.Causal())
    wrong = out64.astype(np.float32)
    wrong[0, 0, 7, 3] += 1e-4
    with pytest.raises(AssertionError, match=r"error 0.0001 exceeds the bound .* at \(0, 0, 7, 3\)"):
        assert_within_bound(wrong, out64, out64.astype(np.float32))
