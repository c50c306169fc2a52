#!/usr/bin/env python3
"""The backward alone: spattn against cuDNN and FlexAttention on one GPU, in one process, taking turns.

    python benchmarks/peers_cuda_backward.py                     # about 4 minutes on an H200; needs torch
    python benchmarks/peers_cuda_backward.py --head-dims 128     # half of it

Problems, contenders, turns and medians are those of peers_cuda.py. spattn is timed as ``attention_backward``, its
peers as ``torch.autograd.grad`` of a graph that is kept. Gradients of one head are checked against float64 before they
are timed. TF/s count allowed pairs alone, 10·head_dim each. Writes ``benchmarks/results/peers_cuda_backward.json``.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator

import peers_cuda
import record

TOKENS = 16384
TOLERANCE = 1.2e-2  # relative error of a bfloat16 gradient, of a whole head
NOTES = (
    "Backward alone, bfloat16, batch 1, 16 heads; medians of CUDA events, contenders in turns. "
    "times_spattn: a contender's time over spattn's."
)


def backwards(pattern, forwards: dict[str, Callable], sets: list[list]) -> dict[str, Callable]:
    """Name to a function of the number of an input set, which returns (dq, dk, dv)."""
    import torch

    import spattn

    calls = {}
    with torch.no_grad():
        results = [spattn.attention(*x[:3], pattern, return_lse=True) for x in sets]
    calls["spattn"] = lambda i: spattn.attention_backward(sets[i][3], *sets[i][:3], *results[i], pattern)
    for who, forward in forwards.items():
        if who not in ("spattn", "FlashAttention-2"):
            with torch.enable_grad():
                outs = [forward(i) for i in range(len(sets))]
            calls[who] = lambda i, outs=outs: torch.autograd.grad(outs[i], sets[i][:3], sets[i][3], retain_graph=True)
    return calls


def worst_error(mask, q, k, v, dout, gradients) -> float:
    """Largest relative error of the gradients of the last head against float64."""
    import torch

    at = torch.arange(q.shape[2], device=q.device)
    q, k, v, dout = (x[0, -1].detach().double() for x in (q, k, v, dout))
    scale = q.shape[1] ** -0.5
    logits = (q @ k.T).mul_(scale)
    if mask is not None:
        logits.masked_fill_(~mask(0, -1, at[:, None], at[None]), -math.inf)
    p = logits.softmax(-1)
    dv, ds = p.T @ dout, dout @ v.T
    ds.sub_((ds * p).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    errors = []
    for got, exact in zip(gradients, (ds @ k, ds.T @ q, dv), strict=True):
        error = torch.linalg.norm(got[0, -1].double() - exact) / torch.linalg.norm(exact)
        errors.append(float(error) if torch.isfinite(error) else math.inf)
    return max(errors)


def run(head_dim: int) -> Iterator[dict]:
    """Rows of the result, one for each contender."""
    import torch

    torch.manual_seed(0)
    shape = (1, peers_cuda.HEADS, TOKENS, head_dim)
    sets = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)] for _ in range(peers_cuda.SETS)]
    for *operands, _ in sets:
        for x in operands:
            x.requires_grad_()
    operands = [x[:3] for x in sets]
    for name, (pattern, mask) in peers_cuda.problems(TOKENS).items():
        calls = backwards(pattern, peers_cuda.contenders(name, pattern, mask, operands, False), sets)
        errors = {}
        with torch.no_grad():
            for who, call in calls.items():
                errors[who] = worst_error(mask, *sets[0], call(0))
                if errors[who] > TOLERANCE:
                    raise AssertionError(f"{who} on {name}: relative error {errors[who]:.2g} against float64")
            times = peers_cuda.measure(calls, 9)
        medians = {who: statistics.median(values) for who, values in times.items()}
        pairs = peers_cuda.HEADS * pattern.index_set(TOKENS, TOKENS).nnz
        for who, median in medians.items():
            row = {
                "problem": name,
                "tokens": TOKENS,
                "head_dim": head_dim,
                "contender": who,
                "median_ms": round(median, 4),
                "tflops": round(1e-9 * 10 * head_dim * pairs / median, 1),
                "times_spattn": round(median / medians["spattn"], 3),
                "relative_error": float(f"{errors[who]:.2g}"),
            }
            print(
                f"d={head_dim} {name:28s} {who:14s} {median:9.4f} ms {row['tflops']:6.0f} TF/s "
                f"{row['times_spattn']:.2f} × spattn's time",
                flush=True,
            )
            yield row


def main() -> None:
    """Measure and write after every problem, so that what was measured is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    args = parser.parse_args()
    import torch

    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 5000
    rows: list[dict] = []
    for head_dim in args.head_dims:
        for row in run(head_dim):
            rows.append(row)
            record.write("peers_cuda_backward", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
