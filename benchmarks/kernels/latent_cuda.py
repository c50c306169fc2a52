#!/usr/bin/env python3
"""Time head dimensions 192 (q, k) and 128 (v) of DeepSeek's MLA on Hopper.

    python benchmarks/kernels/latent_cuda.py            # a minute; needs torch

Forward and backward, bfloat16, batch 1, 16 heads, 16384 tokens: spattn, spattn with its kernels for head_dim 256, and
cuDNN. Rows of results and of dq are checked against dense float64 before timing. Writes ``latent_cuda``.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

import peers_cuda
import record
from gpu_timing import SETS, gradient_error, measure, without_gradients
from peers_cuda import HEADS
from peers_cuda_backward import recorded

TOKENS, HEAD_DIM, HEAD_DIM_V = 16384, 192, 128
ROUNDS, TARGET_MS = 9, 20.0
TOLERANCE = 1.6e-2  # relative error of a bfloat16 result or gradient
NOTES = (
    "bfloat16, batch 1, 16 heads, 16384 tokens; medians of CUDA events. Backwards are torch.autograd.grad of a "
    "retained graph. tflops: floating-point operations of the allowed pairs, 2 (192 + 128) each forward and "
    "2 (3 × 192 + 2 × 128) backward. head_dim 256: spattn with the kernels that served these head dimensions before."
)


@contextlib.contextmanager
def without_own_kernels():
    """Let spattn choose among the other specializations."""
    import spattn
    from spattn.choose import specializations as forward
    from spattn.cuda.sm90.backward import specializations as backward

    with contextlib.ExitStack() as stack:
        for tables in (forward, backward):
            others = tuple(row for row in tables.TABLE if row.head_dim != HEAD_DIM)
            stack.enter_context(mock.patch.object(tables, "TABLE", others))
        spattn.clear_plan_cache()
        yield
    spattn.clear_plan_cache()


def contenders(name: str, pattern) -> dict[str, tuple[Callable, Callable]]:
    """Calls by contender, each with the context that it is measured in."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    import spattn

    def own(q, k, v):
        return spattn.attention(q, k, v, pattern)

    def cudnn(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=name == "causal")

    found = {"spattn": (own, contextlib.nullcontext), "spattn, head_dim 256": (own, without_own_kernels)}
    return found | ({"cuDNN": (cudnn, contextlib.nullcontext)} if name in ("dense", "causal") else {})


def main() -> None:
    """Check, measure, print, write."""
    import torch

    import spattn

    torch.manual_seed(0)
    rows, dims = [], (HEAD_DIM, HEAD_DIM, HEAD_DIM_V, HEAD_DIM_V)
    sets = [[torch.randn(1, HEADS, TOKENS, d, device="cuda", dtype=torch.bfloat16) for d in dims] for _ in range(SETS)]
    for problem in ("dense", "causal", "causal window 1024"):
        pattern = peers_cuda.problems(TOKENS)[problem][0]
        pairs = HEADS * spattn.plan(pattern, TOKENS).nnz
        for who, (call, context) in contenders(problem, pattern).items():
            with context():
                calls = {"forward": without_gradients(call, sets), "backward": recorded(call, sets)}
                error = gradient_error(pattern, sets, *calls.values())
                if not error <= TOLERANCE:
                    raise AssertionError(f"{who}, {problem}: relative error {error:.2g} against float64")
                for which, times in measure(calls, ROUNDS, TARGET_MS).items():
                    median = statistics.median(times)
                    flops = 2 * pairs * (HEAD_DIM + HEAD_DIM_V if which == "forward" else 3 * HEAD_DIM + 2 * HEAD_DIM_V)
                    row = {"problem": problem, "contender": who, "pass": which, "median_ms": round(median, 4)}
                    rows.append(row | {"tflops": round(flops / median / 1e9, 1), "relative_error": round(error, 5)})
                    print(*rows[-1].values(), sep="  ", flush=True)
                del calls
    record.write("latent_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
