"""Type-check the public API: mypy reads this file in ``make lint``; it never runs.

A public parameter or result that loses its type, or has a wrong one, is an error here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import spattn
from spattn import cpu, index_set, patterns, reference, testing
from spattn import jax as spattn_jax
from spattn import torch as spattn_torch
from spattn import transformers as spattn_transformers


@patterns.authoring.register("typed")
@dataclass(frozen=True)
class Typed(patterns.Pattern):
    """Keeps its class through the decorator; otherwise ``Typed(3).period`` would be an error."""

    period: int

    def allows(self, q: Any, k: Any) -> Any:
        same = patterns.authoring.apply(lambda p: p // self.period, q) == patterns.authoring.apply(
            lambda p: p // self.period, k
        )
        return same | patterns.authoring.member(np.arange(3), q - k)


def compose() -> patterns.Pattern:
    grids = patterns.windowed((8, 8), 4, 2) | patterns.Neighborhood(64, 5, causal=True) & ~patterns.axial((8, 8), 0)
    named = patterns.a_shape(1, 1) | patterns.tri_shape(1, 1, 3, 8) | patterns.chunked_causal(4)
    known = patterns.registry.get("causal") | patterns.from_json("{}") | patterns.shared_prefix(3, (4, 5))
    simple = patterns.SlidingWindow(-1, 3) | patterns.DilatedWindow(3, dilation=2) | patterns.Stride(4, 1)
    tokens = patterns.GlobalTokens((1, 2)) | patterns.longformer(8, global_tokens=2) | patterns.Prefix(simple, 3)
    tokens = tokens | patterns.Documents((3, 4))
    arrays = patterns.Mask(np.ones((3, 3), bool)) | patterns.KeyBlocks(np.zeros((1, 1), int), 4, 4)
    blocks = patterns.BigBird(4) | patterns.deepspeed.fixed(4, attention="unidirectional")
    return grids | named - known | simple | tokens | arrays | blocks | patterns.PerHead((Typed(Typed(3).period),))


def attend(pattern: patterns.Pattern) -> tuple[np.ndarray, ...]:
    q, k, v = testing.inputs(1, 2, q_len=9, dtype="bfloat16", layout=("bshd", "fortran", "gapped"))
    plan = spattn.plan(
        pattern, 9, tiling=spattn.Tiling(tile=(48, 64)), batch=1, heads=2, max_bytes=spattn.plan_cache_info().max_bytes
    )
    out, lse = cpu.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cpu"), 0.1, isa="avx2")
    dq, _, _ = cpu.backward(q, q, k, v, out, lse, plan, 0.1)
    exact, _ = reference.attend(q, k, v, pattern, dtype=np.longdouble)
    exact_dq, _, _ = reference.gradients(q, q, k, v, pattern)
    spattn.attention_backward(q, q, k, v, *testing.execute(plan, q, k, v, 0.1), pattern)
    spattn.grouped_attention([(q, k, v, pattern), (q, k, v, plan), (q, k, v, "full")], scale=0.1)
    return out, dq, exact, exact_dq, *testing.plan_pairs(plan)


def judge(pattern: patterns.Pattern) -> float:
    q, k, v = testing.inputs()
    mask = testing.dense_mask(pattern, 1, 1, 64, 64)
    out, lse = testing.naive(q, k, v, mask, dtype="float16")
    outs, _ = testing.naive_orders(q, k, v, mask)
    dq, _, _ = testing.naive_gradients(q, q, k, v, mask)
    testing.assert_within_bound(dq, dq, outs)
    testing.check_pattern(pattern, 64)
    testing.check_plan(spattn.plan(pattern, 64), [pattern.index_set(64, 64)])
    testing.Expectation(pattern, q, k, v).check(testing.at_protected_page(out), lse, "what")
    return testing.error_bound(testing.random((1, 1, 64, 32)), outs, "float32") + testing.eps(np.float32)


def layer(pattern: patterns.Pattern, model: Any) -> patterns.Pattern:
    spattn_transformers.register()
    spattn_transformers.use(model, pattern).eval()
    made = spattn_torch.SparseAttention(64, 4, pattern, bias=False, num_kv_heads=2, device="cpu", dtype=None)
    made.pattern = spattn_torch.attention(made(1, 2, 3, key_padding_mask=None, need_weights=False)[0], 1, 2, "causal")
    spattn_jax.attention(1, 2, 3, made.pattern, scale=0.5, backend="cpu", return_lse=True, precision=None)
    return made.pattern


def index(pattern: patterns.Pattern) -> int:
    rows = index_set.AffineRows.from_runs(index_set.Runs.span(0, np.arange(4), 4), 4)
    same = index_set.AffineRows.from_csr(*rows.to_csr(), 4) == index_set.AffineRows.from_dense(rows.to_dense())
    patterns.show.draw(pattern, 64, head=int(same))
    return pattern.at(0, 0).bind(4, 4).sizes()[0] + len(rows.row(3))
