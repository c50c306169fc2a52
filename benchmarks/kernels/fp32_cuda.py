#!/usr/bin/env python3
"""Compare float32 methods on one GPU: 3×TF32, TF32 and PyTorch.

    python benchmarks/kernels/fp32_cuda.py       # half a minute on an H200; needs torch

Forward, batch 1, 8 heads: three TF32 products, one TF32 product, and PyTorch's dense float32.
Results are checked against float64 on sampled rows before timing. Writes ``fp32_cuda``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record
from gpu_timing import SETS, measure, worst_error

HEADS, ROUNDS = 8, 7
TOLERANCE = {"tf32": 2e-3}  # relative error; EXACT for the others
EXACT = 5e-6
NOTES = (
    "Forward, float32, batch 1, 8 heads; medians of CUDA events, contenders in turns; TF/s count allowed pairs, "
    "4 head_dim each. relative_error: of sampled rows, against float64."
)


def contenders(pattern, sets) -> dict:
    """Calls by name; each takes the number of an input set."""
    from torch.nn.functional import scaled_dot_product_attention

    import spattn
    from spattn import cuda, patterns

    q, k, v = sets[0]
    scale, made = q.shape[3] ** -0.5, spattn.plan_for(pattern, q, k, v, backend="cuda")

    def ours(precision):
        return lambda i: cuda.forward(*sets[i], made, scale, precision=precision)[0]

    calls = {"three TF32 products": ours(None), "tf32": ours("tf32")}
    causal = pattern == patterns.Causal()
    if causal or pattern == patterns.Full():
        calls["torch SDPA"] = lambda i: scaled_dot_product_attention(*sets[i], is_causal=causal)
    return calls


def run(tokens: int, head_dim: int, name: str, pattern) -> list[dict]:
    """Rows of the results for one problem."""
    import torch

    import spattn

    torch.manual_seed(0)
    shape = (1, HEADS, tokens, head_dim)
    sets = [[torch.randn(shape, device="cuda") for _ in range(3)] for _ in range(SETS)]
    calls, rows = contenders(pattern, sets), []
    errors = {who: worst_error(pattern, *sets[0], call(0)) for who, call in calls.items()}
    for who, error in errors.items():
        if error > TOLERANCE.get(who, EXACT):
            raise AssertionError(f"{who} on {name}: relative error {error:.2g} against float64")
    nnz = spattn.plan_for(pattern, *sets[0], backend="cuda").nnz
    for who, times in measure(calls, ROUNDS).items():
        median = statistics.median(times)
        rows.append(
            {
                "problem": name,
                "tokens": tokens,
                "head_dim": head_dim,
                "contender": who,
                "median_ms": round(median, 4),
                "best_ms": round(min(times), 4),
                "tflops": round(4e-9 * HEADS * head_dim * nnz / median, 1),
                "relative_error": float(f"{errors[who]:.2g}"),
            }
        )
        print(*rows[-1].values(), sep="  ", flush=True)
    return rows


def main() -> None:
    """Measure, print, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch

    from spattn import patterns

    with torch.no_grad():
        rows = [row for head_dim in (64, 128, 256) for row in run(4096, head_dim, "dense", patterns.Full())]
        for name, pattern in (
            ("dense", patterns.Full()),
            ("causal", patterns.Causal()),
            ("window ±256", patterns.SlidingWindow(256)),
        ):
            rows += run(16384, 128, name, pattern)
    record.write("fp32_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
