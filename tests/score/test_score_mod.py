"""``from_score_mod`` against torch.vmap of the same function, as FlexAttention applies it."""

import numpy as np
import pytest

from spattn.score import captured, from_score_mod, softcap
from spattn.score.evaluate import evaluate
from spattn.score.program import program_of
from spattn.score.tracing import trace

torch = pytest.importorskip("torch")

BATCH, HEADS, Q, KV = 2, 3, 5, 7
RANDOM = np.random.default_rng(7)
BIAS = torch.from_numpy(RANDOM.normal(size=(BATCH, HEADS, Q, KV)))
RELATIVE = torch.from_numpy(RANDOM.normal(size=(HEADS, Q + KV)))
SCALES = torch.from_numpy(RANDOM.normal(size=HEADS)).requires_grad_()
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2], dtype=torch.int32)
LENGTHS = torch.tensor([7, 4])
CAP = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)


def capped(score, b, h, q_idx, kv_idx):
    return CAP * torch.tanh(score / CAP)


def alibi(score, b, h, q_idx, kv_idx):
    scale = torch.exp2(-((h + 1) * 8.0 / HEADS))
    return score + (kv_idx - q_idx) * scale


def relative(score, b, h, q_idx, kv_idx):
    return score + RELATIVE[h, q_idx - kv_idx + KV - 1]


def full(score, b, h, q_idx, kv_idx):
    return score + BIAS[b, h, q_idx, kv_idx]


def row_by_row(score, b, h, q_idx, kv_idx):
    return score + BIAS[b][h][q_idx, kv_idx]


def causal(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def documents(score, b, h, q_idx, kv_idx):
    same = DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]
    return torch.where(same & (kv_idx < LENGTHS[b]), score * SCALES[h], float("-inf"))


def methods(score, b, h, q_idx, kv_idx):
    near = (q_idx - kv_idx).abs() <= 2
    return (score * 2).sigmoid().clamp(min=0.2) + near.to(torch.float64) * score.abs().sqrt()


def integers(score, b, h, q_idx, kv_idx):
    return (
        score + torch.div(q_idx - kv_idx, 3, rounding_mode="floor") + torch.remainder(kv_idx - q_idx, -4) + (h // 2) % 2
    )


FLOAT32 = (KV + 2) * 2.0**-22  # torch computes ALiBi's slopes in float32: distance times some units of rounding
ALL = [capped, alibi, relative, full, row_by_row, causal, documents, methods, integers]


def by_vmap(function, score):
    """FlexAttention's own nesting: over keys, queries, heads and batch entries."""
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(0, *axes))
    sizes = [torch.arange(n, dtype=torch.int32) for n in score.shape]
    return function(score, *sizes)


def traced_at(function, score):
    traced = trace(function)
    program = program_of(traced.graph)
    b, h, q, k = np.ogrid[:BATCH, :HEADS, :Q, :KV]
    at = {"score": score, "b": b, "h": h, "q": q + KV - Q, "k": k, "offset": KV - Q}
    tables = [x.detach().numpy() for x in traced.tables]
    found = evaluate(program.graph, at, traced.parameters, tables)
    return traced, program, [np.broadcast_to(x, score.shape) for x in found]


@pytest.mark.parametrize("score_mod", ALL, ids=lambda f: f.__name__)
def test_values_and_gradients(score_mod):
    score = torch.from_numpy(2 * RANDOM.normal(size=(BATCH, HEADS, Q, KV))).requires_grad_()
    expected = by_vmap(score_mod, score)
    traced, program, (value, of_score, *of_uses) = traced_at(from_score_mod(score_mod), score.detach().numpy())
    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-14, atol=FLOAT32 * (score_mod is alibi))
    wanted = [score, *(x for x in traced.tables if x.requires_grad)]
    expected = torch.autograd.grad(torch.where(torch.isfinite(expected), expected, 0).sum(), wanted)
    np.testing.assert_allclose(of_score, expected[0].numpy(), rtol=1e-12, atol=1e-15)
    for table, gradient in zip(wanted[1:], expected[1:], strict=True):
        uses = [(use, x) for use, x in zip(program.captured, of_uses, strict=True) if use.name == "look_up"]
        uses = [(use, x) for use, x in uses if traced.tables[use.number] is table]
        axes = tuple(n for n in range(4) if not (table.ndim and n == 1))
        np.testing.assert_allclose(sum(x for _, x in uses).sum(axes), gradient.numpy(), rtol=1e-12)


def test_captured_tensors():
    assert [x is y for x, y in zip(captured(from_score_mod(documents)), (SCALES,), strict=True)] == [True]


def test_composition():
    score = RANDOM.normal(size=(BATCH, HEADS, Q, KV))
    *_, (value, *_) = traced_at(from_score_mod(alibi) | softcap(2.0), score)
    expected = 2 * torch.tanh(by_vmap(alibi, torch.from_numpy(score)) / 2)
    np.testing.assert_allclose(value, expected.numpy(), rtol=1e-14, atol=FLOAT32)
