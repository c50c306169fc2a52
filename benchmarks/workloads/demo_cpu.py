"""Run the example and write its figures: results/demo_cpu.json, the README's tables, docs/images/demo_*.png.

    make demo && .venv/bin/python benchmarks/workloads/demo_cpu.py

The machine must be otherwise idle: a run during which other programs took more than a tenth of the processors is
discarded.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "benchmarks"))  # for the shared modules

from sentence_encoder.others import set_up_threads  # noqa: E402

set_up_threads()  # before NumPy and spattn are imported

import readme_tables  # noqa: E402
import record  # noqa: E402
from sentence_encoder import report as example  # noqa: E402

IMAGES = ROOT / "docs" / "images"
_BUSY = 0.1
_SECONDS = 240  # more rounds than `make demo`, which has 80 s


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


def main() -> int:
    """Run the example; 0 if its results agree and the machine was idle."""
    with tempfile.TemporaryDirectory() as folder:
        if not example.run(Path(folder), "cpu", seconds=_SECONDS):
            print("demo_cpu: results do not agree; nothing was recorded", file=sys.stderr)
            return 1
        report = json.loads((Path(folder) / "demo.json").read_text())
        taken = report["machine"]["taken by other programs"]
        if taken > _BUSY:
            print(f"demo_cpu: other programs took {100 * taken:.0f} % of the processors; not recorded", file=sys.stderr)
            return 1
        IMAGES.mkdir(exist_ok=True)
        for picture in ("speed", "patterns", "embeddings"):
            shutil.copy(Path(folder) / f"{picture}.png", IMAGES / f"demo_{picture}.png")
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
    readme_tables.main()
    return 0


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


if __name__ == "__main__":
    sys.exit(main())
