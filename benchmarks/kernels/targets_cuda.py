#!/usr/bin/env python3
"""Measure neighborhoods, strided patterns, decoding and short sequences on a Hopper GPU.

    python benchmarks/kernels/targets_cuda.py                           # a minute on an H200; needs torch
    python benchmarks/kernels/targets_cuda.py --only patterns decoding  # some of the groups

bfloat16, head_dim 128. Times are GPU times of calls that wait in the stream until all of them are enqueued, so no host
time counts; contenders alternate, each call uses the next of two input sets. Every result is checked against float64 on
sampled rows before timing. TF/s count allowed pairs only, 4·head_dim each forward and 10·head_dim backward.

*patterns*: 16384 tokens, 16 heads, problems of peers_cuda.py, forward and backward. *decoding*: 1, 16 and 64 queries,
32 heads over 8 KV heads, causal, beside PyTorch's attention with one query. *short*: 512 to 2048 tokens, 4 and 16
heads, inputs in L2, beside cuDNN and FlashAttention-2, which compute all causal pairs of a window; host_us is the time
until a call returns. Writes ``targets_cuda_patterns``, ``targets_cuda_decoding`` and ``targets_cuda_short`` after every
problem; exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

import peers_cuda
import peers_cuda_backward
import record
from gpu_timing import SETS, TOLERANCE, host_us, queued_ms, worst_error
from overhead_cuda import COPY_TB_S, decoding_error
from peers_cuda import HEADS
from peers_cuda_backward import TOKENS, recorded

HEAD_DIM = 128
PROBLEMS = ("neighbourhood 128×128, 13×13", "strided 128", "fixed 128, 8")
DECODING, Q_LENS, HEADS_Q, HEADS_KV = ((131072, 1), (32768, 8)), (1, 16, 64), 32, 8  # (keys, batch entries)
SHORT_TOKENS, SHORT_HEADS, SHORT_WINDOW = (512, 1024, 2048), (4, 16), 256
BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "FlashAttention-2": "FLASH_ATTENTION"}
TARGETS = [  # what a row must hold, and the field with its limit
    ({"problem": PROBLEMS[0], "direction": "forward"}, "tflops", "≥", 160),
    ({"problem": PROBLEMS[0], "direction": "backward"}, "tflops", "≥", 115),
    ({"problem": PROBLEMS[1], "direction": "forward"}, "tflops", "≥", 110),
    ({"problem": PROBLEMS[2], "direction": "backward"}, "tflops", "≥", 260),
    ({"contender": "torch SDPA"}, "times_one_query", "≥", 1.0),
    ({"q_len": 16}, "times_one_query", "≤", 1.02),
    ({"q_len": 64, "batch": 1}, "tflops", "≥", 500),
    ({"contender": "spattn", "tokens": 512, "direction": "backward"}, "host_us", "≤", 20),
]
NOTES = {
    "patterns": "bfloat16, batch 1, 16 heads of 128; medians of GPU times without host time.",
    "decoding": "bfloat16, 32 query heads over 8 KV heads of 128, causal; medians of GPU times without host time. "
    "floor_ms: reading K and V at the rate of a copy. times_one_query: ratio to spattn's time for one query.",
    "short": "bfloat16, batch 1, heads of 128, inputs in L2; gpu_us: medians of GPU times without host time; host_us: "
    "medians of host times of single calls. times_spattn: ratio of a contender's gpu_us to spattn's. For a window, the "
    "other libraries compute all causal pairs. spattn, autograd: torch.autograd.grad, as of the other libraries.",
}


def arrays(*shapes: tuple[int, ...]) -> list[list]:
    """Sets of random tensors of these shapes."""
    import torch

    torch.manual_seed(0)
    return [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes] for _ in range(SETS)]


def check(label: str, pattern, arrays: list, result) -> float:
    """Return the relative error of `result`, or of the gradients (dq, dk, dv), if it is within its limit."""
    if isinstance(result, (tuple, list)):
        error, limit = peers_cuda_backward.worst_error(pattern, *arrays, result), peers_cuda_backward.TOLERANCE
    else:
        error, limit = worst_error(pattern, *arrays[:3], result), TOLERANCE
    return accept(label, error, limit)


def accept(label: str, error: float, limit: float = TOLERANCE) -> float:
    """Return the rounded error if it is within the limit."""
    if not error <= limit:
        raise AssertionError(f"{label}: relative error {error:.2g} against float64")
    return float(f"{error:.2g}")


def own_backward(pattern, sets: list) -> Callable:
    """Return spattn.attention_backward as a function of the number of an input set."""
    import spattn

    results = [spattn.attention(*inputs, pattern, return_lse=True) for *inputs, _ in sets]
    return lambda i: spattn.attention_backward(sets[i][3], *sets[i][:3], *results[i], pattern)


def backend(name: str, q, k, v, causal: bool = False, enable_gqa: bool = False) -> Callable | None:
    """Return the context that selects a backend of PyTorch's attention, or None if it refuses these arrays."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, enable_gqa)
    accepts = {
        "cuDNN": torch.backends.cuda.can_use_cudnn_attention,
        "FlashAttention-2": torch.backends.cuda.can_use_flash_attention,
    }
    if not accepts[name](params, debug=True):
        print(f"PyTorch's attention refuses {name}", flush=True)
        return None
    return lambda: sdpa_kernel(getattr(SDPBackend, BACKENDS[name]))


def within(context: Callable, call: Callable) -> Callable:
    """Return `call` inside a new context each time."""

    def wrapped(i):
        with context():
            return call(i)

    return wrapped


def measure_patterns() -> Iterator[list[dict]]:
    """Measure forward and backward of patterns with many views."""
    import spattn

    sets = arrays(*[(1, HEADS, TOKENS, HEAD_DIM)] * 4)
    for name in PROBLEMS:
        pattern = peers_cuda.problems(TOKENS)[name][0]
        made = spattn.plan_for(pattern, *sets[0][:3], backend="cuda")  # the backward may have another plan
        calls = {
            "forward": lambda i, pattern=pattern: spattn.attention(*sets[i][:3], pattern),
            "backward": own_backward(pattern, sets),
        }
        errors = {which: check(f"{name}, {which}", pattern, sets[0], call(0)) for which, call in calls.items()}
        rows = []
        for direction, times in queued_ms(calls).items():
            median = statistics.median(times)
            flops = (4 if direction == "forward" else 10) * HEADS * HEAD_DIM * made.nnz
            rows.append(
                {
                    "problem": name,
                    "direction": direction,
                    "contender": "spattn",
                    "median_ms": round(median, 5),
                    "tflops": round(1e-9 * flops / median, 1),
                    "relative_error": errors[direction],
                    "efficiency": round(made.efficiency, 4) if direction == "forward" else None,
                }
            )
        yield rows


def measure_decoding() -> Iterator[list[dict]]:
    """Measure few queries beside many keys."""
    from torch.nn.functional import scaled_dot_product_attention

    import spattn

    for keys, batch in DECODING:
        sets = arrays(
            *((batch, HEADS_Q, q_len, HEAD_DIM) for q_len in Q_LENS), *[(batch, HEADS_KV, keys, HEAD_DIM)] * 2
        )
        calls = {
            (q_len, "spattn"): lambda i, n=n: spattn.attention(sets[i][n], *sets[i][-2:], "causal")  # noqa: B023
            for n, q_len in enumerate(Q_LENS)
        }

        def dense(i, sets=sets):  # one query attends to all keys
            return scaled_dot_product_attention(sets[i][0], *sets[i][-2:], enable_gqa=True)

        calls[1, "torch SDPA"] = dense
        for name in BACKENDS:
            context = backend(name, sets[0][0], *sets[0][-2:], enable_gqa=True)
            if context is not None:
                calls[1, f"torch SDPA, {name}"] = within(context, dense)
        errors = {
            (q_len, who): accept(
                f"{who}, {q_len} × {keys}",
                decoding_error(sets[0][Q_LENS.index(q_len)], *sets[0][-2:], call(0)),
            )
            for (q_len, who), call in calls.items()
        }
        medians = {which: statistics.median(times) for which, times in queued_ms(calls).items()}
        floor = 1e3 * sum(x.nbytes for x in sets[0][-2:]) / (COPY_TB_S * 1e12)
        rows = []
        for (q_len, who), median in medians.items():
            pairs = q_len * keys - q_len * (q_len - 1) // 2
            rows.append(
                {
                    "keys": keys,
                    "batch": batch,
                    "q_len": q_len,
                    "contender": who,
                    "median_ms": round(median, 5),
                    "floor_ms": round(floor, 5),
                    "times_floor": round(median / floor, 3),
                    "times_one_query": round(median / medians[1, "spattn"], 3),
                    "tflops": round(4e-9 * batch * HEADS_Q * HEAD_DIM * pairs / median, 1),
                    "relative_error": errors[q_len, who],
                }
            )
        yield rows


def short_contenders(name: str, sets: list, backward: bool) -> dict[str, tuple]:
    """(pattern, context, call) by name; calls take the number of an input set."""
    from torch.nn.functional import scaled_dot_product_attention

    import spattn
    from spattn import patterns

    causal, plain = name != "dense", contextlib.nullcontext
    theirs = patterns.Causal() if causal else patterns.Full()
    pattern = patterns.SlidingWindow(SHORT_WINDOW - 1, 0) if "window" in name else theirs

    def own(q, k, v):
        return spattn.attention(q, k, v, pattern)

    def dense(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    if backward:
        found = {
            "spattn": (pattern, plain, own_backward(pattern, sets)),
            "spattn, autograd": (pattern, plain, recorded(own, sets)),
        }
    else:
        found = {"spattn": (pattern, plain, lambda i: own(*sets[i][:3]))}
    for who in BACKENDS:
        context = backend(who, *sets[0][:3], causal)
        if context is None:
            continue
        if backward:
            with context():  # autograd keeps the backend of the forward
                found[who] = theirs, plain, recorded(dense, sets)
        else:
            found[who] = theirs, context, lambda i: dense(*sets[i][:3])
    return found


def short_rows(sets: list, name: str, direction: str) -> list[dict]:
    """One row per contender."""
    found = short_contenders(name, sets, direction == "backward")
    calls = {who: within(context, call) for who, (_, context, call) in found.items()}
    (_, heads, tokens, _), rows = sets[0][0].shape, []
    errors = {
        who: check(f"{who}, {name}, {tokens} tokens, {direction}", pattern, sets[0], calls[who](0))
        for who, (pattern, _, _) in found.items()
    }
    medians = {who: 1e3 * statistics.median(times) for who, times in queued_ms(calls).items()}
    for who, (_, context, call) in found.items():
        with context():
            host = host_us(lambda: call(0), 200)  # noqa: B023
        rows.append(
            {
                "problem": name,
                "direction": direction,
                "tokens": tokens,
                "heads": heads,
                "contender": who,
                "gpu_us": round(medians[who], 2),
                "times_spattn": round(medians[who] / medians["spattn"], 3),
                "host_us": round(host, 2),
                "relative_error": errors[who],
            }
        )
    return rows


def measure_short() -> Iterator[list[dict]]:
    """Measure sequences that leave most SMs idle."""
    problems = "dense", "causal", f"causal window {SHORT_WINDOW}"
    for heads, tokens in itertools.product(SHORT_HEADS, SHORT_TOKENS):
        sets = arrays(*[(1, heads, tokens, HEAD_DIM)] * 4)
        for name, direction in itertools.product(problems, ("forward", "backward")):
            yield short_rows(sets, name, direction)


GROUPS = {"decoding": measure_decoding, "patterns": measure_patterns, "short": measure_short}


def judged(row: dict) -> dict:
    """Return the row with its target, if there is one, and whether it is met."""
    for wanted, field, sign, limit in TARGETS:
        if field in row and wanted.items() <= row.items():
            met = row[field] >= limit if sign == "≥" else row[field] <= limit
            return row | {"target": f"{field} {sign} {limit:g}", "met": "yes" if met else "no"}
    return row


def main() -> int:
    """Measure, print, write; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups of problems")
    options = parser.parse_args()
    import torch

    met = True
    for group in options.only:
        rows: list[dict] = []
        for found in GROUPS[group]():
            rows += map(judged, found)
            for row in rows[-len(found) :]:
                print(*row.values(), sep="  ", flush=True)
            record.write(f"targets_cuda_{group}", rows, notes=NOTES[group], gpu=torch.cuda.get_device_name())
        met = met and all(row.get("met") != "no" for row in rows)
        torch.cuda.empty_cache()
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
