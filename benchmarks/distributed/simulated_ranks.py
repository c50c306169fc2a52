#!/usr/bin/env python3
"""Predict bytes, messages and balance of a million tokens on 8 to 4096 ranks.

    python benchmarks/distributed/simulated_ranks.py            # three minutes
    python benchmarks/distributed/simulated_ranks.py --quick    # 65536 tokens on 8 ranks, writes nothing

The forward pass of batch 1, 16 query heads, 4 key-value heads, head_dim 128, bfloat16, by
``spattn.distributed.simulate``. Writes ``simulated_ranks``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

from spattn.distributed import simulate
from spattn.patterns import Causal, Sinks, SlidingWindow, longformer

RANKS = (8, 64, 512, 4096)
CASES = {
    "window 4096": (SlidingWindow(4095, 0), "contiguous"),
    "window 4096, 64 sinks": (Causal() & (Sinks(64) | SlidingWindow(4095, 0)), "contiguous"),
    "Longformer 512 + 16": (longformer(256, global_tokens=16), "contiguous"),
    "causal": (Causal(), "head_tail"),
}


def predicted(name: str, tokens: int, ranks: int) -> dict[str, object]:
    """One row of the results."""
    pattern, sharding = CASES[name]
    found = simulate(pattern, (1, 16, 4, tokens, 128), ranks, sharding=sharding, dtype="bfloat16", seconds=1.0)
    return {
        "pattern": name,
        "sharding": sharding,
        "tokens": tokens,
        "ranks": ranks,
        "received_mb": round(int(found.received.max()) / 1e6, 3),
        "all_rows_mb": round(tokens * 4 * 256 * 2 * (ranks - 1) / ranks / 1e6, 1),
        "messages": int(found.messages.max()),
        "balance": round(found.balance, 3),
        "exchange": found.exchange,
        "exchange_ms": round(found.exchanges[found.exchange] * 1e3, 3),
    }


def main() -> None:
    """Predict, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="65536 tokens on 8 ranks, write nothing")
    options = parser.parse_args()
    rows = []
    for name in CASES:
        for ranks in RANKS[:1] if options.quick else RANKS:
            rows.append(predicted(name, 65536 if options.quick else 1 << 20, ranks))
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if not options.quick:
        notes = "The most of any rank; balance: most work of a rank over the mean; 25 GB/s and 20 µs per message."
        record.write("simulated_ranks", rows, notes=notes)


if __name__ == "__main__":
    main()
