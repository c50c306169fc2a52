#!/usr/bin/env python3
"""Time image models with small attention windows on one CPU thread.

    python benchmarks/workloads/image_model.py --build NAME=FOLDER [--build NAME=FOLDER ...] [--rounds 5]   # 3 minutes

Transformer blocks of NAT-Mini (7 x 7 neighbourhoods, arXiv:2204.07143) and Swin-Tiny (7 x 7 windows, every second
layer shifted, arXiv:2103.14030) for one image of 224 x 224, float32, random weights: layer norms, projections and MLPs
by PyTorch, attention by spattn, in the plans that the cost model chooses ("chosen") and in tiles of 48 x 64 ("tiles").
Processes of the builds in FOLDERs alternate. Times are CPU times of a forward of all blocks, medians over processes.
Decides whether kernels for small boxes earn their place: docs/decisions/035. Writes ``image_model``. Needs PyTorch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import torch
from torch import nn
from turns import compare_builds

import spattn
from spattn import patterns as sp

NOTES = "One image of 224 x 224, float32, one thread, CPU time of a forward of all blocks; builds in turns."
SIDES = 56, 28, 14, 7
# (dims, heads, depths, hidden dims per dim)
MODELS = {
    "NAT-Mini": ((64, 128, 256, 512), (2, 4, 8, 16), (3, 4, 6, 5), 3),
    "Swin-Tiny": ((96, 192, 384, 768), (3, 6, 12, 24), (2, 2, 6, 2), 4),
}


def pattern_of(model: str, side: int, layer: int) -> sp.Pattern:
    if model == "NAT-Mini":
        return sp.Neighborhood((side, side), 7)
    shift = 3 if layer % 2 and side > 7 else 0
    return sp.windowed((side, side), 7, shift=shift) if side > 7 else sp.Full()


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: int, pattern: sp.Pattern):
        super().__init__()
        self.heads, self.pattern, self.plan = heads, pattern, None
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, ratio * dim), nn.GELU(), nn.Linear(ratio * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, dim // self.heads).unbind(2)
        given = self.pattern if self.plan is None else self.plan
        x = x + self.out(spattn.attention(q, k, v, given, layout="bshd").reshape(batch, tokens, dim))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        dims, heads, depths, ratio = MODELS[name]
        self.stages, self.merges = nn.ModuleList(), nn.ModuleList()
        for stage, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            blocks = [Block(dim, heads[stage], ratio, pattern_of(name, SIDES[stage], layer)) for layer in range(depth)]
            self.stages.append(nn.Sequential(*blocks))
            if stage < 3:
                self.merges.append(nn.Linear(4 * dim, 2 * dim, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, blocks in enumerate(self.stages):
            x = blocks(x)
            if stage < 3:
                side, (batch, _, dim) = SIDES[stage], x.shape
                x = x.view(batch, side // 2, 2, side // 2, 2, dim).transpose(2, 3).reshape(batch, -1, 4 * dim)
                x = self.merges[stage](x)
        return x


def cpu_ms(model: nn.Module, x: torch.Tensor, calls: int = 5) -> float:
    model(x)
    found = []
    for _ in range(calls):
        start = time.process_time()
        model(x)
        found.append(1e3 * (time.process_time() - start))
    return min(found)


def times() -> dict[str, float]:
    """Milliseconds of each model, in both kinds of plans."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {}
    with torch.no_grad():
        for name, (dims, *_) in MODELS.items():
            model, x = Model(name).eval(), torch.randn(1, SIDES[0] ** 2, dims[0])
            found[f"{name}, chosen"] = cpu_ms(model, x)
            for side, stage in zip(SIDES, model.stages, strict=True):
                for block in stage:
                    block.plan = spattn.plan(block.pattern, side * side, tiling=spattn.Tiling(tile=(48, 64)))
            found[f"{name}, tiles"] = cpu_ms(model, x)
    return found


if __name__ == "__main__":
    compare_builds("image_model", __doc__, NOTES, times)
