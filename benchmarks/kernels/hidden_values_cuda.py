#!/usr/bin/env python3
"""Measure NaN at masked keys on one GPU: error and cost.

    python benchmarks/kernels/hidden_values_cuda.py       # seconds on an H200; needs torch

A row whose tile holds such a key comes out non-finite (0 · NaN) and takes the float64 fallback, whose order of
summation differs, so its last bits may change. Kernels that read K and V with non-finite values replaced by 0 would be
bitwise stable; the cheapest such copy is one pass over K and V before every call, timed for comparison. Writes
``hidden_values_cuda``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record
from gpu_timing import SETS, measure

TOKENS, HEADS, HEAD_DIM, ROUNDS = 16384, 16, 128, 7
NOTES = (
    "Forward, batch 1, 16 heads, 16384 tokens, head_dim 128, window ±256 without every 64th key; medians of CUDA "
    "events, contenders in turns. out_ulp, lse_ulp: largest difference between a row with NaN and with numbers at "
    "those keys, in ulps of the row's largest number."
)


def ulps(a, b) -> float:
    """Largest difference between the rows of two tensors, in ulps of the row's largest number."""
    import torch

    distance, largest = ((a.float() - b.float()).abs().amax(-1), a.float().abs().amax(-1))
    return float((distance / (largest * torch.finfo(a.dtype).eps)).max())


def run(dtype: str) -> dict:
    """Row of the results for one dtype."""
    import torch

    import spattn
    from spattn import cuda, patterns

    torch.manual_seed(0)
    pattern = patterns.SlidingWindow(256) - patterns.Columns(64, 0, 1)
    shape = (1, HEADS, TOKENS, HEAD_DIM)
    sets = [[torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3)] for _ in range(SETS)]
    plan = spattn.plan_for(pattern, *sets[0], backend="cuda")
    hidden = [[q, k.clone(), v.clone()] for q, k, v in sets]
    for _, k, v in hidden:
        k[:, :, ::64], v[:, :, ::64] = torch.nan, torch.nan

    def forward(inputs):
        return lambda i: cuda.forward(*inputs[i], plan, HEAD_DIM**-0.5)

    clean, poisoned = (forward(inputs)(0) for inputs in (sets, hidden))
    if not all(x.isfinite().all() for x in poisoned):
        raise AssertionError(f"{dtype}: NaN at masked keys reached a result")
    calls = {
        "forward": forward(sets),
        "forward, NaN in every tile": forward(hidden),
        "finite copies of K and V": lambda i: [torch.nan_to_num(x, 0, 0, 0) for x in sets[i][1:]],
    }
    times = {who: round(statistics.median(taken), 4) for who, taken in measure(calls, ROUNDS).items()}
    lse = [x[1].unsqueeze(-1) for x in (clean, poisoned)]
    moved = {"out_ulp": round(ulps(clean[0], poisoned[0]), 2), "lse_ulp": round(ulps(*lse), 2)}
    return {"dtype": dtype} | {f"{who}_ms": time for who, time in times.items()} | moved


def main() -> None:
    """Measure, print, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch

    with torch.no_grad():
        rows = [run(dtype) for dtype in ("bfloat16", "float16", "float32")]
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ")
    record.write("hidden_values_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
