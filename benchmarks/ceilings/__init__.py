"""Measured peak rates of one CPU core: arithmetic, exponentials, memory reads.

``Ceilings().sample("fma_fp32")`` runs one short loop of ceilings.c and stores its rate; ``median`` is over all samples.
Benchmarks sample between their contenders, so a machine that slows down lowers the ceiling along with the results.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

_SOURCE = Path(__file__).with_name("ceilings.c")
_FLAGS = ["-O3", "-march=native", "-funroll-loops", "-std=gnu11", "-shared", "-fPIC"]
_SECONDS = 0.008  # per sample: long against the clock resolution, short against a time slice
_KIB, _MIB = 1 << 10, 1 << 20

TITLES = {
    "fma_fp32": "fp32 fused multiply-add",
    "dot_bf16": "bf16 dot product (vdpbf16ps)",
    "amx_registers": "bf16 AMX, operands in tile registers",
    "amx_l1": "bf16 AMX, operands loaded from L1",
    "gemm_fp32": "torch.mm fp32, 1024³ (MKL)",
    "gemm_bf16": "torch.mm bf16, 1024³ (oneDNN)",
    "exp_fp32": "fp32 exp2 with row sum, in L1",
    "read_l1": "read 16 KiB, L1",
    "read_l2": "read 512 KiB, L2",
    "read_l3": "read 8 MiB, L3",
    "read_dram": "read 256 MiB, DRAM",
}
UNITS = {name: "GB/s" if name.startswith("read") else "Gexp/s" if name.startswith("exp") else "GF/s" for name in TITLES}
_READ_BYTES = {"read_l1": 16 * _KIB, "read_l2": 512 * _KIB, "read_l3": 8 * _MIB, "read_dram": 256 * _MIB}


def build() -> ctypes.CDLL:
    """Compile ceilings.c for this processor into the temporary folder and load it."""
    compiler = os.environ.get("CC", "cc")
    key = hashlib.sha256(
        _SOURCE.read_bytes() + _version(compiler) + Path("/proc/cpuinfo").read_bytes()[:2000]
    ).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"spattn-ceilings-{key}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *_FLAGS, "-o", unfinished, _SOURCE], check=True)
        unfinished.rename(library)
    loaded = ctypes.CDLL(str(library))
    for name in ("vector_bytes", "fma_fp32", "dot_bf16", "amx_registers", "amx_l1", "exp_fp32", "read_memory"):
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout


class Ceilings:
    """Rates of this machine, sampled on demand.

    Attributes
    ----------
    samples : dict of list of float
        Rates in :data:`UNITS`; 0 if the machine lacks the instruction.
    """

    def __init__(self):
        self._library = build()
        self._rounds: dict[str, int] = {}
        self.samples: dict[str, list[float]] = {}
        self._buffers: dict[str, np.ndarray] = {}

    @property
    def vector_bits(self) -> int:
        """Vector width that the loops were compiled for."""
        return 8 * self._library.vector_bytes()

    def sample(self, *names: str) -> None:
        """Measure each rate once, by CPU time."""
        for name in names:
            work = self._loop(name)
            if name not in self._rounds:
                self._rounds[name] = _calibrate(work)
            seconds, done = _timed(work, self._rounds[name])
            self.samples.setdefault(name, []).append(done / seconds / 1e9)

    def median(self, name: str, last: int | None = None) -> float:
        """Median rate of all samples, or of the `last` ones."""
        return statistics.median(self.samples[name][-(last or 0) :])

    def reference(self, dtype: str) -> str:
        """Name of a dtype's arithmetic ceiling: AMX from L1 if available, else the faster vector instruction."""
        if dtype == "float32":
            return "fma_fp32"
        names = ("amx_l1", "dot_bf16", "fma_fp32")
        for name in names:
            if name not in self.samples:
                self.sample(name)
        if self.median("amx_l1"):
            return "amx_l1"
        return max(names[1:], key=self.median)

    def rows(self) -> list[dict]:
        """One row per available ceiling, for a results file."""
        return [
            {
                "what": TITLES[name],
                "name": name,
                "unit": UNITS[name],
                "median": round(self.median(name), 1),
                "least": round(min(rates), 1),
                "most": round(max(rates), 1),
                "samples": len(rates),
            }
            for name, rates in sorted(self.samples.items(), key=lambda item: list(TITLES).index(item[0]))
            if max(rates)
        ]

    def _loop(self, name: str):
        if name.startswith("gemm"):
            return self._gemm(name)
        if name.startswith("read"):
            size = _READ_BYTES[name]
            buffer = self._buffer(name, size)
            return lambda rounds: self._library.read_memory(
                _pointer(buffer), ctypes.c_int64(size), ctypes.c_int64(rounds)
            )
        if name == "exp_fp32":
            values, results = self._buffer("values", 8 * _KIB), self._buffer("results", 8 * _KIB)
            values[:] = -np.linspace(0, 8, len(values), dtype=np.float32)
            return lambda rounds: self._library.exp_fp32(
                _pointer(values), _pointer(results), ctypes.c_int64(len(values)), ctypes.c_int64(rounds)
            )
        function = getattr(self._library, name)
        return lambda rounds: function(ctypes.c_int64(rounds))

    @functools.cache  # noqa: B019 - one object per process
    def _gemm(self, name: str):
        import torch

        a, b = torch.ones((2, 1024, 1024), dtype=torch.float32 if name == "gemm_fp32" else torch.bfloat16)

        def multiply(rounds: int) -> int:
            for _ in range(rounds):
                torch.mm(a, b)
            return rounds * 2 * 1024**3

        return multiply

    def _buffer(self, name: str, size: int) -> np.ndarray:
        if name not in self._buffers:
            block = np.ones(size // 4 + 1024, dtype=np.float32)
            first = -block.ctypes.data % 4096 // 4
            self._buffers[name] = block[first : first + size // 4]
        return self._buffers[name]


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _timed(work, rounds: int) -> tuple[float, int]:
    start = time.thread_time()
    done = work(rounds)
    return max(time.thread_time() - start, 1e-9), done


def _calibrate(work) -> int:
    """Rounds that take about _SECONDS; 1 if the instruction is missing."""
    rounds = 1
    while True:
        seconds, done = _timed(work, rounds)
        if not done or seconds > _SECONDS / 2:
            return rounds
        rounds *= 2
