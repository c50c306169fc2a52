#!/usr/bin/env python3
"""Study sparse attention on a GPU: speed-ups over naive attention, separate kernels, layers.

    python benchmarks/study/study_cuda.py             # 90 seconds on an H200; torch with Triton, transformers
    python benchmarks/study/study_cuda.py --quick     # short problems, writes nothing
    python benchmarks/study/study_cuda.py --only layers

*Speed-up*: bfloat16, 8 heads of 64, 128 to 65,536 tokens; naive attention is PyTorch's eager mode. *Unfused*: float32,
8 heads of 64, 8192 tokens; the fused kernel beside cuSPARSE's SDDMM and SpMM with a softmax of PyTorch or Triton.
*Layers*: parts of a BERT encoder of BERT-base's sizes with random weights, 16,384 tokens. Every result is checked
against float64 before it is timed. Writes ``study_speedup_cuda``, ``study_unfused_cuda`` and ``study_layers_cuda``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import gpu_timing
import record
import study_problems as study
import torch

from spattn import patterns as sp

sys.path.append(str(record.ROOT / "examples"))

DEVICE, HEADS = "cuda", 8
ROWS = 8192  # queries of a block of naive attention; at 65,536 tokens its scores take 8 GiB
ROUNDS, TARGET_MS = 5, 1.0
FP32_TOLERANCE = 1e-5  # relative error
BERT = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}
UNFUSED = {
    "window ±64": sp.SlidingWindow(64),
    "window ±256": sp.SlidingWindow(256),
    **{name: study.PATTERNS[name] for name in ("Longformer ±256 + 16", "DeepSpeed BigBird", "strided 128")},
}
NOTES = {
    "speedup": "bfloat16, 8 heads of 64; medians between CUDA events around back-to-back calls, contenders in turns. "
    "Plans are made before timing. Naive: PyTorch's eager mode, in blocks of at most 8192 queries.",
    "unfused": "float32, 8 heads of 64, forward; medians between CUDA events, contenders in turns, heads one after the "
    "other. SDDMM: torch.sparse.sampled_addmm, SpMM: torch.sparse.mm, both cuSPARSE; softmax: PyTorch's segment_reduce "
    "or a Triton kernel. Stages are timed apart with their inputs ready.",
    "layers": "bfloat16, BERT encoder of BERT-base's sizes (6 layers) with random weights, 16,384 tokens; medians of "
    "wall time, synchronized at the borders of each part, contenders in turns.",
}


def speedup(quick: bool) -> list[dict]:
    """Rows of all lengths and passes."""
    rows: list[dict] = []
    for tokens in study.LENGTHS[:2] if quick else study.LENGTHS:
        sets = [study.inputs(HEADS, tokens, torch.bfloat16, DEVICE, seed) for seed in range(gpu_timing.SETS)]
        names = {study.NAIVE, *study.PATTERNS}
        errors = study.check(sets[0], ROWS, gpu_timing.TOLERANCE, names)
        for which in study.PASSES:
            calls = study.calls(sets, which, ROWS, names)
            times = gpu_timing.measure(calls, ROUNDS, TARGET_MS)
            ms = {
                name: {"median_ms": round(statistics.median(own), 5), "extrapolated": False}
                for name, own in times.items()
            }
            rows += study.rows_of(ms, which, tokens, errors)
            study.show(rows[-len(ms) :])
    return rows


class Unfused:
    """SDDMM, softmax and SpMM over the CSR index of a pattern, head after head."""

    def __init__(self, pattern: sp.Pattern, tokens: int, softmax: Callable):
        indptr, indices = pattern.index_set(tokens, tokens).to_csr()
        self._indptr, self._indices = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (indptr, indices))
        self._softmax, self._size = softmax, (tokens, tokens)
        self._zeros = self._csr(torch.zeros(len(indices), device=DEVICE))

    def _csr(self, values: torch.Tensor) -> torch.Tensor:
        return torch.sparse_csr_tensor(self._indptr, self._indices, values, self._size, check_invariants=False)

    def sddmm(self, q, k) -> list[torch.Tensor]:
        """Scores of the allowed pairs of each head."""
        scale = q.shape[3] ** -0.5
        return [
            torch.sparse.sampled_addmm(self._zeros, a, b.T, beta=0, alpha=scale).values()
            for a, b in zip(q[0], k[0], strict=True)
        ]

    def softmax(self, scores: list[torch.Tensor]) -> list[torch.Tensor]:
        """Weights of each head."""
        return [self._softmax(x, self._indptr) for x in scores]

    def spmm(self, weights: list[torch.Tensor], v) -> torch.Tensor:
        """The output."""
        return torch.stack([torch.sparse.mm(self._csr(x), b) for x, b in zip(weights, v[0], strict=True)])[None]

    def __call__(self, q, k, v) -> torch.Tensor:
        return self.spmm(self.softmax(self.sddmm(q, k)), v)


def torch_softmax(values: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Softmax of the rows of a CSR matrix by PyTorch's segment reductions."""
    counts = indptr.diff()
    top = torch.segment_reduce(values, "max", offsets=indptr)
    weights = (values - torch.repeat_interleave(top, counts, output_size=len(values))).exp_()
    total = torch.segment_reduce(weights, "sum", offsets=indptr)
    return weights.div_(torch.repeat_interleave(total, counts, output_size=len(values)))


def unfused(quick: bool) -> list[dict]:
    """The fused kernel and the pipelines, by pattern."""
    from row_softmax import row_softmax

    tokens, rows = 1024 if quick else 8192, []
    sets = [
        [x.detach() for x in study.inputs(HEADS, tokens, torch.float32, DEVICE, seed)[:3]]
        for seed in range(gpu_timing.SETS)
    ]
    for problem, pattern in UNFUSED.items():
        made = {
            "cuSPARSE, PyTorch's softmax": Unfused(pattern, tokens, torch_softmax),
            "cuSPARSE, Triton's softmax": Unfused(pattern, tokens, row_softmax),
        }
        calls: dict[str, Callable] = {"spattn, fused": lambda i, p=pattern: study.forward(*sets[i], p)}
        calls |= {name: (lambda i, u=u: u(*sets[i])) for name, u in made.items()}
        errors = {name: gpu_timing.worst_error(pattern, *sets[0], call(0)) for name, call in calls.items()}
        for name, error in errors.items():
            if not error <= FP32_TOLERANCE:
                raise AssertionError(f"{name}, {problem}: relative error {error:.2g}, expected <= {FP32_TOLERANCE}")
        for name, u in made.items():
            scores = [u.sddmm(*given[:2]) for given in sets]
            weights = [u.softmax(x) for x in scores]
            calls[name, "SDDMM"] = lambda i, u=u: u.sddmm(*sets[i][:2])
            calls[name, "softmax"] = lambda i, u=u, scores=scores: u.softmax(scores[i])
            calls[name, "SpMM"] = lambda i, u=u, weights=weights: u.spmm(weights[i], sets[i][2])
        ms = {name: statistics.median(own) for name, own in gpu_timing.measure(calls, ROUNDS, TARGET_MS).items()}
        for name, error in errors.items():
            stages = {
                f"{stage}_ms": round(ms[name, stage], 4) for stage in ("SDDMM", "softmax", "SpMM") if name in made
            }
            rows.append(
                {"problem": problem, "contender": name, "median_ms": round(ms[name], 4), **stages}
                | {"times_fused": round(ms[name] / ms["spattn, fused"], 2), "relative_error": float(f"{error:.2g}")}
            )
            print(rows[-1], flush=True)
    return rows


def layers(quick: bool) -> list[dict]:
    """Parts of the encoder's layers."""
    sizes, tokens = (BERT | {"num_hidden_layers": 1}, 1024) if quick else (BERT, 16384)
    return study.layer_rows(DEVICE, sizes, tokens, torch.bfloat16, 1 if quick else 3)


def main() -> int:
    """Measure, print, write each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short problems, write nothing")
    parser.add_argument("--only", choices=NOTES, help="one part")
    args = parser.parse_args()
    parts = {"speedup": speedup, "unfused": unfused, "layers": layers}
    for name in [args.only] if args.only else parts:
        began = time.perf_counter()
        rows = parts[name](args.quick)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        if not args.quick:
            record.write(f"study_{name}_cuda", rows, notes=NOTES[name], gpu=torch.cuda.get_device_name())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
