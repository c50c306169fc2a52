#!/usr/bin/env python3
"""Compare spattn with FlashAttention-4 on one Hopper GPU, forward and backward.

    python benchmarks/peers/flash_attention_4.py       # a minute and a half; needs torch and flash-attn-4

bfloat16, batch 1, 16 heads, 16,384 tokens, dense and contiguous windows, in one process. Contenders alternate; each
call uses the next of several input sets. Forwards are replayed in CUDA graphs, so that no host time counts. Results are
checked against float64 on sampled rows. TF/s count allowed pairs only, 4·head_dim each forward and 10·head_dim
backward. spattn's backward is deterministic; FlashAttention-4's is measured in both modes. Writes
``flash_attention_4``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import peers_cuda
import peers_cuda_backward
import record
from gpu_timing import SETS, TOLERANCE, measure, worst_error
from peers_cuda import HEADS
from peers_cuda_backward import TOKENS, WINDOWS, recorded

NOTES = (
    "bfloat16, batch 1, 16 heads, 16,384 tokens; medians of CUDA events, contenders in turns; forwards in CUDA graphs. "
    "times_spattn: ratio of a contender's time to spattn's."
)


def replayed(call: Callable) -> Callable:
    """Return `call`, which takes the number of an input set, as replays of CUDA graphs."""
    import torch

    graphs = []
    for number in range(SETS):
        call(number)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            call(number)
    return lambda i: graphs[i].replay()


def contenders(pattern, keywords: dict, sets: list, backward: bool) -> dict[str, Callable]:
    """Calls by name; each takes the number of an input set."""
    from flash_attn.cute import flash_attn_func

    import spattn

    if not backward:
        theirs = [[x.transpose(1, 2).contiguous() for x in arrays[:3]] for arrays in sets]
        return {
            "spattn": lambda i: spattn.attention(*sets[i][:3], pattern),
            "FlashAttention-4": lambda i: flash_attn_func(*theirs[i], **keywords)[0].transpose(1, 2),
        }
    results = [spattn.attention(*arrays[:3], pattern, return_lse=True) for arrays in sets]
    calls = {"spattn": lambda i: spattn.attention_backward(sets[i][3], *sets[i][:3], *results[i], pattern)}
    for name, more in (("FlashAttention-4", {}), ("FlashAttention-4, deterministic", {"deterministic": True})):
        calls[name] = recorded(
            lambda q, k, v, more=more: flash_attn_func(q, k, v, **keywords, **more), sets, transposed=True
        )
    return calls


def main() -> None:
    """Measure, check, print; write after every problem."""
    import torch

    import spattn

    rows: list[dict] = []
    for head_dim in (128, 64):
        torch.manual_seed(0)
        shape = 1, HEADS, TOKENS, head_dim
        sets = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)] for _ in range(SETS)]
        for name, keywords in WINDOWS.items():
            pattern = peers_cuda.problems(TOKENS)[name][0]
            pairs = spattn.plan_for(pattern, *sets[0][:3]).nnz
            for backward in (False, True):
                calls, errors = contenders(pattern, keywords, sets, backward), {}
                for who, call in calls.items():
                    if backward:
                        errors[who] = peers_cuda_backward.worst_error(pattern, *sets[0], call(0))
                    else:
                        errors[who] = worst_error(pattern, *sets[0][:3], call(0))
                    if errors[who] > (peers_cuda_backward.TOLERANCE if backward else TOLERANCE):
                        raise AssertionError(f"{who} on {name}: relative error {errors[who]:.2g} against float64")
                if not backward:
                    calls = {who: replayed(call) for who, call in calls.items()}
                medians = {who: statistics.median(x) for who, x in measure(calls, 9).items()}
                for who, median in medians.items():
                    row = {
                        "problem": name,
                        "direction": "backward" if backward else "forward",
                        "head_dim": head_dim,
                        "contender": who,
                        "median_ms": round(median, 5),
                        "tflops": round((10e-9 if backward else 4e-9) * HEADS * head_dim * pairs / median, 1),
                        "times_spattn": round(median / medians["spattn"], 3),
                        "relative_error": float(f"{errors[who]:.2g}"),
                    }
                    rows.append(row)
                    print(*(f"{value!s:>18}" for value in row.values()), flush=True)
                del calls
                torch.cuda.empty_cache()
            record.write("flash_attention_4", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
