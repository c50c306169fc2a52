"""Steps of generation over caches of any layout, in turns: cached dispatches must not keep strides of another step."""

from __future__ import annotations

import pytest

import spattn
from spattn import patterns as p

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::spattn.EfficiencyWarning")

BATCH, HEADS, HEADS_KV, KEYS = 3, 4, 2, 70
VALID = 3, 30, 47  # the first key of each entry


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
PATTERNS = {  # the first moves with kv_len, the others are planned by rows
    "window": (p.SlidingWindow(20, 0), lambda q, k, entry: (k <= q) & (q - k <= 20)),
    "strided": (p.strided(6), lambda q, k, entry: (k <= q) & ((q - k < 6) | ((q - k) % 6 == 0))),
    "padded": (
        p.PerBatch(tuple(p.Causal() - p.Sinks(first) for first in VALID)),
        lambda q, k, entry: (k <= q) & (k >= torch.tensor(VALID, device=k.device)[entry]),
    ),
    "by head": (
        p.PerHead((p.Causal(), p.Stride(3) & p.Causal(), p.SlidingWindow(9, 0), p.Causal())),
        lambda q, k, entry: torch.stack([k <= q, (k <= q) & ((q - k) % 3 == 0), (k <= q) & (q - k <= 9), k <= q]),
    ),
}
DTYPES = {
    "cpu": ("float32", "bfloat16", "float64"),
    "cuda": ("bfloat16", "float16", "float32", "float64"),
}


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(device, dtype, marks=[pytest.mark.gpu] * (device == "cuda"))
        for device, dtypes in DTYPES.items()
        for dtype in dtypes
    ],
)
def test_keys_of_any_layout(device, dtype, q_len):
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(BATCH, heads, n, 32, device=device, generator=generator).to(getattr(torch, dtype))
        for heads, n in ((HEADS, q_len), (HEADS_KV, KEYS), (HEADS_KV, KEYS))
    )
    exact = [x.double() for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
    entry, key = (torch.arange(n, device=device) for n in (BATCH, KEYS))
    names = list(LAYOUTS)
    for kv_len in (50, 51, 52, 51, 64, 65, 66):
        scores = exact[0] @ exact[1][:, :, :kv_len].mT / 32**0.5
        at = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
        for what, (pattern, allows) in PATTERNS.items():
            seen = allows(at, key[:kv_len], entry[:, None, None, None])
            expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ exact[2][:, :, :kv_len]
            for number, of_k in enumerate(names):
                for of_v in (of_k, names[number - 1]):
                    own = LAYOUTS[of_k](k, kv_len), LAYOUTS[of_v](v, kv_len)
                    out = spattn.attention(q, *own, pattern, backend=device).double()
                    assert (out - expected).abs().max() < 0.008, f"{what}, {kv_len}, {of_k}, {of_v}"
