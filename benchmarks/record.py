"""Write a benchmark's results with the command, machine, versions and commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
CPUINFO = Path("/proc/cpuinfo")
_PACKAGES = ("spattn", "numpy", "ml_dtypes", "torch", "pycuda")
_ZEN = {"23": "zen2", "25": "zen3", "26": "zen5"}  # AMD's CPU families; family 25 with AVX-512 is Zen 4


def write(name: str, rows: list[dict], *, notes: str, gpu: str | None = None, **facts) -> Path:
    """Write ``results/NAME-MACHINE.json`` and print its path.

    Parameters
    ----------
    name : str
        File name without the machine; the script's name, or begins with it.
    rows : list of dict
        The measurements, one JSON object each; units are part of the field names (``_ms``, ``_kib``).
    notes : str
        How the figures were measured, in a sentence or two.
    gpu : str, optional
        Name of the GPU that the figures are from. Default: they are from the CPU.
    **facts
        More top-level fields, such as the shape of the problem.

    Notes
    -----
    The environment variable SPATTN_RESULTS selects another folder. A forced instruction set (SPATTN_ISA) or kernel
    family (SPATTN_CUDA_KERNEL) becomes part of the file name.
    """
    record = {
        "benchmark": name,
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "notes": notes,
        "machine": machine() | ({"gpu": gpu} if gpu else {}),
        "versions": versions(),
        **facts,
        "results": rows,
    }
    path = results_folder() / file_name(name, gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path}")
    return path


def results_folder() -> Path:
    """``benchmarks/results``, or the folder that the environment variable SPATTN_RESULTS names."""
    return Path(os.environ.get("SPATTN_RESULTS", ROOT / "benchmarks" / "results"))


def file_name(name: str, gpu: str | None = None) -> str:
    """``NAME-MACHINE.json``; ``NAME_VARIANT-MACHINE.json`` for a forced instruction set or kernel family."""
    variant = os.environ.get("SPATTN_CUDA_KERNEL" if gpu else "SPATTN_ISA", "auto")
    return f"{name}{'' if variant == 'auto' else '_' + variant}-{slug(gpu)}.json"


def slug(gpu: str | None = None, cpuinfo: str | None = None) -> str:
    """The machine in a word or two: ``h200``, ``xeon-amx``, ``zen4``.

    Parameters
    ----------
    gpu : str, optional
        As PyTorch names it: ``NVIDIA H100 80GB HBM3`` is ``h100``.
    cpuinfo : str, optional
        Text of ``/proc/cpuinfo``. Default: this machine's.
    """
    if gpu:
        words = re.split(r"[\s-]+", gpu.lower())
        last = next((n for n, word in enumerate(words) if re.search(r"\d", word)), len(words) - 1)
        return "-".join(word for word in words[: last + 1] if word not in ("nvidia", "geforce"))
    facts = _cpu_facts(cpuinfo)
    flags = facts.get("flags", "").split()
    family = facts.get("cpu family", "")
    if facts.get("vendor_id") == "AuthenticAMD" and family in _ZEN:
        return "zen4" if family == "25" and "avx512f" in flags else _ZEN[family]
    model = re.sub(r"\([^)]*\)", " ", facts.get("model name", "") or platform.processor() or platform.machine())
    noise = {"intel", "amd", "gen", "processor", "cpu", "core"}
    words = [word for word in re.findall(r"\b[a-z][a-z0-9]*", model.lower()) if word not in noise]
    widest = next((name for flag, name in _VECTORS if flag in flags), None)
    return "-".join([*words[:1], *([widest] if widest else [])]) or "unknown"


_VECTORS = (("amx_bf16", "amx"), ("avx512f", "avx512"), ("avx2", "avx2"))


def machine() -> dict[str, object]:
    """Processor, number of cores that this process may use, and operating system."""
    system = f"{platform.system()} {platform.machine()}"
    model = _cpu_facts().get("model name") or platform.processor()
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "system": system}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages among spattn, NumPy, ml_dtypes, PyTorch and PyCUDA."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Hash of the checked-out commit; ends in ``-dirty`` if the package or the benchmarks differ from it.

    The environment variable SPATTN_COMMIT replaces it where the tree was copied without its history.
    """
    if "SPATTN_COMMIT" in os.environ:
        return os.environ["SPATTN_COMMIT"]
    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", "src", "meson.build", "benchmarks/*.py")
    return f"{head}-dirty" if changed else head


def git(*arguments: str) -> str:
    """What git prints in this repository."""
    return subprocess.run(["git", "-C", ROOT, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _cpu_facts(text: str | None = None) -> dict[str, str]:
    """The fields of the first processor in ``/proc/cpuinfo``."""
    if text is None:
        text = CPUINFO.read_text() if CPUINFO.exists() else ""
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
