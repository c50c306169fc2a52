"""Tokens in front of a pattern's own: what they see, what their plan costs, and what is refused."""

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.testing import check_plan, inputs

IMAGE = p.Neighborhood((8, 10), 3)


def dense(pattern, q_len, kv_len, **which):
    return pattern.index_set(q_len, kv_len, **which).to_dense()


def with_prefix(inner, tokens):
    """A square mask with as many full rows and columns in front."""
    whole = np.ones(np.add(inner.shape, tokens), bool)
    whole[tokens:, tokens:] = inner
    return whole


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(
    "inner",
    [IMAGE, p.Causal(), p.Documents((20, 60)), p.Neighborhood((8, 10), 3) & ~p.axial((8, 10), 1), ~p.Full()],
    ids=str,
)
def test_a_prefix_sees_all_and_is_seen_by_all(inner, tokens):
    length = 80 + tokens
    expected = with_prefix(dense(inner, 80, 80), tokens)
    assert np.array_equal(dense(p.Prefix(inner, tokens), length, length), expected)
    for q_len in (1, 79, 80, 80 + tokens):
        assert np.array_equal(dense(p.Prefix(inner, tokens), q_len, length), expected[length - q_len :])


def test_queries_in_front_of_the_first_key_see_nothing():
    pattern = p.Prefix(IMAGE, 2)
    found = dense(pattern, 90, 82)
    assert not found[:8].any() and np.array_equal(found[8:], with_prefix(dense(IMAGE, 80, 80), 2))
    assert np.array_equal(pattern.allows(np.arange(-8, 82)[:, None], np.arange(82)), found)
    check_plan(spattn.plan(pattern, 90, 82), [pattern.index_set(90, 82)])


def test_patterns_that_know_their_rows_and_keys():
    """Rows and keys of arrays are counted behind the prefix."""
    mask = np.random.default_rng(0).random((10, 10)) < 0.5
    assert np.array_equal(dense(p.Prefix(p.Mask(mask), 3), 13, 13), with_prefix(mask, 3))
    last = dense(p.Prefix(p.Mask(mask[4:]), 3), 6, 13)
    assert np.array_equal(last, with_prefix(mask, 3)[7:])
    padded = dense(p.Prefix(p.KeyPadding(mask[0]), 3), 13, 13)
    assert np.array_equal(padded, with_prefix(np.tile(mask[0], (10, 1)), 3))


def test_nothing_behind_the_prefix():
    for inner in (p.Causal(), p.Mask(np.ones((0, 0), bool))):
        assert dense(p.Prefix(inner, 4), 4, 4).all() and dense(p.Prefix(inner, 4), 2, 4).all()


def test_heads_and_batch_entries_have_their_own():
    heads = p.Prefix(p.PerHead((p.axial((8, 10), 0), p.axial((8, 10), 1))), 1)
    assert heads.sizes() == (1, 2)
    for head in (0, 1):
        expected = with_prefix(dense(p.axial((8, 10), head), 80, 80), 1)
        assert np.array_equal(dense(heads, 81, 81, head=head), expected)
    assert p.Prefix(p.Documents(((3, 4), (7,))), 1).sizes() == (2, 1)


def test_prefixes_of_prefixes():
    assert np.array_equal(dense(p.Prefix(p.Prefix(IMAGE, 2), 3), 85, 85), dense(p.Prefix(IMAGE, 5), 85, 85))


@pytest.mark.parametrize("tile", [(48, 64), (64, 64), (128, 64)])
@pytest.mark.parametrize(
    "inner",
    [p.Neighborhood((48, 48), 13), p.Neighborhood((48, 48), 9, dilation=3), p.windowed((48, 48), 8, 4), p.Causal()],
    ids=str,
)
def test_a_plan_keeps_the_tiles_of_the_pattern(inner, tile):
    """It has a tile more for each of queries, those of the prefix' own rows, and merges of these alone."""
    without, whole = (
        spattn.plan(inner, 2304, tiling=spattn.Tiling(tile=tile)),
        spattn.plan(p.Prefix(inner, 4), 2308, tiling=spattn.Tiling(tile=tile)),
    )
    views = without.components["query_view"]
    own_row = -(-2308 // tile[1])
    assert whole.tiles == without.tiles + int(without.views["tiles"][views].sum()) + own_row
    assert whole.nnz == without.nnz + 4 * 2304 + 4 * 2308
    assert not len(without.merge_rows) and (whole.merge_rows < 4).all()


def test_the_efficiency_of_an_image():
    inner = p.Neighborhood((128, 128), 13)
    without, whole = spattn.plan(inner, 16384), spattn.plan(p.Prefix(inner, 5), 16389)
    assert whole.efficiency > 0.8 * without.efficiency


@pytest.mark.parametrize("inner", [p.strided(4), p.longformer(8, global_tokens=(3,)), p.BigBird(8)], ids=str)
def test_patterns_whose_views_overlap(inner):
    """Their rows lie in several views, so that none of these has the prefix."""
    pattern = p.Prefix(inner, 3)
    check_plan(spattn.plan(pattern, 83), [pattern.index_set(83, 83)])


def test_lattices_of_lists():
    """As a user's pattern may have them."""

    class Halves(p.Causal):
        def parts(self, q_len, kv_len):
            return tuple(
                p.authoring.Part(p.Causal(), p.authoring.Lattice(first, [2], [q_len // 2])) for first in (0, 1)
            )

    pattern = p.Prefix(Halves(), 3)
    plan = spattn.plan(pattern, 43)
    check_plan(plan, [pattern.index_set(43, 43)])
    assert len(plan.components) == 3


@pytest.mark.parametrize("q_len", [84, 80, 30, 90])
def test_both_passes(q_len):
    pattern = p.Prefix(IMAGE, 4)
    q, k, v = inputs(2, 4, 2, q_len=q_len, kv_len=84, head_dim=8)
    out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
    exact, exact_lse = spattn.attention(q, k, v, pattern, backend="reference", return_lse=True)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-4, atol=1e-5)
    found = spattn.attention_backward(q, q, k, v, out, lse, pattern)
    expected = spattn.attention_backward(q, q, k, v, exact, exact_lse, pattern, backend="reference")
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_arrays_of_a_prefix_and_a_grid_have_one_axis_of_tokens():
    q = np.ones((1, 2, 8, 10, 4), np.float32)
    with pytest.raises(ValueError, match="one axis of tokens, because the pattern has no grid"):
        spattn.attention(q, q, q, p.Prefix(IMAGE, 0))


def test_text_and_back():
    pattern = p.Prefix(p.Neighborhood((8, 10), 3) & p.Causal(), 4)
    assert p.from_json(pattern.to_json()) == pattern


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: p.Prefix("causal", 1), TypeError, "^inner: expected a Pattern, got 'causal'"),
        (lambda: p.Prefix(IMAGE, 1.0), TypeError, "^tokens: expected an integer, got 1.0"),
        (lambda: p.Prefix(IMAGE, True), TypeError, "^tokens: expected an integer, got True"),
        (lambda: p.Prefix(IMAGE, -1), ValueError, "^tokens: expected an integer >= 0, got -1"),
        (lambda: p.Prefix(IMAGE, 10**30).bind(9, 9), ValueError, r"^tokens: expected at most 9 \(kv_len\), got 10+$"),
        (
            lambda: p.Prefix(IMAGE, 1).bind(80, 80),
            ValueError,
            r"^kv_len: expected 80 \(a grid of 8 × 10 tokens\), got 79 \(after a prefix of 1 tokens\)$",
        ),
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_nesting_has_an_end():
    pattern = IMAGE
    with pytest.raises(ValueError, match="nested at most 64 deep"):
        for _ in range(65):
            pattern = p.Prefix(pattern, 1)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    "inner, length", [(p.Stride(2), 5), (p.axial((7, 2), 0), 14), (p.DilatedWindow(2, 1, 3), 20)], ids=str
)
@pytest.mark.parametrize("other", [p.SlidingWindow(1, 0), p.Stride(3), p.strided(4), p.DilatedWindow(1, 2, 2)], ids=str)
def test_prefix_in_compositions(inner, length, tokens, other):
    """Views of queries move with `inner`, the keys of the prefix do not, and patterns of distances see that."""
    length += tokens
    prefix = with_prefix(dense(inner, length - tokens, length - tokens), tokens)
    mask = dense(other, length, length)
    own = p.Prefix(inner, tokens)
    compositions = {
        other | own: mask | prefix,
        own | other: mask | prefix,
        own & other: mask & prefix,
        own - other: prefix & ~mask,
        other - own: mask & ~prefix,
    }
    for pattern, expected in compositions.items():
        check_plan(
            spattn.plan(pattern, length, tiling=spattn.Tiling(tile=(16, 64))), [pattern.index_set(length, length)]
        )
        assert np.array_equal(dense(pattern, length, length), expected)
