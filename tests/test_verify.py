"""Attention functions and masks of other libraries against patterns: agreement, the first wrong keys, and causes."""

import functools

import numpy as np
import pytest

import spattn
from spattn import patterns as sp
from spattn.patterns.base.walk import altered

WINDOW = sp.Causal() & (sp.Sinks(2) | sp.SlidingWindow(3, 0))


def dense(mask, scale=None, bias=0.0, interleaved=False, value=None):
    """Return NumPy attention over a mask (..., q_len, kv_len); rows without keys are NaN."""

    def attention(q, k, v):
        group = q.shape[1] // k.shape[1]
        index = np.arange(q.shape[1]) % k.shape[1] if interleaved else np.arange(q.shape[1]) // group
        s = q @ k[:, index].swapaxes(2, 3) * q.dtype.type(q.shape[3] ** -0.5 if scale is None else scale) + bias
        s = np.where(mask, s, -np.inf)
        with np.errstate(invalid="ignore"):
            p = np.exp(s - s.max(axis=3, keepdims=True))
        out = (p / p.sum(axis=3, keepdims=True)) @ v[:, index]
        return out if value is None else value(out)

    return attention


def grid(q_len, kv_len=None):
    kv_len = kv_len or q_len
    row, key = np.ogrid[:q_len, :kv_len]
    return row + kv_len - q_len, key


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_spattn_agrees_with_itself(layout, heads_kv, dtype):
    report = spattn.verify(
        functools.partial(spattn.attention, pattern=WINDOW, layout=layout),
        spattn.plan(WINDOW, 21, 37),
        21,
        37,
        heads=4,
        heads_kv=heads_kv,
        head_dim=5,
        layout=layout,
        dtype=dtype,
    )
    assert report.ok and report.guesses == (), str(report)
    assert str(report).endswith("agree: pairs, weights, results")


@pytest.mark.parametrize("seed", range(4))
def test_the_first_difference_is_found(seed):
    """A few random pairs of a union are flipped."""
    rng = np.random.default_rng(seed)
    pattern = sp.SlidingWindow(2) | sp.GlobalTokens((0, 7)) | sp.DilatedWindow(2, dilation=5)
    expected = pattern.index_set(23, 31).to_dense()
    mask = np.broadcast_to(expected, (2, 2, 23, 31)).copy()
    flips = sorted(zip(*(rng.integers(0, n, 3).tolist() for n in mask.shape), strict=True))
    for at in flips:
        mask[at] = ~expected[at[2:]]
    b, h, row, _ = flips[0]
    wrong = np.flatnonzero(mask[b, h, row] != expected[row])
    for function in (dense(mask), mask):
        difference = spattn.verify(function, pattern, 23, 31).difference
        assert (difference.batch, difference.head, difference.row) == (b, h, row)
        extra, missing = ([key for run in keys for key in run] for keys in (difference.extra, difference.missing))
        assert extra == [key for key in wrong if mask[b, h, row, key]]
        assert missing == [key for key in wrong if not mask[b, h, row, key]]
        assert difference.rows == len({at[:3] for at in flips})


ROW, KEY = grid(12)
CASES = [
    (WINDOW, (KEY < 2) | (ROW - KEY <= 3) & (KEY <= ROW), "Causal() is missing"),
    (
        sp.SlidingWindow(3, 0),
        (KEY <= ROW) & (ROW - KEY < 3),
        "off by one: the pairs are those of SlidingWindow(left=2,",
    ),
    (WINDOW, (KEY <= ROW) & ((KEY < 2) | (ROW - KEY <= 4)), "off by one: the pairs are those of (Causal() & (Sinks"),
    (sp.Causal(), KEY < ROW, "off by one: the query's own key is excluded"),
    (sp.SlidingWindow(3, 0) - sp.DilatedWindow(0), ROW - KEY <= 3, None),
    (sp.Causal(), KEY >= ROW, "transposed"),
    (sp.Causal(), KEY > ROW, "the mask is inverted"),
    (sp.Causal(), KEY >= 0 * ROW, "the mask has no effect"),
    (sp.Causal() & sp.Sinks(4), (KEY < 4) & (ROW >= 0), "the causal mask is missing"),
    (sp.SlidingWindow(2), (KEY <= ROW) & (ROW - KEY <= 2), "a causal mask is added"),
    (sp.Sinks(5), (KEY < 0) & (ROW >= 0), "no key is used"),
]


@pytest.mark.parametrize(("pattern", "mask", "guess"), CASES)
def test_guesses_of_pairs(pattern, mask, guess):
    report = spattn.verify(mask, pattern)
    assert not report.ok
    assert any(each.startswith(guess) for each in report.guesses) if guess else report.guesses == ()
    assert "differ; the first is" in str(report)


def test_alignment_of_fewer_queries():
    row, key = np.ogrid[:5, :9]
    top_left = spattn.verify(key <= row, sp.Causal())
    assert top_left.guesses[0].startswith("aligned top-left instead of bottom-right")
    assert str(top_left.difference).splitlines()[1:] == ["  keys allowed but not used: 1–4"]
    later = spattn.verify(key <= row + 5, sp.Causal())
    assert any(guess.startswith("off by one: query positions are one too large") for guess in later.guesses)


def test_padding_and_entries():
    lengths = np.array([3, 8])
    padded = sp.Causal() & sp.KeyPadding(np.arange(8) < lengths[:, None])
    row, key = grid(8)
    report = spattn.verify(np.broadcast_to(key <= row, (2, 1, 8, 8)), padded)
    assert any(
        guess.startswith("padding keys are used: KeyPadding(") and "is missing" in guess for guess in report.guesses
    )
    assert report.difference.extra == (range(3, 4),) and report.difference.row == 3
    right = dense((key <= row) & (key < lengths[:, None, None, None]))
    assert spattn.verify(right, padded, 8).ok
    first = spattn.verify(np.broadcast_to((key <= row) & (key < 3), (2, 1, 8, 8)), padded)
    assert first.guesses == ("all batch entries use the pairs of the first",)
    per_head = sp.PerHead((sp.Causal(), sp.SlidingWindow(1)))
    swapped = np.stack([abs(row - key) <= 1, key <= row])
    assert spattn.verify(swapped, per_head).guesses == ("the heads are reversed",)
    assert spattn.verify(swapped[::-1], per_head).ok


@pytest.mark.parametrize(
    ("function", "guess", "problem"),
    [
        (dense(KEY <= ROW, scale=1), "scale: the function uses 1 (scale missing) instead of 0.25", "results differ by"),
        (dense(KEY <= ROW, scale=0.123), "scale: the function uses 0.123 instead of 0.25", "results differ by"),
        (dense(KEY <= ROW, interleaved=True), "key-value heads are interleaved", "results differ by"),
        (dense(KEY <= ROW, bias=-0.1 * (ROW - KEY).astype("f4")), None, "logarithms of weights deviate"),
        (dense(KEY <= ROW, value=lambda out: 0.5 * out), None, "do not sum to 1"),
        (
            dense(KEY <= ROW, value=lambda out: np.where(ROW == 4, np.nan, out)),
            None,
            "NaN in 8 rows; the first is batch 0",
        ),
    ],
)
def test_what_differs_besides_the_pairs(function, guess, problem):
    report = spattn.verify(function, sp.Causal(), 12, heads=4, heads_kv=2)
    assert not report.ok and report.difference is None
    assert any(problem in each for each in report.problems), str(report)
    assert [each[: len(guess or "")] for each in report.guesses] == ([guess] if guess else [])


def test_values_of_other_keys():
    right = dense(KEY <= ROW)
    report = spattn.verify(lambda q, k, v: right(q, k, np.round(v, 1)), sp.Causal(), 12)
    assert "the weights agree: the values or the precision of the sums differ" in report.problems


def test_a_scale_that_is_expected():
    assert spattn.verify(dense(KEY <= ROW, scale=1), sp.Causal(), 12, scale=1).ok


def test_rows_without_keys_may_be_nan_or_zero():
    pattern = sp.SlidingWindow(2, 0) - sp.Sinks(3)
    mask = (KEY <= ROW) & (ROW - KEY <= 2) & (KEY >= 3)
    assert spattn.verify(dense(mask), pattern, 12).ok
    assert spattn.verify(dense(mask, value=np.nan_to_num), pattern, 12).ok
    everything = spattn.verify(dense(mask | (ROW < 3)), pattern, 12)
    assert everything.difference.row == 0 and everything.difference.extra == (range(12),)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    attend = torch.nn.functional.scaled_dot_product_attention

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, is_causal=True, enable_gqa=True), "weights"

    assert spattn.verify(Module(), sp.Causal(), 20, heads=4, heads_kv=2, dtype=dtype).ok
    report = spattn.verify(lambda q, k, v: attend(q, k, v, is_causal=True), sp.Causal(), 5, 9, dtype=dtype)
    assert report.guesses[0].startswith("aligned top-left")
    swapped = spattn.verify(
        lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2),
        sp.Causal(),
        9,
        layout="bshd",
        dtype=dtype,
    )
    assert swapped.ok and swapped.checked[-1] == "gradients"


def test_gradients_over_other_pairs():
    torch = pytest.importorskip("torch")

    class Wrong(torch.autograd.Function):
        """Causal attention whose gradient is that of a window."""

        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return spattn.attention(q, k, v, "causal")

        @staticmethod
        def backward(ctx, dout):
            out, lse = spattn.attention(*ctx.saved_tensors, sp.SlidingWindow(3, 0), return_lse=True)
            return spattn.attention_backward(dout, *ctx.saved_tensors, out, lse, sp.SlidingWindow(3, 0))

    class Half(Wrong):
        @staticmethod
        def backward(ctx, dout):
            out, lse = spattn.attention(*ctx.saved_tensors, "causal", return_lse=True)
            dq, *others = spattn.attention_backward(dout, *ctx.saved_tensors, out, lse, "causal")
            return 0.5 * dq, *others

    report = spattn.verify(Wrong.apply, sp.Causal(), 12, heads=4, heads_kv=2, arrays="torch")
    assert "the gradient of v uses other pairs than the forward" in report.problems
    assert report.difference.row == 4 and report.difference.missing == (range(1),)
    report = spattn.verify(lambda q, k, v: Half.apply(q, k, v), sp.Causal(), 12)
    assert report.difference is None and report.problems[0].startswith("gradients: dq: error")
    assert len(report.problems) == 1
    assert spattn.verify(Wrong.apply, sp.Causal(), 12, arrays="torch", gradients=False).ok


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    torch = pytest.importorskip("torch")
    window = torch.tensor(5)

    def mask_mod(b, h, q, k):
        return (k <= q) & (q - k < window)

    block = flex.create_block_mask(mask_mod, None, None, 40, 40, device="cpu")
    attend = functools.partial(flex.flex_attention, block_mask=block)
    pattern = sp.SlidingWindow(4, 0)
    for function in (attend, mask_mod, block, lambda q, k: mask_mod(0, 0, q, k)):
        report = spattn.verify(function, pattern, 40)
        assert report.ok
        assert report.checked[-1].startswith("no gradients" if function is attend else "pairs")
    wrong = [spattn.verify(function, sp.SlidingWindow(5, 0), 40) for function in (attend, mask_mod, block)]
    assert len({(report.difference, report.guesses) for report in wrong}) == 1
    assert wrong[0].guesses == ("off by one: the pairs are those of SlidingWindow(left=4, right=0)",)


def test_the_library_is_that_of_the_names_in_a_function():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")

    def attend(q, k, v):
        return torch.softmax(q @ k.mT / 4, 3) @ v

    class Callable:
        def __call__(self, q, k, v):
            return attend(q, k, v)

    for function in (lambda q, k, v: attend(q, k, v), functools.partial(attend), Callable(), Callable().__call__):
        assert spattn.verify(function, sp.Full(), 6, gradients=False).ok
    with pytest.raises(
        TypeError, match="^arrays: expected one of numpy, torch, jax, as the function refers to several"
    ):
        spattn.verify(lambda q, k, v: (torch.Tensor, jax.numpy), sp.Full(), 6)


def test_jax():
    jax = pytest.importorskip("jax")

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    report = spattn.verify(attend, sp.Causal(), 11, heads=4, heads_kv=2, layout="bshd")
    assert report.ok and report.checked[-1] == "gradients", str(report)
    report = spattn.verify(attend, sp.Causal(), 11, heads=4, heads_kv=2, layout="bshd", scale=1.0)
    assert report.guesses[0].startswith("scale: the function uses 0.25 (1 / sqrt(head_dim)) instead of 1")


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (KEY <= ROW, {"q_len": 11}, ValueError, "^function: expected a mask of 11 × 12, got 12 × 12"),
        ((KEY <= ROW).astype(int), {}, TypeError, "^function: expected a mask of bool, got int"),
        (3, {"q_len": 5}, TypeError, "^function: expected a function or a mask, got int"),
        (dense(KEY <= ROW), {}, ValueError, "^q_len: expected the number of queries"),
        (dense(KEY <= ROW), {"q_len": 12, "heads_kv": 2, "heads": 3}, ValueError, "^heads_kv: expected a divisor of 3"),
        (dense(KEY <= ROW), {"q_len": 1 << 14}, ValueError, "^q_len: expected at most"),
        (lambda q, k, v: q[:, :1], {"q_len": 4}, ValueError, "^function: expected a result of shape"),
        (lambda q, k, v: q.cuda(), {"q_len": 4}, TypeError, "^function: failed with numpy arrays .*`arrays` names"),
        (
            lambda q, k: q + k,
            {"q_len": 4},
            TypeError,
            "^function: expected a mask function that returns bool, got int64",
        ),
        (KEY <= ROW, {"layout": "thd"}, ValueError, "^layout: "),
    ],
)
def test_what_verify_refuses(function, options, error, message):
    with pytest.raises(error, match=message):
        spattn.verify(function, sp.Causal(), **options)
    with pytest.raises(TypeError, match="^pattern: expected a Pattern, its text"):
        spattn.verify(KEY <= ROW, 3)


@pytest.mark.parametrize("pattern", ["causal", KEY <= ROW, lambda b, h, q, k: k <= q])
def test_what_attention_takes_as_a_pattern(pattern):
    assert spattn.verify(KEY <= ROW, pattern).ok
    assert not spattn.verify(KEY < ROW, pattern).ok


def test_patterns_that_differ_in_one_place():
    found = {repr(other): change for change, other in altered(~(sp.Causal() & sp.SlidingWindow(0, 2)))}
    assert found == {
        repr(~sp.SlidingWindow(0, 2)): "Causal() is missing",
        repr(~sp.Causal()): f"{sp.SlidingWindow(0, 2)!r} is missing",
        repr(~(sp.Causal() & sp.SlidingWindow(1, 2))): "off by one",
        repr(~(sp.Causal() & sp.SlidingWindow(-1, 2))): "off by one",
        repr(~(sp.Causal() & sp.SlidingWindow(0, 1))): "off by one",
        repr(~(sp.Causal() & sp.SlidingWindow(0, 3))): "off by one",
    }
