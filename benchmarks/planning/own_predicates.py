#!/usr/bin/env python3
"""Measure planning of user-defined predicates at 65,536 tokens.

    python benchmarks/planning/own_predicates.py             # half a minute
    python benchmarks/planning/own_predicates.py --quick     # 8,192 tokens, writes nothing

CPU time, best of three plans without the cache, and the number of cells on which the predicate is evaluated with
arrays. No attention is computed. Writes ``own_predicates`` and prints the predicates that take more than a second.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record

import spattn
from spattn import patterns as sp

TOKENS, QUICK_TOKENS = 65536, 8192
MOST_MS = 1000

PREDICATES: dict[str, tuple[Callable[[Any, Any], Any], sp.Pattern]] = {
    "gcd(q, k) == 1": (lambda q, k: np.gcd(q, k) == 1, sp.SlidingWindow(256)),
    "q * k % 17 == 0": (lambda q, k: q * k % 17 == 0, sp.SlidingWindow(512)),
    "(q² + k²) % 5 == 0": (lambda q, k: (q**2 + k**2) % 5 == 0, sp.SlidingWindow(512)),
    "|q − k| is a square": (lambda q, k: np.floor(np.sqrt(np.abs(q - k))) ** 2 == np.abs(q - k), sp.Causal()),
    "sqrt|q − k| < 16": (lambda q, k: np.sqrt(np.abs(q - k)) < 16, sp.Causal()),
    "exp(−|q − k| / 100) > 1/2": (lambda q, k: np.exp(-np.abs(q - k) / 100) > 0.5, sp.Full()),
    "|q − k| ≤ q / 10": (lambda q, k: np.abs(q - k) <= q * 0.1, sp.SlidingWindow(512)),
    "(q ^ k) < 64": (lambda q, k: (q ^ k) < 64, sp.Full()),
    "(q − k) & (q − k − 1) == 0": (lambda q, k: (q - k) & (q - k - 1) == 0, sp.Causal()),
    "where(q % 2, q − k < 100, …)": (
        lambda q, k: np.where(q % 2 == 0, q - k < 100, q - k < 200),
        sp.SlidingWindow(512),
    ),
    "isin(q − k, Fibonacci)": (lambda q, k: np.isin(q - k, [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]), sp.Causal()),
}


@dataclass(frozen=True, eq=False)
class Own(sp.Pattern):
    """A predicate that counts the cells it is evaluated on; no two instances are equal."""

    form: str
    cells: list[int]

    def allows(self, q: Any, k: Any) -> Any:
        if isinstance(q, np.ndarray):
            self.cells.append(np.broadcast(q, k).size)
        return PREDICATES[self.form][0](q, k)


def measure(name: str, tokens: int) -> dict[str, object]:
    """One row of the results."""
    times = []
    for _ in range(3):
        own = Own(name, [])
        start = time.process_time()
        plan = spattn.plan(own & PREDICATES[name][1], tokens)
        times.append(time.process_time() - start)
    return {
        "name": f"{name}, {PREDICATES[name][1]!r}",
        "tokens": tokens,
        "processor_ms": round(1e3 * min(times), 1),
        "evaluated_cells": sum(own.cells),
        "share_percent": round(100 * sum(own.cells) / tokens**2, 4),
        "tiles": plan.tiles,
        "bitmasks": len(plan.masks),
        "nnz": plan.nnz,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8,192 tokens, write nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*cannot be evaluated on whole tiles")
    spattn.plan(Own("|q − k| ≤ q / 10", []), 1000)  # imports the planner
    rows = []
    for name in PREDICATES:
        rows.append(measure(name, QUICK_TOKENS if args.quick else TOKENS))
        print(
            f"{rows[-1]['name']:70}{rows[-1]['processor_ms']:>10} ms{rows[-1]['evaluated_cells']:>12} cells", flush=True
        )
    if not args.quick:
        notes = (
            "Tiles of 128 × 64; processor_ms: CPU time, best of three plans, none from the cache, on a shared machine. "
            "evaluated_cells: cells on which the predicate is evaluated; share_percent: of all pairs."
        )
        record.write("own_predicates", rows, notes=notes)
    slow = [f"{row['name']}: {row['processor_ms']} ms" for row in rows if row["processor_ms"] > MOST_MS]
    print("\n".join(slow) or f"all within {MOST_MS} ms")


if __name__ == "__main__":
    main()
