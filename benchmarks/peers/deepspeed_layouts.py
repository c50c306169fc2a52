#!/usr/bin/env python3
"""Measure DeepSpeed's layouts on one CPU thread: fused tiles, separate block products, SDPA.

    OMP_NUM_THREADS=1 python benchmarks/peers/deepspeed_layouts.py            # two minutes; needs torch
    OMP_NUM_THREADS=1 python benchmarks/peers/deepspeed_layouts.py --quick    # 1024 tokens, writes nothing

Forward, float32, 8 heads of 64, contenders in turns, medians of the process's CPU time. *blocks* are the steps of
DeepSpeed's kernels as batched products of PyTorch: a score block for each block of the layout, a softmax over the
blocks of a row, and a product with v. Writes ``deepspeed_layouts``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
import torch
from timing import medians_in_turns

import spattn
from spattn.patterns import Pattern, deepspeed

HEADS, HEAD_DIM = 8, 64
NOTES = (
    "Forward, float32, batch 1, 8 heads of 64, one process, one thread, in turns; medians of CPU time. blocks: score "
    "blocks, softmax and product with v as batched products of PyTorch. times_NAME: a contender's time over spattn's. "
    "plan_ms: the first plan of the pattern."
)


def problems(block: int) -> dict[str, Pattern]:
    """Layouts by name."""
    return {
        "fixed": deepspeed.fixed(block),
        "variable": deepspeed.variable(block, num_random_blocks=1),
        "bigbird": deepspeed.bigbird(block),
        "bslongformer": deepspeed.bslongformer(block),
        "local window": deepspeed.local_sliding_window(block),
    }


def in_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: np.ndarray) -> torch.Tensor:
    """Output of one head from a layout's blocks, in separate steps."""
    blocks = len(layout)
    size = len(q) // blocks
    row, column = map(torch.from_numpy, np.nonzero(layout))
    q, k, v = (x.view(blocks, size, -1) for x in (q, k, v))
    scores = torch.bmm(q[row], k[column].mT).mul_(q.shape[-1] ** -0.5)
    rows = row[:, None].expand(-1, size)
    most = torch.full((blocks, size), -torch.inf).scatter_reduce_(0, rows, scores.amax(-1), "amax")
    weights = scores.sub_(most[row, :, None]).exp_()
    total = torch.zeros(blocks, size).index_add_(0, row, weights.sum(-1))
    out = torch.zeros_like(q).index_add_(0, row, torch.bmm(weights, v[column]))
    return (out / total[..., None]).flatten(0, 1)


def measure(name: str, pattern: Pattern, tokens: int, block: int, rounds: int) -> dict[str, object]:
    """One row of the results; checks all outputs before timing."""
    generator = torch.Generator().manual_seed(0)
    arrays = [torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator) for _ in range(3)]
    masks = np.stack([pattern.index_set(tokens, tokens, head=head).to_dense() for head in range(HEADS)])
    layouts = masks[:, ::block, ::block]
    assert (layouts.repeat(block, 1).repeat(block, 2) == masks).all(), "expected whole blocks"
    heads = list(zip(*(x[0] for x in arrays), layouts, strict=True))
    spattn.clear_plan_cache()
    start = time.process_time()
    plan = spattn.plan_for(pattern, *arrays, backend="cpu")
    planned = 1e3 * (time.process_time() - start)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "spattn": partial(spattn.attention, *arrays, pattern),
        "blocks": lambda: torch.stack([in_blocks(q, k, v, own) for q, k, v, own in heads])[None],
        "sdpa_mask": partial(sdpa, *arrays, attn_mask=torch.from_numpy(masks)[None]),
        "sdpa_dense": partial(sdpa, *arrays),
    }
    for contender in ("blocks", "sdpa_mask"):
        torch.testing.assert_close(calls[contender](), calls["spattn"](), rtol=1e-4, atol=1e-5)
    taken = medians_in_turns(calls, rounds)
    row = {"layout": name, "block": block, "tokens": tokens, "density": round(float(masks.mean()), 4)}
    row |= {"efficiency": round(plan.efficiency, 3), "plan_ms": round(planned, 2)}
    row |= {f"{contender}_ms": round(ms, 2) for contender, ms in taken.items()}
    return row | {f"times_{contender}": round(ms / taken["spattn"], 2) for contender, ms in taken.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1024 tokens, write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens, rounds = (1024, 3) if args.quick else (4096, 5)
    spattn.plan(deepspeed.fixed(16), 64)  # imports the planner
    rows = []
    for block in (16, 64):
        for name, pattern in problems(block).items():
            rows.append(measure(name, pattern, tokens, block, rounds))
            print(rows[-1], flush=True)
    if not args.quick:
        record.write("deepspeed_layouts", rows, notes=NOTES)


if __name__ == "__main__":
    main()
