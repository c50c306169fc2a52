#!/usr/bin/env python3
"""NaN at keys that nobody may see, on one GPU: how far do other rows move, and what would it cost if they never did?

    python benchmarks/kernels/hidden_values_cuda.py       # a few seconds on an H200; needs torch

A row whose tile holds such a key comes out non-finite (0 · NaN) and is computed again, key by key in float64: another
order of summation, so its last bits may move. Kernels that read K and V with every non-finite value replaced by 0 would
give the same bits; the cheapest way to such copies is one pass over K and V before every call, timed beside the call.
Writes ``benchmarks/results/hidden_values_cuda-h200.json``.
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
    "events, contenders in turns. out_ulp, lse_ulp: the largest distance of a row with NaN at those keys from the same "
    "row with numbers there, in units of the last place of its largest number."
)


def ulps(a, b) -> float:
    """The largest distance of two tensors of rows, in units of the last place of the row's largest number."""
    import torch

    distance, largest = ((a.float() - b.float()).abs().amax(-1), a.float().abs().amax(-1))
    return float((distance / (largest * torch.finfo(a.dtype).eps)).max())


def run(dtype: str) -> dict:
    """The row of one dtype."""
    import torch

    import spattn
    from spattn import cuda, patterns

    torch.manual_seed(0)
    pattern = patterns.SlidingWindow(256) - patterns.Columns(64, 0, 1)
    shape = (1, HEADS, TOKENS, HEAD_DIM)
    sets = [[torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3)] for _ in range(SETS)]
    plan = spattn.plan(pattern, backend="cuda", like=sets[0])
    hidden = [[q, k.clone(), v.clone()] for q, k, v in sets]
    for _, k, v in hidden:
        k[:, :, ::64], v[:, :, ::64] = torch.nan, torch.nan

    def forward(inputs):
        return lambda i: cuda.forward(*inputs[i], plan, HEAD_DIM**-0.5)

    clean, poisoned = (forward(inputs)(0) for inputs in (sets, hidden))
    if not all(x.isfinite().all() for x in poisoned):
        raise AssertionError(f"{dtype}: NaN at hidden keys reached a result")
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
    """Measure."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    import torch

    with torch.no_grad():
        rows = [run(dtype) for dtype in ("bfloat16", "float16", "float32")]
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ")
    record.write("hidden_values_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
