#!/usr/bin/env python3
"""Measure what the special cases of the Hopper forward give to models that need them.

    python benchmarks/workloads/special_cases_cuda.py        # two minutes on an H100; needs torch

*chosen* is spattn as it is. The other contenders lack one special case: *two* the specialization of three CTAs per SM,
*in_order* the gathered KV (docs/decisions/027). The recorded *uncut* and *wide* lacked key boxes fitted to their
regions and products of 56 columns, which were removed for these figures (docs/decisions/030). Models are of 16-bit
floats: NAT-Mini and Swin-Tiny on 64 images of 224 x 224 (image_model.py), and a graph transformer whose edges are a
random graph of degree 16 and its nodes themselves, in the manner of Exphormer (arXiv:2303.06147): 4 layers of 256 dims
and 4 heads on 8192 nodes. Attention alone follows. Contenders alternate, CUDA events around CUDA graphs, medians.
Writes ``special_cases_cuda``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
import torch
from gpu_timing import ROUNDS, measure
from image_model import MODELS, SIDES, Block, Model
from torch import nn

import spattn
from spattn import patterns as sp
from spattn.choose import machine_gpu, specializations
from spattn.planning.contract.cache import clear_plan_cache

IMAGES, NODES, DEGREE = 64, 8192, 16


@contextmanager
def without(case: str) -> Iterator[None]:
    """Plan and launch without a special case."""
    candidates = machine_gpu.Gpu.candidates
    patches = {
        "chosen": [],
        "two": [mock.patch.object(specializations, "TABLE", specializations.TABLE[1:])],
        "in_order": [
            mock.patch.object(machine_gpu.Gpu, "scattered", lambda self, how: how),
            mock.patch.object(
                machine_gpu.Gpu, "candidates", lambda *args: (how for how in candidates(*args) if not how.gathered)
            ),
        ],
    }[case]
    clear_plan_cache()
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()
    clear_plan_cache()


def edges() -> sp.Pattern:
    """Edges of a random graph, in both directions, and of each node to itself."""
    rng, own = np.random.default_rng(0), np.arange(NODES)
    first, second = rng.integers(0, NODES, (2, NODES * DEGREE // 2))
    rows, columns = np.concatenate([first, second, own]), np.concatenate([second, first, own])
    rows, columns = np.unique(np.stack([rows, columns]), axis=1)
    return sp.interop.from_pairs(rows, columns, NODES, NODES)


def image_model(name: str) -> tuple[nn.Module, torch.Tensor]:
    dims = MODELS[name][0]
    return Model(name), torch.randn(IMAGES, SIDES[0] ** 2, dims[0], device="cuda", dtype=torch.float16)


def graph_model() -> tuple[nn.Module, torch.Tensor]:
    own = edges()
    blocks = nn.Sequential(*(Block(256, 4, 2, own) for _ in range(4)))
    return blocks, torch.randn(1, NODES, 256, device="cuda", dtype=torch.float16)


def alone(pattern: sp.Pattern, batch: int, heads: int, tokens: int, dim: int) -> tuple[Callable, torch.Tensor]:
    q, k, v = torch.randn(3, batch, heads, tokens, dim, device="cuda", dtype=torch.float16)
    return lambda x: spattn.attention(x, k, v, pattern), q


PROBLEMS: dict[str, tuple[tuple[str, ...], Callable[[], tuple[Callable, torch.Tensor]]]] = {
    "NAT-Mini": (("two",), lambda: image_model("NAT-Mini")),
    "Swin-Tiny": (("two",), lambda: image_model("Swin-Tiny")),
    "graph transformer": (("in_order",), graph_model),
    "7 x 7, 64 images of 56 x 56, head_dim 32": (
        ("two",),
        lambda: alone(sp.Neighborhood((56, 56), 7), 64, 2, 56 * 56, 32),
    ),
    "windows 7 x 7, 64 images of 56 x 56, head_dim 32": (
        ("two",),
        lambda: alone(sp.windowed((56, 56), 7), 64, 3, 56 * 56, 32),
    ),
    "13 x 13 on 128 x 128, head_dim 64": (
        ("two",),
        lambda: alone(sp.Neighborhood((128, 128), 13), 1, 16, 128 * 128, 64),
    ),
    "7 x 7 x 7 on 16 x 32 x 32, head_dim 64": (
        ("two",),
        lambda: alone(sp.Neighborhood((16, 32, 32), 7), 1, 16, 16384, 64),
    ),
    "window of 64 keys, 16384 tokens, head_dim 64": (
        ("two",),
        lambda: alone(sp.SlidingWindow(32, 31), 1, 16, 16384, 64),
    ),
    "graph, head_dim 64": (("in_order",), lambda: alone(edges(), 1, 4, NODES, 64)),
}


def captured(call: Callable, x: torch.Tensor) -> Callable[[int], None]:
    """A CUDA graph of a call, with what it reads."""
    call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(x)
    return lambda _, kept=(call, x): graph.replay()


def run(name: str) -> dict[str, object]:
    """One row of the results."""
    cases, make = PROBLEMS[name]
    calls, first = {}, None
    for case in ("chosen", *cases):
        torch.manual_seed(0)
        with without(case):
            call, x = make()
            if isinstance(call, nn.Module):
                call = call.cuda().half().eval()
            found = call(x).float()
            first = found if first is None else first
            if not (found - first).abs().max() < 0.02 * first.abs().max():
                raise AssertionError(f"{name} without {case}: {(found - first).abs().max()} off")
            calls[case] = captured(call, x)
    times = measure(calls, ROUNDS)
    ms = {case: statistics.median(each) for case, each in times.items()}
    row: dict[str, object] = {"problem": name} | {f"{case}_ms": round(each, 4) for case, each in ms.items()}
    return row | {f"times_{case}": round(ms[case] / ms["chosen"], 3) for case in cases}


def main() -> None:
    """Measure, print, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    with torch.no_grad():
        for name in PROBLEMS:
            rows.append(run(name))
            print(rows[-1], flush=True)
    notes = "float16, CUDA graphs, medians of CUDA events; times: without the special case over chosen."
    record.write("special_cases_cuda", rows, notes=notes, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
