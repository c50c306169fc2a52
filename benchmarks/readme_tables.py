"""Write the README's tables of figures from results/*.json.

    python benchmarks/readme_tables.py

A table stands between ``<!-- NAME: benchmarks/readme_tables.py -->`` and ``<!-- end -->``; tests/test_front.py compares
each with the committed results.
"""

from __future__ import annotations

import json
import re

import record

README = record.ROOT / "README.md"
TABLE = re.compile(r"(<!-- (\w+): benchmarks/readme_tables\.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CPU_ROWS = (
    "naive dense (NumPy)",
    "spattn dense",
    "causal",
    "sliding window ±256",
    "Longformer ±256 + 16 global",
    "BigBird 64 (3 window, 1 global, 3 random)",
    "strided 128",
)
GPU_ROWS = ("dense", "causal", "window ±256", "Longformer ±256 + 64", "strided 128", "neighbourhood 128×128, 13×13")


def main() -> None:
    """Rewrite the tables in README.md."""
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text: str) -> str:
    """The text with its tables made anew."""
    return TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[4]}", text)


def demo_cpu() -> str:
    """Part (c) of ``make demo`` at 16384 tokens."""
    lines = ["| CPU, 16384 tokens | pairs | ms | speed-up (naive dense) | speed-up (spattn dense) |"]
    lines.append("|---|--:|--:|--:|--:|")
    rows = {row["name"]: row for row in _results("demo_cpu") if row["tokens"] == 16384}
    for name in CPU_ROWS:
        row = rows[name]
        naive, dense = (row.get(f"times_faster_than_{baseline}_dense") for baseline in ("naive", "spattn"))
        dense = f"{dense:.3g}×" if dense else "–"
        lines.append(f"| {name} | {row['pairs_percent']:.3g} % | {row['ms']:.4g} | {naive:.3g}× | {dense} |")
    return "\n".join(lines)


def peers_cuda() -> str:
    """spattn beside its fastest peer on an H200: 16384 tokens, head_dim 128."""
    lines = ["| GPU (H200), 16384 tokens | ms | fastest peer | ms | speed-up |", "|---|--:|---|--:|--:|"]
    rows = [r for r in _results("peers_cuda") if r.get("tokens") == 16384 and r["head_dim"] == 128]
    for problem in GPU_ROWS:
        own, *peers = sorted((r for r in rows if r["problem"] == problem), key=lambda r: r["contender"] != "spattn")
        peer = min(peers, key=lambda r: r["median_ms"])
        times = peer["median_ms"] / own["median_ms"]
        name = problem.replace("neighbour", "neighbor")  # recorded results keep the spelling of their run
        lines.append(
            f"| {name} | {own['median_ms']:.3g} | {peer['contender']} | {peer['median_ms']:.3g} | {times:.3g}× |"
        )
    return "\n".join(lines)


def _results(name: str) -> list[dict]:
    file = next(f for f in sorted(record.results_folder().glob(f"{name}-*.json")) if not f.stem.endswith("-h100"))
    return json.loads(file.read_text(encoding="utf-8"))["results"]


TABLES = {"demo_cpu": demo_cpu, "peers_cuda": peers_cuda}


if __name__ == "__main__":
    main()
