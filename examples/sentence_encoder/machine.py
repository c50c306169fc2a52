"""Facts about the machine, and the load by other programs."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import time
from pathlib import Path

import spattn

_CPUINFO, _STAT = Path("/proc/cpuinfo"), Path("/proc/stat")


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


class Others:
    """Processor time of other programs since this object was made."""

    def __init__(self) -> None:
        self._wall, self._busy, self._own = time.perf_counter(), _busy_seconds(), time.process_time()

    def share(self) -> float:
        """Their share of all processor time since then, 0 to 1; 0 without /proc/stat."""
        busy, own = _busy_seconds() - self._busy, time.process_time() - self._own
        seconds = (time.perf_counter() - self._wall) * (os.cpu_count() or 1)
        return min(max((busy - own) / seconds, 0.0), 1.0)


def _busy_seconds() -> float:
    """Seconds of all processors together that were neither idle nor waiting for I/O."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
