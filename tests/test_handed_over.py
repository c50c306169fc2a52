"""What users of other libraries hand over: it means the pairs that NumPy says, or the error's advice computes them.

Shapes and conventions are those of the public documentation of FlexAttention, FlashAttention, xFormers, DeepSpeed,
Transformers, JAX and PyTorch. Sizes: a batch of 2, 4 heads, 6 queries, 9 keys, unless a case says otherwise.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import spattn
from spattn import patterns as p

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
sparse = pytest.importorskip("scipy.sparse")

BATCH, HEADS, Q_LEN, KV_LEN = 2, 4, 6, 9
RNG = np.random.default_rng(0)
BITS = RNG.random((BATCH, HEADS, Q_LEN, KV_LEN)) < 0.6
BIAS = RNG.standard_normal((HEADS, Q_LEN, KV_LEN)).astype(np.float32)
LENGTHS = np.array([9, 5])
TOKENS = np.arange(KV_LEN) < LENGTHS[:, None]  # a tokenizer's mask, padded on the right
DOCUMENT = np.repeat([0, 1, 2], 3)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)

At = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # b, h, i, j: indices that broadcast to all pairs


def everything(b, h, i, j):
    return (i >= 0) & (j >= 0)


def top_left(b, h, i, j):
    return j <= i


def bottom_right(b, h, i, j):
    return j <= i + KV_LEN - Q_LEN


def window(left, right, offset=KV_LEN - Q_LEN):
    return lambda b, h, i, j: (j >= i + offset - left) & (j <= i + offset + right)


def tokens_only(b, h, i, j):
    return TOKENS[b, j]


def of_bits(bits):
    """The pairs of a mask that broadcasts."""
    whole = np.broadcast_to(bits, (BATCH, HEADS, Q_LEN, KV_LEN))
    return lambda b, h, i, j: whole[b, h, i, j]


def additive(bits, least=-np.inf):
    return np.where(bits, 0, least).astype(np.float32)


@dataclass
class Case:
    """`given` are arguments of attention(); `allowed` and `score` say what they mean.

    With `error`, the call is refused; the message has `advice`, arguments to write instead, which mean the same.
    """

    given: Callable[[], dict[str, Any]]
    allowed: Callable[..., np.ndarray] = everything
    score: Callable[..., np.ndarray] = lambda s, b, h, i, j: s
    scale: float = 8**-0.5
    sinks: np.ndarray | None = None
    sizes: tuple[int, int, int, int] = (BATCH, HEADS, Q_LEN, KV_LEN)
    error: type[Exception] | None = None
    advice: str = ""
    names: dict[str, Any] = field(default_factory=dict)  # of the caller, which the advice mentions

    def arrays(self):
        batch, heads, q_len, kv_len = self.sizes
        rng = np.random.default_rng(1)
        return [rng.standard_normal((batch, heads, n, 8), dtype=np.float32) for n in (q_len, kv_len, kv_len)]

    def at(self):
        return np.ogrid[tuple(slice(n) for n in self.sizes)]

    def pairs(self):
        return np.broadcast_to(self.allowed(*self.at()), self.sizes)

    def expected(self):
        """Softmax attention in float64, written out."""
        q, k, v = (x.astype(float) for x in self.arrays())
        s = np.where(self.pairs(), self.score(q @ k.swapaxes(2, 3) * self.scale, *self.at()), -np.inf)
        sinks = np.full(self.sizes[1], -np.inf) if self.sinks is None else self.sinks
        s = np.concatenate([s, np.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], -1)
        top = s.max(-1, keepdims=True)
        weights = np.exp(s - np.where(np.isfinite(top), top, 0))
        total = weights.sum(-1, keepdims=True)
        return (weights / np.where(total > 0, total, 1))[..., :-1] @ v


# -- what is taken -----------------------------------------------------------------------------------------------------


def windowed_causal():
    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx  # noqa: E731
    return flex.and_masks(causal, lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= 2)


def documents():
    table = torch.from_numpy(DOCUMENT)
    return lambda b, h, q_idx, kv_idx: table[q_idx] == table[kv_idx]


def by_lengths():
    lengths = torch.from_numpy(LENGTHS)
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


class Reach:
    """A mask_mod that is an object, as in attention-gym."""

    def __init__(self, reach):
        self.reach = torch.tensor(reach)

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= self.reach[h]


def neighbours(b, h, q_idx, kv_idx):
    """A 3 × 3 neighborhood in an image of 3 × 3 pixels, cut off at its edges; q_idx < 6."""
    return ((q_idx // 3 - kv_idx // 3).abs() <= 1) & ((q_idx % 3 - kv_idx % 3).abs() <= 1)


def block_mask(mask_mod, batch=None, heads=None, **options):
    return flex.create_block_mask(mask_mod, batch, heads, Q_LEN, KV_LEN, device="cpu", **options)


def listed_blocks():
    """Query block i takes the listed key blocks, of 2 × 3 tokens, whole."""
    counts = torch.tensor([[[1, 2, 3]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 0], [0, 1, 0], [0, 1, 2]]]], dtype=torch.int32)
    return flex.BlockMask.from_kv_blocks(
        torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=(2, 3), seq_lengths=(Q_LEN, KV_LEN)
    )


class LowerTriangularMask:  # stands in for xFormers' class, as do the next two
    __module__ = "xformers.ops.fmha.attn_bias"


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    __module__ = "xformers.ops.fmha.attn_bias"


class LocalAttentionFromBottomRightMask(LowerTriangularMask):
    __module__ = "xformers.ops.fmha.attn_bias"
    window_left, window_right = 2, 1


def deepspeed_page():
    """The example on DeepSpeed's configuration page lists the keys of all modes; the mode "fixed" reads some."""
    section = {"mode": "fixed", "block": 2, "different_layout_per_head": True, "num_local_blocks": 2}
    section |= {"num_global_blocks": 1, "attention": "unidirectional", "horizontal_global_attention": False}
    section |= {"num_different_global_patterns": 2, "num_random_blocks": 0, "local_window_blocks": [4]}
    section |= {"global_block_indices": [0], "global_block_end_indices": None, "num_sliding_window_blocks": 3}
    return p.interop.from_deepspeed({"sparse_attention": section, "fp16": {"enabled": True}})


def deepspeed_blocks(b, h, i, j):
    """Its layout: local windows of 2 blocks, whose last (even heads) or first block all later blocks attend to."""
    q, k = i // 2, j // 2
    return (k <= q) & ((q // 2 == k // 2) | (k % 2 == (h + 1) % 2))


def upper_left():
    from torch.nn.attention.bias import causal_upper_left

    return causal_upper_left(Q_LEN, KV_LEN)


def lower_right():
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(Q_LEN, KV_LEN)


SQUARE = {"sizes": (BATCH, HEADS, KV_LEN, KV_LEN)}


def taken(value, allowed=everything, **options):
    """A case whose pattern is `value()`, or key padding if that is a dict."""
    make = value if callable(value) else lambda: value
    return Case(lambda: found if isinstance(found := make(), dict) else {"pattern": found}, allowed, **options)


TAKEN = {
    "flex: causal counts rows from the top": taken(lambda: lambda b, h, q, k: q >= k, top_left),
    "flex: and_masks": taken(windowed_causal, window(2, 0, 0)),
    "flex: or_masks with a prefix": taken(
        lambda: flex.or_masks(lambda b, h, q, k: k < 2, lambda b, h, q, k: q >= k),
        lambda b, h, i, j: (j < 2) | (j <= i),
    ),
    "flex: documents of a table": taken(documents, lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j]),
    "flex: lengths by batch entry": taken(by_lengths, tokens_only),
    "flex: a callable object by head": taken(
        lambda: Reach([0, 1, 2, 9]), lambda b, h, i, j: abs(i - j) <= np.array([0, 1, 2, 9])[h]
    ),
    "flex: functools.partial": taken(
        lambda: functools.partial(lambda every, b, h, q, k: (q - k) % every == 0, 3),
        lambda b, h, i, j: (i - j) % 3 == 0,
    ),
    "flex: neighborhood": taken(
        lambda: neighbours, lambda b, h, i, j: (abs(i // 3 - j // 3) <= 1) & (abs(i % 3 - j % 3) <= 1)
    ),
    "flex: offset of a cache": taken(
        lambda: (lambda offset: lambda b, h, q, k: q + offset >= k)(torch.tensor(3)), bottom_right
    ),
    "flex: noop_mask": taken(lambda: flex.noop_mask),
    "flex: BlockMask": taken(lambda: block_mask(lambda b, h, q, k: q >= k), top_left),
    "flex: BlockMask by entry and head": taken(
        lambda: block_mask(lambda b, h, q, k: (k < 5 + 4 * b) & (q + k >= h), BATCH, HEADS, BLOCK_SIZE=2),
        lambda b, h, i, j: (j < 5 + 4 * b) & (i + j >= h),
    ),
    "flex: lists of blocks": taken(
        listed_blocks, lambda b, h, i, j: np.array([[0, 0, 1], [1, 1, 0], [1, 1, 1]], bool)[i // 2, j // 3]
    ),
    "torch: square subsequent mask": taken(
        lambda: torch.nn.Transformer.generate_square_subsequent_mask(KV_LEN), top_left, **SQUARE
    ),
    "torch: causal_upper_left": taken(upper_left, top_left),
    "torch: causal_lower_right": taken(lower_right, bottom_right),
    "torch: bool per head": taken(lambda: torch.from_numpy(BITS[0]), of_bits(BITS[0])),
    "torch: additive of float16": taken(lambda: torch.from_numpy(additive(BITS)).half(), of_bits(BITS)),
    "torch: COO": taken(lambda: torch.from_numpy(BITS[0, 0]).to_sparse(), of_bits(BITS[0, 0])),
    "torch: CSR": taken(lambda: torch.from_numpy(BITS[0, 0]).float().to_sparse_csr(), of_bits(BITS[0, 0])),
    "SciPy: csr_matrix": taken(lambda: sparse.csr_matrix(BITS[0, 0]), of_bits(BITS[0, 0])),
    "SciPy: coo_array with duplicates": taken(
        lambda: sparse.coo_array((np.ones(3), ([0, 0, 5], [1, 1, 8])), (Q_LEN, KV_LEN)),
        lambda b, h, i, j: (i == 0) & (j == 1) | (i == 5) & (j == 8),
    ),
    "SciPy: a band of diagonals": taken(
        lambda: sparse.diags_array([1, 1], offsets=[0, 2], shape=(Q_LEN, KV_LEN)),
        lambda b, h, i, j: (j == i) | (j == i + 2),
    ),
    "xFormers: LowerTriangularMask": taken(LowerTriangularMask, top_left),
    "xFormers: bottom right": taken(LowerTriangularFromBottomRightMask, bottom_right),
    "xFormers: local attention": taken(LocalAttentionFromBottomRightMask, window(2, 1)),
    "xFormers: a materialized bias": taken(lambda: additive(BITS), of_bits(BITS)),
    "DeepSpeed: the page's example": taken(deepspeed_page, deepspeed_blocks, sizes=(BATCH, HEADS, 16, 16)),
    "Transformers: attention_mask of a tokenizer": taken({"key_padding": TOKENS.astype(np.int64)}, tokens_only),
    "Transformers: with a pattern's text": taken(
        {"key_padding": TOKENS, "pattern": "causal & sliding_window(3, 0)"},
        lambda b, h, i, j: window(3, 0)(b, h, i, j) & TOKENS[b, j],
    ),
    "Transformers: extended bool mask": taken(
        {"key_padding": TOKENS[:, None, None], "pattern": BITS[:, :1]},
        lambda b, h, i, j: BITS[b, 0, i, j] & TOKENS[b, j],
    ),
    "DeepSpeed: key padding that is added": taken({"key_padding": additive(TOKENS)}, tokens_only),
    "JAX: mask (1, 1, queries, keys)": taken(np.tri(Q_LEN, KV_LEN, dtype=bool)[None, None], top_left),
    "a class": taken(lambda: p.Causal, bottom_right),
    "a class joined with a pattern": taken(lambda: p.Causal & ~p.Sinks(2), lambda b, h, i, j: (j <= i + 3) & (j >= 2)),
    "a pattern joined with a mask_mod": taken(
        lambda: p.Sinks(1) | (lambda b, h, q, k: q == k), lambda b, h, i, j: (j < 1) | (i == j)
    ),
    "a repr": taken(
        lambda: repr(p.Causal() & (p.Sinks(1) | p.SlidingWindow(2, 0))),
        lambda b, h, i, j: (j <= i + 3) & ((j < 1) | (j >= i + 1)),
    ),
    "JSON": taken(lambda: p.SlidingWindow(2, 1).to_json(), window(2, 1)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    """By attention() of arrays and of tensors, attention_backward(), plan() and plan_for()."""
    case = TAKEN[name]
    q, k, v = case.arrays()
    out, lse = spattn.attention(q, k, v, **case.given(), return_lse=True)
    np.testing.assert_allclose(out, case.expected(), atol=2e-6)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    assert np.array_equal(spattn.attention(*tensors, **case.given()), out)
    mask = p.Mask(case.pairs())
    for mine, theirs in zip(
        spattn.attention_backward(out, q, k, v, out, lse, **case.given()),
        spattn.attention_backward(out, q, k, v, out, lse, mask),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    given = case.given()
    pattern, padding = given.get("pattern", "full"), given.get("key_padding")
    assert np.array_equal(spattn.attention(q, k, v, spattn.plan_for(pattern, q, k, v, key_padding=padding)), out)
    batch, heads, q_len, kv_len = case.sizes
    plan = spattn.plan(pattern, q_len, kv_len, batch=batch, heads=heads, key_padding=padding)
    np.testing.assert_allclose(spattn.attention(q, k, v, plan), out, atol=2e-6)


# -- what is refused, with the line to write instead -------------------------------------------------------------------


def refused(given, advice, allowed=everything, *, error=TypeError, names=None, **options):
    make = given if callable(given) else lambda: given
    return Case(make, allowed, error=error, advice=advice, names=names or {}, **options)


def soft_cap(s, b, h, i, j):
    return 3 * np.tanh(s / 3)


def distances(s, b, h, i, j):
    return s - SLOPES[h] * abs(i + KV_LEN - Q_LEN - j)


def score_mod(score, b, h, q_idx, kv_idx):
    return score + 0.5 * (kv_idx - q_idx)


ROUNDED = additive(BITS, np.finfo(np.float32).min)
STARTS = np.array([0, 2, 6])  # two sequences: 2 and 4 queries, 4 and 5 keys
KEY_STARTS = np.array([0, 4, 9])


def sequences(b, h, i, j):
    return (i >= 2) == (j >= 4)


REFUSED = {
    "flex: score_mod=": refused(
        {"score_mod": score_mod},
        "score=spattn.score.from_score_mod(score_mod)",
        names={"score_mod": score_mod},
        score=lambda s, b, h, i, j: s + 0.5 * (j - i),
    ),
    "flex: a score_mod as the pattern": refused(
        {"pattern": score_mod},
        "score=spattn.score.from_score_mod(function)",
        names={"function": score_mod},
        score=lambda s, b, h, i, j: s + 0.5 * (j - i),
    ),
    "flex: block_mask=": refused(
        lambda: {"block_mask": block_mask(lambda b, h, q, k: q >= k)},
        "pattern=block_mask",
        top_left,
        names={"block_mask": block_mask(lambda b, h, q, k: q >= k)},
    ),
    "flex: kernel_options=": refused({"kernel_options": {"BLOCK_M": 64}}, ""),
    "flash: causal=": refused({"causal": True}, 'pattern="causal"', bottom_right),
    "flash: window_size=": refused({"window_size": (3, 1)}, 'pattern="sliding_window(3, 1)"', window(3, 1)),
    "flash: softmax_scale=": refused(
        {"softmax_scale": 0.2}, "scale=softmax_scale", names={"softmax_scale": 0.2}, scale=0.2
    ),
    "flash: softcap=": refused(
        {"softcap": 3.0}, "score=spattn.score.softcap(softcap)", names={"softcap": 3.0}, score=soft_cap
    ),
    "flash: alibi_slopes=": refused(
        {"alibi_slopes": SLOPES},
        "score=spattn.score.alibi(alibi_slopes, symmetric=True)",
        names={"alibi_slopes": SLOPES},
        score=distances,
    ),
    "flash: cu_seqlens_q=": refused(
        {"cu_seqlens_q": STARTS, "cu_seqlens_k": KEY_STARTS},
        "pattern=spattn.patterns.Documents.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k)",
        sequences,
        names={"cu_seqlens_q": STARTS, "cu_seqlens_k": KEY_STARTS},
    ),
    "flash: cache_seqlens=": refused(
        {"cache_seqlens": LENGTHS},
        "key_padding=spattn.patterns.KeyPadding.from_lengths(lengths, kv_len)",
        tokens_only,
        names={"lengths": LENGTHS, "kv_len": KV_LEN},
    ),
    "flash: deterministic=": refused({"deterministic": True}, ""),
    "xFormers: attn_bias=": refused(
        {"attn_bias": BIAS},
        "score=spattn.score.bias(attn_bias)",
        names={"attn_bias": BIAS},
        score=lambda s, b, h, i, j: s + BIAS[h, i, j],
    ),
    "xFormers: a tensor with other numbers": refused(
        {"pattern": BIAS},
        "score=spattn.score.bias(mask)",
        names={"mask": BIAS},
        score=lambda s, b, h, i, j: s + BIAS[h, i, j],
    ),
    "DeepSpeed: its configuration": refused(
        {"pattern": {"mode": "dense", "block": 1}},
        "spattn.patterns.interop.from_deepspeed(config)",
        names={"config": {"mode": "dense", "block": 1}},
        **SQUARE,
    ),
    "DeepSpeed: attn_mask that is multiplied": refused(
        {"pattern": BITS.astype(np.float32)}, "mask != 0", of_bits(BITS), names={"mask": BITS.astype(np.float32)}
    ),
    "Transformers: attention_mask=": refused(
        {"attention_mask": TOKENS}, "key_padding=attention_mask", tokens_only, names={"attention_mask": TOKENS}
    ),
    "Transformers: attention_mask in the pattern's place": refused(
        {"pattern": TOKENS}, "key_padding=mask", tokens_only, names={"mask": TOKENS}, error=ValueError
    ),
    "Transformers: (batch, 1, 1, keys)": refused(
        {"pattern": TOKENS[:, None, None]},
        "key_padding=mask",
        tokens_only,
        names={"mask": TOKENS[:, None, None]},
        error=ValueError,
    ),
    "Transformers: the dtype's minimum": refused(
        {"pattern": ROUNDED}, "mask == 0", of_bits(BITS), names={"mask": ROUNDED}
    ),
    "Transformers: sliding_window=": refused({"sliding_window": 4}, 'pattern="sliding_window(3, 0)"', window(3, 0)),
    "Transformers: s_aux=": refused({"s_aux": SLOPES}, "sinks=s_aux", names={"s_aux": SLOPES}, sinks=SLOPES),
    "Transformers: ints 0 and 1 for pairs": refused(
        {"pattern": BITS.astype(np.int64)}, "array.astype(bool)", of_bits(BITS), names={"array": BITS.astype(np.int64)}
    ),
    "torch: ints 0 and 1 for pairs": refused(
        lambda: {"pattern": torch.from_numpy(BITS).int()},
        "array.bool()",
        of_bits(BITS),
        names={"array": torch.from_numpy(BITS).int()},
    ),
    "torch: is_causal=": refused({"is_causal": True}, 'pattern="queries_at(causal, 0)"', top_left),
    "torch: key_padding_mask=": refused(
        {"key_padding_mask": ~TOKENS}, "key_padding=~key_padding_mask", tokens_only, names={"key_padding_mask": ~TOKENS}
    ),
    "torch: attn_mask=": refused({"attn_mask": BITS}, "pattern=mask", of_bits(BITS), names={"mask": BITS}),
    "torch: enable_gqa=": refused({"enable_gqa": True}, ""),
    "torch: a mask per batch entry": refused(
        {"pattern": BITS[:, 0]}, "mask[:, None]", of_bits(BITS[:, :1]), names={"mask": BITS[:, 0]}, error=ValueError
    ),
    "torch: a mask of a batch as large as the heads": refused(
        {"pattern": BITS[0, :2]},
        "mask[:, None]",
        lambda b, h, i, j: BITS[0, :2][b, i, j],
        names={"mask": BITS[0, :2]},
        error=ValueError,
        sizes=(2, 2, Q_LEN, KV_LEN),
    ),
    "torch: a bias that learns": refused(
        lambda: {"pattern": torch.zeros(Q_LEN, KV_LEN, requires_grad=True)},
        "score=spattn.score.bias(mask)",
        names={"mask": np.zeros((Q_LEN, KV_LEN))},
    ),
    "JAX: local_window_size=": refused({"local_window_size": 2}, 'pattern="sliding_window(2, 2)"', window(2, 2)),
    "JAX: key_value_seq_lengths=": refused(
        {"key_value_seq_lengths": LENGTHS},
        "key_padding=spattn.patterns.KeyPadding.from_lengths(lengths, kv_len)",
        tokens_only,
        names={"lengths": LENGTHS, "kv_len": KV_LEN},
    ),
    "JAX: bias=": refused(
        {"bias": BIAS},
        "score=spattn.score.bias(bias)",
        names={"bias": BIAS},
        score=lambda s, b, h, i, j: s + BIAS[h, i, j],
    ),
    "JAX: splash attention's function of two": refused(
        {"pattern": lambda q, k: q >= k},
        "lambda b, h, q_idx, kv_idx: function(q_idx, kv_idx)",
        top_left,
        names={"function": lambda q, k: q >= k},
    ),
    "JAX: lengths as key padding": refused(
        {"key_padding": LENGTHS},
        "key_padding=spattn.patterns.KeyPadding.from_lengths(lengths, 9)",
        tokens_only,
        names={"lengths": LENGTHS},
        error=ValueError,
    ),
    "floats 1 and 0 as key padding": refused(
        {"key_padding": TOKENS.astype(np.float32)},
        "key_padding=mask == 1",
        tokens_only,
        names={"mask": TOKENS.astype(np.float32)},
        error=ValueError,
    ),
    "is_causal by position": refused({"pattern": True}, '"causal"', bottom_right),
    "a window by position": refused({"pattern": (3, 1)}, '"sliding_window(3, 1)"', window(3, 1)),
    "nested lists": refused(
        {"pattern": BITS[0, 0].tolist()},
        "numpy.array(mask)",
        of_bits(BITS[0, 0]),
        names={"mask": BITS[0, 0].tolist(), "numpy": np},
    ),
    "no pattern": refused({"pattern": None}, '"full"'),
    "a name that needs numbers": refused({"pattern": "sinks"}, '"sinks(count=4)"', lambda b, h, i, j: j < 4),
    "a class that needs numbers": refused(
        {"pattern": p.Sinks}, "Sinks(count=4)", lambda b, h, i, j: j < 4, names={"Sinks": p.Sinks}
    ),
    "a function of the library": refused(
        {"pattern": p.strided},
        "strided(stride=4)",
        lambda b, h, i, j: (j <= i + 3) & ((i + 3 - j < 4) | ((i + 3 - j) % 4 == 0)),
        names={"strided": p.strided},
    ),
    "parentheses forgotten": refused(
        {"pattern": p.Causal | p.Sinks},
        "Causal() | Sinks(4)",
        lambda b, h, i, j: (j <= i + 3) | (j < 4),
        names={"Causal": p.Causal, "Sinks": p.Sinks},
    ),
}
RAW = re.compile(r"__init__|positional argument|unsupported operand|_Bound|MaskMod|object at 0x|NoneType")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """One error whose advice, copied and executed, computes what was meant."""
    case = REFUSED[name]
    q, k, v = case.arrays()
    with pytest.raises(case.error) as raised:
        spattn.attention(q, k, v, **case.given())
    message = str(raised.value)
    assert not RAW.search(message), message
    if case.advice:
        assert case.advice in message
    else:
        assert "leave it out" in message
    keyword = re.match(r"\w+=", case.advice)
    call = f"attention(q, k, v, {case.advice if keyword or not case.advice else 'pattern=' + case.advice})"
    out = eval(call, {"attention": spattn.attention, "spattn": spattn, "q": q, "k": k, "v": v} | case.names)
    np.testing.assert_allclose(out, case.expected(), atol=2e-6)


def test_every_hint_for_a_keyword_says_what_to_write():
    from spattn.api._habits import _HINTS

    q, k, v = TAKEN["JSON"].arrays()
    for name in _HINTS:
        for value in (True, 3, (2, 2), None):
            with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'; (write |leave it out)"):
                spattn.attention(q, k, v, **{name: value})


def test_errors_of_other_mistakes_are_plain():
    """No Python words about calls, and no names of internal classes."""
    q, k, v = TAKEN["JSON"].arrays()
    mistakes = {
        "operand: got Sinks itself; call it": lambda: p.Causal() - p.Sinks,
        "operand: expected a Pattern.*got int": lambda: p.Causal() & 5,
        "pattern: expected sliding_window": lambda: p.registry.get("sliding_window"),
        "missing a required": lambda: spattn.attention(q, k, v, "causal & sliding_window"),
        "did you mean 'causal'": lambda: spattn.attention(q, k, v, "casual"),
        "expected a description": lambda: spattn.attention(q, k, v, "causal and sinks(2)"),
        "got a function of 3 arguments; a mask_mod takes b, h": lambda: spattn.attention(
            q, k, v, lambda b, q, k: q >= k
        ),
        "got a score function": lambda: spattn.attention(q, k, v, spattn.score.softcap(2.0)),
        "got the class int": lambda: spattn.attention(q, k, v, int),
        "one per head": lambda: spattn.attention(q, k, v, [p.Causal(), p.Full()]),
        "a BlockMask must have shape": lambda: spattn.attention(q, k, v, block_mask(lambda b, h, q, k: q >= k, 3, 1)),
        "expected a CausalBias for lengths 6 × 6": lambda: spattn.attention(q, q, q, lower_right()),
        "a Plan has fixed pairs": lambda: spattn.attention(
            q, k, v, spattn.plan("causal", Q_LEN, KV_LEN), key_padding=TOKENS
        ),
        "key_padding: expected shape": lambda: spattn.attention(q, k, v, key_padding=BITS),
    }
    for words, call in mistakes.items():
        with pytest.raises((TypeError, ValueError), match=words) as raised:
            call()
        assert not RAW.search(str(raised.value)), raised.value
