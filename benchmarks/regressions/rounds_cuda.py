#!/usr/bin/env python3
"""Compare builds on a GPU for few work items per SM: causal, documents, windows.

    python benchmarks/regressions/rounds_cuda.py --build before=FOLDER --build now=FOLDER   # 10 seconds per process

A folder holds the package spattn; ``tools/package_of.sh`` makes one from a commit. Forward and backward. Processes of
the builds alternate; each plans and times every problem in replays of a CUDA graph of many calls, without host time. A
build's figure is the median over its processes. Before timing, causal results are compared with PyTorch's. Writes
``rounds_cuda``.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

from turns import compare_builds

SIZES = (
    (1024, 16, 1),
    (2048, 8, 1),
    (2048, 16, 1),
    (4096, 4, 1),
    (4096, 8, 1),
    (4096, 2, 4),
    (8192, 4, 1),
    (8192, 6, 1),
    (8192, 8, 1),
    (16384, 2, 1),
    (16384, 16, 1),
)  # tokens, heads, batch
CALLS = 20  # per graph
NOTES = "bfloat16; replays of CUDA graphs of 20 calls, medians over processes of the builds in turns."


def times() -> dict[str, float]:
    """Milliseconds of each problem in this process."""
    import torch
    from gpu_timing import graph_us
    from torch.nn.functional import scaled_dot_product_attention

    import spattn
    from spattn import patterns as sp

    found = {}
    for head_dim in (64, 128):
        for tokens, heads, batch in SIZES:
            q, k, v = torch.randn(3, batch, heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16)
            expected = scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.testing.assert_close(spattn.attention(q, k, v, "causal"), expected, atol=1e-2, rtol=0.02)
            documents = sp.Documents((tokens // 2, tokens // 4, tokens // 8, tokens // 8)) & sp.Causal()
            for name, pattern in {
                "causal": sp.Causal(),
                "causal documents": documents,
                "window": sp.SlidingWindow(tokens // 8, 0),
            }.items():
                out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
                problem = f"{name}, {tokens} tokens, {heads} heads, batch {batch}, head_dim {head_dim}"
                calls = {
                    "": partial(spattn.attention, q, k, v, pattern),
                    "gradients, ": partial(spattn.attention_backward, q, q, k, v, out, lse, pattern),
                }
                for what, call in calls.items():
                    call()  # plans
                    found[what + problem] = 1e-3 * graph_us(call, calls=CALLS)
    return found


if __name__ == "__main__":
    compare_builds("rounds_cuda", __doc__, NOTES, times, gpu=True)
