"""The functions with PyTorch's signatures give PyTorch's results and gradients, or refuse an argument."""

import inspect
import warnings

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import spattn  # noqa: E402
from spattn.torch import flex_attention, scaled_dot_product_attention  # noqa: E402

BATCH, HEADS, Q_LEN, KV_LEN, DIM = 2, 4, 6, 9, 8
Q, K = (BATCH, HEADS, Q_LEN, DIM), (BATCH, HEADS, KV_LEN, DIM)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2}
F = torch.nn.functional


@pytest.fixture(autouse=True)
def seeded():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FlexAttention warns that it is not compiled
        yield


def results(function, tensors, options):
    """Output, and gradients of the tensors and of a mask that requires one."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    mask = options.get("attn_mask")
    wanted = list(leaves)
    if mask is not None and mask.requires_grad:
        options = options | {"attn_mask": mask.detach().clone().requires_grad_()}
        wanted.append(options["attn_mask"])
    out = function(*leaves, **options)
    return out, *torch.autograd.grad(out.double().square().sum(), wanted)


def check(function, other, tensors, **options):
    expected = results(other, tensors, options)
    tolerance = TOLERANCE[tensors[0].dtype]
    for got, want in zip(results(function, tensors, options), expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def check_sdpa(*shapes, dtype=torch.float64, **options):
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    check(scaled_dot_product_attention, F.scaled_dot_product_attention, tensors, **options)


def masks(shape, dtype):
    """A boolean mask; masks of 0 and -inf, of a bias, and of both, without a gradient and with one. Rows are empty."""
    allowed = torch.rand(shape) < 0.6
    if shape[-2] > 1:
        allowed[..., 2, :] = False
    bias = torch.randn(shape, dtype=dtype)
    floats = torch.zeros_like(bias).masked_fill(~allowed, -torch.inf), bias, bias.masked_fill(~allowed, -torch.inf)
    return [allowed, *floats, *(x.clone().requires_grad_() for x in floats)]


SHAPES = [(6, 9), (1, 9), (6, 1), (4, 6, 9), (1, 1, 6, 9), (2, 1, 1, 9), (2, 1, 6, 1), (2, 4, 6, 9)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_that_broadcast(shape, dtype):
    """Rows without a key give 0 in PyTorch, too."""
    for mask in masks(shape, dtype):
        check_sdpa(Q, K, K, dtype=dtype, attn_mask=mask)
    if dtype == torch.bfloat16:
        check_sdpa(Q, K, K, dtype=dtype, attn_mask=torch.randn(shape))  # a float32 bias


@pytest.mark.parametrize("shape, number", [((6, 9), 6), ((2, 1, 1, 9), 0)], ids=str)
def test_masks_in_graphs(shape, number):
    """One graph, though values are unknown: a bias with -inf and a gradient, and key padding."""
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    tensors = [torch.randn(x, dtype=torch.float64) for x in (Q, K, K)]
    mask = masks(shape, torch.float64)[number]
    check(compiled, F.scaled_dot_product_attention, tensors, attn_mask=mask)


@pytest.mark.parametrize("q_len, kv_len", [(6, 9), (9, 6), (7, 7), (1, 5)])
def test_is_causal_is_aligned_at_the_top_left(q_len, kv_len):
    q, k = (1, 2, q_len, DIM), (1, 2, kv_len, DIM)
    check_sdpa(q, k, k, is_causal=True, scale=0.3)
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    tensors = [torch.randn(x, dtype=torch.float64) for x in (q, k, k)]
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    torch.testing.assert_close(scaled_dot_product_attention(*tensors, is_causal=True), expected)


@pytest.mark.parametrize(
    "shapes, options",
    [
        ((Q, (2, 2, 9, 8), (2, 2, 9, 8)), {"enable_gqa": True}),
        ((Q, (2, 2, 9, 8), (2, 4, 9, 8)), {"enable_gqa": True}),
        ((Q, (2, 1, 9, 8), (2, 1, 9, 8)), {}),
        ((Q, (1, 4, 9, 8), (1, 4, 9, 8)), {}),
        (((1, 4, 6, 8), K, (2, 4, 9, 3)), {}),
        (((4, 6, 8), (4, 9, 8), (4, 9, 8)), {"attn_mask": torch.rand(4, 6, 9) < 0.6}),
        (((6, 8), (9, 8), (9, 8)), {"is_causal": True}),
        (((6, 8), (9, 8), (9, 8)), {"attn_mask": torch.rand(6, 9) < 0.6}),
        (((3, *Q), (3, *K), (3, *K)), {"attn_mask": torch.rand(3, 1, 4, 6, 9) < 0.6}),
        (((3, *Q), (3, 2, 2, 9, 8), (3, 2, 2, 9, 8)), {"enable_gqa": True, "attn_mask": torch.rand(4, 6, 9) < 0.6}),
        ((Q, (4, 9, 8), (4, 9, 8)), {}),
        ((Q, (2, 4, 0, 8), (2, 4, 0, 8)), {}),
        ((Q, K, K), {"scale": 0.0}),
    ],
)
def test_axes_and_heads(shapes, options):
    check_sdpa(*shapes, **options)


def test_causal_biases():
    from torch.nn.attention import bias

    for made in (bias.causal_upper_left(Q_LEN, KV_LEN), bias.causal_lower_right(Q_LEN, KV_LEN)):
        check_sdpa(Q, K, K, dtype=torch.float32, attn_mask=made)


def test_dropout_has_the_mean_of_no_dropout():
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    drawn = torch.stack([scaled_dot_product_attention(q, k, v, dropout_p=0.4) for _ in range(600)])
    deviation = drawn.std(0) / 600**0.5
    error = (drawn.mean(0) - F.scaled_dot_product_attention(q, k, v)).abs()
    assert (deviation > 0).all() and (error < 6 * deviation).all()
    torch.manual_seed(3)
    first = scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    torch.manual_seed(3)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.4), first)


@pytest.mark.parametrize(
    "options, error, words",
    [
        (
            {"attn_mask": torch.ones(6, 9, dtype=torch.bool), "is_causal": True},
            ValueError,
            "write attn_mask=attn_mask &",
        ),
        (
            {"attn_mask": torch.ones(2, 6, 9, dtype=torch.bool)},
            ValueError,
            r"broadcasts to \(2, 4, 6, 9\), got \(2, 6, 9\)",
        ),
        ({"attn_mask": torch.ones(9, dtype=torch.bool)}, ValueError, "broadcasts to"),
        ({"attn_mask": torch.ones(6, 9, dtype=torch.int64)}, TypeError, r"got torch.int64; write mask.bool\(\)"),
        ({"attn_mask": torch.ones(6, 9).half()}, TypeError, r"write mask.to\(torch.float64\)"),
        ({"attn_mask": [[True]]}, TypeError, "attn_mask: expected a tensor, got list"),
        ({"key": torch.zeros(2, 2, 9, 8), "value": torch.zeros(2, 2, 9, 8)}, ValueError, "write enable_gqa=True"),
        ({"key": torch.zeros(3, 4, 9, 8)}, ValueError, "batch axes must broadcast"),
        ({"key": torch.zeros(2, 3, 9, 8), "enable_gqa": True}, ValueError, "must divide the query's"),
        ({"query": torch.zeros(8)}, ValueError, "query: expected at least two axes"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p: must be at least 0 and less than 1"),
    ],
)
def test_what_attention_with_scaled_products_refuses(options, error, words):
    given = {"query": torch.zeros(Q).double(), "key": torch.zeros(K).double(), "value": torch.zeros(K).double()}
    with pytest.raises(error, match=words):
        scaled_dot_product_attention(**given | options)


# -- FlexAttention -----------------------------------------------------------------------------------------------------

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (kv_idx >= h) & (q_idx != 3)


def score_mod(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("is_masked", [False, True])
def test_flex_attention(is_masked, scored, dtype):
    """With log-sum-exps, whose unit is the natural logarithm in both; row 3 attends to nothing."""
    q, k, v = (torch.randn(2, heads, n, DIM, dtype=dtype) for heads, n in ((4, Q_LEN), (2, KV_LEN), (2, KV_LEN)))
    blocks = flex.create_block_mask(mask_mod, None, HEADS, Q_LEN, KV_LEN, device="cpu") if is_masked else None
    options = {"block_mask": blocks, "score_mod": score_mod if scored else None, "scale": 0.4, "enable_gqa": True}
    aux = flex.AuxRequest(lse=True)
    (out, got), (expected, want) = (
        f(q, k, v, **options, return_aux=aux) for f in (flex_attention, flex.flex_attention)
    )
    assert type(got) is type(want) and got.max_scores is None and got.lse.dtype == want.lse.dtype
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-5)
    if is_masked:
        assert (out[:, :, 3] == 0).all() and (got.lse[:, :, 3] == -torch.inf).all()
    assert torch.equal(flex_attention(q, k, v, **options), out)
    again, lse = flex_attention(q, k, v, **options, return_lse=True)
    assert torch.equal(again, out) and torch.equal(lse, got.lse)
    assert flex_attention(q, k, v, **options, return_aux=flex.AuxRequest())[1] == flex.AuxOutput()


def test_gradients_of_flex_attention():
    """FlexAttention has none on the CPU: they are those of a mask and a bias."""
    slopes = SLOPES.double().requires_grad_()
    tensors = [torch.randn(2, 4, n, DIM, dtype=torch.float64, requires_grad=True) for n in (Q_LEN, KV_LEN, KV_LEN)]
    blocks = flex.create_block_mask(mask_mod, None, HEADS, Q_LEN, KV_LEN, device="cpu")
    out = flex_attention(*tensors, lambda s, b, h, q, k: s + slopes[h] * (k - q), blocks)
    distance = torch.arange(KV_LEN) - torch.arange(Q_LEN)[:, None]
    allowed = flex.create_mask(mask_mod, None, HEADS, Q_LEN, KV_LEN, device="cpu")
    bias = (slopes[:, None, None] * distance).masked_fill(~allowed, -torch.inf)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=bias)
    wanted = *tensors, slopes
    for got, want in zip(
        torch.autograd.grad(out.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_batches_of_flex_attention():
    """Keys and values of one batch entry, with a mask of all entries; one graph without a BlockMask."""
    q, k, v = torch.randn(2, 4, Q_LEN, DIM), *torch.randn(2, 1, 4, KV_LEN, DIM)
    blocks = flex.create_block_mask(lambda b, h, q, k: q + b >= k, 2, None, Q_LEN, KV_LEN, device="cpu")
    expected = flex.flex_attention(q, k, v, block_mask=blocks)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks), expected)
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    k, v = (x.expand(2, -1, -1, -1) for x in (k, v))
    torch.testing.assert_close(compiled(q, k, v, score_mod), flex.flex_attention(q, k, v, score_mod))


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"query": torch.zeros(4, 6, 8)}, ValueError, r"query: expected \(batch, heads, length, head_dim\)"),
        ({"kernel_options": {"BLOCK_M": 64}}, ValueError, "leave out BLOCK_M"),
        ({"return_lse": True, "return_aux": flex.AuxRequest(lse=True)}, ValueError, "write return_aux=AuxRequest"),
        ({"return_aux": flex.AuxRequest(max_scores=True)}, ValueError, "max_scores is not supported"),
        ({"block_mask": mask_mod}, TypeError, "block_mask: expected a BlockMask, got function"),
        (
            {"block_mask": flex.create_block_mask(mask_mod, None, 4, 6, 8, device="cpu")},
            ValueError,
            r"write create_block_mask\(mask_mod, B, H, 6, 9\)",
        ),
        ({"key": torch.zeros(2, 2, 9, 8)}, ValueError, "write enable_gqa=True"),
    ],
)
def test_what_flex_attention_refuses(options, error, words):
    with pytest.raises(error, match=words):
        flex_attention(**{"query": torch.zeros(Q), "key": torch.zeros(K), "value": torch.zeros(K)} | options)


def test_signatures_are_those_of_pytorch():
    def names(function):
        return [(one.name, one.default, one.kind) for one in inspect.signature(function).parameters.values()]

    assert names(flex_attention) == names(flex.flex_attention)
    documented = "attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    assert ", ".join(f"{name}={default}" for name, default, _ in names(scaled_dot_product_attention)[3:]) == documented
    assert documented in " ".join(F.scaled_dot_product_attention.__doc__.split())
    assert {"flex_attention", "scaled_dot_product_attention"} <= set(spattn.torch.__all__)
