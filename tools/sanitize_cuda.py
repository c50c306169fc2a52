#!/usr/bin/env python3
"""Run the CUDA kernels on small problems under compute-sanitizer.

    tools/sanitize_cuda.py [--kernels portable|auto] [--dtypes DTYPE ...] [--repeated] [--out FOLDER]

Finds memory errors, races, misused barriers and uninitialized memory. Prints one line per tool, writes the reports to
``--out``, and exits with 1 if a tool found something. NumPy arrays keep other libraries' kernels out of the reports.
Problems cover full and partial tiles, several components, combined split-KV partials, fused and separate backward, rows
of the float64 fallback, padding, aligned and misaligned rows, grouped heads in one query tile, per-head and per-batch
patterns, and more tensor maps than the smaller parameter block holds; and repeated calls with PyTorch tensors, which
use cached dispatch (``--repeated`` runs these only).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
DTYPES = ("float16", "bfloat16", "float32", "float64")
HEAD_DIMS = ((64, 64), (128, 128), (40, 24), (33, 35), (256, 256))


def problems(dtypes: list[str]) -> None:
    """Run all problems once in this process."""
    from spattn import patterns

    # (pattern, batch, heads_q, heads_kv, q_len, kv_len)
    every_head_dim = [(patterns.Causal(), 1, 2, 1, 70, 140), (patterns.strided(16), 1, 2, 1, 130, 130)]
    every_head_dim.append((patterns.Neighborhood((10, 13), 5), 1, 2, 1, 130, 130))
    one_head_dim = [
        (patterns.Causal(), 1, 8, 2, 5, 1100),
        (patterns.longformer(32, global_tokens=(0, 5)), 1, 2, 1, 200, 200),
        (patterns.PerHead((patterns.Causal(), patterns.strided(16))), 1, 2, 1, 130, 130),
        (patterns.Documents(((60, 70), (30, 40, 60))), 2, 2, 1, 130, 130),
        (patterns.Neighborhood((15, 15), 3, 5), 1, 2, 1, 225, 225),
    ]
    for dtype in dtypes:
        for case in every_head_dim:
            for dims in HEAD_DIMS:
                attend(*case, *dims, dtype)
        for case in one_head_dim:
            attend(*case, *HEAD_DIMS[0], dtype)
    repeat(dtypes)


def repeat(dtypes: list[str]) -> None:
    """Run repeated calls with PyTorch tensors, each reading the result of the one before.

    Hopper kernels may start early (programmatic dependent launch), those of a group concurrently. PyTorch only copies.
    """
    import torch

    import spattn
    from spattn import patterns
    from spattn.testing import inputs

    cases = [
        (patterns.Causal(), 300),
        (patterns.strided(16), 300),
        (patterns.longformer(64, global_tokens=3), 300),
        (patterns.Neighborhood((15, 15), 7), 225),
        (patterns.windowed((14, 14), 7), 196),
    ]
    for dtype in set(dtypes) & {"float16", "bfloat16"}:
        found = []
        for pattern, tokens in cases:
            x = torch.from_numpy(inputs(1, 2, q_len=tokens, head_dim=64, dtype=dtype)[0].view("int16"))
            found.append(x.view(getattr(torch, dtype)).cuda())
            x = found[-1]
            for _ in range(4):
                x = spattn.attention(x, x, x, pattern)
        for _ in range(3):
            group = [(x, x, x, pattern) for x, (pattern, _) in zip(found, cases, strict=True)]
            found = spattn.grouped_attention(group)
        torch.cuda.synchronize()


def attend(pattern, batch: int, heads_q: int, heads_kv: int, q_len: int, kv_len: int, *dims_and_dtype) -> None:
    """One problem, forward and backward. A NaN in V sends rows to the float64 fallback."""
    import numpy as np

    import spattn
    from spattn import cuda
    from spattn.cuda.sm90.backward import prepared
    from spattn.testing import inputs

    *dims, dtype = dims_and_dtype
    q, k, v = inputs(batch, heads_q, heads_kv, q_len, kv_len, *dims, dtype=dtype)
    v[:, 0, 3] = np.nan
    for precision in (None, "tf32") if dtype == "float32" else (None,):
        cuda.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cuda"), -0.2, precision=precision)
    out, lse = spattn.attention(q, k, v, pattern, scale=-0.2, backend="cuda", return_lse=True)
    for one_pass in False, True:  # selects the Hopper kernels' fused or separate backward
        spattn.clear_plan_cache()
        with mock.patch.multiple(prepared, _hardly_wait=lambda *args, one=one_pass: one, _SLOWER=0):
            spattn.attention_backward(out, q, k, v, out, lse, pattern, dlse=lse, scale=-0.2, backend="cuda")


def check(tool: str, kernels: str, dtypes: list[str], repeated: bool, out: Path) -> bool:
    """Run the problems under one tool; return whether it found nothing."""
    # API errors come from cuda-bindings, which queries optional driver functions.
    command = ["compute-sanitizer", "--report-api-errors", "no", "--tool", tool, sys.executable, __file__, "--inside"]
    command += ["--dtypes", *dtypes]
    if repeated:
        command.append("--repeated")
    env = dict(os.environ, SPATTN_CUDA_KERNEL=kernels)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    (out / f"{tool}-{kernels}.txt").write_text(done.stdout)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", done.stdout)
    clean = done.returncode == 0 and "all problems ran" in done.stdout and len(summary) == 1 and ": 0 " in summary[0]
    print(f"{tool:10} {kernels}: {'clean' if clean else 'NOT CLEAN'}: {summary[0] if summary else done.stdout[-500:]}")
    return clean


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="*", default=["portable"], choices=["portable", "auto"])
    parser.add_argument("--tools", nargs="*", default=TOOLS, choices=TOOLS)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES, choices=DTYPES)
    parser.add_argument("--repeated", action="store_true", help="only repeated calls with PyTorch tensors")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        (repeat if args.repeated else problems)(args.dtypes)
        print("all problems ran")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results = [
        check(tool, kernels, args.dtypes, args.repeated, args.out) for kernels in args.kernels for tool in args.tools
    ]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
