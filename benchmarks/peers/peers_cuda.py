#!/usr/bin/env python3
"""spattn against cuDNN, FlexAttention and FlashAttention-2 on one GPU, in one process, taking turns.

    python benchmarks/peers/peers_cuda.py            # about 5 minutes on an H200; needs torch
    python benchmarks/peers/peers_cuda.py --quick    # spattn and the dense kernels only; written to a temporary folder
    python benchmarks/peers/peers_cuda.py --plot     # draws docs/images/peers_cuda.png from the committed result

Forward, bfloat16, batch 1, 16 heads. Every result is checked against float64 on sampled rows before it is timed. A
measurement is a pair of CUDA events around a few calls; contenders take turns for some rounds, each call on the next
of several input sets, so that none lives on what the last one left in L2; figures are medians, ratios medians over
medians of the same rounds. TF/s count allowed pairs alone, 4·head_dim each. FlexAttention is compiled anew for every
mask, as its users do; without a larger recompile limit dynamo would give up and run it eagerly. spattn is timed as
``spattn.attention``, warm. Writes ``benchmarks/results/peers_cuda-h200.json`` (or ``--out``), with what it had to show
(peers_cuda_floors.py) and whether it did.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import overhead_cuda
import peers_cuda_floors
import record

HEADS = 16
SETS = 2  # input sets; one at 16384 tokens is 201 MB, more than three times L2
WARM, ROUNDS, TARGET_MS, LONG_MS = 3, 15, 4.0, 40.0
ROWS = 48  # checked against float64, in two heads
TOLERANCE = 8e-3  # relative error of a bfloat16 result, twice what rounding gives
IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "peers_cuda.png"
NOTES = (
    "Forward, bfloat16, batch 1, 16 heads; medians of CUDA events, contenders in turns. "
    "times_spattn: a contender's time over spattn's."
)


def problems(tokens: int) -> dict[str, tuple]:
    """Name to (pattern, FlexAttention mask or None where the peers are dense kernels)."""
    from spattn import patterns

    side = math.isqrt(tokens)
    return {
        "dense": (patterns.Full(), None),
        "causal": (patterns.Causal(), lambda b, h, q, k: q >= k),
        "window ±256": (patterns.SlidingWindow(256), lambda b, h, q, k: (q - k).abs() <= 256),
        "causal window 1024": (patterns.SlidingWindow(1023, 0), lambda b, h, q, k: (q >= k) & (q - k < 1024)),
        "Longformer ±256 + 64": (
            patterns.Longformer(512, global_tokens=64),
            lambda b, h, q, k: ((q - k).abs() <= 256) | (q < 64) | (k < 64),
        ),
        "strided 128": (
            patterns.Strided(128),
            lambda b, h, q, k: (q >= k) & ((q - k < 128) | ((q - k) % 128 == 0)),
        ),
        "fixed 128, 8": (
            patterns.Fixed(128, 8),
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
    """FlexAttention's mask of a square window that shifts at the edges."""

    def mask(b, h, q, k):
        def near(x, y):
            return (y - x.clamp(radius, side - 1 - radius)).abs() <= radius

        return near(q // side, k // side) & near(q % side, k % side)

    return mask


def contenders(name, pattern, mask, sets, quick: bool) -> dict[str, Callable]:
    """Name to a function of the number of an input set."""
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


def worst_error(pattern, q, k, v, out) -> float:
    """Largest relative error of sampled rows of the first and the last head, those that see a key, against float64."""
    import torch

    tokens = q.shape[2]
    sampled = np.unique(np.r_[0, tokens - 1, np.random.default_rng(0).integers(0, tokens, ROWS)])
    worst = 0.0
    for head in (0, q.shape[1] - 1):
        allows = pattern.at(0, head).bind(tokens, tokens).allows
        allowed = np.broadcast_to(allows(sampled[:, None], np.arange(tokens)[None]), (len(sampled), tokens))
        rows, allowed = sampled[allowed.any(1)], torch.from_numpy(allowed[allowed.any(1)]).to(q.device)
        logits = q[0, head, rows].double() @ k[0, head].double().T * q.shape[3] ** -0.5
        expected = logits.masked_fill(~allowed, -math.inf).softmax(-1) @ v[0, head].double()
        error = torch.linalg.norm(out[0, head, rows].double() - expected) / torch.linalg.norm(expected)
        worst = max(worst, float(error) if torch.isfinite(error) else math.inf)
    return worst


def measure(calls: dict[str, Callable], rounds: int, target_ms: float = TARGET_MS) -> dict[str, list[float]]:
    """Milliseconds of a call, once a round for each contender; a measurement takes about `target_ms`."""
    import torch

    def once(call, repeats):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for i in range(repeats):
            call(i % SETS)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / repeats

    for call in calls.values():
        call(0)  # plans, compiles
    repeats = {name: max(2, math.ceil(target_ms / once(call, WARM))) for name, call in calls.items()}
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(once(call, repeats[name]))
    return times


def run(tokens: int, head_dim: int, names: set[str] | None, quick: bool) -> list[dict]:
    """Rows of the result for one length and head dimension."""
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
    """One row a contender."""
    import spattn

    made = spattn.plan(pattern, backend="cuda", like=arrays)
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
    """A window over a million tokens, from plan to result, against 65536 tokens; both measured for the same time, since
    the clock falls with the power that a kernel draws."""
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
                "plan_kib": spattn.plan(pattern, backend="cuda", like=sets[0]).nbytes // 1024,
            }
        )
        del sets, calls
        torch.cuda.empty_cache()
    ratio = rows[1]["median_ms"] / rows[0]["median_ms"]
    print(f"1048576 tokens: {rows[1]['median_ms']:.2f} ms, {ratio:.2f} times 65536 tokens", flush=True)
    return rows


def short_sequences() -> list[dict]:
    """Batch 4, 8 heads, 128 tokens, window 32, fp16: bound by launching. Host time of a call and a graph's replay."""
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
        "host_us": round(overhead_cuda.host_us(call), 2),
        "graph_us": round(overhead_cuda.graph_us(call), 2),
    }
    print(f"128 tokens: {row['host_us']} µs of host time a call, {row['graph_us']} µs a graph replay", flush=True)
    return [row]


def main() -> None:
    """Measure, or plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--ends", action="store_true", help="measure only the longest and the shortest sequences")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or record.RESULTS / "peers_cuda-h200.json"
    if args.plot:
        from peers_cuda_plot import plot

        return plot(out, IMAGE)
    if args.quick and args.out is None:  # what is committed stays
        out = Path(tempfile.mkdtemp(prefix="peers-cuda-")) / out.name
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
    result = {
        "benchmark": "peers_cuda",
        "command": " ".join(["python", "benchmarks/peers/peers_cuda.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": record.commit(),
        "notes": NOTES,
        "machine": record.machine() | {"gpu": torch.cuda.get_device_name()},
        "versions": record.versions(),
        "floors": peers_cuda_floors.rows(rows),
        "results": rows,
    }
    for row in result["floors"]:
        print(f"{row['what']}: {row['reached']} (floor {row['target']}): {row['met']}")
    os.makedirs(out.parent, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
