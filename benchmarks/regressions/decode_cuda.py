#!/usr/bin/env python3
"""Compare builds on a GPU for decoding: few queries, many keys.

    python benchmarks/regressions/decode_cuda.py --build before=FOLDER --build now=FOLDER   # 10 seconds per process

A folder holds the package spattn; ``tools/package_of.sh`` makes one from a commit. Processes of the builds alternate;
each plans and times every problem, with CUDA events around many calls. A build's figure is the median over its
processes. Before timing, results of one query are compared with PyTorch's. Writes ``decode_cuda``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

from turns import compare_builds

HEADS = (32, 8), (64, 8), (32, 32), (32, 4)  # (heads_q, heads_kv)
SIZES = (1, 65536, 1), (16, 65536, 1), (1, 131072, 1), (1, 100_000, 1), (1, 65536, 8), (1, 8192, 16), (1, 8192, 1)
MOST_BYTES = 4 << 30  # of K and V
NOTES = "bfloat16, head_dim 128, causal; CUDA events around many calls, medians over processes of the builds in turns."


def problems() -> Iterator[tuple[int, int, int, int, int]]:
    """(heads_q, heads_kv, q_len, kv_len, batch)."""
    for heads_q, heads_kv in HEADS:
        for q_len, kv_len, batch in SIZES:
            if 4 * 128 * batch * heads_kv * kv_len <= MOST_BYTES:
                yield heads_q, heads_kv, q_len, kv_len, batch


def times() -> dict[str, float]:
    """Milliseconds of each problem in this process."""
    import torch
    from gpu_timing import gpu_ms
    from torch.nn.functional import scaled_dot_product_attention

    import spattn

    found = {}
    for heads_q, heads_kv, q_len, kv_len, batch in problems():
        q = torch.randn(batch, heads_q, q_len, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, heads_kv, kv_len, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        call = partial(spattn.attention, q, k, v, "causal")
        if q_len == 1:  # attends to all keys
            dense = scaled_dot_product_attention(q, k, v, enable_gqa=True)
            torch.testing.assert_close(call(), dense, atol=2e-3, rtol=0.02)
        name = f"{q_len} queries, {kv_len} keys, batch {batch}, {heads_q} heads over {heads_kv}"
        found[name] = gpu_ms(call, 7)
    return found


if __name__ == "__main__":
    compare_builds("decode_cuda", __doc__, NOTES, times, gpu=True)
