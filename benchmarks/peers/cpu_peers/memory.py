"""Peak memory of one call, each contender in its own process."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch.nn.functional as F

import spattn

from . import contenders, problems

_MIB = 1 << 20
# Return freed blocks to the system at once, so that the call starts from the memory in use.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def in_a_process(script: str, problem: str, contender: str, dtype: str, both: bool, quick: bool) -> dict:
    """The row that ``SCRIPT --memory-of`` prints in a new process, or the reason for its failure."""
    command = [sys.executable, script, "--memory-of", problem, contender, dtype, "both" if both else "forward"]
    command += ["--quick"] if quick else []
    done = subprocess.run(command, env=os.environ | _MALLOC, capture_output=True, text=True)
    if done.returncode:
        return {"reason": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(problem: problems.Problem, name: str, dtype: str, both: bool) -> dict:
    """Peak MiB above the memory in use before: of a call, and of its preparation (plan, mask, index)."""
    given = problems.inputs(problem, dtype)
    _load_libraries(given)
    before = _start()
    contender = contenders.build(name, problem, given, both)
    prepared = _peak() - before
    # FlexAttention ran when it was built; the first call of the others counts what it keeps.
    before = _start()
    contender.call()
    peak = _peak() - before
    return {"prepare_mib": _mib(prepared), "call_mib": _mib(peak), "output_mib": _mib(_result_bytes(given, both))}


def _load_libraries(given: problems.Inputs) -> None:
    """Run first calls, which load libraries into memory."""
    few = [x[:, :1, :64] for x in (given.q, given.k, given.v)]
    F.scaled_dot_product_attention(*few)
    spattn.attention(*few, spattn.patterns.Full(), backend="cpu")
    spattn.attention(*few, spattn.patterns.SlidingWindow(16), backend="cpu")


def _start() -> int:
    """Reset the peak of this process and return the bytes in use."""
    spattn.cpu.free_workspaces()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets VmHWM
        return _status("VmRSS")
    return _peak()


def _peak() -> int:
    if sys.platform == "linux":
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def _result_bytes(given: problems.Inputs, both: bool) -> int:
    tensors = (given.q,) if not both else (given.q, given.q, given.k, given.v)
    return sum(x.numel() * x.element_size() for x in tensors)


def _mib(size: int) -> float:
    return round(size / _MIB, 1)
