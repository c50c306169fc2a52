#!/usr/bin/env python3
"""Compare the speed of two builds on the CPU: 40 benchmarks.

    make bench-compare BASE=COMMIT
    python benchmarks/regressions/compare.py --base FOLDER --head FOLDER       # 3 minutes; a folder holds spattn

Processes of the two builds alternate. A process times each benchmark on one thread, in CPU time, and reports the
minimum of several calls, since other processes only add time. A round compares neighbouring processes, so a machine
that slows down slows both.

Noise model: the ratio of a benchmark is the median over the rounds. Rounds differ by a few percent on a shared machine,
and by ten in a bad minute. A benchmark whose first ratio exceeds ``DOUBT`` therefore runs again, alone, with three
times as many rounds, and counts as slower only if the median over all rounds exceeds ``SLOWER``. Exits with 1 if a
benchmark is slower. ``benchmarks/regressions/compare_check.py`` measures the error rates of this test.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import turns
from timing import repeated_ms

ROUNDS, DOUBT, SLOWER = 4, 1.04, 1.075
SECONDS, MOST_CALLS = 0.12, 300  # of a benchmark in a process
Call = Callable[[], object]


def benchmarks() -> dict[str, Callable[[], Call]]:
    """Functions by name that allocate the arrays and return the call to time."""
    import ml_dtypes
    import numpy as np
    from compat import make_plan
    from compat import pattern as named

    import spattn
    from spattn import patterns as sp

    def arrays(dtype, q_len, kv_len, heads=2, heads_kv=2, head_dim=64):
        rng = np.random.default_rng(0)
        shapes = (1, heads, q_len, head_dim), *[(1, heads_kv, kv_len, head_dim)] * 2
        return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]

    def forward(pattern, dtype=np.float32, q_len=2048, kv_len=2048, **sizes):
        q, k, v = arrays(dtype, q_len, kv_len, **sizes)
        call = partial(spattn.attention, q, k, v, pattern)
        call()
        return call

    def backward(pattern, dtype=np.float32, q_len=1024, kv_len=1024):
        q, k, v = arrays(dtype, q_len, kv_len)
        out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
        call = partial(spattn.attention_backward, out, q, k, v, out, lse, pattern)
        call()
        return call

    def plan(make, tokens, batch=1):
        def call():
            spattn.clear_plan_cache()
            make_plan(pattern, tokens, (48, 64), batch=batch)

        pattern = make()
        return call

    def replan(make, tokens):
        """Construction and planning of a new pattern in each call."""

        def call():
            spattn.clear_plan_cache()
            make_plan(make(), tokens, (48, 64))

        return call

    grid = sp.Neighborhood((48, 48), 7)
    documents = sp.Causal() & sp.Documents((300, 700, 48, 1000))
    union = named("strided", 8) | named("strided", 64) | sp.DilatedWindow(3, 13, 4)
    layout = np.random.default_rng(1).random((64, 64)) < 0.2
    kept = {
        "full": sp.Full(),
        "causal": sp.Causal(),
        "window": sp.SlidingWindow(128),
        "Longformer": named("longformer", 256, global_tokens=16),
        "BigBird": sp.BigBird(64),
        "strided": named("strided", 64),
        "fixed": named("fixed", 128, 8),
        "dilated": sp.DilatedWindow(64, dilation=4),
        "documents": documents,
        "blocks": sp.BlockLayout(layout, 32),
        "union": union,
    }
    found = {f"forward float32, {name}": partial(forward, pattern) for name, pattern in kept.items()}
    found["forward float32, 7 × 7"] = partial(forward, grid, q_len=2304, kv_len=2304)
    found["forward float32, causal, 8 heads over 2"] = partial(
        forward, kept["causal"], q_len=1024, kv_len=1024, heads=8
    )
    for name in ("full", "causal", "window", "Longformer", "strided"):
        found[f"forward bfloat16, {name}"] = partial(forward, kept[name], ml_dtypes.bfloat16)
    for dtype in (np.float16, np.float64):
        found[f"forward {np.dtype(dtype).name}, window"] = partial(forward, kept["window"], dtype)
    for name in ("causal", "window", "strided", "union"):
        found[f"backward float32, {name}"] = partial(backward, kept[name])
    found["backward bfloat16, window"] = partial(backward, kept["window"], ml_dtypes.bfloat16)
    decode = {"q_len": 1, "kv_len": 8192, "heads": 8, "head_dim": 128}
    found["decode float32"] = partial(forward, sp.Causal(), **decode)
    found["decode bfloat16"] = partial(forward, sp.Causal(), ml_dtypes.bfloat16, **decode)
    found["short call"] = partial(forward, kept["window"], q_len=64, kv_len=64)
    million = 1 << 18
    long = {
        "window": lambda: sp.SlidingWindow(256),
        "causal": lambda: sp.Causal(),
        "Longformer": lambda: named("longformer", 64),
        "strided": lambda: named("strided", 128),
        "dilated": lambda: sp.DilatedWindow(128, dilation=8),
        "BigBird": lambda: sp.BigBird(64),
        "neighbourhood": lambda: sp.Neighborhood((512, 512), 13),
        "union": lambda: union,
    }
    for name, make in long.items():
        found[f"plan {name}"] = partial(plan, make, million)
    found["plan documents"] = partial(replan, lambda: sp.Documents((1000, 24, 7168) * 8), 65536)
    found["plan mask"] = partial(plan, lambda: sp.Mask(np.tri(1024, dtype=bool)), 1024)
    found["plan padding"] = partial(replan, lambda: sp.Causal() & sp.KeyPadding.from_lengths([65000], 65536), 65536)
    found["plan predicate"] = partial(plan, lambda: sp.Stride(3) & ~sp.Sinks(5) | sp.SlidingWindow(9), 16384)
    return found


def times(names: list[str]) -> dict[str, float]:
    """Milliseconds of CPU time of each benchmark, the minimum of several calls."""
    found = {}
    for name, prepare in benchmarks().items():
        if names and name not in names:
            continue
        found[name] = min(repeated_ms(prepare(), SECONDS, MOST_CALLS))
    return found


def compare(base: Path, head: Path, rounds: int = ROUNDS) -> list[dict]:
    """One row per benchmark: milliseconds of both builds, their ratio, and whether the head is slower."""
    found: dict[str, list[tuple[float, float]]] = {}

    def measure(count: int, names: list[str]) -> None:
        for each in turns.rounds({"base": base, "head": head}, count, "--times", *names):
            for name in each["base"]:
                found.setdefault(name, []).append((each["base"][name], each["head"][name]))

    def ratio(name: str) -> float:
        return statistics.median(after / before for before, after in found[name])

    measure(rounds, [])
    doubtful = [name for name in found if ratio(name) > DOUBT]
    if doubtful:
        measure(3 * rounds, doubtful)
    rows = []
    for name, pairs in found.items():
        before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append(
            {
                "benchmark": name,
                "base_ms": round(before, 4),
                "head_ms": round(after, 4),
                "ratio": round(ratio(name), 3),
                "rounds": len(pairs),
                "slower": ratio(name) > SLOWER,
            }
        )
    return rows


def main() -> int:
    """Compare and print; return 1 if a benchmark is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="folder with the build to compare against")
    parser.add_argument("--head", type=Path, help="folder with the build under test")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--times", nargs="*", metavar="BENCHMARK", help="print this process's times as JSON")
    args = parser.parse_args()
    if args.times is not None:
        print(json.dumps(times(args.times)))
        return 0
    if args.base is None or args.head is None:
        parser.error("--base and --head are required")
    rows = compare(args.base.resolve(), args.head.resolve(), args.rounds)
    for row in sorted(rows, key=lambda row: row["ratio"]):
        sign = "SLOWER" if row["slower"] else ""
        print(f"{row['benchmark']:40} {row['base_ms']:10.4f} ms {row['head_ms']:10.4f} ms  {row['ratio']:.3f} {sign}")
    slower = sum(row["slower"] for row in rows)
    print(f"{len(rows)} benchmarks, {slower} slower by more than {SLOWER - 1:.1%}")
    return int(slower > 0)


if __name__ == "__main__":
    raise SystemExit(main())
