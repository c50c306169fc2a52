#!/usr/bin/env python3
"""Measure plan efficiency and planning cost.

    python benchmarks/planning/plan_efficiency.py            # a quarter of a minute
    python benchmarks/planning/plan_efficiency.py --quick    # 16384 tokens only, writes nothing

For each pattern: ``plan.efficiency`` of affine views and of contiguous 128 × 128 blocks; time and peak memory of
planning; bytes of the plan; and the time to evaluate the predicate on every cell. Writes ``plan_efficiency``; exits
with 1 if a target is missed. No attention is computed, so everything except times is independent of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record

import spattn
from spattn import patterns as sp

TOKENS = 16384
TILE = (128, 64)
BLOCKS = (128, 128)
REPEATS = 9
MOST_MS, MOST_MIB = 50, 16

# (name, pattern at N tokens, lengths, target efficiency at 16384 tokens)
CASES = (
    ("window ±256", lambda n: sp.SlidingWindow(256), (16384, 65536, 1 << 20), 0.75),
    ("dilated window ±256, d=4", lambda n: sp.DilatedWindow(256, dilation=4), (16384, 65536, 1 << 20), 0.75),
    ("strided 128", lambda n: sp.strided(128), (16384, 65536, 1 << 20), 0.40),
    ("fixed 128, 8", lambda n: sp.fixed(128, 8), (16384, 65536), 0.65),
    ("neighbourhood 13×13", lambda n: sp.Neighborhood((int(n**0.5),) * 2, 13), (16384, 65536, 1 << 20), 0.20),
    ("Longformer ±256 + 64", lambda n: sp.longformer(512, global_tokens=64), (16384, 65536, 1 << 20), None),
    ("causal", lambda n: sp.Causal(), (16384, 65536), None),
)


@dataclass(frozen=True)
class Contiguous(sp.Pattern):
    """A pattern without hints: planned in tiles of contiguous tokens, as in block-sparse libraries."""

    pattern: sp.Pattern

    def allows(self, q, k):
        """The wrapped pattern's predicate."""
        return self.pattern.allows(q, k)


def planned(pattern, tokens: int, tile=TILE):
    """A new plan, not one from the cache."""
    spattn.clear_plan_cache()
    return spattn.plan(pattern, tokens, tiling=spattn.Tiling(tile=tile))


def planning_ms(pattern, tokens: int, repeats: int) -> float:
    """Median milliseconds of planning on one thread."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        planned(pattern, tokens)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def planning_peak(pattern, tokens: int) -> float:
    """Peak MiB allocated by planning, including the plan."""
    tracemalloc.start()
    planned(pattern, tokens)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def every_cell_ms(pattern, tokens: int, strip: int = 128) -> float:
    """Milliseconds to evaluate the predicate on all tokens × tokens cells, strip by strip."""
    keys = np.arange(tokens)[None, :]
    start = time.perf_counter()
    for first in range(0, tokens, strip):
        allowed = np.broadcast_to(pattern.allows(np.arange(first, first + strip)[:, None], keys), (strip, tokens))
        allowed.reshape(strip, -1, TILE[1]).any(axis=(0, 2))
    return 1e3 * (time.perf_counter() - start)


def measure(name: str, pattern, tokens: int, target: float | None) -> dict[str, object]:
    """One row of the results."""
    plan = planned(pattern, tokens)
    row = {
        "name": name,
        "pattern": repr(pattern),
        "tokens": tokens,
        "nnz": plan.nnz,
        "density": plan.density,
        "efficiency": round(plan.efficiency, 4),
        "tiles": plan.tiles,
        "components": len(plan.components),
        "bitmasks": len(plan.masks),
        "plan_kib": round(plan.nbytes / 1024, 1),
        "plan_ms": round(planning_ms(pattern, tokens, REPEATS if tokens <= 65536 else 3), 2),
        "peak_mib": round(planning_peak(pattern, tokens), 2),
    }
    if tokens == TOKENS:
        row["efficiency_target"] = target
        row["efficiency_contiguous"] = round(planned(Contiguous(pattern), tokens, BLOCKS).efficiency, 4)
        row["every_cell_ms"] = round(every_cell_ms(pattern, tokens), 1)
    return row


def missed(row: dict) -> list[str]:
    """The targets that a row misses, one line each."""
    if row["tokens"] != TOKENS:
        return []
    found = []
    if row["efficiency_target"] is not None and row["efficiency"] < row["efficiency_target"]:
        found.append(f"efficiency {row['efficiency']} < {row['efficiency_target']}")
    if row["plan_ms"] >= MOST_MS:
        found.append(f"planning takes {row['plan_ms']} ms (target < {MOST_MS})")
    if row["peak_mib"] >= MOST_MIB:
        found.append(f"planning takes {row['peak_mib']} MiB (target < {MOST_MIB})")
    return found


def _line(name, *columns) -> str:
    return f"{name:26}" + "".join(f"{column:>11}" for column in columns)


def main() -> int:
    """Measure, print, write; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16384 tokens only, write nothing")
    args = parser.parse_args()
    rows, failures = [], []
    print(_line("pattern", "tokens", "efficiency", "blocks", "plan ms", "peak MiB", "KiB", "cells ms"))
    for name, make, lengths, target in CASES:
        for tokens in lengths[:1] if args.quick else lengths:
            row = measure(name, make(tokens), tokens, target)
            rows.append(row)
            failures += [f"{name}: {what}" for what in missed(row)]
            shown = ("efficiency", "efficiency_contiguous", "plan_ms", "peak_mib", "plan_kib", "every_cell_ms")
            print(_line(name, tokens, *(row.get(field, "") for field in shown)), flush=True)
    if not args.quick:
        notes = (
            f"Tiles of {TILE[0]} × {TILE[1]}; 'contiguous' is the predicate in blocks of {BLOCKS[0]} × {BLOCKS[1]} "
            "consecutive tokens. plan_ms: median wall time, one thread, cache emptied. peak_mib: tracemalloc. "
            "every_cell_ms: the predicate on every cell with NumPy, for comparison."
        )
        record.write("plan_efficiency", rows, notes=notes, tile=TILE, blocks=BLOCKS)
    print("\n".join(failures) or "all targets met")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
