#!/usr/bin/env python3
"""Run the CUDA kernels on small problems under compute-sanitizer: memory errors, races, misused barriers, stale memory.

    tools/sanitize_cuda.py [--kernels portable|auto] [--dtypes DTYPE ...] [--out FOLDER]

prints one line a tool, writes each tool's whole report to ``--out``, and exits with 1 if any found something. NumPy
arrays keep other libraries' kernels out of the reports. Problems cover full and partial tiles, several components,
merges, rows that take the exact path, padding, aligned and misaligned rows.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
DTYPES = ("float16", "bfloat16", "float32", "float64")
HEAD_DIMS = ((64, 64), (128, 128), (40, 24), (33, 35), (256, 256))


def problems(dtypes: list[str]) -> None:
    """Run everything once, in this process."""
    import numpy as np

    from spattn import cuda, patterns
    from spattn.testing import inputs

    cases = [(patterns.Causal(), 70, 140), (patterns.Strided(16), 130, 130)]
    cases.append((patterns.Neighborhood((10, 13), 5), 130, 130))
    for dtype in dtypes:
        for pattern, q_len, kv_len in cases:
            for head_dim, head_dim_v in HEAD_DIMS:
                q, k, v = inputs(1, 2, 1, q_len, kv_len, head_dim, head_dim_v, dtype=dtype)
                v[:, :, 3] = np.nan
                for precision in (None, "tf32") if dtype == "float32" else (None,):
                    cuda.forward(q, k, v, cuda.plan_for(pattern, q, k, v), -0.2, precision=precision)
    print("all problems ran")


def check(tool: str, kernels: str, dtypes: list[str], out: Path) -> bool:
    """Run the problems under one tool; returns whether it found nothing."""
    # cuda-bindings asks the driver for functions that it may not have; those answers are no errors of ours.
    command = ["compute-sanitizer", "--report-api-errors", "no", "--tool", tool, sys.executable, __file__, "--inside"]
    command += ["--dtypes", *dtypes]
    env = dict(os.environ, SPATTN_CUDA_KERNEL=kernels)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    (out / f"{tool}-{kernels}.txt").write_text(done.stdout)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", done.stdout)
    clean = done.returncode == 0 and "all problems ran" in done.stdout and len(summary) == 1 and ": 0 " in summary[0]
    print(f"{tool:10} {kernels}: {'clean' if clean else 'NOT CLEAN'}: {summary[0] if summary else done.stdout[-500:]}")
    return clean


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="*", default=["portable"], choices=["portable", "auto"])
    parser.add_argument("--tools", nargs="*", default=TOOLS, choices=TOOLS)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES, choices=DTYPES)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        problems(args.dtypes)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results = [check(tool, kernels, args.dtypes, args.out) for kernels in args.kernels for tool in args.tools]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
