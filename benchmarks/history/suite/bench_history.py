"""CPU time on one thread, bytes of plans and of processes, through the API that all commits share."""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "regressions"))  # for compat

from compat import pattern as named

import spattn
from spattn import patterns as sp

TOKENS, HEADS, HEAD_DIM = 4096, 2, 64
LONG = 65536  # tokens of plans
BLOCKS = 64
PATTERNS = {
    "window": lambda: sp.SlidingWindow(256),
    "causal": lambda: sp.Causal(),
    "Longformer": lambda: named("longformer", 512, global_tokens=16),
    "BigBird": lambda: sp.BigBird(BLOCKS),
    "strided": lambda: named("strided", 64),
    "neighborhood": lambda: sp.Neighborhood((64, 64), 13),
}
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def arrays(q_len: int, kv_len: int, dtype: str = "float32", heads: int = HEADS) -> list[np.ndarray]:
    """Random q, k and v."""
    rng = np.random.default_rng(0)
    shapes = [(1, heads, n, HEAD_DIM) for n in (q_len, kv_len, kv_len)]
    return [rng.standard_normal(shape, np.float32).astype(TYPES[dtype]) for shape in shapes]


def empty_cache() -> None:
    """Drop all cached plans; before `clear_plan_cache` existed, the cache was a dictionary."""
    if hasattr(spattn, "clear_plan_cache"):
        spattn.clear_plan_cache()
    else:
        importlib.import_module("spattn.plan")._cache.clear()


class Timed:
    """CPU time. Calls that a commit lacks raise NotImplementedError, which asv reports as n/a."""

    timer = time.process_time
    rounds = 1
    repeat = (4, 10, 0.06)
    warmup_time = 0.01
    sample_time = 0.005


class Forward(Timed):
    """One forward call with a cached plan."""

    params = (
        [f"{name}, float32" for name in PATTERNS]
        + ["window, bfloat16", "causal, bfloat16"]
        + ["128 tokens, float32", "one query of 4096 keys, float32"]
    )
    param_names = ("problem",)

    def setup(self, problem):
        name, dtype = problem.rsplit(", ", 1)
        q_len, kv_len = {"128 tokens": (128, 128), "one query of 4096 keys": (1, TOKENS)}.get(name, (TOKENS, TOKENS))
        self.qkv = arrays(q_len, kv_len, dtype, HEADS if q_len > 1 else 8)
        self.pattern = PATTERNS["causal" if q_len == 1 else "window" if q_len == 128 else name]()
        self.time_forward(problem)

    def time_forward(self, problem):
        spattn.attention(*self.qkv, self.pattern, backend="cpu")


class Backward(Timed):
    """One backward call with a cached plan."""

    params = ["window, float32", "causal, float32", "strided, float32", "window, bfloat16"]
    param_names = ("problem",)

    def setup(self, problem):
        name, dtype = problem.rsplit(", ", 1)
        q, k, v = arrays(TOKENS // 2, TOKENS // 2, dtype)
        pattern = PATTERNS[name]()
        if not hasattr(spattn, "attention_backward"):
            raise NotImplementedError("attention_backward")
        out, lse = spattn.attention(q, k, v, pattern, backend="cpu", return_lse=True)
        self.arguments = (out, q, k, v, out, lse, pattern)
        self.time_backward(problem)

    def time_backward(self, problem):
        spattn.attention_backward(*self.arguments, backend="cpu")


class Plan(Timed):
    """A new plan, its bytes and its efficiency."""

    params = list(PATTERNS)
    param_names = ("pattern",)

    def setup(self, name):
        self.pattern = sp.Neighborhood((256, 256), 13) if name == "neighborhood" else PATTERNS[name]()

    def new(self):
        empty_cache()
        return spattn.plan(self.pattern, LONG)

    def time_plan(self, name):
        self.new()

    def track_bytes(self, name):
        return self.new().nbytes

    track_bytes.unit = "bytes"


class Memory:
    """Peak resident memory of a process that plans, or that plans and computes."""

    def peakmem_plan(self):
        spattn.plan(PATTERNS["BigBird"](), LONG)

    def peakmem_forward(self):
        spattn.attention(*arrays(TOKENS, TOKENS), PATTERNS["Longformer"](), backend="cpu")


class Import:
    """CPU time of a fresh interpreter that imports spattn, less that of one that imports NumPy."""

    def track_import(self):
        def seconds(module):
            times = []
            for _ in range(3):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=self.environment)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            return min(times)

        return seconds("spattn") - seconds("numpy")

    track_import.unit = "seconds"

    def setup(self):
        folder = str(Path(spattn.__file__).parents[1])
        self.environment = os.environ | {"PYTHONPATH": folder}
