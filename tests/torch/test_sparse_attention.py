"""The layer: PyTorch's own with a mask is the judge, alone and within its encoder layers."""

import copy
import pickle
import warnings

import numpy as np
import pytest

import spattn
from spattn import patterns as p

torch = pytest.importorskip("torch")
SparseAttention = pytest.importorskip("spattn.torch").SparseAttention
nn = torch.nn

WINDOW = p.SlidingWindow(5, 2)
# Queries that may attend to nothing are NaN in PyTorch's layer, so each keeps a key.
PADDING = torch.arange(20) >= torch.tensor([[20], [15]])


@pytest.fixture(autouse=True)
def fresh():
    """No graph of another test is found, or counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 20, 32, dtype=torch.float64)


def pair(pattern=WINDOW, **options):
    """The layer, and PyTorch's with the same numbers."""
    torch.manual_seed(0)
    own = SparseAttention(32, 4, pattern, dtype=torch.float64, **options)
    torch.manual_seed(0)
    return own, nn.MultiheadAttention(32, 4, **{"batch_first": True, "dtype": torch.float64} | options)


def mask(pattern, q_len=20, kv_len=20):
    """True at pairs that are not allowed, as PyTorch has it."""
    return torch.from_numpy(~pattern.index_set(q_len, kv_len).to_dense())


def additive(padding):
    return torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, -torch.inf)


@pytest.mark.parametrize("bias", [True, False])
def test_same_numbers_and_state(x, bias):
    """From the same seed, and from either's state dict to the other's; and a step of training."""
    own, other = pair(bias=bias)
    assert own.state_dict().keys() == other.state_dict().keys()
    assert all(map(torch.equal, own.state_dict().values(), other.state_dict().values()))
    fresh = SparseAttention(32, 4, WINDOW, bias=bias, dtype=torch.float64)
    fresh.load_state_dict(other.state_dict())
    other.load_state_dict(own.state_dict())
    got, none = fresh(x, x, x)
    want, _ = other(x, x, x, attn_mask=mask(WINDOW), need_weights=False)
    torch.testing.assert_close(got, want)
    assert none is None
    for out in (got, want):
        out.square().sum().backward()
    for mine, theirs in zip(fresh.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_queries_at_the_end_of_other_keys(x):
    own, other = pair()
    key, value = torch.randn(2, 2, 30, 32, dtype=torch.float64)
    got, _ = own(x, key, value)
    want, _ = other(x, key, value, attn_mask=mask(WINDOW, 20, 30), need_weights=False)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads(x, num_kv_heads):
    """As a layer whose heads of keys and values are there once for each query head of their group."""
    own = SparseAttention(32, 4, WINDOW, num_kv_heads=num_kv_heads, dtype=torch.float64)
    nn.init.normal_(own.in_proj_bias)
    other = pair()[1]
    state = own.state_dict()
    for name in ("in_proj_weight", "in_proj_bias"):
        q, *kv = state[name].split((32, 8 * num_kv_heads, 8 * num_kv_heads))
        kv = [one.unflatten(0, (num_kv_heads, 8)).repeat_interleave(4 // num_kv_heads, 0).flatten(0, 1) for one in kv]
        state[name] = torch.cat([q, *kv])
    other.load_state_dict(state)
    torch.testing.assert_close(own(x, x, x)[0], other(x, x, x, attn_mask=mask(WINDOW), need_weights=False)[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", [lambda padding: padding, additive], ids=["bool", "additive"])
def test_padding(x, form, compiled):
    """One graph for all of it."""
    own, other = pair()
    run = torch.compile(own, backend="aot_eager", fullgraph=True) if compiled else own
    for padding in (PADDING, PADDING.flip(0), PADDING & False):
        got = run(x, x, x, key_padding_mask=form(padding))[0]
        want = other(x, x, x, attn_mask=mask(WINDOW), key_padding_mask=padding, need_weights=False)[0]
        torch.testing.assert_close(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == int(compiled)


def test_a_sequence_of_padding_alone(x):
    """PyTorch's layer gives NaN."""
    own, _ = pair()
    everything = torch.tensor([[False], [True]]).expand(2, 20)
    got = own(x, x, x, everything)[0]
    assert torch.equal(got[1], own.out_proj(torch.zeros(20, 32, dtype=torch.float64)))
    torch.testing.assert_close(got[:1], own(x[:1], x[:1], x[:1])[0])


@pytest.mark.parametrize("training", [False, True])
def test_in_encoder_layers(x, training):
    """Whose kernels for inference know dense attention only."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, dtype=torch.float64)
    own = copy.deepcopy(layer)
    own.self_attn = SparseAttention(32, 4, WINDOW, dtype=torch.float64)
    own.self_attn.load_state_dict(layer.self_attn.state_dict())
    stacks = [nn.TransformerEncoder(one, 2, enable_nested_tensor=False).train(training) for one in (own, layer)]
    with torch.set_grad_enabled(training):
        got = stacks[0](x, src_key_padding_mask=PADDING)
        want = stacks[1](x, mask=mask(WINDOW), src_key_padding_mask=PADDING)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(stacks[0](x), stacks[1](x, mask=mask(WINDOW)))
        compiled = torch.compile(stacks[0], backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, src_key_padding_mask=PADDING), want)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deep", "pickle"]
)
def test_copies(x, copied):
    own = SparseAttention(32, 4, p.Causal() & p.Mask(np.tri(20, dtype=bool)), num_kv_heads=2, dtype=torch.float64)
    again = copied(own)
    assert again.pattern == own.pattern and torch.equal(again(x, x, x)[0], own(x, x, x)[0])
    assert repr(again) == repr(own) and "num_kv_heads=2" in repr(own) and "Causal() & Mask" in repr(own)


def test_a_graph_is_of_the_pattern_that_is_set(x):
    own, _ = pair()
    compiled = torch.compile(own, backend="eager", fullgraph=True)
    for pattern in (WINDOW, p.SlidingWindow(3), "causal", np.tri(20, dtype=bool)):
        own.pattern = pattern
        assert torch.equal(compiled(x, x, x)[0], own(x, x, x)[0])
        assert torch.equal(compiled(x, x, x, PADDING)[0], own(x, x, x, PADDING)[0])
    assert own.pattern == p.Mask(np.tri(20, dtype=bool))


def test_layers_that_are_compiled_one_by_one_share_a_graph(x):
    """Patterns are compared by what they are: more layers than torch.compile makes graphs of one function."""
    for _ in range(2 * torch._dynamo.config.recompile_limit):
        torch.compile(pair(p.SlidingWindow(5, 2))[0], backend="eager", fullgraph=True)(x, x, x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Unregistered(p.Pattern):
    def allows(self, q, k):
        return k <= q


@pytest.mark.parametrize("padding", [None, PADDING])
def test_a_pattern_without_a_text(x, padding):
    """Not in one graph, but between two."""
    own, other = pair(Unregistered())
    want = other(x, x, x, attn_mask=mask(p.Causal()), key_padding_mask=padding, need_weights=False)[0]
    for run in (own, torch.compile(own, backend="eager")):
        torch.testing.assert_close(run(x, x, x, padding)[0], want)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(own, backend="eager", fullgraph=True)(x, x, x, padding)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(x, compiled):
    own = pair()[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        run = torch.compile(own, backend="aot_eager", fullgraph=True) if compiled else own
        got = run(*[x.float()] * 3)[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), own.double()(x, x, x)[0], rtol=0.05, atol=0.05)


def test_what_is_refused(x):
    own, _ = pair()
    for options, error, words in (
        ({"need_weights": True}, ValueError, "^need_weights: only False is supported"),
        (
            {"is_causal": True},
            ValueError,
            '^is_causal: a hint about attn_mask; without one, write layer.pattern = "causal"',
        ),
        ({"attn_mask": mask(WINDOW)[1:]}, ValueError, r"^attn_mask: expected shape \(20, 20\), got \(19, 20\)"),
        ({"attn_mask": torch.zeros(4, 20, 20)}, ValueError, r"^attn_mask: expected shape \(8, 20, 20\), got"),
        ({"attn_mask": mask(WINDOW).int()}, TypeError, "^attn_mask: expected a boolean .*; write attn_mask.bool"),
        ({"dropout": 0.1}, TypeError, "^dropout: not an argument of nn.MultiheadAttention.forward, got 0.1"),
        ({"key_padding_mask": PADDING[:1]}, ValueError, r"^key_padding_mask: expected shape \(2, 20\), got \(1, 20\)"),
        (
            {"key_padding_mask": PADDING.int()},
            TypeError,
            "^key_padding_mask: expected a boolean or floating-point tensor",
        ),
        ({"key_padding_mask": PADDING * -3.5}, ValueError, "additive biases are not supported"),
        ({"query": x[0]}, ValueError, r"^key: expected shape \(length, 32\), got \(2, 20, 32\)"),
        ({"query": x[..., 0]}, ValueError, r"^query: expected shape \(length, 32\), got \(2, 20\)"),
        ({"value": x[..., :31]}, ValueError, r"^value: expected shape \(batch, length, 32\), got \(2, 20, 31\)"),
        ({"key": x[:, 1:]}, ValueError, "^v: expected shape"),
    ):
        with pytest.raises(error, match=words):
            own(**{"query": x, "key": x, "value": x} | options)
    for arguments, error, words in (
        ((32, 5), ValueError, r"^embed_dim: must be a multiple of num_heads \(5\), got 32"),
        ((0, 1), ValueError, "^embed_dim: "),
        ((32, 4.0), TypeError, "^num_heads: "),
        ((32, 4, 7), TypeError, "^pattern: expected a Pattern"),
        ((32, 4, 0.1), TypeError, "^pattern: expected a Pattern as the third argument, got 0.1; write dropout=0.1"),
        ((32, 4, "casual"), ValueError, "^pattern: expected one of .*did you mean 'causal'"),
    ):
        with pytest.raises(error, match=words):
            SparseAttention(*arguments)
    for num_kv_heads, words in ((3, r"^num_kv_heads: must divide num_heads \(4\), got 3"), (0, "^num_kv_heads: ")):
        with pytest.raises(ValueError, match=words):
            SparseAttention(32, 4, num_kv_heads=num_kv_heads)


def additive_pairs(other):
    """What a mask adds to scores: -inf and other numbers."""
    numbers = torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return numbers.masked_fill(other, -torch.inf)


FURTHER = ~(torch.ones(8, 20, 20).tril().bool() | (torch.arange(20) < 3))  # each query keeps a key that is no padding
ATTN_MASKS = {
    "bool": lambda: FURTHER[0],
    "additive": lambda: additive(FURTHER[0]),
    "bias": lambda: additive_pairs(FURTHER[0]),
    "bool per head": lambda: FURTHER & (torch.arange(8)[:, None, None] % 2 == 0),
    "bias per head": lambda: additive_pairs(FURTHER[0]) * torch.arange(1.0, 9.0, dtype=torch.float64)[:, None, None],
}


@pytest.mark.parametrize(
    "form, compiled",
    [(None, False), (lambda padding: padding, False), (additive, False), (additive, True)],
    ids=["alone", "bool", "additive", "compiled"],
)
def test_attn_mask(x, form, compiled):
    """As PyTorch's layer has it, with a padding mask and without; the layer's pattern holds, too."""
    own, other = pair("full")
    padding = None if form is None else form(PADDING)
    for name in ("bias per head",) if compiled else ATTN_MASKS:
        run = torch.compile(own, backend="aot_eager", fullgraph=True) if compiled else own
        given = ATTN_MASKS[name]()
        got = run(x, x, x, padding, attn_mask=given, is_causal=True)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the masks differ in dtype
            want = other(x, x, x, padding, attn_mask=given, need_weights=False)[0]
        torch.testing.assert_close(got, want, msg=name)
    own.pattern = "sliding_window(5, 2)"
    both = FURTHER[0] | mask(WINDOW)
    want = other(x, x, x, padding, attn_mask=both if form is not additive else additive(both), need_weights=False)[0]
    torch.testing.assert_close(own(x, x, x, padding, attn_mask=FURTHER[0])[0], want)


@pytest.mark.parametrize("options", [{"kdim": 7, "vdim": 5}, {"vdim": 12, "bias": False}, {"kdim": 32}], ids=str)
def test_other_features_of_keys_and_values(x, options):
    own, other = pair(**options)
    assert own.state_dict().keys() == other.state_dict().keys()
    assert all(map(torch.equal, own.state_dict().values(), other.state_dict().values()))
    key, value = (torch.randn(2, 20, options.get(name, 32), dtype=torch.float64) for name in ("kdim", "vdim"))
    want = other(x, key, value, attn_mask=mask(WINDOW), need_weights=False)[0]
    torch.testing.assert_close(own(x, key, value)[0], want)


def test_batch_second_and_no_batch(x):
    own, other = pair(batch_first=False)
    turned = x.transpose(0, 1)
    want = other(turned, turned, turned, PADDING, attn_mask=mask(WINDOW), need_weights=False)[0]
    torch.testing.assert_close(own(turned, turned, turned, PADDING)[0], want)
    for layer in (own, pair()[0]):
        got = layer(x[1], x[1], x[1], PADDING[1], attn_mask=FURTHER[:4])[0]
        want = other(x[1], x[1], x[1], PADDING[1], attn_mask=FURTHER[:4] | mask(WINDOW), need_weights=False)[0]
        torch.testing.assert_close(got, want)


def test_a_key_of_zeros(x):
    own, other = pair(add_zero_attn=True)
    want = other(x, x, x, PADDING, attn_mask=mask(WINDOW), need_weights=False)[0]
    torch.testing.assert_close(own(x, x, x, PADDING)[0], want)
    with pytest.raises(ValueError, match="^add_bias_kv: only False is supported"):
        pair(add_bias_kv=True)
    learned = SparseAttention(32, 4, WINDOW, sinks=True, dtype=torch.float64)
    learned.load_state_dict(own.state_dict() | {"sinks": torch.zeros(4)})
    torch.testing.assert_close(learned(x, x, x, PADDING)[0], want)  # a sink of 0 is the same


def test_in_decoder_layers(x):
    """They pass masks of both kinds, by name."""
    layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True, dtype=torch.float64)
    own = copy.deepcopy(layer)
    for name in ("self_attn", "multihead_attn"):
        setattr(own, name, SparseAttention(32, 4, "full", dtype=torch.float64))
    own.load_state_dict(layer.state_dict())
    later = nn.Transformer.generate_square_subsequent_mask(20, dtype=torch.float64)
    masks = {"tgt_mask": later, "memory_key_padding_mask": PADDING, "tgt_is_causal": True}
    torch.testing.assert_close(own(x, x, **masks), layer(x, x, **masks))


def test_the_same_function():
    assert spattn.torch.attention is spattn.attention and spattn.torch.attention_backward is spattn.attention_backward
