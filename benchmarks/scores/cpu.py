#!/usr/bin/env python3
"""Measure what score functions cost on one CPU thread, in spattn and in FlexAttention.

    OMP_NUM_THREADS=1 python benchmarks/scores/cpu.py            # needs torch and a C++ compiler; two minutes
    OMP_NUM_THREADS=1 python benchmarks/scores/cpu.py --quick    # head_dim 64 and three rounds only, writes nothing

4096 tokens, 8 heads, float32, a window of 256 tokens on each side; contenders in turns, medians of the process's CPU
time. FlexAttention is compiled with the same functions and the same mask; it has no backward pass on CPUs. The backward
of spattn includes the gradients of slopes and tables. Every output is checked against float64 before timing. Writes
``scores_cpu``; exits with 1 where FlexAttention takes less than 2.5 times as long as spattn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
import torch
import torch.nn.functional as F
from timing import medians_in_turns
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import spattn
from spattn.testing import assert_within_bound

TOKENS, HEADS, WINDOW = 4096, 8, 256
BLOCK = 64  # of FlexAttention's mask: 32 is as fast, 128 slower
TARGET = 2.5
NOTES = (
    "One process, one thread, in turns; medians of CPU time. above_plain_pct: time above the same contender without a "
    "function. times_spattn: ratio to spattn with the same function."
)
PATTERN = spattn.patterns.SlidingWindow(WINDOW, WINDOW)


def functions() -> dict[str, Callable | None]:
    """Score functions by name; None is a plain call."""
    rng = np.random.default_rng(0)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    table = torch.from_numpy(rng.standard_normal((HEADS, 2 * WINDOW + 1), np.float32))
    return {
        "plain": None,
        "alibi": lambda score, b, h, q, k: score + slopes[h] * (k - q),
        "softcap": lambda score, b, h, q, k: 50.0 * torch.tanh(score / 50.0),
        "relative_table": lambda score, b, h, q, k: score + table[h, torch.clamp(k - q, -WINDOW, WINDOW) + WINDOW],
    }


def flex() -> Callable:
    """FlexAttention of the pattern, compiled for each score function."""
    mask = create_block_mask(
        lambda b, h, q, k: (q - k).abs() <= WINDOW, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=BLOCK
    )
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def check(name: str, out: torch.Tensor, function: Callable | None, q, k, v) -> None:
    """Compare rows of an output with float64, within the error of float32."""
    rows = torch.arange(0, TOKENS, 101)
    keys = torch.arange(TOKENS)
    allowed = (keys - rows[:, None]).abs() <= WINDOW
    heads = torch.arange(HEADS)[:, None, None]

    def dense(dtype: torch.dtype) -> np.ndarray:
        s = q[0][:, rows].to(dtype) @ k[0].to(dtype).mT * q.shape[-1] ** -0.5
        s = s if function is None else function(s, 0, heads, rows[:, None], keys)
        return (s.masked_fill(~allowed, -torch.inf).softmax(-1) @ v[0].to(dtype)).numpy()

    assert_within_bound(out[0][:, rows].numpy(), dense(torch.float64), dense(torch.float32), what=name)


def measure(head_dim: int, rounds: int) -> list[dict]:
    """One row per contender, function and pass."""
    rng = np.random.default_rng(1)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal((1, HEADS, TOKENS, head_dim), np.float32)) for _ in range(4))
    theirs, forwards, backwards = flex(), {}, {}
    for name, function in functions().items():
        ours = partial(spattn.attention, q, k, v, PATTERN, score=function)
        forwards["spattn", name] = ours
        forwards["FlexAttention", name] = partial(theirs, q, k, v, score_mod=function)
        for contender in ("spattn", "FlexAttention"):
            check(f"{contender}, {name}", forwards[contender, name](), function, q, k, v)
        out, lse = ours(return_lse=True)
        backwards["spattn", name] = partial(spattn.attention_backward, dout, q, k, v, out, lse, PATTERN, score=function)
    forwards["dense SDPA", "plain"] = partial(F.scaled_dot_product_attention, q, k, v)
    rows = []
    for which, calls in (("forward", forwards), ("backward", backwards)):
        found = medians_in_turns(calls, rounds)
        for (contender, name), ms in found.items():
            row = {"head_dim": head_dim, "pass": which, "contender": contender, "function": name, "ms": round(ms, 2)}
            row["above_plain_pct"] = round(100 * (ms / found[contender, "plain"] - 1), 1)
            row["times_spattn"] = round(ms / found["spattn", name], 2)
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> int:
    """Measure, print, write; return 1 if FlexAttention is closer than the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="head_dim 64, three rounds, write nothing")
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    spattn.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 1000
    rows = [row for d in ((64,) if args.quick else (64, 128)) for row in measure(d, 3 if args.quick else args.rounds)]
    if not args.quick:
        record.write("scores_cpu", rows, notes=NOTES, tokens=TOKENS, heads=HEADS, window=WINDOW)
    return int(any(row["contender"] == "FlexAttention" and row["times_spattn"] < TARGET for row in rows))


if __name__ == "__main__":
    sys.exit(main())
