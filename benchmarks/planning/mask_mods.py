#!/usr/bin/env python3
"""Time tracing and planning of public models' mask functions.

    python benchmarks/planning/mask_mods.py                  # 8,192 and 65,536 tokens, minutes
    python benchmarks/planning/mask_mods.py --quick          # 1,024 tokens, writes nothing
    python benchmarks/planning/mask_mods.py natten disc      # names with these words, writes nothing

Masks: tests/patterns/mask_corpus.py. CPU time on one thread of the plan for a float32 call on the CPU, best of up to
three, none from the cache; and the memory that the first one needs. A mask fails if it is refused, or takes longer than
--most seconds. Needs PyTorch and Linux. Writes ``mask_mods`` and prints the masks above the limits: 0.3 s for 8,192
tokens, 3 s for 65,536.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import signal
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
from child import resident

sys.path.append(str(record.ROOT / "tests"))

import torch
from patterns.mask_corpus import CORPUS

import spattn
from spattn.patterns.interop import from_mask_mod

LIMITS_MS = {8192: 300, 65536: 3000}


class TooSlow(BaseException):
    """Raised by the timer; not an Exception, which planning might handle."""


def interrupt(*_: object) -> None:
    """Handle SIGALRM."""
    raise TooSlow


def measure(name: str, tokens: int, most: float) -> dict[str, object]:
    """One row of the results."""
    mask_mod, batch, heads, q_len, kv_len = CORPUS[name](tokens)
    arrays = [np.broadcast_to(np.float32(0), (batch, heads, length, 64)) for length in (q_len, kv_len, kv_len)]
    row: dict[str, object] = {"name": name, "tokens": tokens}
    best = float("inf")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets VmHWM
    before = resident("VmRSS")
    signal.setitimer(signal.ITIMER_REAL, most)
    try:
        for _ in range(3):
            spattn.clear_plan_cache()
            gc.collect()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                start = time.process_time()
                pattern = from_mask_mod(mask_mod, batch=batch, heads=heads)
                plan = spattn.plan_for(pattern, *arrays, backend="cpu")
                if best == float("inf"):
                    grown = resident("VmHWM") - before
                best = min(best, time.process_time() - start)
    except (TooSlow, ValueError) as error:
        if best == float("inf"):
            message = str(error).replace(f"{record.ROOT}/", "") or f"more than {most:g} s"
            return row | {"processor_ms": None, "error": message}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return row | {
        "processor_ms": round(1e3 * best, 1),
        "peak_mib": round(grown / 2**20, 1),
        "warnings": len(told),
        "tile": plan.tile,
        "tiles": plan.tiles,
        "efficiency": round(plan.efficiency, 4),
        "bitmasks": len(plan.masks),
        "nnz": plan.nnz,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only masks whose name contains one of these words")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, write nothing")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LIMITS_MS), help="lengths")
    parser.add_argument("--most", type=float, default=60, help="seconds after which a mask fails")
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, interrupt)
    measure("heavy hitters and a window", 500, 60)  # imports the planner
    names = [name for name in CORPUS if not args.words or any(word in name for word in args.words)]
    rows = []
    for tokens in [1024] if args.quick else args.tokens:
        for name in names:
            rows.append(measure(name, tokens, args.most))
            time_ms, error = rows[-1]["processor_ms"], str(rows[-1].get("error", ""))
            shown = "    fails" if time_ms is None else f"{time_ms:9} ms{rows[-1]['peak_mib']:9} MiB"
            print(f"{name:36}{tokens:8}{shown}  {error[:100]}", flush=True)
    if not args.quick and not args.words:
        notes = (
            "processor_ms: CPU time of from_mask_mod() and plan_for() a float32 call with heads of 64, on one thread, "
            f"best of up to three, none from the cache; null: refused, or longer than {args.most:g} s. peak_mib: "
            "growth of the process's peak memory in the first of them."
        )
        record.write("mask_mods", rows, notes=notes)
    slow = [row for row in rows if (row["processor_ms"] or float("inf")) > LIMITS_MS.get(row["tokens"], float("inf"))]
    print("\n".join(f"{row['name']}, {row['tokens']} tokens" for row in slow) or "all within the limits")


if __name__ == "__main__":
    main()
