#!/usr/bin/env python3
"""Measure forward and backward of a million tokens on one GPU.

    python benchmarks/kernels/long_cuda.py       # seconds on an H200; needs torch

Time, memory and error: 1,048,576 tokens, window ±256, batch 1, 16 heads, head_dim 128, bfloat16. The middle rows and
keys of one head are checked against float64. Writes ``long_cuda``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

TOKENS, HEADS, HEAD_DIM, WINDOW = 1 << 20, 16, 128, 256
CHECKED, TOLERANCE = 600, 1.6e-2  # rows; relative error of a bfloat16 gradient
NOTES = "allocated: PyTorch's peak, inputs included; process: GPU memory in use after the calls."


def worst_in_the_middle(q, k, v, dout, found) -> float:
    """Largest relative error of out and gradients over the middle rows and keys of one head."""
    import torch

    reach, middle = CHECKED // 2 + 2 * WINDOW, q.shape[2] // 2
    near, own = slice(middle - reach, middle + reach), slice(reach - CHECKED // 2, reach + CHECKED // 2)
    q, k, v, dout, *found = (x[0, 3, near].double() for x in (q, k, v, dout, *found))
    at = torch.arange(len(q), device=q.device)
    scores = (q @ k.T / HEAD_DIM**0.5).masked_fill((at[:, None] - at).abs() > WINDOW, float("-inf"))
    weights = scores.softmax(-1)
    out = weights @ v
    slopes = weights * (dout @ v.T - (dout * out).sum(-1, keepdim=True)) / HEAD_DIM**0.5
    exact = out, slopes @ k, slopes.T @ q, weights.T @ dout
    return max(float((x - y)[own].norm() / y[own].norm()) for x, y in zip(found, exact, strict=True))


def run() -> dict:
    """Time the second forward and backward."""
    import torch

    import spattn

    pattern, shape = spattn.patterns.SlidingWindow(WINDOW), (1, HEADS, TOKENS, HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for _ in range(2):
        gradients = None
        events[0].record()
        out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
        events[1].record()
        gradients = spattn.attention_backward(dout, q, k, v, out, lse, pattern)
        events[2].record()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.max_memory_allocated()
    error = worst_in_the_middle(q, k, v, dout, (out, *gradients))
    assert error <= TOLERANCE, f"relative error {error:.2g}"
    return {
        "tokens": TOKENS,
        "forward_ms": round(events[0].elapsed_time(events[1]), 2),
        "backward_ms": round(events[1].elapsed_time(events[2]), 2),
        "allocated_gb": round(allocated / 1e9, 1),
        "process_gb": round((total - free) / 1e9, 1),
        "relative_error": round(error, 4),
    }


def main() -> None:
    """Measure, print, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch

    row = run()
    print(row)
    record.write("long_cuda", [row], notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
