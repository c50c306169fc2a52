#!/usr/bin/env python3
"""Measure a transformer block whose batch entries, heads and hidden units are sharded over GPUs.

    python benchmarks/distributed/hybrid_cuda.py --gpus 4     # 90 s on four H200s; needs torch and NCCL

A training step of the block of ``examples/hybrid_block.py`` in bfloat16: width 4096, 32 heads, batch 4 of 8192 tokens,
with windows of 1024, 512 and 256 tokens and with all tokens before (*dense*). Each number of GPUs and each layout,
beside one GPU, and beside one rank's share without communication. Before, the attention of 128 tokens alone. Writes
``hybrid_cuda_two`` or ``hybrid_cuda_four`` after each number of GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import gpu_timing
import hybrid_block
import record
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks_timing import milliseconds

SIZES = "--width 4096 --heads 32 --length 8192 --batch 4"
WINDOWS = {"windows": 1024, "dense": 0}
COUNTS = {2: "two", 4: "four"}
SMALL = 4, 8, 128, 64  # batch, heads, tokens, head_dim
NOTES = (
    "Median of rounds of one to eight steps, forward and backward, of the slowest rank, between CUDA events. "
    "compute_ms: a rank's share without communication. communication_percent: the rest of the step. speedup: over one "
    "GPU. Attention of 128 tokens: forward, in replays of a CUDA graph; unfused: product, mask, softmax and product in "
    "PyTorch."
)


def blocks(rank: int, world_size: int, store: str, until: float) -> None:
    """Measure all layouts of some GPUs; rank 0 appends rows to the file `store`."""
    threading.Timer(until - time.time(), lambda: os._exit(3)).start()
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}.{world_size}", rank=rank, world_size=world_size)
    for name, window in WINDOWS.items():
        args = hybrid_block.arguments([*SIZES.split(), "--window", str(window)])
        args.device, args.dtype = f"cuda:{rank}", torch.bfloat16
        torch.manual_seed(1)
        x = torch.randn(args.batch, args.length, args.width, device=args.device, dtype=args.dtype)
        alone = hybrid_block.made(args)
        want = hybrid_block.step(alone, x)
        one = milliseconds(lambda block=alone, x=x: hybrid_block.step(block, x), True)
        if rank == 0 and world_size == 2:
            append(store, {"attention": name, "gpus": 1, "step_ms": one})
        del alone
        for tensor in (size for size in range(1, world_size + 1) if world_size % size == 0):
            data = world_size // tensor
            mesh = dist.init_device_mesh("cuda", (data, tensor), mesh_dim_names=("data", "tensor"))
            mine = mesh["data"].get_local_rank()
            own, block = x.chunk(data)[mine], hybrid_block.parallel(args, mesh)
            difference = (hybrid_block.step(block, own) - want.chunk(data)[mine]).abs().max()
            dist.all_reduce(difference, dist.ReduceOp.MAX)
            took = milliseconds(lambda block=block, own=own: hybrid_block.step(block, own), True)
            del block
            share = hybrid_block.made(args, tensor, mesh["tensor"].get_local_rank())
            compute = milliseconds(lambda block=share, own=own: hybrid_block.step(block, own), True)
            del share
            torch.cuda.empty_cache()
            row = {
                "attention": name,
                "gpus": world_size,
                "data": data,
                "tensor": tensor,
                "step_ms": took,
                "compute_ms": compute,
                "communication_percent": round(100 * max(0.0, 1 - compute / took), 1),
                "speedup": round(one / took, 3),
                "largest_difference": float(difference),
            }
            if rank == 0:
                append(store, row)
    dist.barrier()
    os._exit(0)


def append(store: str, row: dict) -> None:
    """Print a row, and append it to the file."""
    print(row, flush=True)
    with Path(store).open("a") as file:
        print(json.dumps(row), file=file)


def small() -> list[dict]:
    """Return the time of attention of 128 tokens, window 32, of several implementations."""
    import spattn
    from spattn.patterns import SlidingWindow

    found, (batch, heads, tokens, width) = [], SMALL
    q, k, v = (torch.randn(batch, heads, tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    at = torch.arange(tokens, device="cuda")
    near = (at[:, None] - at).abs() <= 32

    def unfused(q, k, v, mask):
        scores = q @ k.transpose(2, 3) * width**-0.5
        return torch.softmax(scores if mask is None else scores.masked_fill(~mask, float("-inf")), -1) @ v

    contenders = {
        "unfused, dense": lambda: unfused(q, k, v, None),
        "unfused, masked": lambda: unfused(q, k, v, near),
        "SDPA, dense": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        "spattn, window 32": lambda: spattn.attention(q, k, v, SlidingWindow(32)),
    }
    torch.testing.assert_close(contenders["spattn, window 32"](), unfused(q, k, v, near), atol=2e-2, rtol=2e-2)
    for name, call in contenders.items():
        for _ in range(3):
            call()
        row = {"attention": name, "tokens": tokens, "graph_us": round(gpu_timing.graph_us(call, calls=10), 2)}
        found.append(row | {"host_us": round(gpu_timing.host_us(call), 1)})
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2, choices=COUNTS, help="largest number of GPUs")
    parser.add_argument("--limit", type=float, default=100, help="seconds until a number of GPUs is given up")
    options = parser.parse_args()
    rows, name = small(), torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        for world_size in (size for size in COUNTS if size <= options.gpus):
            store = Path(folder) / f"rows{world_size}"
            store.touch()
            try:
                mp.spawn(blocks, (world_size, str(store), time.time() + options.limit), nprocs=world_size)
            except mp.ProcessExitedException as error:
                print(f"{world_size} GPUs: {error}"[:300], flush=True)
            rows += map(json.loads, store.read_text().splitlines())
            record.write(f"hybrid_cuda_{COUNTS[options.gpus]}", rows, notes=NOTES, gpu=name, gpus=options.gpus)


if __name__ == "__main__":
    main()
