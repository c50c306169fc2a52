#!/usr/bin/env python3
"""Compare float32 attention with block-sparse Triton kernels on one GPU.

    python benchmarks/peers/acsr_cuda.py            # under two minutes on an H200; needs torch with Triton
    python benchmarks/peers/acsr_cuda.py --quick    # 512 and 1024 tokens without FlexAttention, writes nothing

The patterns and lengths of planning/formats.py, and two denser ones, since SPLAT (Gupta et al. 2024, arXiv:2407.16847)
is about densities of 10 to 50 %. Forward, batch 1, 12 heads of 64 (our choice: the paper's abstract names none), one
draw of BigBird's blocks for all heads. Contenders: spattn in float32 and TF32; a block-sparse Triton kernel
(triton_block_sparse.py) with float32 products (``ieee``), three TF32 products (``tf32x3``) and one (``tf32``), each
with the best of several tilings per problem; FlexAttention, compiled for every mask; PyTorch's dense float32 attention
without a mask and with a boolean one. Plans, layouts and block masks are prepared outside the timing.

Every result is checked against float64 on sampled rows. A contender that fails or exceeds its bound is reported with
the reason and not timed, and the exit status is 1. A measurement replays a CUDA graph of one call on each of enough
input sets to exceed L2; contenders alternate, figures are medians per call. FlexAttention takes part until its
compilation has taken ``--flex-seconds``, starting at 8192 tokens. Writes ``acsr_cuda``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record
from gpu_timing import measure, worst_error
from planning.formats import CASES, LENGTHS

from spattn import patterns as sp

DEVICE, HEADS, HEAD_DIM = "cuda", 12, 64
ROUNDS, TARGET_MS = 7, 3.0
SETS_BYTES = 160e6  # all input sets together, more than three times L2
EXACT, TF32 = 5e-6, 2e-3  # relative errors
FIRST = (8192, 1024, 4096)  # lengths that FlexAttention runs first
DENSER = {
    "strided, 4": lambda n: sp.strided(4),
    "blocked, a quarter": lambda n: sp.BlockLocal(n // 4),
}
# Tilings by precision of the products: (block_q, block_kv, warps, stages).
TILINGS = {
    "ieee": ((64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
    "tf32x3": ((64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2)),
    "tf32": ((64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2)),
}
NOTES = (
    "Forward, float32, batch 1, 12 heads of 64; medians per call in CUDA graph replays over input sets that exceed L2, "
    "contenders in turns. triton_ms is the faster of Triton's two exact kernels, ieee and tf32x3; times_NAME is the "
    "ratio of a contender's time to spattn's, of triton_tf32 to spattn_tf32. FlexAttention takes part until its "
    "compilation budget is spent; other contenders without a time are in refused."
)


@dataclasses.dataclass
class Flex:
    """Compiles FlexAttention calls within a time budget."""

    seconds: float  # remaining budget

    def call(self, pattern, mask, inputs) -> Callable:
        """A function of q, k, v, compiled for one pattern."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        began = time.perf_counter()
        torch._dynamo.reset()
        try:
            blocks = create_block_mask(flex_mask(pattern, mask), None, None, *mask.shape, device=DEVICE)
            flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)
            flex(*inputs, block_mask=blocks)
        finally:
            self.seconds -= time.perf_counter() - began
        return lambda q, k, v: flex(q, k, v, block_mask=blocks)


def flex_mask(pattern, mask) -> Callable:
    """FlexAttention mask of a pattern; random blocks come from a table."""
    match pattern:
        case sp.longformer(window=window, global_tokens=first):
            reach = window // 2
            return lambda b, h, q, k: ((q - k).abs() <= reach) | (q < first) | (k < first)
        case sp.strided(stride=stride):
            return lambda b, h, q, k: (q >= k) & ((q - k < stride) | ((q - k) % stride == 0))
        case sp.BlockLocal(block=block):
            return lambda b, h, q, k: q // block == k // block
        case sp.BigBird(block=block):
            table = mask[::block, ::block].contiguous()
            return lambda b, h, q, k: table[q // block, k // block]
    raise TypeError(f"no FlexAttention mask for {pattern!r}")


def block_sparse(mask, precision: str, inputs) -> tuple[Callable, tuple]:
    """The Triton kernel with its fastest tiling, and that tiling."""
    import triton_block_sparse

    calls = {tiling: triton_block_sparse.attention(mask, precision, *tiling) for tiling in TILINGS[precision]}
    times = measure({tiling: lambda i, call=call: call(*inputs) for tiling, call in calls.items()}, 3, 0.0)
    fastest = min(times, key=lambda tiling: min(times[tiling]))
    return calls[fastest], fastest


class Replayed:
    """A CUDA graph of a call on each input set; keeps the arrays that its kernels read alive."""

    def __init__(self, call: Callable, sets: list):
        import torch

        self._reads, self._graph = (call, sets), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = [call(*inputs) for inputs in sets]

    def __call__(self, number: int) -> None:
        self._graph.replay()

    def result(self, number: int):
        """Result of a replay for an input set."""
        self._graph.replay()
        return self._results[number]


def contenders(pattern, mask, inputs, flex: Flex | None, tilings: dict) -> dict[str, tuple]:
    """(factory of a function of q, k, v; error bound; computed pattern) by name."""
    from torch.nn.functional import scaled_dot_product_attention as dense

    import spattn

    def triton(precision):
        def make():
            call, tilings[precision] = block_sparse(mask, precision, inputs)
            return call

        return make

    found = {
        "spattn": (lambda: lambda q, k, v: spattn.attention(q, k, v, pattern), EXACT, pattern),
        "spattn_tf32": (lambda: lambda q, k, v: spattn.attention(q, k, v, pattern, precision="tf32"), TF32, pattern),
        "triton_ieee": (triton("ieee"), EXACT, pattern),
        "triton_tf32x3": (triton("tf32x3"), EXACT, pattern),
        "triton_tf32": (triton("tf32"), TF32, pattern),
        "dense": (lambda: dense, EXACT, sp.Full()),
        "masked": (lambda: lambda q, k, v: dense(q, k, v, attn_mask=mask), EXACT, pattern),
    }
    if flex is not None and flex.seconds > 0:
        found["flex"] = (lambda: flex.call(pattern, mask, inputs), EXACT, pattern)
    return found


def run(name: str, tokens: int, pattern, flex: Flex | None) -> dict[str, object]:
    """One row of the results."""
    import torch

    torch.manual_seed(0)
    shape = (1, HEADS, tokens, HEAD_DIM)
    count = max(2, math.ceil(SETS_BYTES / (3 * 4 * math.prod(shape))))
    sets = [[torch.randn(shape, device=DEVICE) for _ in range(3)] for _ in range(count)]
    rows = pattern.index_set(tokens, tokens)
    mask = torch.from_numpy(rows.to_dense()).to(DEVICE)
    graphs, errors, refused, tilings = {}, {}, {}, {}
    for who, (make, bound, computed) in contenders(pattern, mask, sets[0], flex, tilings).items():
        try:
            call = make()
            call(*sets[0])  # compile before the capture
            graph = Replayed(call, sets)
            errors[who] = float(f"{worst_error(computed, *sets[0], graph.result(0)):.2g}")
            if not errors[who] <= bound:
                raise ArithmeticError(f"relative error {errors[who]} against float64")
            graphs[who] = graph
        except Exception as error:  # any failure: the other contenders are still timed
            refused[who] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"REFUSED {who} on {name}, {tokens} tokens: {refused[who]}", flush=True)
    medians = {who: statistics.median(times) / count for who, times in measure(graphs, ROUNDS, TARGET_MS).items()}
    exact = [medians[who] for who in ("triton_ieee", "triton_tf32x3") if who in medians]
    if exact:
        medians["triton"] = min(exact)
    return {
        "problem": name,
        "tokens": tokens,
        "density": round(rows.density, 4),
        **{f"{who}_ms": round(median, 5) for who, median in medians.items()},
        **ratios(medians),
        "relative_errors": errors,
        "tilings": tilings,
        "refused": refused,
    }


def ratios(medians: dict[str, float]) -> dict[str, float]:
    """Ratios of times to spattn's in the same precision."""
    of = {"triton": "spattn", "triton_tf32": "spattn_tf32", "flex": "spattn", "dense": "spattn", "masked": "spattn"}
    pairs = ((who, own) for who, own in of.items() if who in medians and own in medians)
    return {f"times_{who}": round(medians[who] / medians[own], 3) for who, own in pairs}


def geometric_means(rows: list[dict]) -> dict[str, float]:
    """Geometric mean of each ratio over the problems that have it."""
    fields = dict.fromkeys(field for row in rows for field in row if field.startswith("times_"))
    return {field: round(statistics.geometric_mean(row[field] for row in rows if field in row), 3) for field in fields}


def main() -> int:
    """Measure, print, write; return 1 if a contender failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 and 1024 tokens without FlexAttention, write nothing")
    parser.add_argument("--flex-seconds", type=float, default=30.0, help="compilation budget of FlexAttention (30)")
    options = parser.parse_args()
    import torch
    import triton

    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 5000
    began, flex = time.perf_counter(), None if options.quick else Flex(options.flex_seconds)
    lengths = LENGTHS[:2] if options.quick else sorted(LENGTHS, key=lambda n: (n not in FIRST, n not in FIRST[:1], n))
    rows = []
    with torch.no_grad():
        for cases in (CASES,) if options.quick else (CASES, DENSER):
            for tokens in lengths:
                for name, case in cases.items():
                    rows.append(run(name, tokens, case(tokens), flex))
                    figures = ", ".join(f"{key} {value}" for key, value in rows[-1].items())
                    print(f"{time.perf_counter() - began:5.1f} s: {figures}", flush=True)
    names = [*CASES, *DENSER]
    rows.sort(key=lambda row: (names.index(row["problem"]), row["tokens"]))
    means = geometric_means(rows)
    print("geometric means of the ratios to spattn's time:", means)
    if not options.quick:
        gpu = torch.cuda.get_device_name()
        record.write("acsr_cuda", rows, notes=NOTES, gpu=gpu, triton=triton.__version__, geometric_means=means)
    return 1 if any(row["refused"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
