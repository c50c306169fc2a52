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
