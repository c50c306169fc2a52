#!/usr/bin/env python3
"""Measure attention over a sequence on several GPUs against one.

    python benchmarks/distributed/context_cuda.py               # a minute on two H200s; needs torch and NCCL
    python benchmarks/distributed/context_cuda.py --gpus 4

Forward and backward of batch 1, 16 heads, head_dim 128, bfloat16. For each case: milliseconds of one GPU and of all,
the bytes that a rank receives, and whether all results have the bits of one rank. torch's context parallelism beside
it for causal. Writes ``context_cuda_two``, or ``context_cuda_four``, after
each case, so that it has the others if one fails or the time is up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
from ranks_timing import milliseconds

HEADS, HEAD_DIM = 16, 128
CASE_SECONDS = 40
COUNTS = {2: "two", 4: "four", 8: "eight"}
NOTES = (
    "Median of rounds of one to eight steps, forward and backward, one after the other, of the slowest rank, between "
    'CUDA events. exchange: that of "auto", and all_gpus_ms_ the time of the other. host_us: of one step. '
    "received_bytes: of each rank, forward and backward. same_bits: out, dq, dk and dv of all ranks equal those of "
    "spattn.distributed on one rank; equals_plain: those of spattn.attention (whose fused backward sums dq in another "
    "order than an exchange of rows)."
)


def cases(quick: bool) -> dict:
    """Return (pattern, length, sharding) of each case."""
    from spattn import patterns as p

    scale = 16 if quick else 1
    documents = np.random.default_rng(0).integers(2000, 14000, 100)
    documents = documents[np.cumsum(documents) < 262144 // scale]
    lengths = *documents.tolist(), 262144 // scale - int(documents.sum())
    return {
        "window 256": (p.SlidingWindow(256), (1 << 20) // scale, "contiguous"),
        "causal": (p.Causal(), 131072 // scale, "head_tail"),
        "documents": (p.Causal() & p.Documents(lengths), 262144 // scale, "balanced"),
        "strided 128": (p.strided(128), 262144 // scale, "head_tail"),
        "longformer 256 + 64": (p.longformer(512, global_tokens=64), (1 << 20) // scale, "contiguous"),
        "streaming 1023 + 4": (p.Causal() & (p.Sinks(4) | p.SlidingWindow(1023, 0)), (1 << 19) // scale, "contiguous"),
    }


def compared() -> dict:
    """Return (pattern, length, sharding) of the cases whose bits are compared with one rank."""
    from spattn import patterns as p

    return {
        "bits: window": (p.SlidingWindow(100, 60), 5000, "contiguous"),
        "bits: causal": (p.Causal(), 6000, "head_tail"),
        "bits: causal, balanced": (p.Causal(), 4999, "balanced"),
        "bits: streaming": (p.Causal() & (p.Sinks(4) | p.SlidingWindow(255, 0)), 8192, "contiguous"),
        "bits: longformer": (p.longformer(256, global_tokens=64), 8192, "contiguous"),
        "bits: documents": (p.Causal() & p.Documents((1700, 90, 3000, 1210)), 6000, "balanced"),
        "bits: strided": (p.strided(64), 8192, "contiguous"),
        "bits: dilated": (p.DilatedWindow(50, 50, 3), 4097, "striped"),
        "bits: neighborhood": (p.Neighborhood((64, 64), (13, 13)), 4096, "contiguous"),
        "bits: bigbird": (p.BigBird(3, 1, 3, 0), 4096, "contiguous"),
    }


class Ranks:
    """The measurements of one rank; rank 0 writes them."""

    def __init__(self, rank: int, world_size: int, options: argparse.Namespace):
        import torch
        import torch.distributed as dist

        self.rank, self.world_size, self.options = rank, world_size, options
        self.torch, self.dist, self.begin = torch, dist, time.monotonic()
        self.rows = json.loads(options.progress.read_text())
        self.alone = [dist.new_group([of]) for of in range(world_size)][rank]

    def write(self) -> None:
        if self.rank == 0:
            name = self.torch.cuda.get_device_name()
            record.write(
                f"context_cuda_{COUNTS[self.world_size]}", self.rows, notes=NOTES, gpu=name, gpus=self.world_size
            )

    def run(self, name: str, measure, *arguments) -> None:
        """Measure a case. An error is part of the result; after one on the GPU, or a timeout, the process ends."""
        found, failed = {}, ""
        late = threading.Timer(CASE_SECONDS, lambda: os._exit(4))
        late.start()
        if self.rank == 0:  # in case that the process ends
            self.options.progress.write_text(json.dumps([*self.rows, {"name": name, "error": "the process ended"}]))
        try:
            found = measure(name, *arguments)
        except Exception as error:
            failed = f"rank {self.rank}: {type(error).__name__}: {error}"[:400]
            traceback.print_exc()
        if "CUDA" in failed:  # no later call on this GPU works
            os._exit(5)
        errors = [text for text in self.gathered(failed) if text]
        row = {"name": name, **found, **({"error": "; ".join(errors)} if errors else {})}
        row["at_s"] = round(time.monotonic() - self.begin, 1)
        if self.rank == 0:
            print(row, flush=True)
            self.rows.append(row)
            self.options.progress.write_text(json.dumps(self.rows))
            self.write()
        late.cancel()
        self.torch.cuda.empty_cache()

    def arrays(self, length: int) -> list:
        """Return q, k, v and dout of the whole sequence, the same on all ranks."""
        torch = self.torch
        generator = torch.Generator("cuda").manual_seed(length)
        shape = 1, HEADS, length, HEAD_DIM
        return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def digests(self, arrays, rows) -> list[int]:
        """Return a sum of the bits of each array, weighted by position, over all ranks that hold rows of it."""
        torch, found = self.torch, []
        at = (rows[:, None] * HEAD_DIM + torch.arange(HEAD_DIM, device="cuda")) * 2654435761 + 1
        for x in arrays:
            bits = x.detach().contiguous().view(torch.int16)
            found.append(sum(int((bits[0, head].long() * at).sum()) * (2 * head + 1) for head in range(HEADS)))
        return [value % (1 << 62) for value in found]

    def gathered(self, value) -> list:
        """Return the values of all ranks."""
        each: list = [None] * self.world_size
        self.dist.all_gather_object(each, value)
        return each

    def attention(self, name: str, pattern, length: int, kind: str) -> dict:
        """Measure one GPU and all; small cases compare bits alone."""
        import spattn
        import spattn.distributed as sd

        torch, timed, found = self.torch, not name.startswith("bits"), {"tokens": length, "sharding": kind}
        whole = self.arrays(length)
        every = torch.arange(length, device="cuda")

        def stepped(attend, leaves, dout):
            leaves = [x.detach().requires_grad_() for x in leaves]

            def step():
                out = attend(*leaves)
                return out, *torch.autograd.grad(out, leaves, dout)

            return step

        plain = one = failed = None
        try:  # before any collective, so that all ranks know
            if self.rank == 0:
                step = stepped(lambda *x: spattn.attention(*x, pattern), whole[:3], whole[3])
                plain = self.digests(step(), every)
                if timed:
                    found["one_gpu_ms"] = milliseconds(step, False)
                step = stepped(lambda *x: sd.attention(*x, pattern, self.alone), whole[:3], whole[3])
                one = self.digests(step(), every)
                if timed:
                    found["one_rank_ms"] = milliseconds(step, False)
                del step
        except Exception as error:
            failed = error
        if any(self.gathered(failed is not None)):
            raise failed or RuntimeError("rank 0 failed alone")
        torch.cuda.empty_cache()
        sharding = sd.shard(pattern, (1, HEADS, HEADS, length, HEAD_DIM), self.world_size, kind, dtype="bfloat16")
        rows = torch.from_numpy(sharding.rows(self.rank)).cuda()
        own = [x[:, :, rows].contiguous() for x in whole]
        del whole
        torch.cuda.empty_cache()

        def of_ranks(exchange):
            given = {"length": length, "sharding": sharding, "exchange": exchange}
            return stepped(lambda *x: sd.attention(*x, pattern, **given), own[:3], own[3])

        step = of_ranks("auto")
        results, bytes_in, exchange = self.counting(step)
        received, found["exchange"] = self.gathered(bytes_in), exchange
        each = self.gathered(self.digests(results, rows))
        several = [sum(values) % (1 << 62) for values in zip(*each, strict=True)]
        del results
        if timed:
            found["all_gpus_ms"] = milliseconds(step, True)
            begin = time.perf_counter()
            step()
            found["host_us"] = round(1e6 * (time.perf_counter() - begin))
            other = "point_to_point" if exchange == "heads" else "heads"
            found["all_gpus_ms_" + other] = milliseconds(of_ranks(other), True)
        if self.rank == 0:
            names = "out", "dq", "dk", "dv"
            found["received_bytes"] = received
            found["same_bits"] = [of for of, a, b in zip(names, one, several, strict=True) if a == b]
            found["equals_plain"] = [of for of, a, b in zip(names, plain, several, strict=True) if a == b]
            if timed:
                found["speedup"] = round(found["one_gpu_ms"] / found["all_gpus_ms"], 3)
        return found

    def counting(self, step):
        """Return the results of a step, the bytes that it received, and its exchange."""
        dist, bytes_in = self.dist, {"point_to_point": 0, "heads": 0}
        rows, heads = dist.batch_isend_irecv, dist.all_to_all

        def count_rows(operations):
            bytes_in["point_to_point"] += sum(x.tensor.nbytes for x in operations if x.op is dist.irecv)
            return rows(operations)

        def count_heads(receive, send, **options):
            bytes_in["heads"] += sum(x.nbytes for rank, x in enumerate(receive) if rank != self.rank)
            return heads(receive, send, **options)

        dist.batch_isend_irecv, dist.all_to_all = count_rows, count_heads
        try:
            return step(), sum(bytes_in.values()), max(bytes_in, key=bytes_in.__getitem__)
        finally:
            dist.batch_isend_irecv, dist.all_to_all = rows, heads

    def torchs(self, name: str, length: int, rotate: str) -> dict:
        """Measure torch's context parallelism of causal scaled_dot_product_attention."""
        torch = self.torch
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(rotate)
        mesh = self.dist.device_mesh.init_device_mesh("cuda", (self.world_size,))
        generator = torch.Generator("cuda").manual_seed(length)
        shape = 1, HEADS, length, HEAD_DIM
        made = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        flash = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
        with flash, context_parallel(mesh, buffers=made, buffer_seq_dims=[2] * 4):
            leaves = [x.detach().requires_grad_() for x in made[:3]]

            def step():
                out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
                torch.autograd.grad(out, leaves, made[3])

            times = milliseconds(step, True)
        return {"tokens": length, "all_gpus_ms": times}


def worker(rank: int, world_size: int, options: argparse.Namespace, names: list[str]) -> None:
    """Measure the cases of some names."""
    import torch
    import torch.distributed as dist

    threading.Timer(options.until - time.time(), lambda: os._exit(3)).start()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port), "NCCL_NVLS_ENABLE": "0"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=torch.device("cuda", rank))
    ranks = Ranks(rank, world_size, options)
    of = cases(options.quick) | compared()
    for name in names:
        if name in of:
            ranks.run(name, ranks.attention, *of[name])
        else:
            ranks.run(name, ranks.torchs, 131072 // (16 if options.quick else 1), name.split()[-1])
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the tokens")
    parser.add_argument("--only", default="", help="parts of the names of cases, with commas")
    parser.add_argument("--gpus", type=int, default=2, choices=COUNTS)
    parser.add_argument("--limit", type=float, default=145, help="seconds until the program ends")
    options = parser.parse_args()
    options.until = time.time() + options.limit
    import torch.multiprocessing as mp

    torchs = [f"torch context parallel, {rotate}" for rotate in ("alltoall", "allgather")]
    names = [*cases(options.quick), *torchs, *compared()]
    names = [name for name in names if any(part in name for part in options.only.split(","))]
    with tempfile.TemporaryDirectory() as folder:
        options.progress = Path(folder) / "progress.json"
        options.progress.write_text("[]")
        for attempt in range(len(names)):
            options.port = 29517 + attempt
            done = {row["name"] for row in json.loads(options.progress.read_text())}
            left = [name for name in names if name not in done]
            if not left or time.time() > options.until:
                break
            try:
                mp.spawn(worker, (options.gpus, options, left), nprocs=options.gpus)
            except Exception as error:  # a process ended: the next attempt has the cases that are left
                print(f"{type(error).__name__}: {error}"[:300], flush=True)


if __name__ == "__main__":
    main()
