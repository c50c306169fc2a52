#!/usr/bin/env python3
"""Compare planning with FlexAttention's block masks and SciPy's CSR.

    python benchmarks/peers/peers_plan.py            # ten minutes; needs torch and SciPy; Linux
    python benchmarks/peers/peers_plan.py --quick    # 1024 tokens only, writes nothing

Contenders: ``spattn.plan``; ``create_block_mask`` of PyTorch's FlexAttention, eager and compiled by torch.compile
(compilation not counted); and ``scipy.sparse.csr_array`` of the mask. All but spattn evaluate every pair and are
skipped above 2³¹ pairs. Every row is a process of its own with one thread, after a warm-up: growth of resident memory,
and the best of five times (one, if it exceeds two seconds). At 1024 tokens the contenders are checked to allow the same
pairs. Writes ``peers_plan``; exits with 1 if spattn is not 500 times as fast as ``create_block_mask`` at 8192 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
from child import child, resident

import spattn
from spattn import patterns as sp

LENGTHS = (1 << 10, 1 << 13, 1 << 15, 1 << 20, 10**7)
MOST_PAIRS = 1 << 31  # evaluated one by one
AGAIN_SECONDS = 2.0
LEAST_RATIO, AT = 500, 1 << 13
DOCUMENT = 700  # mean tokens


def document_lengths(tokens: int) -> list[int]:
    """Random lengths of consecutive documents."""
    found = np.random.default_rng(0).integers(1, 2 * DOCUMENT, 4 + 2 * tokens // DOCUMENT).cumsum()
    ends = np.append(found[found < tokens], tokens)
    return np.diff(ends, prepend=0).tolist()


def documents(tokens: int, of: Callable[[np.ndarray], Any]) -> Callable[[Any, Any], Any]:
    """Predicate of the documents; `of` converts a NumPy array to the contender's."""
    number = of(np.repeat(np.arange(len(document_lengths(tokens))), document_lengths(tokens)))
    return lambda q, k: number[q] == number[k]


def neighbours(tokens: int) -> Callable[[Any, Any], Any]:
    """Predicate of 13 × 13 neighbours on a square, shifted at its edges as in NATTEN."""
    side = math.isqrt(tokens)

    def first(at: Any) -> Any:
        return (at - 6).clip(0, side - 13)

    def near(at: Any, key: Any) -> Any:
        return (key >= first(at)) & (key < first(at) + 13)

    return lambda q, k: near(q // side, k // side) & near(q % side, k % side)


# name: (the pattern, the predicate of q and k) at N tokens
CASES: dict[str, tuple[Callable[[int], sp.Pattern], Callable[[int, Any], Callable[[Any, Any], Any]]]] = {
    "causal": (lambda n: sp.Causal(), lambda n, of: lambda q, k: q >= k),
    "window ±256": (lambda n: sp.SlidingWindow(256), lambda n, of: lambda q, k: abs(q - k) <= 256),
    "dilated window ±256, d=4": (
        lambda n: sp.DilatedWindow(256, dilation=4),
        lambda n, of: lambda q, k: (abs(q - k) <= 1024) & ((q - k) % 4 == 0),
    ),
    "documents": (lambda n: sp.Documents(tuple(document_lengths(n))), documents),
    "neighbourhood 13×13": (lambda n: sp.Neighborhood((math.isqrt(n),) * 2, 13), lambda n, of: neighbours(n)),
}


def plan(name: str, tokens: int) -> Callable[[], object]:
    """Planning by spattn."""
    pattern = CASES[name][0](tokens)

    def made() -> spattn.Plan:
        spattn.clear_plan_cache()
        return spattn.plan(pattern, tokens)

    spattn.plan(sp.Sinks(1) | sp.SlidingWindow(3), 1000)  # imports the planner
    return made


def block_mask(name: str, tokens: int, compiled: bool = False) -> Callable[[], object]:
    """FlexAttention's block mask on the CPU, with its default blocks of 128 × 128."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    torch.set_num_threads(1)
    create = torch.compile(create_block_mask) if compiled else create_block_mask
    allows = CASES[name][1](tokens, torch.from_numpy)

    def mask_mod(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return allows(q, k)

    def made(length: int = tokens) -> object:
        return create(mask_mod, None, None, length, length, device="cpu")

    made(tokens if compiled else 128)  # warm
    return made


def rows(name: str, tokens: int) -> Callable[[], object]:
    """SciPy's CSR array of the mask."""
    import scipy.sparse

    q, k = np.ogrid[:tokens, :tokens]
    allows = CASES[name][1](tokens, lambda x: x)
    return lambda: scipy.sparse.csr_array(np.broadcast_to(allows(q, k), (tokens, tokens)))


CONTENDERS: dict[str, Callable[[str, int], Callable[[], object]]] = {
    "spattn": plan,
    "create_block_mask": block_mask,
    "create_block_mask, compiled": lambda name, tokens: block_mask(name, tokens, compiled=True),
    "SciPy CSR": rows,
}


def whole(name: str, tokens: int) -> int:
    """The number of tokens, rounded down to a square for neighbourhoods."""
    return math.isqrt(tokens) ** 2 if "neighbourhood" in name else tokens


def check() -> None:
    """Exit with an error if a pattern and its predicate differ."""
    for name, (pattern, predicate) in CASES.items():
        q, k = np.ogrid[:1024, :1024]
        if not np.array_equal(pattern(1024).index_set(1024, 1024).to_dense(), predicate(1024, lambda x: x)(q, k)):
            raise SystemExit(f"{name}: pattern and predicate differ")


def measure(contender: str, name: str, tokens: int) -> dict[str, object]:
    """One row of the results, measured in this process."""
    made = CONTENDERS[contender](name, tokens)
    before, took = resident("VmRSS"), []
    for _ in range(5):
        start = time.process_time()
        kept = made()
        took.append(time.process_time() - start)
        if len(took) == 1:
            peak = resident("VmHWM") - before
        del kept
        if took[0] > AGAIN_SECONDS:
            break
    return {
        "name": name,
        "tokens": tokens,
        "contender": contender,
        "plan_ms": round(1e3 * min(took), 3),
        "peak_mib": round(max(peak, 0) / 2**20, 1),
    }


def in_a_process(contender: str, name: str, tokens: int) -> dict[str, Any]:
    """One row of the results, measured in a child process."""
    row = child("--one", contender, name, str(tokens))
    print(f"{name:26}{tokens:>10} {contender:28}{row['plan_ms']:>12.2f} ms{row['peak_mib']:>10.1f} MiB", flush=True)
    return row


def with_ratios(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the ratio of each time to spattn's."""
    own = {(row["name"], row["tokens"]): row["plan_ms"] for row in found if row["contender"] == "spattn"}
    return [row | {"times_spattn": round(row["plan_ms"] / own[row["name"], row["tokens"]], 1)} for row in found]


def main() -> int:
    """Check, measure, print, write; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1024 tokens only, write nothing")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        contender, name, tokens = options.one
        print(json.dumps(measure(contender, name, int(tokens))))
        return 0
    check()
    lengths = LENGTHS[:1] if options.quick else LENGTHS
    found = with_ratios(
        [
            in_a_process(contender, name, whole(name, tokens))
            for name in CASES
            for tokens in lengths
            for contender in CONTENDERS
            if contender == "spattn" or tokens**2 <= MOST_PAIRS
        ]
    )
    if not options.quick:
        notes = "CPU time of one thread, the best of five; growth of resident memory."
        record.write("peers_plan", found, notes=notes, least_ratio=LEAST_RATIO)
    slow = [
        f"{row['name']}: {row['times_spattn']}"
        for row in found
        if row["contender"] == "create_block_mask" and row["tokens"] >= 0.9 * AT and row["times_spattn"] < LEAST_RATIO
    ]
    print(f"less than {LEAST_RATIO} times as fast as create_block_mask:", *slow or ["none"], sep="\n  ")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
