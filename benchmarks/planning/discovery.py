#!/usr/bin/env python3
"""Measure patterns.discover: cost, and efficiency of the plan it leads to.

    python benchmarks/planning/discovery.py            # half a minute
    python benchmarks/planning/discovery.py --quick    # writes nothing

Each pattern has 4096 tokens and is passed as a boolean array: ``plan.efficiency`` of the pattern's own plan, of
the array's plan and of the plan of the discovered pattern; CPU time and peak memory of discovery. The pairs are
compared before timing. Writes ``discovery``; exits with 1 if a target is missed. No attention is computed, so
everything except times is independent of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

import spattn
from spattn import patterns as sp

TOKENS = 4096
REPEATS = 7
MOST_MS, LEAST_SHARE = 200, 0.95

# (name, pattern, grid)
CASES = (
    ("window ±128", sp.SlidingWindow(128), None),
    ("dilated window ±128, d=4", sp.DilatedWindow(128, dilation=4), None),
    ("strided 64", sp.strided(64), None),
    ("fixed 64, 8", sp.fixed(64, 8), None),
    ("Longformer ±64 + 16 spaced tokens", sp.longformer(128, global_tokens=tuple(range(0, TOKENS, 256))), None),
    ("BigBird 64", sp.BigBird(64).at(0, 0), None),
    ("neighbourhood 13×13", sp.Neighborhood((64, 64), 13), (64, 64)),
    ("window 13×13, cut off", sp.PerAxis((64, 64), (sp.SlidingWindow(6),) * 2), (64, 64)),
)


def discovery_ms(mask, grid) -> float:
    """Median milliseconds of CPU time of a discovery."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        sp.discover(mask, grid)
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times)


def discovery_peak(mask, grid) -> float:
    """Peak MiB allocated by a discovery."""
    tracemalloc.start()
    sp.discover(mask, grid)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def measure(name: str, pattern, grid) -> dict[str, object]:
    """One row of the results."""
    index_set = pattern.index_set(TOKENS, TOKENS)
    mask = index_set.to_dense()
    found = sp.discover(mask, grid)
    if found.index_set(TOKENS, TOKENS) != index_set:
        raise SystemExit(f"{name}: discovered {found!r}, which allows other pairs")
    native, bits, discovered = (spattn.plan(each, TOKENS).efficiency for each in (pattern, sp.Mask(mask), found))
    return {
        "name": name,
        "nnz": index_set.nnz,
        "found": repr(found),
        "efficiency": round(native, 4),
        "efficiency_bits": round(bits, 4),
        "efficiency_found": round(discovered, 4),
        "discovery_ms": round(discovery_ms(mask, grid), 1),
        "peak_mib": round(discovery_peak(mask, grid), 1),
        "mask_mib": mask.nbytes / 2**20,
    }


def missed(row: dict) -> list[str]:
    """The targets that a row misses, one line each."""
    found = []
    if row["efficiency_found"] < LEAST_SHARE * row["efficiency"]:
        found.append(f"efficiency {row['efficiency_found']} < {LEAST_SHARE} · {row['efficiency']}")
    if row["discovery_ms"] > MOST_MS:
        found.append(f"discovery takes {row['discovery_ms']} ms (target {MOST_MS})")
    return found


def main() -> int:
    """Measure, print, write; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="write nothing")
    args = parser.parse_args()
    columns = ("efficiency", "efficiency_bits", "efficiency_found", "discovery_ms", "peak_mib")
    print(f"{'pattern':36}" + "".join(f"{column:>18}" for column in columns))
    rows, failures = [], []
    for case in CASES:
        row = measure(*case)
        rows.append(row)
        failures += [f"{row['name']}: {what}" for what in missed(row)]
        print(f"{row['name']:36}" + "".join(f"{row[column]:>18}" for column in columns), flush=True)
    if not args.quick:
        notes = (
            f"{TOKENS} tokens, the default tile of 128 × 64. efficiency: of the pattern's own plan; _bits: of the same "
            "pairs as a Mask; _found: of the discovered pattern. discovery_ms: median CPU time of "
            f"{REPEATS}, one thread. peak_mib: tracemalloc, without the array (mask_mib)."
        )
        record.write("discovery", rows, notes=notes, tokens=TOKENS)
    print("\n".join(failures) or "all targets met")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
