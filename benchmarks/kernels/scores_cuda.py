#!/usr/bin/env python3
"""Price of score functions and sinks on a GPU, and in FlexAttention.

    python benchmarks/kernels/scores_cuda.py                  # needs torch; minutes for FlexAttention's compilation
    python benchmarks/kernels/scores_cuda.py --without-flex --only "window ±256"

Forward and backward, bfloat16, batch 1, 16 heads, 16384 tokens, head_dim 128: ALiBi, a soft-cap, a table of relative
positions whose gradient is wanted, and sinks. FlexAttention gets the same function. Results and gradients are checked
against dense float64 on sampled rows before timing. The rows "first call" are the time of a process's first call with a
new expression, with an empty cache of kernels and with a full one: of a forward without gradients, of the backward
after it, and of a training step with another new expression, whose kernels are compiled together. ``--first-calls``
measures and prints these rows alone. Writes ``scores_cuda``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

import peers_cuda
import record
from gpu_timing import SETS, gradient_error, measure, without_gradients
from peers_cuda import HEADS
from peers_cuda_backward import recorded

TOKENS, HEAD_DIM, REACH, CAP = 16384, 128, 512, 30.0
ROUNDS, TARGET_MS = 9, 20.0  # long enough that the first call's host time does not count
TOLERANCE = 1.6e-2  # relative error of a bfloat16 result or gradient
NOTES = (
    "bfloat16, batch 1, 16 heads, 16384 tokens, head_dim 128; medians of CUDA events, contenders in turns. Backwards "
    "are torch.autograd.grad of a retained graph. times_plain: ratio to spattn without a score function; times_spattn: "
    "ratio to spattn with the same function. The table's gradient is part of its backward. Where FlexAttention's "
    "default backward does not fit shared memory, it runs with two stages."
)


FIRST_CALL = """
import time, torch, spattn
q, k, v, dout = (torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
leaves = [x.requires_grad_() for x in (q, k, v)]
slopes = torch.rand(4, device="cuda")
spattn.attention(q, k, v, "causal").backward(dout)
def score(s, b, h, q, k):
    return 20 * torch.tanh((s - slopes[h] * abs(q - k)) / 20)
def other(s, b, h, q, k):
    return 20 * torch.tanh(s / 20) - slopes[h] * abs(q - k)
times = []
def measure(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    times.append(1e3 * (time.perf_counter() - start))
    return result
with torch.no_grad():
    measure(lambda: spattn.attention(q, k, v, "causal", score=score))
out = spattn.attention(q, k, v, "causal", score=score)
measure(lambda: torch.autograd.grad(out, leaves, dout))
measure(lambda: torch.autograd.grad(spattn.attention(q, k, v, "causal", score=other), leaves, dout))
print(*times)
"""


def functions(torch) -> dict[str, tuple[Callable, Callable, list]]:
    """Score functions by name: spattn's and FlexAttention's form, and captured tensors whose gradients are wanted."""
    from spattn.score import relative_bias, softcap

    slopes = 2.0 ** (-8.0 / HEADS * torch.arange(1, HEADS + 1, device="cuda"))
    table = (0.1 * torch.randn(HEADS, 2 * REACH + 1, device="cuda")).requires_grad_()

    def alibi(s, b, h, q, k):
        return s - slopes[h] * abs(q - k)

    return {
        "ALiBi": (alibi, alibi, []),
        "soft-cap": (softcap(CAP), lambda s, b, h, q, k: CAP * torch.tanh(s / CAP), []),
        "relative table": (
            relative_bias(table),
            lambda s, b, h, q, k: s + table[h, torch.clamp(k - q, -REACH, REACH) + REACH],
            [table],
        ),
    }


def first_calls() -> list[dict]:
    """Time of the first forward, backward and training step in a process without and one with compiled kernels."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "full"):
            command = [sys.executable, "-W", "ignore", "-c", FIRST_CALL]
            environment = {**os.environ, "SPATTN_CACHE_DIR": str(Path(folder) / "kernels")}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            passes = "forward", "backward", "training step"
            for which, taken in zip(passes, map(float, done.stdout.split()), strict=True):
                rows.append({"problem": "first call", "cache": cache, "pass": which, "ms": round(taken, 1)})
                print(*rows[-1].values(), sep="  ", flush=True)
    return rows


def contenders(pattern, mask, sets, given, sinks, with_flex: bool) -> dict[tuple[str, str, str], Callable]:
    """Calls by function, contender and pass; each takes the number of an input set."""
    import torch

    import spattn

    def ours(**options):
        return lambda q, k, v: spattn.attention(q, k, v, pattern, **options)

    own = {"plain": (ours(), []), "sinks": (ours(sinks=sinks), [sinks])}
    own |= {name: (ours(score=score), captured) for name, (score, _, captured) in given.items()}
    rows = [(name, "spattn", *one) for name, one in own.items()]
    if with_flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        blocks = mask and create_block_mask(mask, None, None, TOKENS, TOKENS, device="cuda", _compile=True)
        torch._dynamo.reset()
        flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)

        def theirs(score, options):
            return lambda q, k, v: flex(q, k, v, score_mod=score, block_mask=blocks, kernel_options=options)

        for name, (_, score, captured) in given.items():
            call = theirs(score, None)
            try:
                with_captured(call, captured, sets[:1])(0)
            except torch._inductor.exc.InductorError as error:  # its default backward may exceed shared memory
                print(f"FlexAttention, {name}: {str(error).splitlines()[0]}; two stages instead", flush=True)
                call = theirs(score, {"bwd_num_stages": 2})
            rows.append((name, "FlexAttention", call, captured))

    calls = {(name, who, "forward"): without_gradients(call, sets) for name, who, call, _ in rows}
    return calls | {(name, who, "backward"): with_captured(call, own, sets) for name, who, call, own in rows}


def with_captured(call: Callable, captured: list, sets) -> Callable:
    """The backward of a call, with the gradients of captured tensors."""
    if not captured:
        return recorded(call, sets)
    import torch

    graphs = []
    for *inputs, dout in sets:
        leaves = [x.detach().requires_grad_() for x in inputs]
        graphs.append((call(*leaves), [*leaves, *captured], dout))

    def backward(i):
        out, leaves, dout = graphs[i]
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return backward


def main() -> None:
    """Measure, check, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="problem names; writes nothing")
    parser.add_argument("--without-flex", action="store_true", help="skip FlexAttention")
    parser.add_argument("--first-calls", action="store_true", help="only first calls; writes nothing")
    args = parser.parse_args()
    if args.first_calls:
        first_calls()
        return
    import torch

    torch._dynamo.config.recompile_limit = 1000
    torch.manual_seed(0)
    shape = 1, HEADS, TOKENS, HEAD_DIM
    sets = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)] for _ in range(SETS)]
    problems, rows, given = peers_cuda.problems(TOKENS), [], functions(torch)
    sinks = torch.randn(HEADS, device="cuda").requires_grad_()
    for problem in args.only or ("dense", "window ±256", "strided 128"):
        pattern, mask = problems[problem]
        calls = contenders(pattern, mask, sets, given, sinks, not args.without_flex)
        for name, who in sorted({key[:2] for key in calls}):
            both = calls[name, who, "forward"], calls[name, who, "backward"]
            _, score, _ = given.get(name, (None, None, []))
            error = gradient_error(pattern, sets, *both, score=score, sinks=sinks if name == "sinks" else None)
            if not error <= TOLERANCE:
                raise AssertionError(f"{who}, {name}, {problem}: relative error {error:.2g} against float64")
        for which in ("forward", "backward"):
            own = {key: call for key, call in calls.items() if key[2] == which}
            medians = {key: statistics.median(x) for key, x in measure(own, ROUNDS, TARGET_MS).items()}
            for (name, who, _), median in medians.items():
                row = {
                    "problem": problem,
                    "score": name,
                    "contender": who,
                    "pass": which,
                    "median_ms": round(median, 4),
                }
                row["times_plain"] = round(median / medians["plain", "spattn", which], 3)
                row["times_spattn"] = round(median / medians[name, "spattn", which], 3)
                rows.append(row)
                print(*row.values(), sep="  ", flush=True)
        del calls
        torch.cuda.empty_cache()
    if args.only is None:
        rows += first_calls()
        record.write("scores_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
