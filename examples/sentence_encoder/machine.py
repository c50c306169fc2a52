"""Facts about the machine."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
from pathlib import Path

import spattn

_CPUINFO = Path("/proc/cpuinfo")


def facts() -> dict[str, object]:
    """Versions, backends, the processor's name and the number of CPUs that this process may use."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        spattn.show_versions()
    known: dict[str, object] = {}
    for line in printed.getvalue().splitlines():
        name, _, value = re.sub(r"\s{2,}", "\t", line.strip()).partition("\t")
        known[name] = int(value) if value.isdecimal() else value
    return known | {"processor": _processor(), "cpus": len(os.sched_getaffinity(0))}


def _processor() -> str:
    """The processor's model name; its architecture where /proc/cpuinfo has none."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line for line in lines if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()
