#!/usr/bin/env python3
"""Compare chains of operations on scores as separate operators with one fused call.

    python benchmarks/scores/chains.py              # one CPU thread; needs torch; minutes
    python benchmarks/scores/chains.py --quick      # 512 tokens, three rounds; writes nothing
    python benchmarks/scores/chains.py --cuda       # needs torch; a minute, most of it for compiling eight kernels

Eight chains (``score_chains.py``), forward. CPU: float32, 8 heads of 64, 2048 tokens. NumPy and PyTorch's eager mode
materialise the scores of all heads and change them in place. They run as installed, then in a process that reuses
memory: freed arrays stay in the heap, so no operator waits for pages. Tuned ones also compute one head after the other,
whose scores stay in cache, and keep the biases of a chain between calls, which trained parameters would not allow. GPU:
bfloat16, 16 heads of 128, 4096 tokens, causal, PyTorch's eager mode. Rows of every result are checked against float64
before timing. Writes ``chains_cpu`` or ``chains_cuda``; exits with 1 if causal chains miss the target.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import gpu_timing
import numpy as np
import record
import torch
from child import child
from score_chains import CHAINS, PLAIN, Chain, Separate, exact, parameters, pattern_of
from timing import medians_in_turns

import spattn

PATTERNS = ("all pairs", "causal", "window 256")
GOAL = "causal"  # the target is the geometric mean over its chains
TARGET = {"cpu": 4.0, "cuda": 3.8}
TOLERANCE = {"cpu": 1e-6, "cuda": gpu_timing.TOLERANCE}  # relative error in float32, bfloat16
SHAPE = {"cpu": (8, 2048, 64), "cuda": (16, 4096, 128)}
TARGET_MS = 20.0  # long enough that the first call's host time does not count
MEAN, PLAIN_NAME, DEVICE = "geometric mean", "none", "cuda"
REUSED = {  # of glibc; torch then also has huge pages, as NumPy has
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "THP_MEM_ALLOC_ENABLE": "1",
}
NOTES = {
    "cpu": "float32, batch 1, 8 heads of 64, 2048 tokens, forward, one thread; medians of CPU time, in turns. numpy, "
    "torch: all heads at once, in place, positions computed before timing. reused: the same in a process that keeps "
    "freed memory. tuned: memory reused, head by head, biases computed before timing. times_unfused, times_reused, "
    "times_tuned: the faster of numpy and torch over the fused call in the same process.",
    "cuda": "bfloat16, batch 1, 16 heads of 128, 4096 tokens, forward; medians of CUDA events around back-to-back "
    "calls, in turns. torch: eager, all heads at once, in place, positions computed before timing; its softmax "
    "computes in float32. times_unfused: torch over fused.",
}


def to_torch(x: np.ndarray, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of an array; floats get `dtype`."""
    return torch.tensor(x, device=device, dtype=dtype if x.dtype.kind == "f" else None)


def each(p: SimpleNamespace, convert: Callable) -> SimpleNamespace:
    """Parameters, each converted."""
    return SimpleNamespace(**{name: convert(x) for name, x in vars(p).items()})


def cpu_calls(chain: Chain, pattern: str, p: SimpleNamespace, qkv: list[np.ndarray]) -> dict[str, Callable]:
    """Calls by contender."""
    tensors, batch, allowed = [to_torch(x) for x in qkv], [x[None] for x in qkv], pattern_of(pattern)
    of_numpy, of_torch = Separate(np, chain, pattern, p, np.asarray), Separate(torch, chain, pattern, p, to_torch)
    return {
        "numpy": partial(of_numpy, *qkv),
        "torch": partial(of_torch, *tensors),
        "numpy_tuned": partial(of_numpy.head_by_head(), *qkv),
        "torch_tuned": partial(of_torch.head_by_head(), *tensors),
        "fused": lambda: spattn.attention(*batch, allowed, score=chain.function(p))[0],
    }


def cuda_calls(chain: Chain, pattern: str, p: SimpleNamespace, sets: list[list[torch.Tensor]]) -> dict[str, Callable]:
    """Calls by contender; each takes the number of an input set."""
    unfused = Separate(torch, chain, pattern, p, partial(to_torch, device=DEVICE, dtype=torch.bfloat16))
    function, allowed = chain.function(each(p, partial(to_torch, device=DEVICE))), pattern_of(pattern)
    batches = [[x[None] for x in own] for own in sets]
    return {
        "torch": lambda i=0: unfused(*sets[i]),
        "fused": lambda i=0: spattn.attention(*batches[i], allowed, score=function)[0],
    }


def worst_errors(calls: dict[str, Callable], want: np.ndarray, rows: np.ndarray) -> dict[str, float]:
    """Relative error of each contender's sampled rows."""
    found = {}
    for name, call in calls.items():
        out = torch.as_tensor(call())[:, rows].double().cpu().numpy()
        found[name] = float(np.linalg.norm(out - want) / np.linalg.norm(want))
    return found


def measure(backend: str, pattern: str, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each contender, by chain, and the largest relative error."""
    heads, _, head_dim = SHAPE[backend]
    p, rng, found = parameters(heads, tokens), np.random.default_rng(1), {}
    sampled = np.unique(np.r_[0, tokens - 1, rng.integers(0, tokens, gpu_timing.ROWS)])
    sets = [rng.standard_normal((3, heads, tokens, head_dim), np.float32) for _ in range(gpu_timing.SETS)]
    if backend == "cuda":
        sets = [[to_torch(x, DEVICE, torch.bfloat16) for x in own] for own in sets]
    given = [torch.as_tensor(x).double().cpu().numpy() for x in sets[0]]  # as rounded
    for name, chain in (CHAINS if backend == "cuda" else {PLAIN_NAME: PLAIN} | CHAINS).items():
        calls = cuda_calls(chain, pattern, p, sets) if backend == "cuda" else cpu_calls(chain, pattern, p, sets[0])
        function = chain.function(each(p, lambda x: x.astype(float) if x.dtype.kind == "f" else x))
        errors = worst_errors(calls, exact(function, pattern, *given, sampled), sampled)
        for who, error in errors.items():
            if not error <= TOLERANCE[backend]:
                raise AssertionError(f"{who}, {name}, {pattern}: relative error {error:.2g} against float64")
        if backend == "cuda":
            ms = {who: statistics.median(x) for who, x in gpu_timing.measure(calls, rounds, TARGET_MS).items()}
        else:
            ms = medians_in_turns(calls, rounds)
        found[name] = ms | {"relative_error": max(errors.values())}
    return found


def table(pattern: str, stock: dict, reused: dict) -> list[dict]:
    """One row per chain from times as installed and with reused memory, if any, and their geometric mean."""
    rows = []
    for name, ms in stock.items():
        row = {f"{who}_ms": ms[who] for who in ("numpy", "torch", "fused") if who in ms}
        row |= {f"times_{who}": ms[who] / ms["fused"] for who in ("numpy", "torch") if who in ms}
        row["times_unfused"] = min(row.get("times_numpy", np.inf), row["times_torch"])
        if reused:
            own = reused[name]
            row |= {f"{who}_reused_ms": own[who] for who in ("numpy", "torch")}
            row |= {f"{who}_ms": own[who] for who in ("numpy_tuned", "torch_tuned")}
            row["times_reused"] = min(own["numpy"], own["torch"]) / own["fused"]
            row["times_tuned"] = min(own["numpy_tuned"], own["torch_tuned"]) / own["fused"]
        row = {field: round(x, 3) for field, x in row.items()}
        rows.append({"pattern": pattern, "chain": name, **row, "relative_error": float(f"{ms['relative_error']:.2g}")})
    ratios = [field for field in rows[0] if field.startswith("times_")]
    chains = [row for row in rows if row["chain"] != PLAIN_NAME]
    means = {field: round(statistics.geometric_mean(row[field] for row in chains), 2) for field in ratios}
    return [*rows, {"pattern": pattern, "chain": MEAN, **means}]


def main() -> int:
    """Measure, print, write; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="on a GPU")
    parser.add_argument("--quick", action="store_true", help="512 tokens, three rounds, write nothing")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--times", metavar="PATTERN", help="print this CPU process's times as JSON")
    args = parser.parse_args()
    backend = "cuda" if args.cuda else "cpu"
    heads, tokens, head_dim = SHAPE[backend]
    tokens, rounds = (512, 3) if args.quick else (tokens, args.rounds)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    spattn.set_num_threads(1)
    if args.times:
        print(json.dumps(measure(backend, args.times, tokens, rounds)))
        return 0
    rows, load = [], os.getloadavg()
    for pattern in [GOAL] if args.cuda else PATTERNS:
        if args.cuda:
            rows += table(pattern, measure(backend, pattern, tokens, rounds), {})
        else:
            again = ["--times", pattern, "--rounds", str(rounds), *["--quick"] * args.quick]
            rows += table(pattern, child(*again), child(*again, **REUSED))
        print(*(json.dumps(row) for row in rows if row["pattern"] == pattern), sep="\n", flush=True)
    means = next(row for row in rows if row["pattern"] == GOAL and row["chain"] == MEAN)
    print(f"unfused over fused, {GOAL}: {means['times_unfused']}× (target {TARGET[backend]}×)")
    if not args.quick:
        facts = {"heads": heads, "tokens": tokens, "head_dim": head_dim, "load_before": load}
        gpu = torch.cuda.get_device_name() if args.cuda else None
        record.write(f"chains_{backend}", rows, notes=NOTES[backend], gpu=gpu, **facts, load_after=os.getloadavg())
    return int(not args.quick and means["times_unfused"] < TARGET[backend])


if __name__ == "__main__":
    sys.exit(main())
