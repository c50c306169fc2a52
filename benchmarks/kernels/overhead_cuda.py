#!/usr/bin/env python3
"""Where the GPU kernel is not what bounds a call: launching, short sequences, decoding, a million tokens.

    python benchmarks/kernels/overhead_cuda.py         # about a minute on an H200; needs torch

Host times are medians over single calls of ``time.perf_counter`` differences, with the GPU idle enough never to block
the queue; GPU times are medians of CUDA events, or of a CUDA graph's replays. Decoding results are checked against
float64 before they are timed. Writes ``benchmarks/results/overhead_cuda-h200.json`` (or ``--out``).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

HEADS = 16
COPY_TB_S = 4.3  # what a device-to-device copy moves on an H200, bytes read and written together
TOLERANCE = 8e-3  # relative error of a bfloat16 result
DECODING = [(q_len, kv_len, batch) for kv_len in (65536, 131072) for batch in (1, 8) for q_len in (1, 16)]
NOTES = "Host times are medians over single calls; GPU times medians of CUDA events or of graph replays."


def host_us(call: Callable[[], object], calls: int = 400) -> float:
    """Median host time of one call in µs; the GPU is emptied now and then so that its queue never fills."""
    import torch

    taken = []
    for number in range(calls + 50):
        if number % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        taken.append(1e6 * (time.perf_counter() - start))
    return statistics.median(taken[50:])


def gpu_ms(call: Callable[[], object], rounds: int = 15, least_ms: float = 3.0) -> float:
    """Median time of a call between two CUDA events around enough calls to last `least_ms`."""
    import torch

    start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
    repeats, times = 1, []
    for number in range(rounds + 3):
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / repeats)
        if number < 3:
            repeats = max(1, math.ceil(least_ms / times[-1]))
    return statistics.median(times[3:])


def graph_us(call: Callable[[], object], replays: int = 300, calls: int = 1) -> float:
    """Time of a call in µs, in a CUDA graph of so many of them that is replayed, replays back to back."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return 1e3 * gpu_ms(graph.replay, 5, replays * 0.01) / calls


def launching() -> Iterator[dict]:
    """Host time of a call with a warm plan, and of what it is made of; torch's dense attention for scale."""
    import torch

    import spattn
    from spattn import cuda, patterns

    window = patterns.SlidingWindow(32)
    for tokens, head_dim, dtype in ((128, 64, torch.bfloat16), (128, 64, torch.float16), (1024, 64, torch.bfloat16)):
        q, k, v = (torch.randn(4, 8, tokens, head_dim, device="cuda", dtype=dtype) for _ in range(3))
        made, kept = spattn.plan(window, backend="cuda", like=(q, k, v)), []
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
    """Few queries against many keys: 32 query heads over 8 key heads, head_dim 128, causal."""
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
        if q_len == 1:  # causal masks of torch start at the first key; one query sees all keys without one
            dense = torch.nn.functional.scaled_dot_product_attention
            took = gpu_ms(lambda: dense(q, k, v, enable_gqa=True), 5)  # noqa: B023
            yield row | {
                "contender": "torch SDPA",
                "median_ms": round(took, 4),
                "times_floor": round(took / floor, 2),
                "relative_error": None,
            }


def decoding_error(q, k, v, out) -> float:
    """Relative error of the first and last head of the last batch entry against float64."""
    import torch

    worst, q_len, kv_len = 0.0, q.shape[2], k.shape[2]
    for head in (0, q.shape[1] - 1):
        of_kv = head // (q.shape[1] // k.shape[1])
        logits = q[-1, head].double() @ k[-1, of_kv].double().T / math.sqrt(q.shape[3])
        row, key = (torch.arange(n, device="cuda") for n in (q_len, kv_len))
        logits.masked_fill_(key[None] > row[:, None] + kv_len - q_len, -math.inf)
        expected = logits.softmax(-1) @ v[-1, of_kv].double()
        worst = max(worst, float((out[-1, head].double() - expected).norm() / expected.norm()))
    return worst


def window_over(tokens: int) -> dict:
    """A window of ±256 over so many tokens, measured long enough for the clock to settle under the power limit."""
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
    """65536 and 1048576 tokens, both measured for the same time."""
    short = window_over(65536)
    yield short | {"times_65536": 1.0}
    long = window_over(1 << 20)
    yield long | {"times_65536": round(long["median_ms"] / short["median_ms"], 2)}


def main() -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the result goes")
    args = parser.parse_args()
    import torch

    if args.out:
        record.RESULTS = args.out.resolve().parent
    rows = []
    for group in (launching, decoding, long_sequence):
        for row in group():
            rows.append(row)
            print(json.dumps(row, ensure_ascii=False), flush=True)
    record.write(args.out.stem if args.out else "overhead_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
