#!/usr/bin/env python3
"""Compare spattn with cuDNN, FlexAttention and FlashAttention-2 on one GPU.

    python benchmarks/peers/peers_cuda.py            # 5 minutes on an H200; needs torch
    python benchmarks/peers/peers_cuda.py --quick    # spattn and the dense kernels only, writes nothing
    python benchmarks/peers/peers_cuda.py --plot     # draws docs/images/peers_cuda.png from the H200's results

Forward, bfloat16, batch 1, 16 heads, in one process. Every result is checked against float64 on sampled rows before
timing. A measurement is a pair of CUDA events around several calls; contenders alternate, and each call uses the next
of several input sets, so that none profits from L2. Figures are medians, ratios are medians over medians of the same
rounds. TF/s count allowed pairs only, 4·head_dim each. FlexAttention is compiled for every mask, as its users do; with
dynamo's default recompile limit it would fall back to eager mode. spattn is timed as ``spattn.attention`` after a
warm-up call. Writes ``peers_cuda`` with the targets of peers_cuda_floors.py and whether they are met.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import peers_cuda_floors
import record
from gpu_timing import ROUNDS, SETS, TOLERANCE, graph_us, host_us, measure, worst_error

HEADS = 16
LONG_MS = 40.0
NOTES = (
    "Forward, bfloat16, batch 1, 16 heads; medians of CUDA events, contenders in turns. "
    "times_spattn: ratio of a contender's time to spattn's."
)


def problems(tokens: int) -> dict[str, tuple]:
    """(pattern, FlexAttention mask, or None if the peers are dense kernels) by name."""
    from spattn import patterns

    side = math.isqrt(tokens)
    return {
        "dense": (patterns.Full(), None),
        "causal": (patterns.Causal(), lambda b, h, q, k: q >= k),
        "window ±256": (patterns.SlidingWindow(256), lambda b, h, q, k: (q - k).abs() <= 256),
        "causal window 1024": (patterns.SlidingWindow(1023, 0), lambda b, h, q, k: (q >= k) & (q - k < 1024)),
        "Longformer ±256 + 64": (
            patterns.longformer(512, global_tokens=64),
            lambda b, h, q, k: ((q - k).abs() <= 256) | (q < 64) | (k < 64),
        ),
        "strided 128": (
            patterns.strided(128),
            lambda b, h, q, k: (q >= k) & ((q - k < 128) | ((q - k) % 128 == 0)),
        ),
        "fixed 128, 8": (
            patterns.fixed(128, 8),
            lambda b, h, q, k: (q >= k) & ((q // 128 == k // 128) | (k % 128 >= 120)),
        ),
        "dilated ±256, d=4": (
            patterns.DilatedWindow(256, 256, 4),
            lambda b, h, q, k: ((q - k).abs() <= 1024) & ((q - k) % 4 == 0),
        ),
        f"neighbourhood {side}×{side}, 13×13": (patterns.Neighborhood((side, side), 13), neighbourhood(side, 6)),
        f"neighbourhood {side}×{side}, 33×33": (patterns.Neighborhood((side, side), 33), neighbourhood(side, 16)),
    }


def neighbourhood(side: int, radius: int) -> Callable:
    """FlexAttention mask of a square window that shifts at the edges."""

    def mask(b, h, q, k):
        def near(x, y):
            return (y - x.clamp(radius, side - 1 - radius)).abs() <= radius

        return near(q // side, k // side) & near(q % side, k % side)

    return mask


def contenders(name, pattern, mask, sets, quick: bool) -> dict[str, Callable]:
    """Calls by name; each takes the number of an input set."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    import spattn

    q, k, _ = sets[0]

    def dense(backend):
        def call(i):
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*sets[i], is_causal=name == "causal")

        return call

    calls = {"spattn": lambda i: spattn.attention(*sets[i], pattern)}
    if name in ("dense", "causal"):
        calls |= {"cuDNN": dense(SDPBackend.CUDNN_ATTENTION), "FlashAttention-2": dense(SDPBackend.FLASH_ATTENTION)}
    if mask is not None and not quick:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        blocks = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=q.device, _compile=True)
        flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        calls["FlexAttention"] = lambda i: flex(*sets[i], block_mask=blocks)
    return calls


def run(tokens: int, head_dim: int, names: set[str] | None, quick: bool) -> list[dict]:
    """Rows of the results for one length and head dimension."""
    import torch

    torch.manual_seed(0)
    shape = (1, HEADS, tokens, head_dim)
    sets = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for _ in range(SETS)]
    rows = []
    for name, (pattern, mask) in problems(tokens).items():
        if names is not None and name not in names:
            continue
        calls = contenders(name, pattern, mask, sets, quick)
        errors = {who: worst_error(pattern, *sets[0], call(0)) for who, call in calls.items()}
        for who, error in errors.items():
            if error > TOLERANCE:
                raise AssertionError(f"{who} on {name}: relative error {error:.2g} against float64")
        times = measure(calls, ROUNDS)
        rows += list(table(name, tokens, head_dim, pattern, sets[0], times, errors))
    return rows


def table(name, tokens, head_dim, pattern, arrays, times, errors):
    """One row per contender."""
    import spattn

    made = spattn.plan_for(pattern, *arrays, backend="cuda")
    medians = {who: statistics.median(values) for who, values in times.items()}
    for who, median in medians.items():
        tera = 4e-9 * HEADS * head_dim * made.nnz / median
        times_spattn = round(median / medians["spattn"], 3)
        row = {
            "problem": name,
            "tokens": tokens,
            "head_dim": head_dim,
            "contender": who,
            "median_ms": round(median, 5),
            "best_ms": round(min(times[who]), 5),
            "tflops": round(tera, 1),
            "times_spattn": times_spattn,
            "relative_error": float(f"{errors[who]:.2g}"),
            "efficiency": round(made.efficiency, 4),
        }
        print(
            f"N={tokens} d={head_dim} {name:28s} {who:17s} {median:9.4f} ms {tera:6.0f} TF/s "
            f"{times_spattn:.2f} × spattn's time",
            flush=True,
        )
        yield row


def long_sequence() -> list[dict]:
    """A window over 65536 and a million tokens, timed for the same duration, since power draw lowers the clock."""
    import torch

    import spattn
    from spattn import patterns

    pattern, rows = patterns.SlidingWindow(256), []
    for tokens in (65536, 1 << 20):
        sets = [[torch.randn(1, HEADS, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]] * SETS
        calls = contenders("long", pattern, None, sets, True)
        times = measure(calls, 5, LONG_MS)
        rows.append(
            {
                "problem": "window ±256, long",
                "tokens": tokens,
                "head_dim": 128,
                "contender": "spattn",
                "median_ms": round(statistics.median(times["spattn"]), 4),
                "plan_kib": spattn.plan_for(pattern, *sets[0], backend="cuda").nbytes // 1024,
            }
        )
        del sets, calls
        torch.cuda.empty_cache()
    ratio = rows[1]["median_ms"] / rows[0]["median_ms"]
    print(f"1048576 tokens: {rows[1]['median_ms']:.2f} ms, {ratio:.2f} times 65536 tokens", flush=True)
    return rows


def short_sequences() -> list[dict]:
    """Host time and graph replay of a launch-bound call: batch 4, 8 heads, 128 tokens, window 32, float16."""
    import torch

    import spattn

    q, k, v = (torch.randn(4, 8, 128, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    window = spattn.patterns.SlidingWindow(32)

    def call():
        return spattn.attention(q, k, v, window)

    row = {
        "problem": "window 32, batch 4, 8 heads",
        "tokens": 128,
        "head_dim": 64,
        "contender": "spattn",
        "host_us": round(host_us(call), 2),
        "graph_us": round(graph_us(call), 2),
    }
    print(f"128 tokens: {row['host_us']} µs host time per call, {row['graph_us']} µs per graph replay", flush=True)
    return [row]


def main() -> None:
    """Measure, print, write; or plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="spattn and the dense kernels only, write nothing")
    parser.add_argument("--plot", action="store_true", help="draw the figure from the H200's results")
    parser.add_argument("--ends", action="store_true", help="measure only the longest and the shortest sequences")
    args = parser.parse_args()
    if args.plot:
        from peers_cuda_plot import plot

        return plot(record.results_folder() / "peers_cuda-h200.json", record.IMAGES / "peers_cuda.png")
    import torch

    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 5000
    with torch.no_grad():
        if args.ends:
            long_sequence(), short_sequences()
            return
        rows = run(16384, 128, None, args.quick)
        rows += run(16384, 64, None, args.quick)
        far = {"window ±256", "Longformer ±256 + 64", "strided 128"}
        far |= {f"neighbourhood 256×256, {n}×{n}" for n in (13, 33)}
        rows += run(65536, 128, far, args.quick)
        rows += long_sequence() + short_sequences()
    floors = peers_cuda_floors.rows(rows)
    for row in floors:
        print(f"{row['what']}: {row['reached']} (target {row['target']}): {row['met']}")
    if not args.quick:
        record.write("peers_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name(), floors=floors)


if __name__ == "__main__":
    main()
