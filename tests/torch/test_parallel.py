"""Training over two processes equals training in one: DistributedDataParallel and fully sharded parameters."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from spattn.patterns import SlidingWindow
from spattn.torch import SparseAttention

rank, folder = int(sys.argv[1]), sys.argv[2]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = SparseAttention(16, 4, SlidingWindow(5, 2), num_kv_heads=2, dtype=torch.float64)

    def forward(self, x, padding):
        return x + self.attention(x, x, x, padding)[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, padding):
        for block in self.blocks:
            x = block(x, padding)
        return x


def train(model, x, padding):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = (model(x, padding) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def parameters(model):
    full = [getattr(x, "full_tensor", lambda x=x: x)() for x in model.parameters()]
    return [x.detach().clone() for x in full]


def made():
    torch.manual_seed(0)
    return Model()


def shared_out(model, how):
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    mesh = dist.init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(2)
x, padding = torch.randn(4, 30, 16, dtype=torch.float64), torch.zeros(4, 30, dtype=torch.bool)
padding[1, 20:] = padding[2, 25:] = True
alone, start = made(), parameters(made())
train(alone, x, padding)
own = slice(2 * rank, 2 * rank + 2)
for how in ("DDP", "FSDP2"):
    for compiled in (False, True):
        model = shared_out(made(), how)
        train(torch.compile(model, backend="aot_eager") if compiled else model, x[own], padding[own])
        for got, want, before in zip(parameters(model), parameters(alone), start, strict=True):
            torch.testing.assert_close(got, want)
            assert not torch.equal(got, before)
        print(how, compiled)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Each has half of the batch, with padding of its own; compiled and not."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=240)
        assert rank.returncode == 0, err
        said = [line for line in out.splitlines() if "[Gloo]" not in line]  # as PyTorch 2.8 says when ranks meet
        assert said == ["DDP False", "DDP True", "FSDP2 False", "FSDP2 True"]
