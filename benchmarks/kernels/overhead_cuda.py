#!/usr/bin/env python3
"""Measure GPU calls bound by launch, memory or clock instead of arithmetic.

    python benchmarks/kernels/overhead_cuda.py         # a minute on an H200; needs torch

Launch overhead on short sequences, decoding, and a window over a million tokens. Host times are medians of single calls
with ``time.perf_counter``, with synchronizations so that the queue never fills; GPU times are medians of CUDA events or
of CUDA graph replays. Decoding results are checked against float64 before timing. Writes ``overhead_cuda``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record
from gpu_timing import TOLERANCE, gpu_ms, graph_us, host_us

HEADS = 16
COPY_TB_S = 4.3  # device-to-device copy on an H200, bytes read plus bytes written
DECODING = [(q_len, kv_len, batch) for kv_len in (65536, 131072) for batch in (1, 8) for q_len in (1, 16)]
NOTES = "Host times: medians of single calls; GPU times: medians of CUDA events or of graph replays."


def launching() -> Iterator[dict]:
    """Host time of a call with a cached plan and of its parts; torch's dense attention for comparison."""
    import torch

    import spattn
    from spattn import cuda, patterns

    window = patterns.SlidingWindow(32)
    for tokens, head_dim, dtype in ((128, 64, torch.bfloat16), (128, 64, torch.float16), (1024, 64, torch.bfloat16)):
        q, k, v = (torch.randn(4, 8, tokens, head_dim, device="cuda", dtype=dtype) for _ in range(3))
        made, kept = spattn.plan_for(window, q, k, v, backend="cuda"), []
        calls = {
            "spattn.attention": lambda: spattn.attention(q, k, v, window),  # noqa: B023
            "spattn.attention, results kept": lambda: kept.append(spattn.attention(q, k, v, window)),  # noqa: B023
            "spattn.attention, plan given": lambda: spattn.attention(q, k, v, made),  # noqa: B023
            "spattn.cuda.forward": lambda: cuda.forward(q, k, v, made, 0.125),  # noqa: B023
            "torch SDPA, dense": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),  # noqa: B023
            "two torch allocations": lambda: (torch.empty_like(q), q.new_empty(q.shape[:3])),  # noqa: B023
        }
        for name, call in calls.items():
            row = {
                "problem": "launching",
                "tokens": tokens,
                "head_dim": head_dim,
                "dtype": str(dtype)[6:],
                "contender": name,
                "host_us": round(host_us(call), 2),
            }
            if "allocations" not in name and "kept" not in name:
                row["graph_us"] = round(graph_us(call), 2)
                row["loop_us"] = round(1e3 * gpu_ms(call), 2)
            yield row


def decoding() -> Iterator[dict]:
    """Few queries, many keys: 32 query heads over 8 KV heads, head_dim 128, causal."""
    import torch

    import spattn

    for q_len, kv_len, batch in DECODING:
        q = torch.randn(batch, 32, q_len, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, 8, kv_len, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        error = decoding_error(q, k, v, spattn.attention(q, k, v, "causal"))
        if not error < TOLERANCE:
            raise AssertionError(f"decoding {q_len} × {kv_len}, batch {batch}: relative error {error:.2g}")
        took = gpu_ms(lambda: spattn.attention(q, k, v, "causal"), 9)  # noqa: B023
        floor = 1e3 * 2 * k.nbytes / (COPY_TB_S * 1e12)
        row = {
            "problem": "decoding",
            "q_len": q_len,
            "tokens": kv_len,
            "batch": batch,
            "contender": "spattn",
            "median_ms": round(took, 4),
            "floor_ms": round(floor, 4),
            "times_floor": round(took / floor, 2),
            "relative_error": float(f"{error:.2g}"),
        }
        yield row
        if q_len == 1:  # torch's causal mask starts at the first key; one query attends to all keys
            dense = torch.nn.functional.scaled_dot_product_attention
            took = gpu_ms(lambda: dense(q, k, v, enable_gqa=True), 5)  # noqa: B023
            yield row | {
                "contender": "torch SDPA",
                "median_ms": round(took, 4),
                "times_floor": round(took / floor, 2),
                "relative_error": None,
            }


def decoding_error(q, k, v, out) -> float:
    """Relative error against float64 of the first and last head of the last batch entry."""
    import torch

    worst, q_len, kv_len = 0.0, q.shape[2], k.shape[2]
    for head in (0, q.shape[1] - 1):
        of_kv = head // (q.shape[1] // k.shape[1])
        scores = q[-1, head].double() @ k[-1, of_kv].double().T / math.sqrt(q.shape[3])
        row, key = (torch.arange(n, device="cuda") for n in (q_len, kv_len))
        scores.masked_fill_(key[None] > row[:, None] + kv_len - q_len, -math.inf)
        expected = scores.softmax(-1) @ v[-1, of_kv].double()
        worst = max(worst, float((out[-1, head].double() - expected).norm() / expected.norm()))
    return worst


def window_over(tokens: int) -> dict:
    """A window of ±256 tokens, timed long enough for the clock to settle under the power limit."""
    import torch

    import spattn

    pattern = spattn.patterns.SlidingWindow(256)
    q, k, v = (torch.randn(1, HEADS, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    start = time.perf_counter()
    spattn.attention(q, k, v, pattern)
    torch.cuda.synchronize()
    first = 1e3 * (time.perf_counter() - start)
    median = gpu_ms(lambda: spattn.attention(q, k, v, pattern), 9, 120.0)
    return {
        "problem": "window ±256",
        "tokens": tokens,
        "head_dim": 128,
        "contender": "spattn",
        "median_ms": round(median, 4),
        "first_call_ms": round(first, 1),
    }


def long_sequence() -> Iterator[dict]:
    """65536 and 1048576 tokens, both timed for the same duration."""
    short = window_over(65536)
    yield short | {"times_65536": 1.0}
    long = window_over(1 << 20)
    yield long | {"times_65536": round(long["median_ms"] / short["median_ms"], 2)}


def main() -> None:
    """Measure, print, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch

    rows = []
    for group in (launching, decoding, long_sequence):
        for row in group():
            rows.append(row)
            print(json.dumps(row, ensure_ascii=False), flush=True)
    record.write("overhead_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
