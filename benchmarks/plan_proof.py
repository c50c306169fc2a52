#!/usr/bin/env python3
"""What planning takes with the proof that each row is written once, against a build before it, in turns.

    python benchmarks/plan_proof.py FOLDER_OF_THE_OTHER_BUILD [--rounds 5]

A million tokens, tiles of 128 × 64 and 16 × 64, and new plans of 65,536 tokens (``replanning.py``'s). Each round is a
process for each build, which takes the least of five times of the processor. Allowed are 3 % or 0.5 ns a row. Writes
``benchmarks/results/plan_proof.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import record

TOKENS, MOST_RATIO, MOST_NS = 1 << 20, 1.03, 0.5
MEASURE = """
import json, sys, time
sys.path[:0] = sys.argv[1:]
import numpy as np, spattn, replanning
from spattn import patterns as p
n = 1 << 20
patterns = {
    "window": p.SlidingWindow(256), "causal": p.Causal(), "dilated": p.DilatedWindow(128, dilation=8),
    "Longformer": p.Longformer(64), "strided 128": p.Strided(128), "strided 1024": p.Strided(1024),
    "fixed": p.Fixed(1024, 32), "neighbourhood": p.Neighborhood((1024, 1024), 13), "BigBird": p.BigBird(64),
    "union of three": p.Strided(8) | p.Strided(64) | p.DilatedWindow(3, 13, 4),
}
found = {}
def least(name, make, batch=1, **options):
    times = []
    for _ in range(5):
        pattern = make()
        spattn.clear_plan_cache()
        start = time.process_time()
        spattn.plan(pattern, batch=batch, **options)
        times.append(time.process_time() - start)
    found[name] = min(times), options["q_len"] * batch
for rows in 128, 16:
    for name, pattern in patterns.items():
        least(f"{name}, {rows}", lambda: pattern, q_len=n, tile=(rows, 64))
for name, case in replanning.CASES.items():
    rng = np.random.default_rng(0)
    least(name, lambda: case.make(case.draw(rng, 65536), 65536), case.batch, q_len=65536, tile=(128, 64))
print(json.dumps(found))
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a folder with another spattn")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    here = str(Path(__file__).parent)
    times: dict[str, list[tuple[float, float]]] = {}
    rows: dict[str, int] = {}
    for _ in range(args.rounds):
        each = []
        for paths in ([str(args.other), here], [here]):
            done = subprocess.run([sys.executable, "-c", MEASURE, *paths], check=True, capture_output=True, text=True)
            each.append(json.loads(done.stdout))
        for name, (before, tokens) in each[0].items():
            times.setdefault(name, []).append((before, each[1][name][0]))
            rows[name] = tokens
    found = []
    for name, pairs in times.items():
        before, now = (statistics.median(column) for column in zip(*pairs, strict=True))
        more = 1e9 * (now - before) / rows[name]
        held = now <= MOST_RATIO * before or more <= MOST_NS
        found.append(
            {
                "name": name,
                "before_ms": round(1e3 * before, 3),
                "now_ms": round(1e3 * now, 3),
                "ratio": round(now / before, 3),
                "more_ns_a_row": round(more, 2),
                "within": held,
            }
        )
        print(*found[-1].values(), sep="\t", flush=True)
    record.write(
        "plan_proof", found, notes="Medians over rounds of the least of five; builds in turns; processor time."
    )


if __name__ == "__main__":
    main()
