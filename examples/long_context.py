"""Train a small model whose sequence is on two processes, and compare its losses with those of one process.

    python examples/long_context.py            # seconds on two cores; --ranks 4 --length 8192 for more

Each rank has a part of every sequence: its tokens, positions and labels. Everything but attention works row by row;
``ContextParallel`` lets the attention layers, one with a window and one causal, receive the rows that they need. The
gradients of the parameters are summed over the ranks.
"""

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

import spattn.distributed as sd
from spattn.patterns import Causal, Sinks, SlidingWindow
from spattn.torch import SparseAttention

VOCABULARY, PERIOD = 64, 97


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width, heads, pattern):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SparseAttention(width, heads, pattern)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        at = self.before(x)
        x = x + self.attn(at, at, at)[0]
        return x + self.mlp(self.between(x))


def made(args):
    """The model, the same on all ranks."""
    torch.manual_seed(0)
    patterns = Causal() & (Sinks(4) | SlidingWindow(128, 0)), Causal()
    return nn.ModuleDict(
        {
            "token": nn.Embedding(VOCABULARY, args.width),
            "position": nn.Embedding(args.length, args.width),
            "blocks": nn.Sequential(*(Block(args.width, args.heads, pattern) for pattern in patterns)),
            "out": nn.Linear(args.width, VOCABULARY),
        }
    )


def losses(args, model, rows, group=None):
    """Train on sequences that repeat after PERIOD tokens; return the loss of each step. `rows` are this rank's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(args.steps):
        period = torch.randint(VOCABULARY, (1, PERIOD), generator=generator)
        tokens = period.repeat(1, args.length // PERIOD + 2)[:, : args.length + 1]
        x = model["token"](tokens[:, rows]) + model["position"](rows)
        scores = model["out"](model["blocks"](x))
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[0, rows + 1], reduction="sum") / args.length
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if group is not None:
            for x in [total, *(p.grad for p in model.parameters())]:
                dist.all_reduce(x, group=group)
        optimizer.step()
        found.append(total.item())
    return found


def compare(args):
    """Train on all ranks and on one, and compare."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, model = dist.init_device_mesh("cpu", (ranks,)), made(args)
    sharding = sd.shard("causal", (1, args.heads, args.heads, args.length, args.width // args.heads), ranks)
    parallelize_module(model, mesh, {"blocks.*.attn": sd.ContextParallel(length=args.length, sharding=sharding)})
    begin = time.perf_counter()
    found = losses(args, model, torch.from_numpy(sharding.rows(rank)), dist.group.WORLD)
    took = time.perf_counter() - begin
    if rank == 0:
        want = losses(args, made(args), torch.arange(args.length))
        for step, (several, one) in enumerate(zip(found, want, strict=True)):
            print(f"step {step}: loss {several:.5f} on {ranks} processes, {one:.5f} on one")
        print(f"{took:.1f} s on {ranks} processes")
        torch.testing.assert_close(found, want, atol=0, rtol=1e-3)


def rank_program(rank, args, port):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    compare(args)
    dist.destroy_process_group()


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"ranks": 2, "length": 2048, "width": 64, "heads": 4, "steps": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(given)


def main():
    args = arguments()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_program, (args, port), nprocs=args.ranks)


if __name__ == "__main__":
    main()
