#!/usr/bin/env python3
"""Compare the predictions of ``spattn.distributed.simulate`` with the times of ``context_cuda.py``.

    python benchmarks/distributed/simulated_gpus.py     # half a minute on a CPU

For each measured case, number of GPUs and exchange: the time of a forward and a backward pass, predicted from that of
one GPU, of which 1 / 3.5 is forward. Writes ``simulated_gpus``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import context_cuda
import record

from spattn.distributed import simulate

FORWARD = 1 / 3.5  # share of a forward pass in both
RESULTS = Path(record.__file__).parent / "results"


def predicted_ms(pattern, length: int, sharding: str, gpus: int, exchange: str, one_gpu_ms: float) -> float:
    """Return the predicted time of both passes."""
    total = 0.0
    for backward in (False, True):
        found = simulate(
            pattern,
            (1, context_cuda.HEADS, context_cuda.HEADS, length, context_cuda.HEAD_DIM),
            gpus,
            sharding=sharding,
            device="cuda",
            seconds=FORWARD * one_gpu_ms / 1e3,
            dtype="bfloat16",
            backward=backward,
        )
        total += found.others["heads"] if exchange == "heads" else found.seconds
    return 1e3 * total


def main() -> None:
    """Compare, print, write."""
    cases, rows = context_cuda.cases(False), []
    for count in ("two", "four"):
        measured = json.loads((RESULTS / f"context_cuda_{count}-h200.json").read_text())
        for row in measured["results"]:
            if "speedup" not in row:
                continue
            pattern, length, sharding = cases[row["name"]]
            other = "point_to_point" if row["exchange"] == "heads" else "heads"
            times = {row["exchange"]: row["all_gpus_ms"], other: row[f"all_gpus_ms_{other}"]}
            for exchange, took in sorted(times.items()):
                of = predicted_ms(pattern, length, sharding, measured["gpus"], exchange, row["one_gpu_ms"])
                rows.append(
                    {
                        "pattern": row["name"],
                        "gpus": measured["gpus"],
                        "exchange": exchange,
                        "predicted_ms": round(of, 1),
                        "measured_ms": round(took, 1),
                        "measured_by_predicted": round(took / of, 2),
                    }
                )
                print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    record.write("simulated_gpus", rows, notes="Forward and backward; measured: context_cuda_two and _four.")


if __name__ == "__main__":
    main()
