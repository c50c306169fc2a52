#!/usr/bin/env python3
"""Run the demo and update its committed results, README table and figures.

    make demo && .venv/bin/python benchmarks/workloads/demo_cpu.py

The machine must be idle: results are discarded if other programs took more than a tenth of the processors. Writes
``demo_cpu``, the table in README.md and docs/images/demo_*.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

from spattn import demo

README = record.ROOT / "README.md"
BEGIN, END = "<!-- written by benchmarks/workloads/demo_cpu.py -->", "<!-- end -->"
_BUSY = 0.1


def rows(report: dict) -> list[dict]:
    """One row per pattern and length, naive dense attention included."""
    naive = {d["tokens"]: d for d in report["dense"]}
    own = {c["tokens"]: c["timing"]["seconds"] for c in report["speed"] if c["pattern"] == "spattn dense"}
    found = [
        {
            "name": "naive dense (NumPy)",
            "tokens": n,
            "ms": _ms(d["seconds"]),
            "runs": d["runs"],
            "pairs_percent": 100.0,
            "times_faster_than_naive_dense": 1.0,
        }
        for n, d in naive.items()
    ]
    found += [
        {
            "name": c["pattern"],
            "tokens": c["tokens"],
            "ms": _ms(c["timing"]["seconds"]),
            "runs": c["timing"]["runs"],
            "pairs_percent": round(100 * c["density"], 3),
            "efficiency": round(c["efficiency"], 3),
            "plan_ms": _ms(c["plan_seconds"]),
            "times_faster_than_naive_dense": round(c["speedup"], 2),
            "times_faster_than_spattn_dense": round(own[c["tokens"]] / c["timing"]["seconds"], 2),
        }
        for c in report["speed"]
    ]
    return found


def table(results: list[dict]) -> str:
    """The README's table for the longest length, in Markdown."""
    longest = max(r["tokens"] for r in results)
    lines = [
        f"| {longest} tokens | pairs | ms | against naive dense | against spattn dense | efficiency |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        if r["tokens"] == longest:
            dense, naive = r.get("times_faster_than_spattn_dense"), r["times_faster_than_naive_dense"]
            lines.append(
                f"| {r['name']} | {r['pairs_percent']:.3g} % | {r['ms']:.4g} | {naive:.3g}× | "
                + (f"{dense:.3g}× | {r['efficiency']:.2f} |" if dense else "– | – |")
            )
    return "\n".join(lines)


def with_table(text: str, results: list[dict]) -> str:
    """The README's text with a new table."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Run, print, write; return 1 if results disagree or the machine was busy."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not demo.run(Path(folder), "cpu"):
            print("demo_cpu: results disagree; nothing written", file=sys.stderr)
            return 1
        report = json.loads((Path(folder) / "demo.json").read_text())
        taken = report["machine"]["taken by other programs"]
        if taken > _BUSY:
            print(f"demo_cpu: other programs took {100 * taken:.0f} % of the CPU; results discarded", file=sys.stderr)
            return 1
        record.IMAGES.mkdir(exist_ok=True)
        for picture in ("speed", "patterns", "embeddings"):
            shutil.copy(Path(folder) / f"{picture}.png", record.IMAGES / f"demo_{picture}.png")
    results = rows(report)
    notes = f"Medians of wall time, contenders in turns, float32, all threads. {report['settings']['note']}."
    record.write(
        "demo_cpu",
        results,
        notes=notes,
        settings=report["settings"],
        agreement=report["agreement"],
        embeddings=report["embeddings"],
        taken_by_other_programs=taken,
    )
    README.write_text(with_table(README.read_text(), results))
    return 0


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


if __name__ == "__main__":
    sys.exit(main())
