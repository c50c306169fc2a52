#!/usr/bin/env python3
"""Price of attention dropout on a GPU, and in PyTorch's attention.

    python benchmarks/kernels/dropout_cuda.py            # a minute; needs torch

Forward and backward, bfloat16, batch 1, 16 heads, 16384 tokens, with dropout_p 0.1 and without. Rows of results and of
dq are checked against dense float64 with :func:`spattn.testing.dropout_mask` before timing. Writes ``dropout_cuda``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

import peers_cuda
import record
from gpu_timing import SETS, gradient_error, measure, without_gradients
from peers_cuda import HEADS
from peers_cuda_backward import recorded

TOKENS, SHARE, SEED = 16384, 0.1, 7
ROUNDS, TARGET_MS = 9, 20.0  # long enough that the first call's host time does not count
TOLERANCE = 1.6e-2  # relative error of a bfloat16 result or gradient
NOTES = (
    "bfloat16, batch 1, 16 heads, 16384 tokens, dropout_p 0.1; medians of CUDA events, contenders in turns. Backwards "
    "are torch.autograd.grad of a retained graph. times_plain: ratio to the same contender without dropout. PyTorch: "
    "scaled_dot_product_attention with FlashAttention-2."
)


def contenders(name: str, pattern, sets) -> dict[tuple[str, str, str], Callable]:
    """Calls by contender, kind and pass; each takes the number of an input set."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    import spattn

    calls = {
        ("spattn", "plain"): lambda q, k, v: spattn.attention(q, k, v, pattern),
        ("spattn", "dropout"): lambda q, k, v: spattn.attention(q, k, v, pattern, dropout_p=SHARE, seed=SEED),
    }
    if name in ("dense", "causal"):

        def theirs(share):
            def call(q, k, v):
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    return scaled_dot_product_attention(q, k, v, dropout_p=share, is_causal=name == "causal")

            return call

        calls |= {("PyTorch", "plain"): theirs(0.0), ("PyTorch", "dropout"): theirs(SHARE)}

    found = {(*key, "forward"): without_gradients(call, sets) for key, call in calls.items()}
    return found | {(*key, "backward"): recorded(call, sets) for key, call in calls.items()}


def main() -> None:
    """Check, measure, print, write."""
    import torch

    from spattn.testing import dropout_mask

    torch.manual_seed(0)
    rows, kept = [], dropout_mask(SEED, SHARE, 1, 1, TOKENS, TOKENS)[0, 0]
    for head_dim in (128, 64):
        shape = 1, HEADS, TOKENS, head_dim
        sets = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)] for _ in range(SETS)]
        for problem in ("dense", "causal", "window ±256", "causal window 1024"):
            pattern = peers_cuda.problems(TOKENS)[problem][0]
            calls = contenders(problem, pattern, sets)
            for kind, pairs in (("plain", None), ("dropout", (kept, SHARE))):
                both = calls["spattn", kind, "forward"], calls["spattn", kind, "backward"]
                error = gradient_error(pattern, sets, *both, kept=pairs)
                if not error <= TOLERANCE:
                    raise AssertionError(f"{kind}, {problem}: relative error {error:.2g} against float64")
            for which in ("forward", "backward"):
                own = {key: call for key, call in calls.items() if key[2] == which}
                medians = {key: statistics.median(x) for key, x in measure(own, ROUNDS, TARGET_MS).items()}
                for (who, kind, _), median in medians.items():
                    row = {"problem": problem, "head_dim": head_dim, "contender": who, "kind": kind, "pass": which}
                    row["median_ms"] = round(median, 4)
                    row["times_plain"] = round(median / medians[who, "plain", which], 3)
                    rows.append(row)
                    print(*row.values(), sep="  ", flush=True)
            del calls
            torch.cuda.empty_cache()
    record.write("dropout_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
