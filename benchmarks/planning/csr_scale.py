#!/usr/bin/env python3
"""Measure CSR patterns at up to a million tokens: planning and attention.

    OMP_NUM_THREADS=1 python benchmarks/planning/csr_scale.py            # a minute, 3 GiB; Linux
    OMP_NUM_THREADS=1 python benchmarks/planning/csr_scale.py --quick    # 65,536 tokens, writes nothing

16 random keys per query, at 65,536 and 1,048,576 tokens. Each row is a process of its own, and its first large plan:
CPU time and growth of resident memory. ``attention`` is the first call of one float32 head, head_dim 64, on one thread,
including planning; its growth is plan, workspace and result. ``default`` is ``spattn.plan`` without options.
Writes ``csr_scale``; exits with 1 if the default plan, or the plan that the CPU (pair by pair) or a GPU (gathered KV)
chooses, needs more than 3 s or 1 GiB at a million tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
from child import child, resident

import spattn
from spattn import cpu
from spattn import patterns as sp
from spattn.schedule import compiler

LENGTHS, KEYS, HEAD_DIM = (1 << 16, 1 << 20), 16, 64
PLANS = {
    "default": spattn.plan,
    "pair by pair": partial(spattn.plan, tile=(1, 64)),
    "tiles of the CPU": partial(spattn.plan, tile=cpu.TILE),
    "tiles of 128": partial(spattn.plan, tile=(128, 64)),
    "keys gathered": partial(compiler.plan, tile=(64, 64), gathered=True),
}
TAKEN = "default", "pair by pair", "keys gathered"  # without options, chosen by the CPU, chosen by a GPU
ATTENTION = "attention"
MOST_S, MOST_GIB = 3.0, 1.0  # targets at the longest length


def listed(tokens: int) -> sp.CSR:
    """Random keys, sorted, without repetition."""
    keys = np.sort(np.random.default_rng(0).integers(0, tokens, (tokens, KEYS)), axis=1)
    first = np.ones_like(keys, bool)
    first[:, 1:] = keys[:, 1:] != keys[:, :-1]
    return sp.CSR(np.append(0, np.cumsum(first.sum(axis=1))), keys[first], tokens)


def measure(what: str, tokens: int) -> dict[str, object]:
    """One row of the results, measured in this process."""
    pattern = listed(tokens)
    spattn.plan(listed(100), 100)  # imports the planner
    arrays = ()
    if what == ATTENTION:
        arrays = tuple(np.random.default_rng(0).standard_normal((3, 1, 1, tokens, HEAD_DIM), np.float32))
    before, start = resident("VmRSS"), time.process_time()
    if arrays:
        spattn.attention(*arrays, pattern, backend="cpu")
        found: dict[str, object] = {}
    else:
        plan = PLANS[what](pattern, tokens)
        found = {"tile": plan.tile, "plan_mib": round(plan.nbytes / 2**20, 1), "bitmasks": len(plan.masks)}
    took = time.process_time() - start
    grown = resident("VmHWM") - before
    return {"name": what, "tokens": tokens, "processor_s": round(took, 3), "peak_gib": round(grown / 2**30, 3)} | found


def missed(row: dict[str, Any]) -> bool:
    """Whether a row of one of the TAKEN plans misses a target."""
    of = row["name"] in TAKEN and row["tokens"] == LENGTHS[-1]
    return of and (row["processor_s"] > MOST_S or row["peak_gib"] > MOST_GIB)


def main() -> int:
    """Measure, print, write; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="65,536 tokens, write nothing")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]))))
        return 0
    rows = []
    for tokens in LENGTHS[:1] if args.quick else LENGTHS:
        for what in (*PLANS, ATTENTION):
            rows.append(child("--one", what, str(tokens)))
            print(rows[-1], flush=True)
    if not args.quick:
        record.write("csr_scale", rows, notes=f"{KEYS} random keys per query. CPU time, one thread; one run each.")
    return int(any(map(missed, rows)))


if __name__ == "__main__":
    raise SystemExit(main())
