"""Calls with score functions and sinks: values read at every call, gradients of captured arrays, and refusals."""

import copy
import gc
import weakref

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.testing import inputs

torch = pytest.importorskip("torch")

WINDOW = p.SlidingWindow(5, 2)
SIZES = 2, 4, 2, 18, 23, 8  # batch, heads, KV heads, q_len, kv_len, head_dim


@pytest.fixture(params=["cpu", "reference"])
def backend(request):
    return request.param


@pytest.fixture
def qkv():
    return inputs(*SIZES, dtype="float64")


@pytest.fixture
def captured():
    """Slopes and sinks per head, a table of (heads, distance), and a full bias."""
    rng = np.random.default_rng(3)
    _, heads, _, q_len, kv_len, _ = SIZES
    return (
        rng.standard_normal(heads),
        rng.standard_normal((heads, 2 * kv_len)),
        rng.standard_normal((1, heads, q_len, kv_len)),
        rng.standard_normal(heads),
    )


def function_of(xp, slopes, table, bias, cap=4.0):
    offset = SIZES[4] - SIZES[3]

    def score(s, b, h, q, k):
        s = cap * xp.tanh(s / cap) + slopes[h] * (k - q)
        return s + table[h, k - q + SIZES[4]] * s + bias[0, h, q - offset, k]

    return score


def dense(q, k, v, allowed, slopes, table, bias, sinks, cap=4.0):
    """The formula by PyTorch's own operations: out and lse."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q_len, kv_len = q.shape[2], k.shape[2]
    row, key = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)
    s = q @ k.mT * q.shape[3] ** -0.5
    s = cap * torch.tanh(s / cap) + slopes[:, None, None] * (key - row)
    s = s + table[:, key - row + kv_len] * s + bias
    s = s.masked_fill(~torch.from_numpy(allowed), -torch.inf)
    rows = sinks[:, None, None].expand(s.shape[0], -1, q_len, 1)
    weights = torch.softmax(torch.cat([s, rows], -1), -1)[..., :-1]
    return weights @ v, torch.logsumexp(torch.cat([s, rows], -1), -1)


def leaves(arrays):
    return [torch.from_numpy(x.copy()).requires_grad_() for x in arrays]


@pytest.mark.parametrize("pattern", [WINDOW, p.Stride(3) | p.SlidingWindow(2, 0), p.Causal() & p.Stride(4)], ids=str)
def test_as_dense_attention(backend, qkv, captured, pattern):
    """Out, lse and every gradient, through autograd and through attention_backward."""
    mine, theirs = leaves((*qkv, *captured)), leaves((*qkv, *captured))
    allowed = pattern.index_set(*SIZES[3:5]).to_dense()
    weights = [torch.from_numpy(x) for x in inputs(*SIZES, dtype="float64", seed=9)]
    score = function_of(torch, *mine[3:6])
    options = {"score": score, "sinks": mine[6], "backend": backend}
    out, lse = spattn.attention(*mine[:3], pattern, **options, return_lse=True)
    want = dense(*theirs[:3], allowed, *theirs[3:])
    torch.testing.assert_close((out, lse), want)
    (out * weights[0]).sum().add(lse.square().sum()).backward()
    (want[0] * weights[0]).sum().add(want[1].square().sum()).backward()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    with torch.no_grad():
        *found, dcaptured, dsinks = spattn.attention_backward(
            weights[0], *mine[:3], out, lse, pattern, dlse=2 * lse, **options
        )
    for one, other in zip((*found, *dcaptured, dsinks), theirs, strict=True):
        torch.testing.assert_close(one, other.grad)


def test_values_are_read_at_every_call(backend, qkv):
    """Python numbers in closures, globals and attributes; elements of arrays; the plan and kernels stay."""
    cap, slopes = 2.0, np.ones(4)

    def score(s, b, h, q, k):
        return cap * np.tanh(s / cap) + slopes[h] * (k - q)

    def attend():
        return spattn.attention(*qkv, WINDOW, score=score, backend=backend)

    first = attend()
    np.testing.assert_array_equal(attend(), first)
    cap = 3.0
    second = attend()
    assert not np.array_equal(second, first)
    slopes[2] = -1
    third = attend()
    np.testing.assert_array_equal(third[:, [0, 1, 3]], second[:, [0, 1, 3]])
    assert not np.array_equal(third[:, 2], second[:, 2])
    cap, slopes[2] = 2.0, 1
    np.testing.assert_array_equal(attend(), first)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_layouts(backend, captured, layout):
    q, k, v = inputs(1, *SIZES[1:], dtype="float64")
    given = [x.swapaxes(1, 2)[0 if layout == "thd" else slice(None)] for x in (q, k, v)]
    options = {"score": function_of(np, *captured[:3]), "sinks": captured[3], "backend": backend}
    want = spattn.attention(q, k, v, WINDOW, return_lse=True, **options)
    found = spattn.attention(*given, WINDOW, return_lse=True, layout=layout, **options)
    np.testing.assert_array_equal(found[0].reshape(want[0].swapaxes(1, 2).shape), want[0].swapaxes(1, 2))
    np.testing.assert_array_equal(found[1].reshape(want[1].shape), want[1])
    gradients = spattn.attention_backward(*(x[0] for x in (want, (q, k, v))), k, v, *want, WINDOW, **options)
    again = spattn.attention_backward(found[0], *given, *found, WINDOW, layout=layout, **options)
    for one, other in zip(again[3] + again[4:], gradients[3] + gradients[4:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_have_the_library_and_dtype_of_captured_arrays(backend, qkv):
    """Arrays of integers have none."""
    half, whole = np.linspace(0, 1, 4).astype(np.float16), torch.arange(4)
    q, k, v = (x.astype(np.float32) for x in qkv)

    def score(s, b, h, q, k):
        return s * half[h] + whole[h] * 0.25

    out, lse = spattn.attention(q, k, v, WINDOW, score=score, backend=backend, return_lse=True)
    *_, dcaptured = spattn.attention_backward(out, q, k, v, out, lse, WINDOW, score=score, backend=backend)
    assert [(x.dtype, x.shape) for x in dcaptured] == [(np.float16, (4,))]
    assert spattn.score.captured(score)[0] is half


def test_arrays_without_axes_get_gradients(backend, qkv):
    """By finite differences."""
    q, k, v = map(torch.from_numpy, qkv)
    cap = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)

    def attend(cap):
        return spattn.attention(q, k, v, WINDOW, score=lambda s, b, h, i, j: cap * torch.tanh(s / cap), backend=backend)

    assert torch.autograd.gradcheck(attend, [cap], fast_mode=True)


def test_captured_values_stay_those_of_the_forward_pass(backend, qkv):
    """NumPy arrays are copied, and PyTorch refuses tensors that have changed."""
    slopes, sinks = np.ones(4), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    q, k, v = leaves(qkv)

    def gradient(change):
        out = spattn.attention(q, k, v, WINDOW, score=lambda s, b, h, i, j: s * slopes[h], sinks=sinks, backend=backend)
        if change:
            slopes[:] = 7
        found = torch.autograd.grad(out.sum(), q)[0]
        slopes[:] = 1
        return found

    assert torch.equal(gradient(False), gradient(True))
    table = torch.ones(4, dtype=torch.float64, requires_grad=True)
    out = spattn.attention(q, k, v, WINDOW, score=lambda s, b, h, i, j: s * table[h], backend=backend)
    with torch.no_grad():
        table += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_only_captured_tensors_need_gradients(backend, qkv):
    q, k, v = map(torch.from_numpy, qkv)
    table = torch.ones(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda table: spattn.attention(q, k, v, WINDOW, score=lambda s, b, h, i, j: s * table[h], backend=backend),
        [table],
        fast_mode=True,
    )
    out = spattn.attention(q, k, v, WINDOW, sinks=table, backend=backend)
    assert torch.autograd.grad(out.sum(), table)[0].abs().sum() > 0


def test_growing_sequences(backend, captured):
    """Decoding: cached calls of other lengths use their own positions."""
    slopes, sinks = captured[0], captured[3]
    for kv_len in (17, 18, 40, 33):
        q, k, v = inputs(1, 4, 2, 1, kv_len, 8, dtype="float64")
        found = spattn.attention(
            q, k, v, "causal", score=lambda s, b, h, i, j: s + slopes[h] * (j - i), sinks=sinks, backend=backend
        )
        s = np.einsum("bhqd,bhkd->bhqk", q, k.repeat(2, 1)) / np.sqrt(8)
        s += slopes[:, None, None] * (np.arange(kv_len) - (kv_len - 1))
        weights = np.exp(s) / (np.exp(s).sum(-1, keepdims=True) + np.exp(sinks)[:, None, None])
        np.testing.assert_allclose(found, weights @ v.repeat(2, 1), rtol=1e-10, atol=1e-12)


def test_no_key_and_no_score(backend, qkv, captured):
    """A row without a key gives its sink; the identity gives the bits of a call without a score function."""
    q, k, v = qkv
    allowed = WINDOW.index_set(*SIZES[3:5]).to_dense()
    allowed[3] = False
    sinks = captured[3]
    out, lse = spattn.attention(q, k, v, allowed, sinks=sinks, return_lse=True, backend=backend)
    assert not out[:, :, 3].any()
    np.testing.assert_array_equal(lse[:, :, 3], np.broadcast_to(sinks, lse.shape[:2]))
    dlse = np.zeros_like(lse)
    dlse[:, :, 3] = 1
    *_, dsinks = spattn.attention_backward(
        np.zeros_like(out), q, k, v, out, lse, allowed, dlse=dlse, sinks=sinks, backend=backend
    )
    np.testing.assert_allclose(dsinks, SIZES[0])
    plain = spattn.attention(q, k, v, allowed, backend=backend)
    np.testing.assert_array_equal(
        spattn.attention(q, k, v, allowed, score=lambda s, b, h, q, k: s, backend=backend), plain
    )


def test_removed_pairs(backend, qkv):
    """−inf removes a pair, as a mask does, even where its value is not a number; so does a whole row."""
    q, k, v = (x.copy() for x in qkv)
    v[:, :, 7] = np.nan
    allowed = WINDOW.index_set(*SIZES[3:5]).to_dense()

    def score(s, b, h, i, j):
        return np.where((j == 7) | (i == 9), -np.inf, s)

    want = allowed.copy()
    want[:, 7], want[9 - (SIZES[4] - SIZES[3])] = False, False
    found = spattn.attention(q, k, v, WINDOW, score=score, return_lse=True, backend=backend)
    for one, other in zip(
        found, spattn.attention(q, k, np.nan_to_num(v), want, return_lse=True, backend="reference"), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (3, "score: expected a function"),
        (lambda s, b, h, q, k: None, "score: expected a function that returns the modified score"),
        (lambda s, b, h, q, k: s if q > k else 0, "use where"),
        (lambda s, b, h, q, k: np.sort(s), "numpy.sort is not supported"),
    ],
)
def test_refused_functions(backend, qkv, score, message):
    with pytest.raises(TypeError, match=message):
        spattn.attention(*qkv, WINDOW, score=score, backend=backend)


def test_refused_sinks(backend, qkv):
    with pytest.raises(ValueError, match=r"sinks: expected shape \(4,\), got \(3,\)"):
        spattn.attention(*qkv, WINDOW, sinks=np.zeros(3), backend=backend)
    with pytest.raises(TypeError, match="sinks: expected an array of floats, got int64"):
        spattn.attention(*qkv, WINDOW, sinks=np.zeros(4, int), backend=backend)
    with pytest.raises(TypeError, match="sinks: expected an array, got list"):
        spattn.attention(*qkv, WINDOW, sinks=[0.0] * 4, backend=backend)
    with pytest.raises(RuntimeError, match="sinks"):  # autograd of q's library cannot see it
        spattn.attention(*qkv, WINDOW, sinks=torch.zeros(4, requires_grad=True), backend=backend)


def test_sizes_of_library_arrays(backend, qkv):
    """An entry too many would be ignored, and one entry for all would be out of range."""
    f = spattn.score
    for function in (
        f.alibi(np.ones(5)),
        f.softcap(np.ones(5)),
        f.temperature(np.ones(1)),
        f.temperature(np.ones(3), per="batch"),
        f.temperature(np.ones(SIZES[4]), per="query"),
        f.relative_bias(np.ones((1, 9))),
        f.t5_bias(np.ones((32, 5)), bidirectional=True),
        f.swin_bias(np.ones((25, 1)), (3, 3)),
        f.natten_rpb(np.ones((5, 9)), 5),
    ):
        with pytest.raises(ValueError, match="expected"):
            spattn.attention(*qkv, WINDOW, score=function, backend=backend)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "uint64"])
def test_integers_have_32_bits(backend, qkv, dtype):
    """Larger elements of tables are refused, not wrapped; so are conversions to other widths."""
    table = np.zeros(4, dtype)
    score = lambda s, b, h, q, k: s + table[h]  # noqa: E731
    spattn.attention(*qkv, WINDOW, score=score, backend=backend)
    table[1] = 2**31
    with pytest.raises(ValueError, match="integers of at most 32 bits"):
        spattn.attention(*qkv, WINDOW, score=score, backend=backend)
    for other in (np.int8, np.uint8, np.float16):
        with pytest.raises(TypeError, match="is not supported; kernels have floats"):
            spattn.attention(*qkv, WINDOW, score=lambda s, b, h, q, k, to=other: s + q.astype(to), backend=backend)


def test_no_call_keeps_captured_arrays(backend, qkv):
    """Plans and cached dispatches hold none."""
    table = np.ones((4, 60))
    alive = weakref.ref(table)
    options = {"score": lambda s, b, h, q, k, table=table: s * table[h, k], "backend": backend}
    out, lse = spattn.attention(*qkv, WINDOW, return_lse=True, **options)
    spattn.attention_backward(out, *qkv, out, lse, WINDOW, **options)
    del table, options
    gc.collect()
    assert alive() is None


def test_layers_train_captured_parameters():
    """An nn.Module as the score function, and the layer's own sinks."""
    from spattn.torch import SparseAttention

    class Bias(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(4, 9))

        def forward(self, s, b, h, q, k):
            return s + self.table[h, (k - q).clamp(-4, 4) + 4]

    torch.manual_seed(0)
    layer = SparseAttention(32, 4, WINDOW, score=Bias(), sinks=True)
    x = torch.randn(2, 20, 32)
    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[:, -3:] = True
    before = copy.deepcopy(layer.state_dict())
    assert {"sinks", "score.table"} < set(before)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layer(x, x, x, key_padding_mask=padding)[0].square().sum().backward()
        optimizer.step()
    for name in ("sinks", "score.table"):
        assert not torch.equal(layer.state_dict()[name], before[name])


def test_grouped_calls(backend, captured):
    problems = [(*inputs(1, 4, 2, n, n + 3, 8, dtype="float64"), WINDOW) for n in (5, 12)]
    options = {"score": lambda s, b, h, q, k: s * captured[0][h], "sinks": captured[3], "backend": backend}
    for found, problem in zip(spattn.grouped_attention(problems, **options), problems, strict=True):
        np.testing.assert_array_equal(found, spattn.attention(*problem, **options))


def test_gradients_of_grouped_calls(backend, captured):
    slopes, sinks, *first = leaves((captured[0], captured[3], *inputs(1, 4, 2, 5, 8, 8, dtype="float64")))
    second = leaves(inputs(1, 4, 2, 12, 15, 8, dtype="float64"))
    problems = [(*first, WINDOW), (*second, "causal")]
    options = {"score": lambda s, b, h, q, k: s * slopes[h], "sinks": sinks, "backend": backend}
    results = spattn.grouped_attention(problems, **options), [spattn.attention(*own, **options) for own in problems]
    of = [*first, *second, slopes, sinks]
    gradients = [torch.autograd.grad([x.square().sum() for x in found], of) for found in results]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other) and one.abs().sum() > 0


def test_a_compiled_function_breaks_its_graph(qkv):
    q, k, v = (torch.from_numpy(x) for x in qkv)
    slopes = torch.ones(4, dtype=torch.float64)

    def attend(q, k, v):
        return spattn.attention(q * 2, k, v, WINDOW, score=lambda s, b, h, i, j: s - slopes[h]) + 1

    torch.testing.assert_close(torch.compile(attend, backend="eager")(q, k, v), attend(q, k, v))
