#!/usr/bin/env python3
"""Measure a tensor-parallel rank's share of a training step on one CPU thread.

    OMP_NUM_THREADS=1 python benchmarks/distributed/tensor_parallel.py            # two minutes; needs torch
    OMP_NUM_THREADS=1 python benchmarks/distributed/tensor_parallel.py --quick    # 256 tokens, writes nothing

The block of ``examples/hybrid_block.py``, without communication: CPU time of forward and backward of each rank's heads
and hidden units, in turns with the block of one process. All-reduces and their bytes are counted in the sharded block,
with a process group that sends nothing. *causal* is the same block without windows. Writes ``tensor_parallel``.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import hybrid_block
import record
import torch
import torch.distributed as dist
from timing import medians_in_turns
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = (1, 2, 4, 8)
NOTES = (
    "One step, forward and backward, float32, batch 1, one process, one thread, in turns; medians of CPU time, no "
    "communication. slowest_ms, fastest_ms: of the ranks. times_ideal: slowest_ms over the step of one process divided "
    "by the ranks. all_reduces, all_reduce_mib: counted in the sharded block, of one rank."
)


class AllReduces(TorchDispatchMode):
    """The bytes of each all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Run an operator."""
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.bytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def all_reduces(args: argparse.Namespace, ranks: int, x: torch.Tensor) -> tuple[list[int], list[int]]:
    """Bytes of each all-reduce of a forward and of its backward."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    block = hybrid_block.parallel(args, dist.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "tensor")))
    with AllReduces() as forward:
        out = block(x)
    with AllReduces() as backward:
        out.sum().backward()
    dist.destroy_process_group()
    return forward.bytes, backward.bytes


def measure(sizes: dict[str, int], rounds: int) -> list[dict[str, object]]:
    """Rows of the results: of windows, then of causal attention."""
    torch.manual_seed(1)
    x = torch.randn(1, sizes["length"], sizes["width"])
    whole = {"window": 4 * sizes["length"]}  # a head's window is a quarter at least
    given = {"windows": sizes, "causal": sizes | whole}
    args = {
        name: hybrid_block.arguments([f"--{option}={size}" for option, size in options.items()])
        for name, options in given.items()
    }
    calls = {
        (name, ranks, rank): partial(hybrid_block.step, hybrid_block.made(own, ranks, rank), x)
        for name, own in args.items()
        for ranks in RANKS
        for rank in range(ranks)
    }
    taken = medians_in_turns(calls, rounds)
    rows: list[dict[str, object]] = []
    for name, own in args.items():
        for ranks in RANKS:
            ms = [taken[name, ranks, rank] for rank in range(ranks)]
            row = {"attention": name, "ranks": ranks, "slowest_ms": round(max(ms), 2), "fastest_ms": round(min(ms), 2)}
            row["times_ideal"] = round(max(ms) * ranks / taken[name, 1, 0], 3)
            if ranks > 1:
                forward, backward = all_reduces(own, ranks, x)
                row |= {"all_reduces_forward": len(forward), "all_reduces_backward": len(backward)}
                row["all_reduce_mib"] = sum(forward + backward) / 2**20
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="256 tokens, write nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    sizes = {"width": 256, "heads": 8, "length": 256 if quick else 4096, "window": 512}
    rows = measure(sizes, 5)
    if not quick:
        record.write("tensor_parallel", rows, notes=NOTES, block=sizes)


if __name__ == "__main__":
    main()
