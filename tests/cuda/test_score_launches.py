"""Gradients of score functions for kinds of calls that other modules only run forward, by PyTorch's autograd."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import patterns
from spattn.arrays import to_host
from spattn.schedule import compiler
from spattn.testing import dense_mask

from . import test_traced_scores as traced
from .sm90.test_dynamic_masks import SELECTIONS, on_gpu
from .test_traced_scores import ALIBI, BATCH, HEADS, SCALE, SLOPES

pytestmark = pytest.mark.gpu

RANDOM = np.random.default_rng(0)
SCATTERED = patterns.interop.from_pairs(*np.nonzero(RANDOM.random((300, 417)) < 0.05), 300, 417)
CLUSTERS = patterns.Clusters(RANDOM.integers(0, 9, 300))


def leaves(torch, arrays, given):
    """On the GPU: q, k, v and the slopes, which need gradients; dout and dlse."""
    *operands, dout, dlse = [arrays("torch")(x) for x in given]
    return [x.requires_grad_() for x in (*operands, arrays("torch")(SLOPES))], [dout, dlse]


def alibi(slopes):
    return lambda s, b, h, q, k: s + slopes[h] * (k - q)


@pytest.mark.family("sm90")
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("kind", ["gathered", "ordered", "dynamic"])
def test_gradients(torch, arrays, kind):
    """The backward has a plan of its own, since it has no kernels for such calls."""
    pattern, q_len, kv_len = {
        "gathered": (SCATTERED, 300, 417),
        "ordered": (CLUSTERS, 300, 300),
        "dynamic": (patterns.Causal(), 260, 391),
    }[kind]
    given = traced.problem("bfloat16" if kind == "dynamic" else "float16", q_len, kv_len)
    (q, k, v, slopes), upstream = leaves(torch, arrays, given)
    if kind == "dynamic":
        chosen = pattern & SELECTIONS["padding"](np.random.default_rng(1), kv_len, on_gpu(torch))
        pattern = chosen.to_host(kv_len)
    else:
        chosen = compiler.plan(
            pattern, q_len, kv_len, batch=BATCH, heads=HEADS, tile=(128, 64), workers=3, **{kind: True}
        )
        assert (chosen.gathered, chosen.ordered) == (kind == "gathered", True)
    results = spattn.attention(q, k, v, chosen, scale=SCALE, score=alibi(slopes), return_lse=True)
    *gradients, of_slopes = torch.autograd.grad(results, [q, k, v, slopes], upstream)
    found = [to_host(x.detach()) for x in (*results, *gradients)]
    traced.compare(ALIBI, None, pattern, given[:4], given[4], found, [to_host(of_slopes)])


@pytest.mark.family("sm90")
@pytest.mark.usefixtures("hopper_kernels")
def test_groups(torch, arrays):
    """Problems of a grouped call have the bits of calls of their own, gradients included."""
    cases = [traced.CASES[name] for name in ("more keys", "strided")]
    given = [traced.problem("bfloat16", *case[1:]) for case in cases]
    (*first, slopes), (*second, _) = (leaves(torch, arrays, one)[0] for one in given)
    problems = [(*own, case[0]) for own, case in zip((first, second), cases, strict=True)]
    options = {"scale": SCALE, "score": alibi(slopes)}
    grouped = spattn.grouped_attention(problems, **options)
    single = [spattn.attention(*problem, **options) for problem in problems]
    douts = [arrays("torch")(one[3]) for one in given]
    gradients = [torch.autograd.grad(found, [*first, *second, slopes], douts) for found in (grouped, single)]
    for x, y in zip((*grouped, *gradients[0]), (*single, *gradients[1]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.family("sm80")
def test_portable_float16():
    traced.check(ALIBI, None, "more keys", "float16")


@pytest.mark.parametrize(("family", "dtype"), [("sm90", "bfloat16"), ("sm80", "float32")], indirect=["family"])
def test_fallback(family, dtype):
    """NaN and infinities at a key that no query sees send the rows of its tile to the float64 fallback."""
    mask = dense_mask(patterns.SlidingWindow(70), 1, 1, 300, 300)[0, 0]
    mask[:, 5] = False
    pattern = patterns.Mask(mask)
    q, k, v, dout, dlse = traced.problem(dtype, 300, 300)
    bad = [x.copy() for x in (k, v)]
    bad[0][:, :, 5], bad[1][:, :, 5] = np.nan, np.inf
    results, tables = traced.run(ALIBI, None, traced.planned(pattern, q, k, v), q, *bad, dout, dlse)
    traced.compare(ALIBI, None, pattern, (q, k, v, dout), dlse, results, tables)
