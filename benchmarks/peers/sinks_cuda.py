#!/usr/bin/env python3
"""Compare spattn and FlashAttention-4 on gpt-oss's attention with sinks.

    python benchmarks/peers/sinks_cuda.py        # half a minute; needs torch and flash_attn.cute

Forward and backward, bfloat16, batch 1, 64 heads on 8, head_dim 64, a causal window of 128 keys, learned sinks. The
gradient of the sinks is included where a contender has it. spattn's results are checked against dense float64 on
sampled rows, FlashAttention-4's against spattn's. Writes ``sinks_cuda``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record
from gpu_timing import SETS, gradient_error, measure, without_gradients

TOKENS, HEADS, HEADS_KV, HEAD_DIM, WINDOW = (4096, 16384), 64, 8, 64, 128
ROUNDS, TARGET_MS = 11, 10.0
TOLERANCE = 1.6e-2  # relative error of a bfloat16 result or gradient
NOTES = (
    "bfloat16, batch 1, 64 heads on 8, head_dim 64, a causal window of 128 keys, one sink per head; medians of CUDA "
    "events, contenders in turns. Backwards are torch.autograd.grad of a retained graph. times_spattn: ratio of a "
    "contender's time to spattn's. FlashAttention-4: flash_attn.cute with learnable_sink, in its own layout."
)


def recorded(call: Callable, graphs: list) -> Callable:
    """The backward of recorded calls, by the number of an input set."""
    import torch

    outputs = [(call(*leaves), leaves, dout) for leaves, dout in graphs]

    def backward(i):
        out, leaves, dout = outputs[i]
        return torch.autograd.grad(out, leaves, dout, retain_graph=True, allow_unused=True)

    return backward


def contenders(pattern, sets, sinks) -> dict[tuple[str, str], Callable]:
    """Calls by contender and pass; each takes the number of an input set."""
    from flash_attn.cute import flash_attn_func

    import spattn

    def own(q, k, v, logits):
        return spattn.attention(q, k, v, pattern, sinks=logits)

    def theirs(q, k, v, logits):
        found = flash_attn_func(q, k, v, causal=True, window_size=(WINDOW - 1, 0), learnable_sink=logits)
        return found[0] if isinstance(found, tuple) else found

    calls = {}
    for who, call, transposed in (("spattn", own, False), ("FlashAttention-4", theirs, True)):
        graphs = []
        for one in sets:
            *inputs, dout = [x.transpose(1, 2).contiguous() if transposed else x for x in one]
            # FlashAttention-4 takes bfloat16 sinks.
            logits = sinks.bfloat16() if transposed else sinks
            graphs.append(([x.detach().clone().requires_grad_() for x in (*inputs, logits)], dout))
        calls[who, "forward"] = without_gradients(call, [(*inputs, dout) for inputs, dout in graphs])
        calls[who, "backward"] = recorded(call, graphs)
    return calls


def main() -> None:
    """Check, measure, print, write."""
    import torch

    from spattn.patterns import SlidingWindow

    torch.manual_seed(0)
    pattern = SlidingWindow(WINDOW - 1, 0)
    rows, sinks = [], torch.randn(HEADS, device="cuda")
    for tokens in TOKENS:
        shapes = [(1, heads, tokens, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
        sets = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes] for _ in range(SETS)]
        calls = contenders(pattern, sets, sinks)
        error = gradient_error(pattern, sets, calls["spattn", "forward"], calls["spattn", "backward"], sinks=sinks)
        if not error <= TOLERANCE:
            raise AssertionError(f"{tokens} tokens: relative error {error:.2g} against float64")
        for which in ("forward", "backward"):
            mine, other = calls["spattn", which](0), calls["FlashAttention-4", which](0)
            pairs = [(mine, other)] if which == "forward" else list(zip(mine, other, strict=True))[:3]
            for a, b in pairs:
                apart = float(torch.linalg.norm((a - b.transpose(1, 2)).float()) / torch.linalg.norm(a.float()))
                if not apart <= 2 * TOLERANCE:
                    raise AssertionError(f"{tokens} tokens, {which}: contenders differ by {apart:.2g}")
            own = {key: call for key, call in calls.items() if key[1] == which}
            medians = {key: statistics.median(x) for key, x in measure(own, ROUNDS, TARGET_MS).items()}
            for (who, _), median in medians.items():
                row = {"tokens": tokens, "contender": who, "pass": which, "median_ms": round(median, 4)}
                row["times_spattn"] = round(median / medians["spattn", which], 3)
                row["sink_gradient"] = which == "backward" and calls[who, which](0)[3] is not None
                rows.append(row)
                print(*row.values(), sep="  ", flush=True)
        del calls
        torch.cuda.empty_cache()
    record.write("sinks_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
