#!/usr/bin/env python3
"""Compare the backward of spattn with cuDNN, FlexAttention and FlashAttention-4.

    python benchmarks/peers/peers_cuda_backward.py            # minutes for FlexAttention's compilation; needs torch
    python benchmarks/peers/peers_cuda_backward.py --without-flex          # 6 minutes on an H200
    python benchmarks/peers/peers_cuda_backward.py --dims 128 --only dense "window ±256"

The backward alone on one GPU, bfloat16, batch 1, 16 heads, 16384 tokens, timed as in peers_cuda.py. spattn is timed as
``spattn.attention_backward``, the others as ``torch.autograd.grad`` of a retained graph. Gradients are checked against
float64 on sampled rows and keys before timing. TF/s count allowed pairs only, 10·head_dim each. FlashAttention-4 takes
part if ``flash_attn.cute`` is installed. Writes ``peers_cuda_backward_flex``, or ``peers_cuda_backward`` without
FlexAttention, with the targets of peers_cuda_floors.py; with ``SPATTN_CUDA_KERNEL=portable``,
``peers_cuda_backward_portable``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import peers_cuda
import peers_cuda_floors
import record
from gpu_timing import ROUNDS, ROWS, SETS, measure
from peers_cuda import HEADS

TOKENS = 16384
TOLERANCE = 1.6e-2  # relative error of a bfloat16 gradient, four times the rounding error of P and dS
WINDOWS = {
    "dense": {},
    "causal": {"causal": True},
    "window ±256": {"window_size": (256, 256)},
    "causal window 1024": {"causal": True, "window_size": (1023, 0)},
}
NOTES = (
    "The backward alone, bfloat16, batch 1, 16 heads; medians of CUDA events, contenders in turns. "
    "times_spattn: ratio of a contender's time to spattn's."
)


def recorded(forward: Callable, sets, transposed: bool = False) -> Callable:
    """A call that takes the number of an input set and returns (dq, dk, dv) by autograd through `forward`."""
    import torch

    graphs = []
    for *inputs, dout in sets:
        if transposed:
            inputs, dout = [x.transpose(1, 2).contiguous() for x in inputs], dout.transpose(1, 2).contiguous()
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = forward(*leaves)
        graphs.append((out[0] if isinstance(out, tuple) else out, leaves, dout))

    def call(i):
        out, leaves, dout = graphs[i]
        found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return [x.transpose(1, 2) for x in found] if transposed else found

    return call


def contenders(name, pattern, mask, sets) -> dict[str, Callable]:
    """Calls by name; each takes the number of an input set."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    import spattn

    results = [spattn.attention(q, k, v, pattern, return_lse=True) for q, k, v, _ in sets]

    def own(i):
        q, k, v, dout = sets[i]
        return spattn.attention_backward(dout, q, k, v, *results[i], pattern)

    calls = {"spattn": own}
    if name in ("dense", "causal"):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            calls["cuDNN"] = recorded(
                lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=name == "causal"), sets
            )
    if mask is not None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        q, k = sets[0][:2]
        blocks = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=q.device, _compile=True)
        flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        calls["FlexAttention"] = recorded(lambda q, k, v: flex(q, k, v, block_mask=blocks), sets)
    if name in WINDOWS and importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        from flash_attn.cute import flash_attn_func

        calls["FlashAttention-4"] = recorded(
            lambda q, k, v: flash_attn_func(q, k, v, **WINDOWS[name]), sets, transposed=True
        )
    return calls


def worst_error(pattern, q, k, v, dout, gradients) -> float:
    """Largest relative error of sampled rows of dq and keys of dk and dv, in the first and the last head."""
    import torch

    import spattn

    tokens, scale = q.shape[2], q.shape[3] ** -0.5
    rows = np.unique(np.r_[0, tokens - 1, np.random.default_rng(0).integers(0, tokens, ROWS)])
    everyone, bound = np.arange(tokens), pattern.bind(tokens, tokens)
    masks = [
        torch.from_numpy(np.broadcast_to(bound.allows(*pair), shape).copy()).to(q.device)
        for pair, shape in (
            ((rows[:, None], everyone[None]), (len(rows), tokens)),
            ((everyone[:, None], rows[None]), (tokens, len(rows))),
        )
    ]
    out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
    worst = 0.0
    for head in (0, q.shape[1] - 1):
        qh, kh, vh, dh, oh = (x[0, head].double() for x in (q, k, v, dout, out))
        delta, own_lse = (dh * oh).sum(1, keepdim=True), lse[0, head, :, None].double()

        def weights(mask, queries, keys, qh=qh, kh=kh, vh=vh, dh=dh, delta=delta, own_lse=own_lse):
            p = torch.where(mask, torch.exp(qh[queries] @ kh[keys].T * scale - own_lse[queries]), 0.0)
            return p, p * (dh[queries] @ vh[keys].T - delta[queries]) * scale

        _, by_rows = weights(masks[0], rows, everyone)
        p, by_keys = weights(masks[1], everyone, rows)
        expected = by_rows @ kh, by_keys.T @ qh, p.T @ dh
        for got, exact in zip(gradients, expected, strict=True):
            error = float(torch.linalg.norm(got[0, head, rows].double() - exact) / torch.linalg.norm(exact))
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def run(head_dim: int, names: list[str] | None, with_flex: bool = True) -> Iterator[dict]:
    """Rows of the results for one head dimension."""
    import torch

    import spattn

    torch.manual_seed(0)
    shape = 1, HEADS, TOKENS, head_dim
    sets = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)] for _ in range(SETS)]
    for name, (pattern, mask) in peers_cuda.problems(TOKENS).items():
        if names is not None and name not in names:
            continue
        calls = contenders(name, pattern, mask if with_flex else None, sets)
        errors = {who: worst_error(pattern, *sets[0], call(0)) for who, call in calls.items()}
        for who, error in errors.items():
            if error > TOLERANCE:
                raise AssertionError(f"{who} on {name}: relative error {error:.2g} against float64")
        medians = {who: statistics.median(x) for who, x in measure(calls, ROUNDS).items()}
        made = spattn.plan_for(pattern, *sets[0][:3], backend="cuda")
        for who, median in medians.items():
            tera = 10e-9 * HEADS * head_dim * made.nnz / median
            print(f"d={head_dim} {name:28s} {who:17s} {median:9.4f} ms {tera:6.0f} TF/s", flush=True)
            yield {
                "problem": name,
                "tokens": TOKENS,
                "head_dim": head_dim,
                "contender": who,
                "median_ms": round(median, 5),
                "tflops": round(tera, 1),
                "times_spattn": round(median / medians["spattn"], 3),
                "relative_error": float(f"{errors[who]:.2g}"),
                "efficiency": round(made.efficiency, 4),
            }
        del calls
        torch.cuda.empty_cache()


def main() -> None:
    """Measure and print; write after every contender, so an interrupted run keeps its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", nargs="*", type=int, default=[128, 64], help="head dimensions")
    parser.add_argument("--only", nargs="*", help="problem names; writes nothing")
    parser.add_argument("--without-flex", action="store_true", help="skip FlexAttention")
    args = parser.parse_args()
    import torch

    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 5000
    name = "peers_cuda_backward" if args.without_flex else "peers_cuda_backward_flex"
    rows: list[dict] = []
    for head_dim in args.dims:
        for row in run(head_dim, args.only, not args.without_flex):
            rows.append(row)
            if args.only is None:
                floors = peers_cuda_floors.backward_rows(rows)
                record.write(name, rows, notes=NOTES, gpu=torch.cuda.get_device_name(), floors=floors)
    for row in peers_cuda_floors.backward_rows(rows):
        print(f"{row['what']}: {row['reached']} (target {row['target']}): {row['met']}")


if __name__ == "__main__":
    main()
