"""The same score_mod gives the same results in FlexAttention; on a GPU also gradients, which it lacks on the CPU."""

from __future__ import annotations

import warnings

import pytest

import spattn
from spattn.patterns.interop import from_block_mask
from spattn.score import from_score_mod

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

BATCH, HEADS, HEADS_KV, LENGTH, HEAD_DIM, REACH = 2, 4, 2, 200, 64, 150
MASKS = {
    "window": lambda b, h, q, k: (q - k <= 60) & (k - q <= 20),
    "causal": lambda b, h, q, k: q >= k,
    "blocks and window": lambda b, h, q, k: (q // 64 == k // 64) | ((q - k <= 9) & (q >= k)),
}


def captured(device):
    """Slopes, caps, a table of distances, a bias of buckets, offsets of documents, document numbers."""
    torch.manual_seed(0)
    floats = [torch.rand(HEADS), 2 + torch.rand(HEADS), torch.randn(HEADS, 2 * REACH + 1), torch.randn(16)]
    floats += [torch.randn(BATCH, LENGTH)]
    return [x.to(device).requires_grad_() for x in floats], (torch.arange(LENGTH) // 37).to(device)


def score_mods(tensors, documents):
    slopes, caps, table, buckets, offsets = tensors
    return {
        "ALiBi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), [slopes]),
        "soft-cap per head": (lambda s, b, h, q, k: caps[h] * torch.tanh(s / caps[h]), [caps]),
        "table of distances": (
            lambda s, b, h, q, k: s + table[h, torch.clamp(k - q, -REACH, REACH) + REACH],
            [table],
        ),
        "buckets": (lambda s, b, h, q, k: s + buckets[(q * 3 + k) % 16], [buckets]),
        "offsets of keys": (lambda s, b, h, q, k: s * 1.5 + offsets[b, k] - offsets[b, q], [offsets]),
        "where documents differ": (
            lambda s, b, h, q, k: torch.where(documents[q] == documents[k], s, s - slopes[h]),
            [slopes],
        ),
        "cap, then bias": (
            lambda s, b, h, q, k: 5 * torch.tanh(s / 5) + table[h, torch.clamp(k - q, -9, REACH) + REACH],
            [table],
        ),
    }


def check(device, dtype, name, mask, most):
    tensors, documents = captured(device)
    score_mod, wanted = score_mods(tensors, documents)[name]
    blocks = flex.create_block_mask(MASKS[mask], None, None, LENGTH, LENGTH, device=device)
    torch.manual_seed(1)
    shapes = [(BATCH, heads, LENGTH, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    q, k, v, dout = (torch.randn(shape).to(device, dtype) for shape in shapes)

    def results(function, *given):
        if device == "cpu":
            with torch.no_grad():
                return function(*given)
        leaves = [x.detach().clone().requires_grad_() for x in given]
        out, lse = function(*leaves)
        loss = (out * dout.to(out.dtype)).sum() + lse.sum()
        return out, lse, *torch.autograd.grad(loss, [*leaves, *wanted])

    def theirs(q, k, v):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow without torch.compile
            return flex.flex_attention(
                q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=True, return_lse=True
            )

    def ours(q, k, v):
        pattern = from_block_mask(blocks)
        return spattn.attention(q, k, v, pattern, score=from_score_mod(score_mod), return_lse=True)

    expected = results(theirs, *(x.float() for x in (q, k, v)))
    for one, other in zip(results(ours, q, k, v), expected, strict=True):
        error = torch.linalg.norm((one - other).double()) / torch.linalg.norm(other.double())
        assert error <= most, (name, mask, float(error))


NAMES = ["ALiBi", "soft-cap per head", "table of distances", "buckets", "offsets of keys", "where documents differ"]
NAMES += ["cap, then bias"]


@pytest.mark.parametrize("name", NAMES)
def test_on_the_cpu(name):
    check("cpu", torch.float32, name, list(MASKS)[NAMES.index(name) % len(MASKS)], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name, dtype):
    for mask in MASKS:
        check("cuda", getattr(torch, dtype), name, mask, 2e-5 if dtype == "float32" else 1.2e-2)
