#!/usr/bin/env python3
"""Compare the speed of two builds on every kernel family.

    tools/package_of.sh /tmp/builds COMMIT                 # prints the folder that holds that commit's package
    python benchmarks/regressions/builds.py --old FOLDER --new FOLDER --backend cpu|cuda        # 4 minutes; 2 minutes

Processes of the two builds alternate. Each times every problem after a warm-up call: on the CPU the process's CPU time
on one thread, on a GPU pairs of CUDA events around several calls, and the host time of a call on 128 tokens. A build's
figure is the median over its processes. Writes ``builds_BACKEND`` with the ratio new to old of every problem; exits
with 1 if one exceeds ``--most``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

from timing import repeated_ms
from turns import rounds

NOTES = "Medians over processes of both builds in turns. ratio: new to old, below 1 is faster."
SECONDS, MOST_CALLS = 0.1, 200  # of a problem in a process
TOKENS = {"cpu": 4096, "cuda": 16384}


def problems(tokens: int) -> dict:
    """(pattern, q_len) by name; at least one for every kernel family."""
    from compat import pattern as named

    from spattn import patterns as sp

    side = int(tokens**0.5)
    return {
        "dense": (sp.Full(), tokens),
        "causal": (sp.Causal(), tokens),
        "window ±256": (sp.SlidingWindow(256), tokens),
        "Longformer ±256 + 16": (named("longformer", 512, global_tokens=16), tokens),
        "strided 128": (named("strided", 128), tokens),
        "fixed 128, 8": (named("fixed", 128, 8), tokens),
        "dilated ±256, d=4": (sp.DilatedWindow(256, 256, 4), tokens),
        "neighbourhood 13×13": (sp.Neighborhood((side, side), 13), tokens),
        "one query": (sp.Causal(), 1),
        "128 tokens": (sp.SlidingWindow(32), 128),
    }


def cpu_times() -> dict[str, float]:
    """Median milliseconds of CPU time of each problem on one thread."""
    import ml_dtypes
    import numpy as np

    import spattn

    rng, times = np.random.default_rng(0), {}
    for name, (pattern, q_len) in problems(TOKENS["cpu"]).items():
        kv_len = 128 if q_len == 128 else TOKENS["cpu"]
        for dtype in (np.float32, ml_dtypes.bfloat16):
            q, k, v, dout = (
                rng.standard_normal((1, 8, n, 64), np.float32).astype(dtype) for n in (q_len, kv_len, kv_len, q_len)
            )
            out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
            label = f"{name}, {np.dtype(dtype).name}"
            times[f"{label}, forward"] = median_ms(partial(spattn.attention, q, k, v, pattern))
            if name in ("window ±256", "strided 128", "128 tokens"):
                backward = partial(spattn.attention_backward, dout, q, k, v, out, lse, pattern)
                times[f"{label}, backward"] = median_ms(backward)
    return times


def median_ms(call: Callable[[], object]) -> float:
    """Median milliseconds of CPU time of several calls."""
    return statistics.median(repeated_ms(call, SECONDS, MOST_CALLS))


def cuda_times() -> dict[str, float]:
    """Median milliseconds of each problem on the GPU, and on the host for the short one."""
    import torch
    from gpu_timing import SETS, host_us, measure

    import spattn

    def attend(sets, pattern, i):
        return spattn.attention(*sets[i], pattern)

    torch.manual_seed(0)
    times = {}
    for head_dim, dtype, kernel in (
        (128, "bfloat16", "auto"),
        (64, "bfloat16", "auto"),
        (64, "float16", "portable"),
        (64, "float32", "auto"),
    ):
        os.environ["SPATTN_CUDA_KERNEL"] = kernel
        for name, (pattern, q_len) in problems(TOKENS["cuda"]).items():
            kv_len = 128 if q_len == 128 else TOKENS["cuda"]
            sets = [
                [
                    torch.randn(1, 16, n, head_dim, device="cuda", dtype=getattr(torch, dtype))
                    for n in (q_len, kv_len, kv_len)
                ]
                for _ in range(SETS)
            ]
            call = partial(attend, sets, pattern)
            label = f"{name}, {dtype}, d={head_dim}{', portable' if kernel == 'portable' else ''}"
            times[label] = statistics.median(measure({"": call}, 5)[""])
            if q_len == 128:
                times[f"{label}, host"] = host_us(partial(call, 0)) / 1e3
    return times


def main() -> int:
    """Measure, print, write; return 1 if a problem became slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, default=1.1, help="largest ratio that counts as noise (default: 1.1)")
    parser.add_argument("--times", action="store_true", help="print this process's times as JSON")
    args = parser.parse_args()
    if args.times:
        print(json.dumps(cpu_times() if args.backend == "cpu" else cuda_times()))
        return 0
    import record

    if args.old is None or args.new is None:
        parser.error("--old and --new are required")
    found = list(rounds({"old": args.old, "new": args.new}, args.rounds, "--times", "--backend", args.backend))
    rows = []
    for problem in found[0]["new"]:
        old, new = (statistics.median(each[name][problem] for each in found) for name in ("old", "new"))
        rows.append(
            {"problem": problem, "old_ms": round(old, 5), "new_ms": round(new, 5), "ratio": round(new / old, 3)}
        )
        print(f"{problem:48} {old:10.4f} ms {new:10.4f} ms  {new / old:.3f}", flush=True)
    gpu = None
    if args.backend == "cuda":
        import torch

        gpu = torch.cuda.get_device_name()
    record.write(
        f"builds_{args.backend}",
        rows,
        notes=NOTES,
        rounds=args.rounds,
        gpu=gpu,
        geometric_mean=round(statistics.geometric_mean(row["ratio"] for row in rows), 4),
    )
    return int(max(row["ratio"] for row in rows) > args.most)


if __name__ == "__main__":
    raise SystemExit(main())
