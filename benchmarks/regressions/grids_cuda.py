#!/usr/bin/env python3
"""Compare builds on 2D neighbourhood and window attention on a GPU.

    python benchmarks/regressions/grids_cuda.py --build before=FOLDER --build now=FOLDER    # half a minute per build

A folder holds the package spattn; ``tools/package_of.sh`` makes one from a commit. Images of 56 × 56 tokens. Processes
of the builds alternate; each plans and times every problem, with CUDA events around many calls. A build's figure is the
median over its processes. Before timing, the results of the pattern are compared with those of a plan with other tiles.
Writes ``grids_cuda``.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

from grids_cpu import SIDE, problems
from turns import compare_builds

IMAGES = 16
NOTES = "bfloat16, 16 images; CUDA events around many calls, medians over processes of the builds in turns."


def times() -> dict[str, float]:
    """Milliseconds of each problem in this process."""
    import torch
    from gpu_timing import gpu_ms

    import spattn

    found = {}
    for heads, head_dim in ((4, 32), (4, 64), (4, 128)):
        shape = IMAGES, heads, SIDE**2, head_dim
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for name, pattern in problems().items():
            rows = spattn.plan(pattern, SIDE**2, tiling=spattn.Tiling(tile=(128, 64)), batch=IMAGES, heads=heads)
            results = [spattn.attention(q, k, v, how) for how in (pattern, rows)]
            torch.testing.assert_close(*results, atol=0.04, rtol=0.02)
            found[f"{name}, {heads} heads, head_dim {head_dim}"] = gpu_ms(partial(spattn.attention, q, k, v, pattern))
    return found


if __name__ == "__main__":
    compare_builds("grids_cuda", __doc__, NOTES, times, gpu=True)
