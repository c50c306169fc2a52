#!/usr/bin/env python3
"""float8 against bfloat16 in the Hopper forward.

    python benchmarks/kernels/float8_cuda.py            # half a minute; needs torch

Batch 1, 16 heads, 16384 tokens, head_dim 128 and 64, q, k and v of random normal numbers, in CUDA graphs. Rows of the
results are checked against dense float64 before timing. Writes ``float8_cuda``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

import peers_cuda
import record
from gpu_timing import SETS, TOLERANCE, measure, worst_error
from peers_cuda import HEADS

TOKENS, ROUNDS, TARGET_MS = 16384, 15, 10.0
TOLERANCES = {"bfloat16": TOLERANCE, "float8": 0.1}
NOTES = (
    "Forward, batch 1, 16 heads, 16384 tokens, random normal numbers that float8_e4m3fn represents, in both dtypes; "
    "medians of CUDA events around replays of CUDA graphs, contenders in turns. tflops: of allowed pairs. "
    "relative_error: worst of sampled rows against float64, in the Euclidean norm."
)


def graphs(call: Callable, sets: list) -> Callable:
    """Return a function of the number of an input set, which replays `call` on the set."""
    import torch

    captured = []
    for own in sets:
        call(*own)  # plans, compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(*own)
        captured.append(graph)
    return lambda i: captured[i].replay()


def main() -> None:
    """Check, measure, print, write."""
    import torch

    import spattn

    torch.manual_seed(0)
    rows = []
    for head_dim in (128, 64):
        shape = 1, HEADS, TOKENS, head_dim
        short = [[torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(3)] for _ in range(SETS)]
        wide = [[x.to(torch.bfloat16) for x in own] for own in short]
        for problem in ("dense", "causal", "window ±256"):
            pattern = peers_cuda.problems(TOKENS)[problem][0]
            contenders = {
                "bfloat16": (lambda *own, pattern=pattern: spattn.attention(*own, pattern), wide),
                "float8": (lambda *own, pattern=pattern: spattn.float8_attention(*own, pattern), short),
            }
            errors = {}
            for name, (call, sets) in contenders.items():
                errors[name] = worst_error(pattern, *wide[0], call(*sets[0]))
                if not errors[name] <= TOLERANCES[name]:
                    raise AssertionError(f"{name}, {problem}: relative error {errors[name]:.2g} against float64")
            times = measure({name: graphs(*one) for name, one in contenders.items()}, ROUNDS, TARGET_MS)
            medians = {name: statistics.median(x) for name, x in times.items()}
            pairs = pattern.index_set(TOKENS, TOKENS).nnz
            for name, median in medians.items():
                row = {"problem": problem, "head_dim": head_dim, "dtype": name, "median_ms": round(median, 4)}
                row["tflops"] = round(4e-9 * HEADS * head_dim * pairs / median, 1)
                row["times_bfloat16"] = round(medians["bfloat16"] / median, 3)
                row["relative_error"] = float(f"{errors[name]:.2g}")
                rows.append(row)
                print(*row.values(), sep="  ", flush=True)
    record.write("float8_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
