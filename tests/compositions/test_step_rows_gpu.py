"""Steps of generation on a GPU: plans by rows, and patterns of any kind in a fixed-size cache."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.schedule import few_queries

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::spattn.EfficiencyWarning")]

PATTERNS = {
    "strided": (p.strided(16), lambda q, k: (q - k >= 0) & ((q - k < 16) | ((q - k) % 16 == 0))),
    "dilated": (p.DilatedWindow(40, 0, 5), lambda q, k: (q - k >= 0) & (q - k <= 200) & ((q - k) % 5 == 0)),
    "difference": (p.Causal() - p.Stride(7), lambda q, k: (k <= q) & ((q - k) % 7 != 0)),
    "union": (
        (p.Sinks(5) | p.SlidingWindow(60, 0) | p.Stride(50)) & p.Causal(),
        lambda q, k: (k <= q) & ((k < 5) | (q - k <= 60) | ((q - k) % 50 == 0)),
    ),
}


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("name", PATTERNS)
def test_steps(name, q_len):
    pattern, allows = PATTERNS[name]
    batch, heads, heads_kv, keys = 3, 4, 2, 1000
    rng = np.random.default_rng(0)
    shapes = (heads, q_len), (heads_kv, keys), (heads_kv, keys)
    host = [rng.standard_normal((batch, *shape, 64)).astype(np.float16) for shape in shapes]
    q, k, v = (torch.from_numpy(x).cuda() for x in host)
    exact = [x.astype(np.float64) for x in host]
    exact[1:] = (x.repeat(heads // heads_kv, axis=1) for x in exact[1:])
    for step in range(3):
        first = np.array([10, 500, keys - q_len - 3]) + step
        own = p.QueriesAt(pattern, first[:, None] + np.arange(q_len))
        at = (first[:, None] + np.arange(q_len))[:, None, :, None]
        scores = np.where(allows(at, np.arange(keys)), exact[0] @ exact[1].swapaxes(2, 3) / 8, -np.inf)
        weights = np.exp(scores - scores.max(axis=3, keepdims=True))
        expected = weights / weights.sum(axis=3, keepdims=True) @ exact[2]
        for what in (own, few_queries.plan_rows(own, q_len, keys, batch, heads, 4)):
            out = spattn.attention(q, k, v, what, backend="cuda")
            np.testing.assert_allclose(out.double().cpu().numpy(), expected, atol=4e-3, err_msg=f"{what!r:.200}")


@pytest.mark.parametrize("q_len", [1, 5])
def test_steps_have_the_bits_of_their_plans(q_len):
    """In a cache that grows, with patterns in turns, and whichever step comes first."""
    batch, heads, heads_kv, keys = 2, 8, 2, 9000
    k, v = (torch.randn(batch, heads_kv, keys, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, heads, q_len, 64, device="cuda", dtype=torch.bfloat16)
    by_head = p.PerHead((p.Causal(), p.strided(9)) * (heads // 2))
    patterns = [*(pattern for pattern, _ in PATTERNS.values()), p.Causal(), by_head, p.Causal() & p.BlockLocal(600)]
    for step in range(3):
        for number, pattern in enumerate(patterns):
            kv_len = keys - 1000 * step - number
            own = p.QueriesAt(pattern, kv_len - q_len - 300 * step)
            arrays = q, k[:, :, :kv_len], v[:, :, :kv_len]
            plan = spattn.plan_for(own, *arrays)
            assert torch.equal(spattn.attention(*arrays, own), spattn.attention(*arrays, plan)), f"{step}, {own!r:.200}"


def concatenated(x, kv_len):
    """As a cache that grows by torch.cat: its strides depend on its length."""
    return x[:, :, :kv_len].contiguous()


LAYOUTS = {
    "concatenated": concatenated,
    "part of a cache": lambda x, kv_len: x[:, :, :kv_len],
    "heads inside": lambda x, kv_len: x[:, :, :kv_len].transpose(1, 2).contiguous().transpose(1, 2),
    "every other head": lambda x, kv_len: concatenated(x, kv_len).repeat_interleave(2, 1)[:, ::2],
    "unaligned rows": lambda x, kv_len: torch.nn.functional.pad(x[:, :, :kv_len], (0, 3))[..., :-3],
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("padded", [False, True])
def test_steps_take_keys_of_any_layout(dtype, padded):
    """Caches of several layouts in turns, at growing and at equal lengths."""
    batch, heads, heads_kv, keys = 3, 4, 2, 70
    gen = torch.Generator("cuda").manual_seed(0)
    shapes = (heads, 1), (heads_kv, keys), (heads_kv, keys)
    q, k, v = (torch.randn(batch, *s, 32, device="cuda", generator=gen).to(getattr(torch, dtype)) for s in shapes)
    exact = [x.double() for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
    valid = [3, 30, 47] if padded else [0, 0, 0]
    pattern = p.PerBatch(tuple(p.Causal() - p.Sinks(n) if n else p.Causal() for n in valid))
    names = list(LAYOUTS)
    for kv_len in (50, 51, 52, 51, 64, 65, 66):
        seen = torch.arange(kv_len, device="cuda") >= torch.tensor(valid, device="cuda")[:, None, None, None]
        scores = (exact[0] @ exact[1][:, :, :kv_len].mT / 32**0.5).masked_fill(~seen, -torch.inf)
        expected = scores.softmax(-1) @ exact[2][:, :, :kv_len]
        for number, of_k in enumerate(names):
            for of_v in (of_k, names[number - 1]):
                own = LAYOUTS[of_k](k, kv_len), LAYOUTS[of_v](v, kv_len)
                out = spattn.attention(q, *own, pattern, backend="cuda")
                torch.testing.assert_close(out.double(), expected, atol=6e-3, rtol=0, msg=f"{kv_len}, {of_k}, {of_v}")
