#!/usr/bin/env python3
"""Profile four kernels of spattn on a GPU with Nsight Compute.

    python benchmarks/study/study_profile_cuda.py            # a minute on an H200; needs ncu, torch, GPU counters
    python benchmarks/study/study_profile_cuda.py --quick    # short problems, writes nothing

bfloat16: dense and windowed forward, dense backward, and decoding. Each problem runs in a process of its own, where one
call precedes the profiled one. Records how busy tensor cores, issue slots, exponential unit, shared memory, L2 and DRAM
are in each kernel. Kernels of less than 2 % of a problem's time are left out. Writes ``study_profile_cuda``.
"""

from __future__ import annotations

import argparse
import csv
import glob
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record
import torch

import spattn
from spattn import patterns as sp

LEAST_SHARE = 0.02
TIME = "gpu__time_duration.sum"
# Field and the names of its metric, newest first; the first one that this version of Nsight Compute has counts.
METRICS = {
    "tensor_percent": (
        "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_elapsed",
    ),
    "issue_percent": ("sm__inst_issued.avg.pct_of_peak_sustained_elapsed",),
    "exponentials_percent": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",),
    "shared_percent": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",),
    "l2_percent": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "dram_percent": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
}
# Query length, key length, batch, query heads, key heads, pattern, pass; head_dim 128.
PROBLEMS = {
    "forward, dense": (16384, 16384, 1, 16, 16, sp.Full(), "forward"),
    "forward, window ±256": (16384, 16384, 1, 16, 16, sp.SlidingWindow(256), "forward"),
    "backward, dense": (16384, 16384, 1, 16, 16, sp.Full(), "backward"),
    "decoding": (1, 65536, 8, 32, 8, sp.Causal(), "forward"),
}
NOTES = (
    "bfloat16, head_dim 128; dense and window: 16,384 tokens, 16 heads; decoding: one query against 65,536 keys, batch "
    "8, 32 query heads over 8 key heads. Nsight Compute, one launch each, clocks not fixed; percentages of the peak "
    "over the kernel's time. tensor_metric: the metric of the tensor cores."
)


def run(name: str, quick: bool) -> None:
    """One call for warming up, one between the profiler's start and stop."""
    q_len, kv_len, batch, heads, heads_kv, pattern, which = PROBLEMS[name]
    if quick:
        q_len, kv_len = min(q_len, 1024), 1024
    shapes = [(batch, heads, q_len, 128), *[(batch, heads_kv, kv_len, 128)] * 2]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    with torch.set_grad_enabled(which == "backward"):
        for profiled in (False, True):
            out = None if which == "forward" else spattn.attention(q, k, v, pattern)
            torch.cuda.synchronize()
            if profiled:
                torch.cuda.cudart().cudaProfilerStart()
            if which == "forward":
                spattn.attention(q, k, v, pattern)
            else:
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def nsight_compute() -> str:
    """Path of ncu: from PATH, or of a CUDA toolkit."""
    found = shutil.which("ncu") or next(
        iter(sorted(glob.glob("/usr/local/cuda*/bin/ncu") + glob.glob("/opt/nvidia/nsight-compute/*/ncu"))), None
    )
    if found is None:
        raise SystemExit("study_profile_cuda: install Nsight Compute (ncu), part of the CUDA toolkit")
    return found


def metrics(ncu: str) -> dict[str, str]:
    """Metric of each field, as this version of Nsight Compute names it."""
    known = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=True).stdout.split()
    found = {}
    for field, names in METRICS.items():
        name = next((name for name in names if name.partition(".")[0] in known), None)
        if name is None:
            like = [name for name in known if field.partition("_")[0] in name]
            raise SystemExit(f"study_profile_cuda: add this ncu's metric of {field} to METRICS; {like}")
        found[field] = name
    return found


def profile(ncu: str, name: str, found: dict[str, str], quick: bool) -> list[dict]:
    """One row per kernel of a problem."""
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--metrics", ",".join([TIME, *found.values()])]
    done = subprocess.run(
        [*command, sys.executable, sys.argv[0], "--run", name, *["--quick"] * quick], capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 3:
        raise SystemExit(f"study_profile_cuda: ncu failed on {name}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    kernels = list(csv.DictReader([lines[0], *lines[2:]]))  # the second line has the units
    times = [float(kernel[TIME].replace(",", "")) for kernel in kernels]
    rows = []
    for kernel, taken in zip(kernels, times, strict=True):
        if taken >= LEAST_SHARE * sum(times):
            row = {"problem": name, "kernel": kernel["Kernel Name"].partition("(")[0], "us": round(taken / 1e3, 2)}
            row |= {field: round(float(kernel[metric].replace(",", "")), 1) for field, metric in found.items()}
            rows.append(row)
            print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Profile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short problems, write nothing")
    parser.add_argument("--run", choices=PROBLEMS, help="only run this problem; ncu does so")
    args = parser.parse_args()
    if args.run:
        run(args.run, args.quick)
        return 0
    ncu = nsight_compute()
    found = metrics(ncu)
    rows = [row for name in PROBLEMS for row in profile(ncu, name, found, args.quick)]
    if not args.quick:
        gpu, version = torch.cuda.get_device_name(), subprocess.run([ncu, "--version"], capture_output=True, text=True)
        facts = {"nsight_compute": version.stdout.split()[-1], "tensor_metric": found["tensor_percent"]}
        record.write("study_profile_cuda", rows, notes=NOTES, gpu=gpu, **facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
