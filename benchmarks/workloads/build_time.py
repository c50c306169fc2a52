#!/usr/bin/env python3
"""Time ``make build``: the first one, and one after a change of a kernel header.

    python benchmarks/workloads/build_time.py        # 5 minutes; needs make, a compiler and the package index

Builds a copy of the commit, without ccache. What pip downloads first is not timed. On a busy machine the wall time is
that of the machine: ``cpu_s`` is the compilers' own, and ``cpu_s / 2`` a lower bound for two cores. Writes
``build_time``.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

HEADER = Path("src/spattn/cpu/kernels/softmax/softmax.h")


def timed(*goals: str, folder: Path) -> dict[str, float]:
    """Run ``make`` and return the wall time and the CPU time of all its processes."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = os.environ | {"CCACHE_DISABLE": "1"}
    environment = {name: value for name, value in environment.items() if name not in ("MAKEFLAGS", "CC", "CXX")}
    command = ["make", f"PYTHON={sys.executable}", "WORKERS=2", *goals]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(time.monotonic() - start, 1), "cpu_s": round(cpu, 1)}


def main() -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=record.ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
        timed(".venv/stamps/build-requires", ".venv/stamps/runtime-requires", folder=folder)
        rows = [{"build": "first", **timed("build", folder=folder)}]
        header = folder / HEADER
        header.write_text(header.read_text() + "// changed\n")
        rows.append({"build": "after a change of a kernel header", **timed("build", folder=folder)})
        rows.append({"build": "without a change", **timed("build", folder=folder)})
    for row in rows:
        print(row)
    notes = "make build in a copy of the commit, two jobs, without ccache; cpu_s is of all processes"
    record.write("build_time", rows, notes=notes, load_before=round(load, 2), header=str(HEADER))


if __name__ == "__main__":
    main()
