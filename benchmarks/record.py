"""What every committed result says about itself: the command, the machine, the versions, the commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("spattn", "numpy", "ml_dtypes", "torch", "pycuda")


def write(name: str, rows: list[dict], *, notes: str, **facts) -> Path:
    """Write ``results/NAME.json`` and say where it went.

    Parameters
    ----------
    name : str
        File name without its ending.
    rows : list of dict
        The measurements, one JSON object each; units are part of the field names (``_ms``, ``_kib``).
    notes : str
        How the figures were taken, in a sentence or two.
    **facts
        More top-level fields, such as the shape of the problem.
    """
    record = {
        "benchmark": name,
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "notes": notes,
        "machine": machine(),
        "versions": versions(),
        **facts,
        "results": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path}")
    return path


def machine() -> dict[str, object]:
    """Processor, cores that this process may use, and system."""
    system = f"{platform.system()} {platform.machine()}"
    return {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "system": system}


def versions() -> dict[str, str]:
    """Python and the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit; ``-dirty`` when the sources of the package differ from it.

    The environment variable SPATTN_COMMIT says it where the files were copied without their history.
    """
    if "SPATTN_COMMIT" in os.environ:
        return os.environ["SPATTN_COMMIT"]
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", "src", "meson.build", "benchmarks/*.py")
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
