"""Masks in other libraries' parameters, against rules derived anew and, where it is installed, the library itself."""

import functools
import importlib.util
import itertools
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import patterns as p

some = settings(max_examples=max(20, settings.default.max_examples // 2), deadline=None)
LENGTHS = st.integers(0, 40)
SEQUENCES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6)  # (queries, keys) of each
SIDE = st.integers(-2, 12)


def dense(pattern, q_len, kv_len, **which):
    return pattern.index_set(q_len, kv_len, **which).to_dense()


# -- FlashAttention ----------------------------------------------------------------------------------------------------


def flash(q_len, kv_len, window_size, causal):
    """Keys in [i + seqlen_k - seqlen_q - left, i + seqlen_k - seqlen_q + right]; causal is a right side of 0."""
    rows = []
    for i in range(q_len):
        place, left, right = i + kv_len - q_len, window_size[0], 0 if causal else window_size[1]
        rows.append([(left < 0 or j >= place - left) and (right < 0 or j <= place + right) for j in range(kv_len)])
    return np.array(rows, bool).reshape(q_len, kv_len)


@some
@given(LENGTHS, LENGTHS, st.tuples(SIDE, SIDE), st.booleans())
def test_flash_attention(q_len, kv_len, window_size, causal):
    expected = flash(q_len, kv_len, window_size, causal)
    assert np.array_equal(dense(p.interop.from_flash_attention(window_size, causal), q_len, kv_len), expected)


@some
@given(SEQUENCES, st.tuples(SIDE, SIDE), st.booleans())
def test_flash_attention_of_packed_sequences(sequences, window_size, causal):
    """Each sequence is a call of its own, aligned to its own end."""
    q, k = (np.cumsum([0, *lengths]) for lengths in ([n for n, _ in sequences], [n for _, n in sequences]))
    expected = np.zeros((q[-1], k[-1]), bool)
    for a, b, c, d in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True):
        expected[a:b, c:d] = flash(b - a, d - c, window_size, causal)
    pattern = p.interop.from_flash_attention(window_size, causal, cu_seqlens_q=q, cu_seqlens_k=k)
    assert np.array_equal(dense(pattern, q[-1], k[-1]), expected)
    same = p.interop.from_flash_attention(window_size, causal, cu_seqlens_q=k)
    squares = [flash(n, n, window_size, causal) for _, n in sequences]
    found = dense(same, k[-1], k[-1])
    assert all(np.array_equal(found[c:d, c:d], x) for c, d, x in zip(k[:-1], k[1:], squares, strict=True))
    assert found.sum() == sum(x.sum() for x in squares)


def test_packed_sequences_are_stored_and_planned_by_the_sequence():
    cu_seqlens = [0, 1000, 5000, 1 << 20]
    pattern = p.interop.from_flash_attention((300, 2), cu_seqlens_q=cu_seqlens)
    assert len(pattern.to_json()) < 400
    same = p.SlidingWindow(300, 2) & p.Documents.from_cu_seqlens(cu_seqlens)
    one, other = (spattn.plan(x, 1 << 20) for x in (pattern, same))
    assert one.nnz == other.nnz and np.array_equal(one.indices, other.indices) and len(one.masks) == len(other.masks)
    assert pattern.at(0, 0).bind(1 << 20, 1 << 20)._bands(0, 1 << 20) is not None


@some
@given(SEQUENCES)
def test_documents_with_other_lengths_of_queries(sequences):
    q, k = ([n for n, _ in sequences], [n for _, n in sequences])
    owner_q, owner_k = (np.repeat(np.arange(len(n)), n) for n in (q, k))
    pattern = p.Documents.from_cu_seqlens(np.cumsum([0, *q]), np.cumsum([0, *k]))
    assert np.array_equal(dense(pattern, sum(q), sum(k)), owner_q[:, None] == owner_k)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: p.interop.from_flash_attention((1, 2, 3)), ValueError, "^window_size: expected two numbers, got 3"),
        (lambda: p.interop.from_flash_attention(3), TypeError, "^window_size: expected a sequence of integers, got 3"),
        (lambda: p.interop.from_flash_attention(causal=1), TypeError, "^causal: expected True or False, got 1"),
        (
            lambda: p.interop.from_flash_attention(cu_seqlens_k=[0, 1]),
            ValueError,
            "^cu_seqlens_q: required with",
        ),
        (
            lambda: p.interop.from_flash_attention(cu_seqlens_q=[0, 1], cu_seqlens_k=[0, 1, 2]),
            ValueError,
            "^cu_seqlens_k: expected 2 numbers, got 3",
        ),
        (
            lambda: p.interop.from_flash_attention(cu_seqlens_q=[0, 5, 3]),
            ValueError,
            "^cu_seqlens_q: expected non-decreasing",
        ),
        (lambda: p.Documents.from_cu_seqlens([0, 1], [0, 1, 2]), ValueError, "^cu_seqlens_k: expected 2 numbers"),
        (
            lambda: p.Documents.from_cu_seqlens([0, 1], [1, 2]),
            ValueError,
            "^cu_seqlens_k: expected non-decreasing",
        ),
        (
            lambda: p.interop.from_flash_attention(cu_seqlens_q=[0, 2]).index_set(3, 3),
            ValueError,
            "^queries: expected 3 in all .*cu_seqlens_q",
        ),
        (lambda: p.RowIntervals([0], [1, 2]), ValueError, r"^stop: expected shape \(1,\), got \(2,\)"),
        (lambda: p.RowIntervals([0.5], [1]), TypeError, "^start: expected an array of integers"),
        (lambda: p.RowIntervals([0], [1]).allows(0, 0), ValueError, r"use \.bind\(q_len, kv_len\)"),
        (lambda: p.RowIntervals([[0], [1]], [[1], [1]]).allows(0, 0), ValueError, r"use \.at\(batch, head\)"),
    ],
)
def test_what_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


# -- FlashMask ---------------------------------------------------------------------------------------------------------


def flashmask(bounds, causal):
    """By the column: the rows that one or two intervals hide, and those above the diagonal when causal."""
    length = len(bounds)
    hidden = np.zeros((length, length), bool)
    for j, column in enumerate(bounds):
        for i in range(length):
            match causal, len(column):
                case True, 1:
                    out = i >= column[0]
                case True, 2:
                    out = column[0] <= i < column[1]
                case False, 2:
                    out = i >= column[0] or i < column[1]
                case False, 4:
                    out = column[0] <= i < column[1] or column[2] <= i < column[3]
            hidden[i, j] = out or (causal and i < j)
    return ~hidden


@some
@given(st.data(), st.booleans(), st.booleans(), st.integers(1, 24))
def test_flashmask(data, causal, more, length):
    count = (2 if more else 1) * (1 if causal else 2)
    column = st.lists(st.integers(0, length), min_size=count, max_size=count)
    columns = data.draw(st.lists(column, min_size=2 * length, max_size=2 * length))
    array = np.array(columns).reshape(1, 2, length, count)
    pattern = p.interop.from_flashmask(array, causal)
    for head in range(2):
        expected = flashmask(array[0, head].tolist(), causal)
        assert np.array_equal(dense(pattern, length, length, head=head), expected)


@pytest.mark.parametrize(
    "shape, causal, error, words",
    [
        ((1, 1, 4, 3), True, ValueError, "expected 1 or 2 bounds, got 3"),
        ((1, 1, 4, 1), False, ValueError, "expected 2 or 4 bounds, got 1"),
        ((1, 4, 1), True, ValueError, "expected 4-D"),
    ],
)
def test_flashmask_of_other_shapes(shape, causal, error, words):
    with pytest.raises(error, match=f"^startend_row_indices: {words}"):
        p.interop.from_flashmask(np.zeros(shape, np.int32), causal)


# -- NATTEN ------------------------------------------------------------------------------------------------------------


@st.composite
def neighbourhoods(draw):
    """grid, kernel_size, stride, dilation, is_causal"""
    axes = []
    for _ in range(draw(st.integers(1, 2))):
        length = draw(st.integers(2, 11))
        dilation = draw(st.integers(1, max(1, length // 2)))
        kernel = draw(st.integers(min(2, length // dilation), length // dilation))
        axes.append((length, kernel, draw(st.integers(1, kernel)), dilation, draw(st.booleans())))
    return tuple(zip(*axes, strict=True))


def natten_axis(length, kernel, stride, dilation, causal):
    """One axis: a window around the leader of each `stride` queries of a dilation group, pushed inside the group."""
    allowed = np.zeros((length, length), bool)
    for group in range(dilation):
        members = list(range(group, length, dilation))
        for u, x in enumerate(members):
            first_of_stride = u - u % stride
            if causal:
                leader = min(first_of_stride + stride - 1, len(members) - 1)
                keys = range(max(leader - kernel + 1, 0), u + 1)
            else:
                leader = min(first_of_stride + stride // 2, len(members) - 1)
                start = min(max(leader - kernel // 2, 0), len(members) - kernel)
                keys = range(start, start + kernel)
            allowed[x, [members[z] for z in keys]] = True
    return allowed


@some
@given(neighbourhoods())
def test_natten(parameters):
    grid, kernel, stride, dilation, causal = parameters
    expected = functools.reduce(np.kron, itertools.starmap(natten_axis, zip(*parameters, strict=True)))
    pattern = p.interop.from_natten(grid, kernel, stride=stride, dilation=dilation, is_causal=causal)
    assert np.array_equal(dense(pattern, len(expected), len(expected)), expected)


@some
@given(neighbourhoods())
def test_natten_itself(parameters):
    flex = pytest.importorskip("natten.backends.flex", reason="NATTEN is not installed")
    grid, kernel, stride, dilation, causal = parameters
    theirs = flex.get_na_flex_mask("cpu", len(grid), grid, kernel, stride, dilation, causal)
    tokens = int(np.prod(grid))
    ours = p.interop.from_natten(grid, kernel, stride=stride, dilation=dilation, is_causal=causal)
    assert p.interop.from_block_mask(theirs).index_set(tokens, tokens) == ours.index_set(tokens, tokens)


# -- xFormers ----------------------------------------------------------------------------------------------------------


class Blocks:
    """As xFormers describes the blocks of one side."""

    def __init__(self, starts, lengths):
        self.seqstart_py = list(starts)
        self.pairs = [(start, start + n) for start, n in zip(starts[:-1], lengths, strict=True)]

    def intervals(self):
        yield from self.pairs


def bias(name, **fields):
    """A stand-in for a mask of xFormers, which is told by the name of its class."""
    return type(name, (types.SimpleNamespace,), {"__module__": "xformers.ops.fmha.attn_bias"})(**fields)


def band(q_len, kv_len, at_end, window):
    """xFormers' bands: `at_end` shifts the diagonal to the bottom right corner; a window is (left, right)."""
    i, j = np.ogrid[:q_len, :kv_len]
    place = i + (kv_len - q_len if at_end else 0)
    left, right = window
    return (j <= place + (kv_len + q_len if right is None else right)) & (
        j >= place - (kv_len + q_len if left is None else left)
    )


WINDOW = st.integers(1, 6)
CORNERS = {  # class, whether it is aligned to the end, what its window is made of
    "LowerTriangularMask": (False, lambda w: ({}, (None, 0))),
    "LowerTriangularFromBottomRightMask": (True, lambda w: ({}, (None, 0))),
    "LowerTriangularFromBottomRightLocalAttentionMask": (True, lambda w: ({"_window_size": w}, (w - 1, 0))),
    "LocalAttentionFromBottomRightMask": (True, lambda w: ({"window_left": w, "window_right": w // 2}, (w, w // 2))),
}
BLOCKS = {
    "BlockDiagonalMask": (True, lambda w: ({}, (None, None))),
    "BlockDiagonalCausalMask": (False, lambda w: ({}, (None, 0))),
    "BlockDiagonalCausalFromBottomRightMask": (True, lambda w: ({}, (None, 0))),
    "BlockDiagonalCausalLocalAttentionMask": (False, lambda w: ({"_window_size": w}, (w - 1, 0))),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (True, lambda w: ({"_window_size": w}, (w - 1, 0))),
    "BlockDiagonalPaddedKeysMask": (True, lambda w: ({}, (None, None))),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (True, lambda w: ({}, (None, 0))),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        True,
        lambda w: ({"window_left": w, "window_right": w // 2}, (w, w // 2)),
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (True, lambda w: ({"_window_size": w}, (w - 1, 0))),
    "BlockDiagonalGappyKeysMask": (True, lambda w: ({}, (None, None))),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (True, lambda w: ({}, (None, 0))),
}


@pytest.mark.parametrize("name", CORNERS)
@some
@given(LENGTHS, LENGTHS, WINDOW)
def test_xformers_of_one_sequence(name, q_len, kv_len, w):
    at_end, make = CORNERS[name]
    fields, window = make(w)
    assert np.array_equal(
        dense(p.interop.from_xformers(bias(name, **fields)), q_len, kv_len), band(q_len, kv_len, at_end, window)
    )


@pytest.mark.parametrize("name", BLOCKS)
@some
@given(SEQUENCES, st.lists(st.integers(0, 4), min_size=6, max_size=6), WINDOW)
def test_xformers_of_blocks(name, sequences, gaps, w):
    """Blocks of keys stand anywhere: packed, padded to one length, or with gaps."""
    at_end, make = BLOCKS[name]
    fields, window = make(w)
    queries, keys = [n for n, _ in sequences], [n for _, n in sequences]
    gap = gaps[: len(keys)] if "Gappy" in name else [9 - n if "Padded" in name else 0 for n in keys]
    q, k = np.cumsum([0, *queries]), np.cumsum([0, *np.add(keys, gap)]).astype(int)
    expected = np.zeros((q[-1], k[-1]), bool)
    for a, b, c, n in zip(q[:-1], q[1:], k[:-1], keys, strict=True):
        expected[a:b, c : c + n] = band(b - a, n, at_end, window)
    made = bias(name, q_seqinfo=Blocks(q, queries), k_seqinfo=Blocks(k, keys), **fields)
    assert np.array_equal(dense(p.interop.from_xformers(made), int(q[-1]), int(k[-1])), expected)
    for q_len, kv_len in ((q[-1] + 1, k[-1]), (q[-1], k[-1] + 1), (q[-1], k[-1] - 1)):
        with pytest.raises(ValueError, match="must end with"):
            p.interop.from_xformers(made).bind(int(q_len), int(kv_len))


@pytest.mark.parametrize("name", [*CORNERS, *BLOCKS])
@some
@given(st.data())
def test_xformers_itself(name, data):
    theirs = pytest.importorskip("xformers.ops.fmha.attn_bias", reason="xFormers is not installed")
    cls, w, cpu = getattr(theirs, name), data.draw(WINDOW), theirs.torch.device("cpu")
    fields = (CORNERS | BLOCKS)[name][1](w)[0]
    if name in CORNERS:
        q_len, kv_len = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
        made = cls(**fields)
    else:
        queries = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
        keys = [n + data.draw(st.integers(0, 5)) for n in queries]  # as many at least, which some classes ask for
        q = theirs._SeqLenInfo.from_seqlens(queries, device=cpu)
        if "Padded" in name:
            k = theirs._PaddedSeqLenInfo.from_seqlens_padded(keys, 12, device=cpu)
        elif "Gappy" in name:
            starts = np.cumsum([0, *(n + data.draw(st.integers(0, 3)) for n in keys)]).tolist()
            k = theirs._GappySeqInfo.from_seqlens_gappy(starts, keys, False, device=cpu)
        else:
            k = theirs._SeqLenInfo.from_seqlens(keys, device=cpu)
        made, q_len, kv_len = cls(q_seqinfo=q, k_seqinfo=k, **fields), sum(queries), k.seqstart_py[-1]
    expected = made.materialize((q_len, kv_len)).numpy() == 0
    assert np.array_equal(dense(p.interop.from_xformers(made), q_len, kv_len), expected)


@pytest.mark.parametrize(
    "other, got",
    [
        (bias("LowerTriangularMaskWithTensorBias"), "LowerTriangularMaskWithTensorBias"),
        (bias("PagedBlockDiagonalPaddedKeysMask"), "PagedBlockDiagonalPaddedKeysMask"),
        (np.zeros((3, 3)), "ndarray"),
        (type("LowerTriangularMask", (), {})(), "LowerTriangularMask"),
    ],
)
def test_what_is_no_mask_of_xformers(other, got):
    with pytest.raises(TypeError, match=f"^attn_bias: expected a mask of xformers.ops.fmha.attn_bias, got {got}"):
        p.interop.from_xformers(other)


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------

ds = p.deepspeed
CONFIGS = [
    ({}, ds.fixed()),
    ({"mode": "dense", "block": 32}, ds.dense(32)),
    (
        {
            "mode": "fixed",
            "block": 8,
            "different_layout_per_head": True,
            "num_local_blocks": 4,
            "num_global_blocks": 1,
            "attention": "bidirectional",
            "horizontal_global_attention": True,
            "num_different_global_patterns": 4,
        },
        ds.fixed(8, 4, 1, "bidirectional", True, 4),
    ),
    (
        {
            "mode": "variable",
            "local_window_blocks": [2, 3],
            "global_block_indices": [0, 5],
            "attention": "unidirectional",
        },
        ds.variable(16, 0, (2, 3), (0, 5), attention="unidirectional", head=0),
    ),
    ({"mode": "variable", "num_random_blocks": 2, "different_layout_per_head": True}, ds.variable(num_random_blocks=2)),
    ({"mode": "bigbird", "num_sliding_window_blocks": 5}, ds.bigbird(16, 0, 5, head=0)),
    ({"mode": "bigbird", "num_random_blocks": 1}, ds.bigbird(head=0)),
    (
        {"mode": "bslongformer", "global_block_indices": [0], "global_block_end_indices": [2]},
        ds.bslongformer(16, 3, (0,), (2,)),
    ),
]


@pytest.mark.parametrize("config, expected", CONFIGS)
def test_deepspeed(config, expected):
    before = repr(config)
    assert (
        p.interop.from_deepspeed(config)
        == expected
        == p.interop.from_deepspeed({"sparse_attention": config, "fp16": {}})
    )
    assert repr(config) == before


CLASSES = {
    "dense": "DenseSparsityConfig",
    "fixed": "FixedSparsityConfig",
    "variable": "VariableSparsityConfig",
    "bigbird": "BigBirdSparsityConfig",
    "bslongformer": "BSLongformerSparsityConfig",
}


@functools.cache
def deepspeed_layouts():
    """DeepSpeed's own module of layouts, without the rest of it, which wants a GPU; its later versions have none."""
    found = importlib.util.find_spec("deepspeed")
    path = found and f"{found.submodule_search_locations[0]}/ops/sparse_attention/sparsity_config.py"
    try:
        spec = importlib.util.spec_from_file_location("deepspeed_layouts", path) if path else None
        module = importlib.util.module_from_spec(spec) if spec else None
        if module:
            spec.loader.exec_module(module)
    except FileNotFoundError:
        return None
    return module


@pytest.mark.parametrize("config", [config for config, _ in CONFIGS if not config.get("num_random_blocks")], ids=str)
@pytest.mark.parametrize("blocks", [8, 11])
def test_deepspeed_itself(config, blocks):
    """Without random blocks, which are other ones in every run of DeepSpeed's."""
    theirs = deepspeed_layouts()
    if theirs is None:
        pytest.skip("DeepSpeed with sparse attention is not installed")
    mode = config.get("mode", "fixed")
    defaults = {"num_random_blocks": 0} if mode in ("variable", "bigbird") else {}  # of its reader
    fields = defaults | {key: value for key, value in config.items() if key != "mode"}
    made = getattr(theirs, CLASSES[mode])(num_heads=4, **fields)
    layout = made.make_layout(blocks * made.block).numpy().astype(bool)
    tokens = np.ones((made.block, made.block), bool)
    pattern = p.interop.from_deepspeed(config)
    for head in range(4):
        which = {"head": head} if pattern.sizes()[1] != 1 else {}
        found = dense(pattern, blocks * made.block, blocks * made.block, **which)
        assert np.array_equal(found, np.kron(layout[head], tokens))


@pytest.mark.parametrize(
    "config, error, words",
    [
        ("fixed", TypeError, "^config: expected a dict, got str"),
        ({"mode": "strided"}, ValueError, "^config: expected a mode of dense, fixed, .*; got 'strided'"),
        (
            {"mode": "bigbird", "attention": "unidirectional"},
            ValueError,
            "^config: DeepSpeed's mode 'bigbird' is bidirectional and ignores 'attention', got 'unidirectional'",
        ),
        ({"mode": "dense", "blocks": 4}, ValueError, "^config: expected the keys mode, .*block, .*; got {'blocks'}"),
        ({"block": 0}, ValueError, "^block: expected an integer >= 1, got 0"),
        ({"block": "16"}, TypeError, "^block: expected an integer, got '16'"),
        ({"different_layout_per_head": 1}, TypeError, "^different_layout_per_head: expected True or False, got 1"),
        ({"num_different_global_patterns": 2}, ValueError, "^config: expected different_layout_per_head with"),
        ({"mode": []}, ValueError, "^config: expected a mode of"),
    ],
)
def test_deepspeed_refuses(config, error, words):
    with pytest.raises(error, match=words):
        p.interop.from_deepspeed(config)
