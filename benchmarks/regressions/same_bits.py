#!/usr/bin/env python3
"""Compare the results of two builds bit by bit.

    make same-bits BASE=COMMIT
    python benchmarks/regressions/same_bits.py --old FOLDER --new FOLDER --backend cpu|cuda     # 2 minutes; a minute

Every pattern of the old build, dtype and instruction set (on a GPU: kernel family), forward and backward. Both builds
compute the same problems from the same inputs, in one process per instruction set; digests of ``out``, ``lse``,
``dq``, ``dk`` and ``dv`` are compared. Writes ``same_bits_BACKEND``; exits with 1 if a result differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

from child import child

NOTES = "Digests of out, lse and the gradients of two builds on the same problems: how many are equal, which differ."
DTYPES = ("float32", "float64", "float16", "bfloat16")
SHAPES = {  # (batch, heads_q, heads_kv, head_dim, head_dim_v) for small and large patterns
    "small": ((1, 4, 4, 64, 64), (2, 4, 2, 40, 72), (1, 8, 2, 128, 128)),
    "large": ((1, 4, 2, 64, 64),),
}
LARGE = 1200


def make_problems() -> list[dict]:
    """Registered patterns and gallery compositions at their own length; others at 1200 keys, also with few queries."""
    from compat import describe, registry, show
    from compat import pattern as named

    from spattn import patterns as sp

    problems = []

    def add(name: str, pattern, q_len: int, kv_len: int, size: str):
        problems.append(
            {
                "name": f"{name}, {q_len} × {kv_len}",
                "pattern": describe(pattern),
                "q_len": q_len,
                "kv_len": kv_len,
                "size": size,
            }
        )

    for name in registry.names():
        found = registry.example(name)
        if found is not None:
            add(name, *found, "small")
    for name, (pattern, length) in show.gallery().items():
        add(name, pattern, length, length, "small")
    large = {
        "full": sp.Full(),
        "causal": sp.Causal(),
        "window": sp.SlidingWindow(100),
        "longformer": named("longformer", 200, global_tokens=16),
        "strided": named("strided", 64),
        "fixed": named("fixed", 64, 8),
        "dilated": sp.DilatedWindow(64, 64, 3),
        "bigbird": sp.BigBird(64),
        "hole": sp.Causal() - sp.SlidingWindow(30),
    }
    for name, pattern in large.items():
        add(name, pattern, LARGE, LARGE, "large")
        for rows in (1, 5, 100):
            add(name, pattern, rows, LARGE, "large")
    add("neighbourhood", sp.Neighborhood((40, 30), 13), LARGE, LARGE, "large")
    return problems


def digests(problems: list[dict], backend: str) -> dict[str, str]:
    """Digests by name of the result, computed by the build of this process."""
    import ml_dtypes
    import numpy as np
    from compat import read

    import spattn

    found = {}
    for number, problem in enumerate(problems):
        pattern = read(problem["pattern"])
        for shape in SHAPES[problem["size"]]:
            batch, heads_q, heads_kv, head_dim, head_dim_v = _fitting(pattern, shape)
            rows, keys = (batch, problem["q_len"], heads_q), (batch, problem["kv_len"], heads_kv)
            for dtype in DTYPES:
                rng = np.random.default_rng(number)
                kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
                q, k, v, dout = (  # (batch, length, heads, dim) in memory, as models have them
                    rng.standard_normal((*of, dim)).astype(kind).transpose(0, 2, 1, 3)
                    for of, dim in ((rows, head_dim), (keys, head_dim), (keys, head_dim_v), (rows, head_dim_v))
                )
                results = compute(spattn, backend, q, k, v, dout, pattern)
                label = f"{problem['name']}, heads {heads_q}/{heads_kv}, dim {head_dim}/{head_dim_v}, {dtype}"
                for name, result in results.items():
                    found[f"{label}: {name}"] = hashlib.sha256(np.ascontiguousarray(result).tobytes()).hexdigest()[:16]
    return found


def _fitting(pattern, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with the batch size and number of heads that the pattern requires."""
    batch, heads = pattern.sizes()
    if heads and heads != shape[1]:
        shape = (shape[0], heads, heads, *shape[3:])
    return (batch or shape[0], *shape[1:])


def compute(spattn, backend: str, q, k, v, dout, pattern) -> dict:
    """Forward and backward results by name."""
    if backend == "cuda" and not hasattr(spattn.cuda, "backward"):
        out, lse = spattn.attention(q, k, v, pattern, return_lse=True, backend=backend)
        return {"out": out, "lse": lse}
    out, lse = spattn.attention(q, k, v, pattern, return_lse=True, backend=backend)
    gradients = spattn.attention_backward(dout, q, k, v, out, lse, pattern, backend=backend)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def variants(backend: str) -> dict[str, dict[str, str]]:
    """Environment variables by name of the instruction set or kernel family that they select."""
    if backend == "cuda":
        return {name: {"SPATTN_CUDA_KERNEL": name} for name in ("auto", "portable")}
    import spattn.cpu

    return {name: {"SPATTN_ISA": name} for name in spattn.cpu.instruction_sets()}


def main() -> int:
    """Compute, compare, write; return 1 if a result differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--problems", action="store_true", help="print this build's problems as JSON")
    parser.add_argument("--digests", type=Path, help="print the digests of the results of these problems as JSON")
    args = parser.parse_args()
    if args.problems:
        print(json.dumps(make_problems()))
        return 0
    if args.digests:
        import importlib

        import spattn

        importlib.import_module(f"{spattn.__name__}.{args.backend}")
        print(json.dumps(digests(json.loads(args.digests.read_text()), args.backend)))
        return 0
    if args.old is None or args.new is None:
        parser.error("--old and --new are required")
    sys.path.insert(0, str(args.new.resolve()))
    import record

    rows, differing = [], []
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder, "problems.json")
        problems.write_text(json.dumps(child("--problems", package=args.old)))
        for name, settings in variants(args.backend).items():
            wanted = "--digests", str(problems), "--backend", args.backend
            old, new = (child(*wanted, package=build, **settings) for build in (args.old, args.new))
            both = [result for result in old if result in new]
            assert both, "the builds have no problem in common"
            differ = [result for result in both if old[result] != new[result]]
            rows.append({"kernels": name, "results": len(both), "equal": len(both) - len(differ)})
            differing += [f"{name}: {result}" for result in differ]
            print(rows[-1], *differ[:20], sep="\n  ", flush=True)
    gpu = None
    if args.backend == "cuda":
        import torch

        gpu = torch.cuda.get_device_name()
    record.write(f"same_bits_{args.backend}", rows, notes=NOTES, gpu=gpu, differing=differing)
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
