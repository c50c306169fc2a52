"""Load by other programs, and settings that suit it. Imports no NumPy, so that the settings precede it."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_SAMPLE_SECONDS = 0.5


class Others:
    """Processor time of other programs since this object was made."""

    def __init__(self) -> None:
        self._wall, self._busy, self._own = time.perf_counter(), _busy_seconds(), time.process_time()

    def cores(self) -> float:
        """Number of processors that they occupied since then; 0 without /proc/stat."""
        busy, own = _busy_seconds() - self._busy, time.process_time() - self._own
        return min(max((busy - own) / (time.perf_counter() - self._wall), 0.0), float(os.cpu_count() or 1))

    def share(self) -> float:
        """Their share of all processor time since then, 0 to 1."""
        return self.cores() / (os.cpu_count() or 1)


def set_up_threads() -> None:
    """Let idle threads sleep, and limit NumPy's BLAS to the idle processors. The caller's environment has priority.

    A BLAS thread without a core delays each product by a slice of the scheduler: with one busy core of two, two threads
    take four times as long as one. spattn adapts the number of its threads itself.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")  # spin for 2**16 cycles instead of 2**26
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    others = Others()
    time.sleep(_SAMPLE_SECONDS)
    idle = max(1, round((os.cpu_count() or 1) - others.cores()))
    if idle < len(os.sched_getaffinity(0)):
        for library in ("OPENBLAS", "MKL"):
            os.environ.setdefault(f"{library}_NUM_THREADS", str(idle))


def _busy_seconds() -> float:
    """Seconds of all processors together that were neither idle nor waiting for I/O."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
