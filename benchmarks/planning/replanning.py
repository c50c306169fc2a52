#!/usr/bin/env python3
"""Measure planning when the mask changes in every call, at 65,536 tokens.

    python benchmarks/planning/replanning.py             # a quarter of a minute
    python benchmarks/planning/replanning.py --quick     # 8,192 tokens, writes nothing

Every plan is for a new pattern, so none comes from the cache. CPU time: plan_ms is the median over the plans, best_ms
the minimum, make_ms the median of the pattern's construction, which checks and copies its arrays. Writes ``replanning``
and prints the patterns that take more than a millisecond.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record

import spattn
from spattn import cpu
from spattn import patterns as sp

TOKENS, QUICK_TOKENS = 65536, 8192
PLANS, QUICK_PLANS = 50, 5
MOST_MS = 1.0
CHOSEN = 16  # key blocks per query block
BATCH = 8  # padded sequences
TILES = (128, 64), cpu.TILE


class Case(NamedTuple):
    """Draws a random mask as a model would choose it, and makes a pattern of it."""

    draw: Callable[[np.random.Generator, int], object]
    make: Callable[..., sp.Pattern]
    batch: int = 1


def blocks(block_q: int, block_kv: int, causal: bool = False) -> Case:
    """CHOSEN random key blocks per query block, or all if there are fewer."""

    def draw(rng: np.random.Generator, tokens: int) -> np.ndarray:
        rows, columns = tokens // block_q, tokens // block_kv
        chosen = rng.random((rows, columns))
        if causal:
            first, last = np.arange(columns) * block_kv, np.arange(1, rows + 1) * block_q - 1
            chosen[first > last[:, None]] = 2
        found = np.argpartition(chosen, CHOSEN, axis=1)[:, :CHOSEN]
        return np.where(np.take_along_axis(chosen, found, axis=1) < 2, found, -1)

    def make(chosen: np.ndarray, tokens: int) -> sp.Pattern:
        own = sp.KeyBlocks(chosen, block_q, block_kv)
        return sp.Causal() & own if causal else own

    return Case(draw, make)


def documents(rng: np.random.Generator, tokens: int) -> tuple[int, ...]:
    """Document lengths, 700 tokens on average."""
    ends = np.cumsum(rng.integers(1, 1400, tokens // 100))
    return tuple(np.diff(np.append(ends[ends < tokens], tokens), prepend=0).tolist())


def lines(rng: np.random.Generator, tokens: int) -> tuple[list[int], list[int]]:
    """64 columns; 64 random diagonals, and 448 in 8 bands among the first 4,096."""
    columns, alone = (rng.choice(tokens, 64, replace=False) for _ in range(2))
    bands = np.sort(rng.choice(4096 // 64, 8, replace=False)) * 64
    return columns.tolist(), np.concatenate([alone, (bands[:, None] + np.arange(56)).ravel()]).tolist()


def lengths(rng: np.random.Generator, tokens: int) -> list[int]:
    """Sequence lengths of a batch, none shorter than a quarter."""
    return rng.integers(tokens // 4, tokens, BATCH).tolist()


def causal(case: Case) -> Case:
    """The same case intersected with Causal."""
    return case._replace(make=lambda *chosen: sp.Causal() & case.make(*chosen))


DOCUMENTS = Case(documents, lambda chosen, tokens: sp.Documents(chosen))
PADDING = Case(lengths, sp.KeyPadding.from_lengths, BATCH)
CASES = {
    "key blocks 64/64": blocks(64, 64),
    "key blocks 128/64": blocks(128, 64),
    "key blocks 64/128": blocks(64, 128),
    "causal, key blocks 64/64": blocks(64, 64, causal=True),
    "documents": DOCUMENTS,
    "causal, documents": causal(DOCUMENTS),
    "vertical slash": Case(lines, lambda chosen, tokens: sp.VerticalSlash(*map(tuple, chosen))),
    f"padding of {BATCH}": PADDING,
    f"causal, padding of {BATCH}": causal(PADDING),
}


def measure(name: str, tokens: int, tile: tuple[int, int], plans: int) -> dict[str, object]:
    """One row of the results."""
    case, rng = CASES[name], np.random.default_rng(0)
    times = []
    for _ in range(plans + 1):  # the first one imports the planner and is not counted
        chosen = case.draw(rng, tokens)
        spattn.clear_plan_cache()
        ends = [time.process_time()]
        pattern = case.make(chosen, tokens)
        ends.append(time.process_time())
        plan = spattn.plan(pattern, tokens, tiling=spattn.Tiling(tile=tile), batch=case.batch)
        times.append(np.diff([*ends, time.process_time()]))
    make, planned = 1e3 * np.array(times[1:]).T
    return {
        "name": name,
        "tokens": tokens,
        "tile": "{} × {}".format(*tile),
        "make_ms": round(statistics.median(make), 3),
        "plan_ms": round(statistics.median(planned), 3),
        "best_ms": round(min(planned), 3),
        "runs": len(plan.indices),
        "tiles": plan.tiles,
        "bitmasks": len(plan.masks),
        "plan_kib": round(plan.nbytes / 1024, 1),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8,192 tokens, write nothing")
    args = parser.parse_args()
    tokens, plans = (QUICK_TOKENS, QUICK_PLANS) if args.quick else (TOKENS, PLANS)
    shown = "tile", "make_ms", "plan_ms", "best_ms", "runs", "bitmasks", "plan_kib"
    print(f"{'pattern':28}" + "".join(f"{column:>12}" for column in shown))
    rows = []
    for tile in TILES:
        for name in CASES:
            rows.append(measure(name, tokens, tile, plans))
            print(f"{name:28}" + "".join(f"{rows[-1][column]:>12}" for column in shown), flush=True)
    if not args.quick:
        notes = (
            "CPU time. Each plan is for a new random pattern, none from the cache. "
            f"plan_ms: median of {PLANS} plans; best_ms: minimum; make_ms: median of the patterns' construction. "
            "Tiles of 128 × 64, and the CPU's."
        )
        record.write("replanning", rows, notes=notes)
    slow = [
        f"{row['name']}, {row['tile']}: {row['plan_ms']} ms (target {MOST_MS})"
        for row in rows
        if row["plan_ms"] > MOST_MS
    ]
    print("\n".join(slow) or "all targets met")


if __name__ == "__main__":
    main()
