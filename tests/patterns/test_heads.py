"""Patterns that tell batch entries or heads apart."""

import numpy as np
import pytest

import spattn
from spattn import patterns as p


def test_documents_per_batch():
    pattern = p.Documents(((3, 5), (8,)))
    assert pattern.sizes() == (2, 1)
    assert pattern.at(1, 7) == p.Documents((8,))
    with pytest.raises(ValueError, match=r"\.at\(batch, head\)"):
        pattern.allows(np.arange(3), np.arange(3))


def test_prefix_per_batch():
    pattern = p.prefix_lm((2, 5))
    assert pattern.sizes() == (2, 1)
    assert pattern.at(1, 0) == p.Causal() | p.Sinks(5)
    with pytest.raises(ValueError, match=r"\.at\(batch, head\)"):
        pattern.runs(np.arange(3), 8)


@pytest.mark.parametrize(("leading", "sizes"), [((), (1, 1)), ((3,), (1, 3)), ((2, 1), (2, 1)), ((2, 3), (2, 3))])
def test_array_axes(leading, sizes):
    rng = np.random.default_rng(0)
    own = {
        "mask": (8, 8),
        "block_layout": (4, 4),
        "key_blocks": (4, 2),
        "column_intervals": (8,),
    }
    makers = {
        "mask": lambda shape: p.Mask(rng.random(shape) < 0.5),
        "block_layout": lambda shape: p.BlockLayout(rng.random(shape) < 0.5, 2),
        "key_blocks": lambda shape: p.KeyBlocks(rng.integers(-1, 4, shape), 2, 2),
        "column_intervals": lambda shape: p.ColumnIntervals(*rng.integers(0, 9, (2, *shape))),
    }
    for name, make in makers.items():
        pattern = make(leading + own[name])
        assert pattern.sizes() == sizes
        variants, index = pattern.variants(2, 6)
        assert index.shape == (sizes[0], 6 if sizes[1] > 1 else 1)
        field = next(iter(pattern._arrays()))
        array = getattr(pattern, field).reshape(*sizes, *own[name])
        for b in range(sizes[0]):
            for h in range(sizes[1]):
                one = pattern.at(b, h)
                assert np.array_equal(getattr(one, field), array[b, h])
                assert variants[index[b, h * (6 // sizes[1]) if sizes[1] > 1 else 0]] == one
        if sizes != (1, 1):
            with pytest.raises(ValueError, match=r"\.at\(batch, head\)"):
                pattern.allows(np.arange(8), np.arange(8))
            with pytest.raises(ValueError, match=r"(batch|head): expected"):
                pattern.at(*(n if n > 1 else 0 for n in sizes))


def test_per_head():
    pattern = p.PerHead((p.Causal(), p.Documents(((4, 4), (8,))), p.BigBird(2)))
    assert pattern.sizes() == (2, 3)
    assert pattern.at(1, 1) == p.Documents((8,))
    assert pattern.at(0, 2) == p.BigBird(2, head=2)
    assert pattern.bind(8, 8).at(1, 0) == p.Causal()
    with pytest.raises(ValueError, match=r"\.at\(batch, head\)"):
        pattern.allows(0, 0)
    patterns, index = pattern.variants(2, 6)
    assert len(patterns) == 5  # two of BigBird's
    assert index[:, 0].tolist() == index[:, 1].tolist()


def test_per_batch():
    """Whatever has no batch axis of its own gets one."""
    patterns = p.GlobalTokens((0, 5)), p.longformer(4, global_tokens=(2,)), p.SlidingWindow(3, 0), p.BlockLocal(4)
    pattern = p.PerBatch(patterns)
    assert pattern.sizes() == (4, 1)
    for entry, one in enumerate(patterns):
        assert pattern.at(entry, 0) == one.at(0, 0)
        assert pattern.index_set(8, 8, batch=entry) == one.index_set(8, 8)
    with pytest.raises(ValueError, match=r"^PerBatch: expected the pattern of one batch entry, got 4; use \.at\(batch"):
        pattern.allows(0, 0)
    with pytest.raises(ValueError, match="^batch: expected an integer in"):
        pattern.at(4, 0)
    with pytest.raises(ValueError, match="^patterns: expected patterns for one batch entry or 2, got one for 3"):
        p.PerBatch((p.Causal(), p.prefix_lm((1, 2, 3))))


def test_per_batch_of_heads():
    heads = p.PerHead((p.Causal(), p.Full()))
    pattern = p.PerBatch((heads, p.BigBird(2), p.SlidingWindow(1)))
    assert pattern.sizes() == (3, 2)
    assert [pattern.at(0, h) for h in range(2)] == [p.Causal(), p.Full()]
    assert pattern.at(1, 1) == p.BigBird(2, head=1) and pattern.at(2, 1) == p.SlidingWindow(1)
    turned = p.PerHead((p.PerBatch((p.Causal(), p.Full())), p.Sinks(1)))
    assert turned.sizes() == (2, 2) and turned.at(1, 0) == p.Full() and turned.at(1, 1) == p.Sinks(1)


def test_numbers_that_no_composition_joins():
    two, three = (p.PerHead((p.Causal(),) * n) for n in (2, 3))
    for joined in (two | three, p.PerBatch((two, three))):
        with pytest.raises(ValueError, match=r"whose numbers divide the largest, got \[2, 3\]; give each PerHead one"):
            joined.sizes()
    two, four = (p.PerBatch((p.Causal(),) * n) for n in (2, 4))
    for joined in (two & four, p.PerHead((two, four))):
        with pytest.raises(ValueError, match=r"expected patterns for one number of batch entries, got \[2, 4\]"):
            joined.sizes()


def test_composition_of_heads():
    pattern = p.Causal() & p.PerHead((p.Sinks(1), p.Sinks(2)))
    assert pattern.sizes() == (1, 2)
    assert pattern.at(0, 1) == p.Causal() & p.Sinks(2)


def test_bigbird_heads_differ():
    pattern = p.BigBird(2, random_blocks=2)
    assert pattern.sizes() == (1, 0)
    variants, index = pattern.variants(3, 4)
    assert len(variants) == 4
    assert index.shape[1] == 4
    sets = [v.index_set(64, 64) for v in variants]
    assert sets[0] != sets[1]
    assert p.BigBird(2, random_blocks=0).sizes() == (1, 1)


def test_deepspeed_fixed_versions():
    pattern = p.deepspeed.fixed(2, 4, 1, num_different_global_patterns=4)
    variants, index = pattern.variants(1, 8)
    assert len(variants) == 4
    assert index.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]


@pytest.mark.parametrize("config", [p.deepspeed.bigbird(4), p.deepspeed.variable(4, 2)], ids=repr)
def test_random_layouts_belong_to_a_head(config):
    with pytest.raises(ValueError, match=r"use \.at\(batch, head\)"):
        config.allows(0, 0)
    assert config.at(0, 1).bind(64, 64) != config.at(0, 2).bind(64, 64)


def test_random_blocks_belong_to_a_head():
    with pytest.raises(ValueError, match=r"its random blocks depend on the head; use \.at\(batch, head\)"):
        p.BigBird(4).draw(np.arange(8), 8)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_each_head_and_groups_of_heads(batch, wrapped):
    """Of a pattern that draws for each head and one for groups of heads, every head attends to what both say of it."""
    blocks = np.random.default_rng(0).integers(-1, 8, (batch, 2, 8, 3))
    drawn, grouped = p.BigBird(8), p.KeyBlocks(blocks, 8, 8)
    pattern = (drawn | p.Columns(5, 0, 1)) & grouped
    variants, index = (p.QueriesAt(pattern, 0) if wrapped else pattern).variants(2, 6)
    assert pattern.sizes() == (batch, 2) and index.shape == (batch, 6)
    for b in range(batch):
        for h in range(6):
            one = (drawn.at(0, h) | p.Columns(5, 0, 1)) & grouped.at(b, h // 3)
            got = variants[index[b, h]].bind(64, 64).index_set(64, 64)
            assert got == one.bind(64, 64).index_set(64, 64)
    assert len(pattern.variants(2, 2)[0]) == 2 * batch  # as many heads as groups


DEPENDS = {  # on the head, with their pairs
    "function": (
        p.interop.from_mask_mod(lambda b, h, q, k: (k <= q) & ((q - k) % (h + 2) == 0)),
        lambda h, q, k: (k <= q) & ((q - k) % (h + 2) == 0),
    ),
    "random blocks": (p.BigBird(4), lambda h, q, k: p.BigBird(4).at(0, h).index_set(65, 65).to_dense()),
}


@pytest.mark.parametrize("name", DEPENDS)
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_patterns_of_groups_that_depend_on_the_head(name, few, groups):
    """They are those of each head, not of the group, also in unions, and in steps of generation."""
    pattern, allows = DEPENDS[name]
    heads, n, window = 4, 65, p.SlidingWindow(3, 0)
    x = np.random.default_rng(0).standard_normal((2, heads, n, 16))
    q, k = np.arange(n)[:, None], np.arange(n)[None]
    near, causal = (q - k >= 0) & (q - k <= 3), k <= q
    several = p.PerHead((pattern, p.Causal(), pattern | window, pattern & p.Causal())[:groups])
    union = several | p.PerHead((window, window & pattern))
    start = n - 3 if few else 0
    for own in (several, union):
        out = spattn.attention(x[:, :, start:], x, x, own)
        for head in range(heads):
            of = allows(head, q, k)[start:]
            if few and name == "function":  # its queries are numbered from 0
                of = allows(head, q, k)[: n - start]
            mask = (of, causal[start:], of | near[start:], of & causal[start:])[head * groups // heads]
            if own is union:
                mask = mask | (near[start:] if head < 2 else near[start:] & of)
            scores = np.where(mask, x[:, head, start:] @ x[:, head].swapaxes(1, 2) / 4, -np.inf)
            weights = np.exp(scores - np.maximum(scores.max(axis=2, keepdims=True), -1e9))
            total = weights.sum(axis=2, keepdims=True)
            expected = np.divide(weights @ x[:, head], total, out=np.zeros((2, n - start, 16)), where=total > 0)
            np.testing.assert_allclose(out[:, head], expected, atol=1e-12, err_msg=f"{own!r:.80}, {head}")


def _far(b, h, q, k):
    return (k <= q) & ((q - k) % (h + 2 + 3 * b) == 0)


def _apart(b, h, q, k):
    return (k <= q) & ((q - k) % (h + 2) == 0)


def _grouped(b, h, q, k):
    return (q - k >= 0) & (q - k <= 2) if h < 2 else k <= q


GROUPS = p.PerHead((p.SlidingWindow(2, 0), p.Causal()))  # of two heads each
FAR, APART = (p.interop.from_mask_mod(function) for function in (_far, _apart))
JOINED = {
    "union": (FAR | GROUPS, lambda *at: _far(*at) | _grouped(*at)),
    "intersection": (GROUPS & FAR & p.Causal(), lambda *at: _far(*at) & _grouped(*at)),
    "difference": (GROUPS - FAR, lambda *at: _grouped(*at) & ~_far(*at)),
    "entries": (p.PerBatch((APART, GROUPS)), lambda b, *at: (_grouped if b else _apart)(b, *at)),
    "entries of unlike groups": (
        p.PerBatch((p.PerHead((p.SlidingWindow(2, 0), p.Sinks(3), p.Causal(), APART)), GROUPS | p.Sinks(1))),
        lambda b, h, q, k: (
            _grouped(b, h, q, k) | (k < 1) if b else (_grouped(0, 2 * h, q, k), k < 3, k <= q, _apart(b, h, q, k))[h]
        ),
    ),
    "entries of groups": (
        p.PerBatch((p.PerHead((APART, p.Causal())), GROUPS)) | p.Sinks(1),
        lambda b, h, q, k: (k < 1) | (_grouped(b, h, q, k) if b or h > 1 else _apart(b, h, q, k)),
    ),
    "groups of entries": (
        p.PerHead((p.PerBatch((APART, p.Causal())), FAR)),
        lambda b, h, q, k: _far(b, h, q, k) if h > 1 else (k <= q if b else _apart(b, h, q, k)),
    ),
}


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_patterns_of_each_head_and_entry_beside_groups_of_heads(name, few):
    pattern, allows = JOINED[name]
    n = 33
    q_len = 5 if few else n
    x = np.random.default_rng(0).standard_normal((2, 4, n, 8))
    out = spattn.attention(x[:, :, :q_len], x, x, p.QueriesAt(pattern, 0) if few else pattern)
    q, k = np.arange(q_len)[:, None], np.arange(n)[None]
    for b, h in np.ndindex(2, 4):
        mask = np.broadcast_to(allows(b, h, q, k), (q_len, n))
        weights = np.where(mask, np.exp(x[b, h, :q_len] @ x[b, h].T / 8**0.5), 0)
        total = weights.sum(axis=1, keepdims=True)
        expected = np.divide(weights @ x[b, h], total, out=np.zeros((q_len, 8)), where=total > 0)
        np.testing.assert_allclose(out[b, h], expected, atol=1e-12, err_msg=f"{b}, {h}")


def test_a_cache_of_entries_with_groups_of_heads():
    heads, n, blocks = 4, 65, p.BigBird(4, causal=True)
    pattern = p.PerBatch((p.PerHead((blocks, p.Causal())), GROUPS))
    x = np.random.default_rng(0).standard_normal((2, heads, n, 16))
    cache = spattn.KVCache(pattern, n, batch=2, heads_kv=heads, head_dim=16, dtype="float64", chunk=4)
    cache.append(x, x, lengths=[60, 51])
    out = cache.attention(np.stack([x[0, :, 58:60], x[1, :, 49:51]]))
    for b, h in np.ndindex(2, heads):
        end = (60, 51)[b]
        q, k = np.arange(end - 2, end)[:, None], np.arange(end)[None]
        drawn = blocks.at(0, h).index_set(n, n).to_dense()[end - 2 : end, :end]
        mask = _grouped(b, h, q, k) if b or h > 1 else drawn
        weights = np.where(mask, np.exp(x[b, h, end - 2 : end] @ x[b, h, :end].T / 4), 0)
        expected = weights @ x[b, h, :end] / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out[b, h], expected, atol=1e-12, err_msg=f"{b}, {h}")
