#!/usr/bin/env python3
"""Measure random pairs and clusters on one GPU.

    python benchmarks/kernels/scattered_cuda.py          # a minute on an H200; needs torch

4096 tokens, 16 heads, bfloat16. *spattn* is its own choice of plan, *contiguous* its plan of tiles of consecutive
tokens, *dense* its attention over all pairs, *pytorch* PyTorch's dense attention, *masked* PyTorch's with a boolean
mask. Contenders alternate, CUDA events around many calls, two sets of inputs; results are checked against float64
before timing. Writes ``scattered_cuda``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
from gpu_timing import ROUNDS, SETS, TOLERANCE, measure, worst_error

from spattn import patterns as sp

TOKENS, HEADS = 4096, 16
NOTES = "bfloat16, medians of CUDA events around many calls; dense and pytorch compute all pairs."


def problems() -> dict[str, sp.Pattern]:
    """Patterns by name."""
    rng, found = np.random.default_rng(0), {}
    for share in (0.001, 0.003, 0.01, 0.03):
        pairs = (rng.random((TOKENS, TOKENS)) < share).nonzero()
        found[f"random {100 * share:.2g} %"] = sp.interop.from_pairs(*pairs, TOKENS, TOKENS)
    found["32 clusters"] = sp.Clusters(rng.integers(0, 32, TOKENS))
    return found


def run(name: str, pattern: sp.Pattern, sets: list) -> dict[str, object]:
    """One row of the results."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as dense

    import spattn

    shape = sets[0][0].shape
    mask = torch.from_numpy(pattern.index_set(TOKENS, TOKENS).to_dense()).cuda()
    own = spattn.plan_for(pattern, *sets[0], backend="cuda")
    plain = spattn.plan(pattern, TOKENS, tiling=spattn.Tiling(tile=(128, 64)), heads=HEADS)
    calls = {
        "spattn": (pattern, lambda i: spattn.attention(*sets[i], pattern)),
        "contiguous": (pattern, lambda i: spattn.attention(*sets[i], plain)),
        "dense": (sp.Full(), lambda i: spattn.attention(*sets[i], "full")),
        "pytorch": (sp.Full(), lambda i: dense(*sets[i])),
        "masked": (pattern, lambda i: dense(*sets[i], attn_mask=mask)),
    }
    for who, (computed, call) in calls.items():
        if not (error := worst_error(computed, *sets[0], call(0))) < TOLERANCE:
            raise AssertionError(f"{who} on {name}: relative error {error} against float64")
    times = measure({who: call for who, (_, call) in calls.items()}, ROUNDS)
    ms = {who: statistics.median(each) for who, each in times.items()}
    how = "gathered KV" if own.gathered else "permuted" if own.ordered else "consecutive tokens"
    row = {"problem": name, "head_dim": shape[3], "plan": f"{own.block_q} × {own.block_kv}, {how}"}
    row |= {f"{who}_ms": round(each, 4) for who, each in ms.items()}
    return row | {f"times_{who}": round(ms[who] / ms["spattn"], 3) for who in list(ms)[1:]}


def main() -> None:
    """Measure, print, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch

    torch.manual_seed(0)
    rows = []
    for head_dim in (64, 128):
        shape = 1, HEADS, TOKENS, head_dim
        sets = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for _ in range(SETS)]
        for name, pattern in problems().items():
            rows.append(run(name, pattern, sets))
            print(rows[-1], flush=True)
    record.write("scattered_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
