"""A transformer block on several ranks: data parallel, tensor parallel, and both.

    torchrun --nproc-per-node 4 examples/hybrid_block.py

Heads and the hidden layer of the MLP are sharded over the dimension "tensor" of a mesh, batch entries and parameters
over "data"; without sharded heads, each rank has all parameters. For each layout the script checks output and gradients
against one process, then times a training step, and the same step of one rank's share without communication. On CPUs it
uses gloo, on GPUs NCCL.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import spattn
from spattn.patterns import Causal, PerHead, SlidingWindow


class Block(nn.Module):
    """Attention, with a causal window for each head, and an MLP. A window of 0 tokens stands for all tokens before."""

    def __init__(self, width, windows, head_dim, hidden):
        super().__init__()
        self.windows, self.head_dim = windows, head_dim
        inner = head_dim * len(windows)
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        # One projection, head by head: a head's query, key and value are on one rank, and one all-reduce sums the
        # gradient of their input.
        self.query_key_value = nn.Linear(width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        each = self.query_key_value(self.before_attention(x)).unflatten(-1, (-1, 3, self.head_dim))
        heads = each.transpose(1, 2).unbind(3)  # views, (batch, heads, n, head_dim)
        pattern = PerHead([SlidingWindow(window, 0) if window else Causal() for window in self.windows])
        x = x + self.out(spattn.attention(*heads, pattern).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


def made(args, parts=1, part=0):
    """A block with one of `parts` equal parts of the heads and hidden units; the windows differ by head."""
    torch.manual_seed(0)
    windows = [args.window >> (head % 3) for head in range(args.heads)]
    own = windows[part * args.heads // parts : (part + 1) * args.heads // parts]
    return Block(args.width, own, args.width // args.heads, 4 * args.width // parts).to(args.device, args.dtype)


def parallel(args, mesh):
    """The block of a mesh ("data", "tensor")."""
    block, rank, size = made(args), mesh["tensor"].get_local_rank(), mesh["tensor"].size()
    if size == 1:  # whole parameters on each rank: gradients are summed while others are computed
        return DistributedDataParallel(block, process_group=mesh["data"].get_group(), gradient_as_bucket_view=True)
    columns, rows = ColwiseParallel, RowwiseParallel
    layout = {"query_key_value": columns(), "out": rows(), "up": columns(), "down": rows()}
    parallelize_module(block, mesh["tensor"], layout)
    block.windows = made(args, size, rank).windows  # those of this rank's heads
    return fully_shard(block, mesh=mesh["data"])


def step(block, x):
    block.zero_grad()
    out = block(x)
    out.square().mean().backward()
    return out.detach()


def milliseconds(block, x, repeats):
    times = []
    for _ in range(repeats):
        if x.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step(block, x)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return sorted(times)[len(times) // 2]


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"width": 256, "heads": 8, "length": 512, "window": 64, "batch": 4, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.set_defaults(device="cpu", dtype=torch.float32)
    return parser.parse_args(given)


def main():
    args = arguments()
    if torch.cuda.is_available():
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    compare(args)
    dist.destroy_process_group()


def compare(args):
    """Check and time all layouts of the ranks."""
    ranks = dist.get_world_size()
    torch.manual_seed(1)
    x = torch.randn(args.batch, args.length, args.width, device=args.device)
    alone = made(args)
    want = step(alone, x)
    if dist.get_rank() == 0:
        print(f"one process: {milliseconds(alone, x, args.repeats):.1f} ms")
    for tensor in (size for size in range(1, ranks + 1) if ranks % size == args.heads % size == 0):
        data = ranks // tensor
        if args.batch % data:
            continue
        mesh = dist.init_device_mesh(args.device.partition(":")[0], (data, tensor), mesh_dim_names=("data", "tensor"))
        own = x.chunk(data)[mesh["data"].get_local_rank()]
        block = parallel(args, mesh)
        torch.testing.assert_close(step(block, own), want.chunk(data)[mesh["data"].get_local_rank()])
        for got, expected in zip(block.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(got.grad), expected.grad, atol=1e-6, rtol=1e-3)
        took = milliseconds(block, own, args.repeats)
        compute = milliseconds(made(args, tensor, mesh["tensor"].get_local_rank()), own, args.repeats)
        if dist.get_rank() == 0:
            print(f"data {data} × tensor {tensor}: {took:.1f} ms, {compute:.1f} ms of them compute")


if __name__ == "__main__":
    main()
