#!/usr/bin/env python3
"""Measure decoding on one CPU thread against memory bandwidth.

    python benchmarks/kernels/decode_cpu.py              # three minutes; needs torch and a C compiler
    python benchmarks/kernels/decode_cpu.py --quick      # fewer keys, writes nothing

1 to 16 queries, 100 000 keys, 8 KV heads with 8 or 32 query heads, head_dim 64 and 128; spattn and PyTorch's SDPA. The
floor is one read of K and V at the DRAM bandwidth that ``ceilings`` measures between the contenders. Results of spattn
are checked against SDPA in float64 on one head. Medians of the process's CPU time. Writes ``decode_cpu``.
"""

from __future__ import annotations

import os

# Set before the import of NumPy and torch, which read it once.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record
import timing
import torch
from ceilings import Ceilings
from torch.nn.functional import scaled_dot_product_attention as sdpa

import spattn
from spattn import patterns as sp

KEYS, HEADS_KV = 100_000, 8
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
NOTES = "One process, one thread, in turns; medians of CPU time. gb_per_s: bytes of K and V over that time."


def check(out, q, k, v) -> None:
    """Check the last head against SDPA in float64."""
    expected = sdpa(*(x[:, -1:].double() for x in (q, k, v)))
    error = (out[:, -1:].double() - expected).abs().max().item()
    assert error < TOLERANCE[q.dtype], f"error {error:.2g} exceeds {TOLERANCE[q.dtype]:.2g}"


def measure(q, k, v, rounds: int, ceilings: Ceilings) -> list[dict]:
    """One row per contender."""
    calls = {
        "spattn": lambda: spattn.attention(q, k, v, sp.Full(), backend="cpu"),
        "SDPA": lambda: sdpa(q, k, v, enable_gqa=q.shape[1] != k.shape[1]),
    }
    check(calls["spattn"](), q, k, v)
    times = timing.interleave(calls, rounds, lambda: ceilings.sample("read_dram"))
    bandwidth = ceilings.median("read_dram", rounds)
    size = (k.nbytes + v.nbytes) / 1e6
    rows = []
    for name in calls:
        row = timing.summary(times[name])
        rate = size / row["median_ms"]
        rows.append(
            {
                "dtype": str(q.dtype).removeprefix("torch."),
                "head_dim": q.shape[3],
                "heads": q.shape[1],
                "q_len": q.shape[2],
                "contender": name,
                **row,
                "floor_ms": round(size / bandwidth, 3),
                "gb_per_s": round(rate, 1),
                "read_gb_per_s": round(bandwidth, 1),
                "share_of_bandwidth_pct": round(100 * rate / bandwidth, 1),
            }
        )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 000 keys, three rounds, write nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    keys, rounds, rows, ceilings = KEYS // 10 if quick else KEYS, 3 if quick else 9, [], Ceilings()
    ceilings.sample("read_dram")
    generator = torch.Generator().manual_seed(0)
    load = os.getloadavg()
    for dtype, head_dim in itertools.product((torch.float32, torch.bfloat16), (64, 128)):
        k, v = (torch.randn((1, HEADS_KV, keys, head_dim), generator=generator).to(dtype) for _ in range(2))
        for heads, q_len in itertools.product((8, 32), (1, 2, 4, 8, 16)):
            q = torch.randn((1, heads, q_len, head_dim), generator=generator).to(dtype)
            rows += measure(q, k, v, rounds, ceilings)
            for row in rows[-2:]:
                print(
                    f"{row['dtype']} d={head_dim} {heads}/{HEADS_KV} heads, {q_len} queries, {row['contender']:6}: "
                    f"{row['median_ms']:8.2f} ms, {row['gb_per_s']:5.1f} of {row['read_gb_per_s']:.1f} GB/s",
                    flush=True,
                )
    if not quick:
        record.write(
            "decode_cpu",
            rows,
            notes=NOTES,
            keys=keys,
            heads_kv=HEADS_KV,
            threads=1,
            load_before=load,
            load_after=os.getloadavg(),
        )


if __name__ == "__main__":
    main()
