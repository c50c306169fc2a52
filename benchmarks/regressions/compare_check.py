#!/usr/bin/env python3
"""Measure the error rates of compare.py: missed slow-downs of 15 %, false alarms.

    python benchmarks/regressions/compare_check.py [--runs 10]        # 25 minutes

Builds the last commit twice: unchanged, and with 15 % more time in the float32 forward kernels and in planning. Each
run compares the first build with a copy of itself and with the second build. Writes ``compare_check``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

SOURCE = {"kernel": "src/spattn/cpu/_core.pyx", "planning": "src/spattn/schedule/compiler.py"}
PLANTED = {  # file: (text, replacement, which waits for 15 % of the elapsed time)
    SOURCE["kernel"]: (
        """        self.table.forward[self.dtype](self.call, number // self.heads, number % self.heads,
                                       self.call.plan.work + item, end - item,
                                       self.scratch + thread * self.scratch_bytes)
""",
        """        cdef int64_t began = monotonic_ns(), until
        self.table.forward[self.dtype](self.call, number // self.heads, number % self.heads,
                                       self.call.plan.work + item, end - item,
                                       self.scratch + thread * self.scratch_bytes)
        if self.dtype == 0:
            until = monotonic_ns() + (monotonic_ns() - began) * 15 // 100
            while monotonic_ns() < until:
                pass
""",
    ),
    SOURCE["planning"]: (
        "return keep(key, _compile(*key, budget), budget.needed)",
        "return keep(key, _slowly(*key, budget), budget.needed)",
    ),
}
SLOWLY = """

def _slowly(*arguments: Any) -> Plan:
    import time

    began = time.perf_counter()
    made = _compile(*arguments)
    until = time.perf_counter() + 0.15 * (time.perf_counter() - began)
    while time.perf_counter() < until:
        pass
    return made
"""


def build(folder: Path, planted: bool) -> Path:
    """Build the last commit, with or without the planted slow-down; return the folder that holds the package."""
    source, wheels, package = folder / "source", folder / "wheels", folder / "package"
    subprocess.run(["git", "clone", "--quiet", record.ROOT, source], check=True)
    for file, (old, new) in PLANTED.items() if planted else ():
        text = (source / file).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"compare_check: {file} expected the replaced text once, found {text.count(old)}")
        (source / file).write_text(text.replace(old, new) + (SLOWLY if file == SOURCE["planning"] else ""))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", wheels, source], check=True, env=environment)
    (wheel,) = wheels.glob("spattn-*.whl")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, package], check=True)
    return package


def slower(base: Path, head: Path) -> list[str]:
    """Names of the benchmarks that compare.py reports as slower."""
    script = Path(__file__).with_name("compare.py")
    done = subprocess.run(
        [sys.executable, script, "--base", base, "--head", head], capture_output=True, text=True, check=False
    )
    found = [line.rsplit(" ms", 2)[0][:40].strip() for line in done.stdout.splitlines() if line.endswith("SLOWER")]
    if done.returncode != (1 if found else 0):
        raise SystemExit(f"compare_check: compare.py exited with {done.returncode}: {done.stderr}")
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base, planted = (build(Path(folder, name), name == "planted") for name in ("base", "planted"))
        same = Path(shutil.copytree(base, Path(folder, "same")))
        for run in range(args.runs):
            seen = slower(base, planted)
            rows.append(
                {
                    "run": run,
                    "kernel_caught": any(name.startswith("forward float32") for name in seen),
                    "planning_caught": any(name.startswith("plan ") for name in seen),
                    "planted_slower": len(seen),
                    "identical_slower": slower(base, same),
                }
            )
            print(rows[-1], flush=True)
    counts = {
        "kernel_caught": sum(row["kernel_caught"] for row in rows),
        "planning_caught": sum(row["planning_caught"] for row in rows),
        "identical_passed": sum(not row["identical_slower"] for row in rows),
    }
    print(counts)
    record.write("compare_check", rows, notes="15 % added to float32's forward kernels and to planning.", **counts)


if __name__ == "__main__":
    main()
