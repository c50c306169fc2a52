#!/usr/bin/env python3
"""Measure the declared commits of the past, and annotate each step.

    python benchmarks/regressions/history.py --packages /tmp/history      # 20 minutes, 2 more per missing package

``benchmarks/history/commits.json`` declares the commits and says what changed since the one before. Builds each
commit that ``--packages`` lacks (``tools/package_of.sh``; for one instruction set alone set
``PIP_CONFIG_SETTINGS=setup-args=-Disa=avx512bf16``), or with ``--built`` leaves them out. Then runs the asv suite
``benchmarks/history/suite`` on all of them, ``--rounds`` times in turns: CPU time on one thread, bytes of plans, peak
memory, import.

Needs asv and the build requirements of ``pyproject.toml``. Writes ``history`` with all figures, and ``history_steps``
with the changes by 15 % or more that asv's step detection finds. ``--report`` only writes again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

FOLDER = record.ROOT / "benchmarks" / "history"
MEASURED = record.ROOT / "benchmarks" / ".asv" / "history"
CONFIG = ("--config", str(FOLDER / "asv.conf.json"))
LEAST = 1.15  # ratio of a step, up or down
SERIES = {  # asv's names: heading, unit, units per asv's unit
    "bench_history.Forward.time_forward": ("forward", "ms", 1e3),
    "bench_history.Backward.time_backward": ("backward", "ms", 1e3),
    "bench_history.Plan.time_plan": ("plan", "ms", 1e3),
    "bench_history.Plan.track_bytes": ("bytes of a plan", "KiB", 1 / 1024),
    "bench_history.Memory.peakmem_plan": ("peak memory, plan", "MiB", 1 / 2**20),
    "bench_history.Memory.peakmem_forward": ("peak memory, forward", "MiB", 1 / 2**20),
    "bench_history.Import.track_import": ("import", "ms", 1e3),
}
NOTES = (
    "CPU time on one thread in a new process: the least of asv's samples of all rounds, since other processes only add "
    "time. import: beyond NumPy's."
)


def package(commit: str, packages: Path) -> Path | None:
    """The folder that holds a commit's package, built if it is missing; None if it does not build."""
    command = [record.ROOT / "tools" / "package_of.sh", packages, commit]
    environment = os.environ | {"PYTHON": sys.executable}
    built = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    return Path(built.stdout.strip()) if built.returncode == 0 else None


def measure(commits: list[dict], packages: Path, rounds: int) -> None:
    """Run the suite on every commit, once per round; every other round in reverse."""
    folders = {entry["commit"]: package(entry["commit"], packages) for entry in commits}
    missing = [commit for commit, folder in folders.items() if folder is None]
    if missing:
        print(f"history: left out, since they do not build: {', '.join(missing)}", file=sys.stderr)
    asv = [sys.executable, "-m", "asv"]
    subprocess.run([*asv, "machine", "--yes", *CONFIG], check=True, stdout=subprocess.DEVNULL)
    for turn in range(rounds):
        for commit, folder in list(folders.items())[:: 1 - 2 * (turn % 2)]:
            if folder is None:
                continue
            print(f"round {turn + 1} of {rounds}: {commit}", flush=True)
            environment = os.environ | {"ASV_PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
            arguments = ("--python=same", "--append-samples", "--set-commit-hash", folder.name)
            ran = subprocess.run([*asv, "run", *arguments, *CONFIG], env=environment, stdout=subprocess.PIPE, text=True)
            if ran.returncode not in (0, 2):  # 2: a benchmark failed, since the commit lacks what it needs
                raise RuntimeError(f"asv run failed at {commit}:\n{ran.stdout}")
            print(*(line for line in ran.stdout.splitlines() if "failed" in line), sep="\n", end="", flush=True)


def collect(commits: list[dict]) -> tuple[list[dict], list[dict]]:
    """The measured commits, and a row for each series with its value at each of them."""
    from asv.results import Results

    found = {}
    for path in MEASURED.glob("*/*-existing-*.json"):
        results = Results.load(str(path))
        found[results.commit_hash] = results
    measured, values = [], {}
    for entry in commits:
        results = next((found[full] for full in found if full.startswith(entry["commit"])), None)
        if results is None:
            continue
        for name in SERIES:
            if name not in results.get_all_result_keys():
                continue
            params = results.get_result_params(name)
            of_asv, samples = results.get_result_value(name, params), results.get_result_samples(name, params)
            for problem, one, times in zip(params[0] if params else [""], of_asv, samples, strict=True):
                if one is not None and not math.isnan(one):
                    values.setdefault((name, problem.strip("'")), {})[len(measured)] = min(times or [one])
        measured.append(entry)
    rows = []
    for (name, problem), by_commit in sorted(values.items(), key=lambda item: list(SERIES).index(item[0][0])):
        heading, unit, factor = SERIES[name]
        numbers = [by_commit.get(n) for n in range(len(measured))]
        numbers = [None if one is None else float(f"{one * factor:.4g}") for one in numbers]
        known = [one for one in numbers if one is not None]
        ends = {"first": known[0], "last": known[-1], "ratio": float(f"{known[-1] / known[0]:.3g}")}
        rows.append({"benchmark": heading, "problem": problem, "unit": unit, **ends, "values": numbers})
    return measured, rows


def steps(commits: list[dict], rows: list[dict]) -> list[dict]:
    """One row for each commit at which a series changes by a factor of :data:`LEAST` or more."""
    from asv.step_detect import detect_steps

    changes: dict[int, list[tuple[str, str]]] = {}
    for row in rows:
        logs = [None if value is None else math.log(value) for value in row["values"]]
        pieces = detect_steps(logs)
        for before, after in zip(pieces, pieces[1:], strict=False):
            ratio = math.exp(after[2] - before[2])
            if max(ratio, 1 / ratio) >= LEAST:
                at = next(n for n in range(after[0], after[1]) if logs[n] is not None)
                change = f"{row['benchmark']}{', ' * bool(row['problem'])}{row['problem']} × {ratio:.2f}"
                changes.setdefault(at, []).append((row["benchmark"], change))
    return [
        {
            "step": number,
            "at": at,
            **commits[at],
            "subject": record.git("log", "-1", "--format=%s", commits[at]["commit"]),
            "changes": "; ".join(change for _, change in changes[at]),
            "benchmarks": list(dict.fromkeys(benchmark for benchmark, _ in changes[at])),
        }
        for number, at in enumerate(sorted(changes), 1)
    ]


def main() -> None:
    """Build, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="folder that holds, or gets, the package of each commit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--built", action="store_true", help="measure only commits whose package is there")
    parser.add_argument("--only", nargs="*", metavar="COMMIT", help="add a measurement of these commits")
    parser.add_argument("--report", action="store_true", help="write the last run's figures again")
    args = parser.parse_args()
    if args.packages is None and not args.report:
        parser.error("expected --packages or --report")
    commits = json.loads((FOLDER / "commits.json").read_text())
    chosen = commits
    if args.only:
        chosen = [entry for entry in commits if entry["commit"].startswith(tuple(args.only))]
    if args.built:
        chosen = [entry for entry in chosen if list(args.packages.glob(f"{entry['commit']}*/spattn"))]
    if not args.report:
        if not args.only:
            shutil.rmtree(MEASURED, ignore_errors=True)
        measure(chosen, args.packages, args.rounds)
    measured, rows = collect(commits)
    found = steps(measured, rows)
    facts = {"commits": [entry["commit"] for entry in measured], "dates": [entry["date"] for entry in measured]}
    record.write("history", rows, notes=NOTES, rounds=args.rounds, **facts)
    record.write("history_steps", found, notes=f"Steps of asv's detection by a factor of {LEAST} or more.")


if __name__ == "__main__":
    main()
