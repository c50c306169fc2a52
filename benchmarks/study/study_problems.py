"""Patterns, naive attention and the checks of the study, for CPU and GPU. Needs PyTorch."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Iterator

import gpu_timing
import torch

import spattn
from spattn import patterns as sp
from spattn.patterns import deepspeed

LENGTHS = tuple(128 << n for n in range(10))
HEAD_DIM = 64
NAIVE, DENSE = "naive", "dense"
# DeepSpeed's have the defaults of its classes; all heads share the random blocks of head 0.
PATTERNS: dict[str, sp.Pattern] = {
    DENSE: sp.Full(),
    "DeepSpeed fixed": deepspeed.fixed(),
    "DeepSpeed variable": deepspeed.variable(),
    "DeepSpeed BigBird": deepspeed.bigbird(head=0),
    "DeepSpeed BSLongformer": deepspeed.bslongformer(),
    "strided 128": sp.strided(128),
    "fixed 128, 8": sp.fixed(128, 8),
    "Longformer ±256 + 16": sp.longformer(512, global_tokens=16),
    "BigBird, blocks of 64": sp.BigBird(64, head=0),
}
PASSES = ("forward", "forward and backward")
CHECKED = 2048  # longest sequence whose results are compared in full; more than one block of naive attention's


def naive(q, k, v, masked, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Product, mask, softmax, product: the output of one block of queries after the other.

    A block has `rows` queries, which bounds the memory; all pairs are computed. `masked` is True where a pair is not
    allowed, as `masked_fill_` takes it.
    """
    for start in range(0, q.shape[2], rows):
        block = slice(start, start + rows)
        scores = (q[:, :, block] * q.shape[3] ** -0.5) @ k.mT
        yield block, scores.masked_fill_(masked[block], -math.inf).softmax(-1) @ v


def naive_forward(q, k, v, masked, rows: int) -> torch.Tensor:
    """The output of naive attention."""
    with torch.no_grad():
        return torch.cat([out for _, out in naive(q, k, v, masked, rows)], 2)


def naive_gradients(q, k, v, dout, masked, rows: int) -> list[torch.Tensor]:
    """Gradients of q, k and v by autograd, one block of queries after the other."""
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for block, out in naive(q, k, v, masked, rows):
        for total, part in zip(found, torch.autograd.grad(out, (q, k, v), dout[:, :, block]), strict=True):
            total += part
    return found


def forward(q, k, v, pattern: sp.Pattern) -> torch.Tensor:
    """spattn's output."""
    with torch.no_grad():
        return spattn.attention(q, k, v, pattern)


def gradients(q, k, v, dout, pattern: sp.Pattern) -> tuple[torch.Tensor, ...]:
    """spattn's gradients of q, k and v by autograd, after a forward."""
    return torch.autograd.grad(spattn.attention(q, k, v, pattern), (q, k, v), dout)


def inputs(heads: int, tokens: int, dtype: torch.dtype, device: str, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, which require gradients, and dout: standard normal, (1, heads, tokens, 64)."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (1, heads, tokens, HEAD_DIM)
    made = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def outside_window(tokens: int, device: str, side: int = 256) -> torch.Tensor:
    """The mask of naive attention's timings: pairs more than `side` apart. No mask changes what naive does."""
    at = torch.arange(tokens, device=device, dtype=torch.int32)
    return torch.cat([(at[None] - rows[:, None]).abs() > side for rows in at.split(1024)])


def calls(sets: list, which: str, rows: int, names: Collection[str]) -> dict[str, Callable[[int], object]]:
    """A function of the number of an input set for naive attention and for spattn with each pattern, if in `names`."""
    tokens, device = sets[0][0].shape[2], sets[0][0].device
    found: dict[str, Callable[[int], object]] = {}
    if NAIVE in names:
        found[NAIVE] = _call(sets, which, naive_forward, naive_gradients, outside_window(tokens, device), rows)
    return found | {
        name: _call(sets, which, forward, gradients, pattern) for name, pattern in PATTERNS.items() if name in names
    }


def _call(sets: list, which: str, of_output: Callable, of_gradients: Callable, *rest) -> Callable[[int], object]:
    if which == PASSES[0]:
        return lambda i: of_output(*sets[i][:3], *rest)
    return lambda i: of_gradients(*sets[i], *rest)


def check(given: list, rows: int, tolerance: float, names: Collection[str]) -> dict[str, float]:
    """Largest relative error against float64, by contender; raise if one exceeds `tolerance`.

    Sampled rows of spattn's output; up to :data:`CHECKED` tokens everything, gradients and naive attention included.
    """
    tokens, device, errors = given[0].shape[2], given[0].device, {}
    wide = [x.detach().double().requires_grad_() for x in given[:3]] + [given[3].double()]

    def naively(arrays: list, masked: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return naive_forward(*arrays[:3], masked, rows), *naive_gradients(*arrays, masked, rows)

    for name, pattern in PATTERNS.items():
        if name not in names:
            continue
        errors[name] = gpu_timing.worst_error(pattern, *[x.detach() for x in given[:3]], forward(*given[:3], pattern))
        if tokens <= CHECKED:
            masked = torch.from_numpy(~pattern.index_set(tokens, tokens).to_dense()).to(device)
            found = forward(*given[:3], pattern), *gradients(*given, pattern)
            errors[name] = max(errors[name], _distance(found, naively(wide, masked)))
    if NAIVE in names and tokens <= CHECKED:
        masked = outside_window(tokens, device)
        errors[NAIVE] = _distance(naively(given, masked), naively(wide, masked))
    for name, error in errors.items():
        if not error <= tolerance:
            raise AssertionError(f"{name}, {tokens} tokens: relative error {error:.2g}, expected <= {tolerance:.2g}")
    return errors


def _distance(found: tuple, exact: tuple) -> float:
    """Largest relative distance; NaN in a result is infinite."""
    distances = [torch.linalg.norm(x.double() - y) / torch.linalg.norm(y) for x, y in zip(found, exact, strict=True)]
    return max(float(distance) if torch.isfinite(distance) else math.inf for distance in distances)


@functools.cache
def allowed_pairs(name: str, tokens: int) -> int:
    """Pairs of one head: those of a plan, or all for naive attention."""
    return tokens**2 if name == NAIVE else spattn.plan(PATTERNS[name], tokens).nnz


def rows_of(ms: dict[str, dict], which: str, tokens: int, errors: dict[str, float], **facts) -> list[dict]:
    """Return one row per contender, with the speed-ups over naive attention and over spattn's dense attention.

    `ms` maps a contender to its row's own fields, ``median_ms`` and ``extrapolated`` among them.
    """
    rows = []
    for name, own in ms.items():
        guessed = own["extrapolated"] or ms[NAIVE]["extrapolated"]
        pairs, times = allowed_pairs(name, tokens), ms[NAIVE]["median_ms"] / own["median_ms"]
        row = {"pass": which, "tokens": tokens, "contender": name, **facts, **own}
        row |= {
            "pairs_percent": round(100 * pairs / tokens**2, 3),
            "times_naive": round(times, 3),
            "times_naive_extrapolated": guessed,
            "times_naive_shown": "≈ " * guessed + (f"{times:.0f}" if times >= 100 else f"{times:.3g}"),
            "times_dense": round(ms[DENSE]["median_ms"] / own["median_ms"], 3),
        }
        if name in errors:
            row["relative_error"] = float(f"{errors[name]:.2g}")
        rows.append(row)
    return rows


def show(rows: list[dict]) -> None:
    """Print the rows of one length and pass in a line; naive attention's is the first."""
    first = rows[0]
    speedups = ", ".join(f"{row['contender']} {row['times_naive_shown']}" for row in rows[1:])
    print(f"{first['tokens']} tokens, {first['pass']}: naive {first['median_ms']:.4g} ms; × {speedups}", flush=True)


def layer_rows(device: str, sizes: dict[str, int], tokens: int, dtype: torch.dtype, rounds: int) -> list[dict]:
    """Milliseconds of the parts of each layer of a BERT encoder with random weights, for each kind of attention.

    CPU time on the CPU, wall time on a GPU. The rows with ``layer = "all"`` are sums over the layers. Attention is the
    module between the projections of q, k, v and that of the output.
    """
    from sentence_encoder import layers
    from transformers import BertConfig, BertModel

    from spattn.transformers import register

    register()
    torch.manual_seed(0)
    bert = BertModel(BertConfig(max_position_embeddings=512, **sizes), add_pooling_layer=False)
    bert = bert.eval().to(device, dtype)
    ids = torch.randint(0, bert.config.vocab_size, (1, tokens)).numpy()
    kinds = {
        "before: eager, all pairs": ("eager", None),
        "before: SDPA, all pairs": ("sdpa", None),
        "after: spattn, all pairs": ("spattn", None),
        "after: spattn, Longformer ±256 + 16": ("spattn", PATTERNS["Longformer ±256 + 16"]),
        "after: spattn, DeepSpeed BigBird": ("spattn", PATTERNS["DeepSpeed BigBird"]),
    }
    profiles, difference = layers.measure(bert, ids, 512, kinds, rounds, time.process_time if device == "cpu" else None)
    most = 1e-4 if dtype == torch.float32 else 0.3  # states up to 8, whose bfloat16 neighbours are 0.03 apart
    if not difference <= most:
        raise AssertionError(f"hidden states of dense attention differ by {difference:.2g}")
    rows = []
    for profile in profiles:
        total = {part: sum(layer[part] for layer in profile.layers) for part in layers.PARTS}
        for number, layer in [*enumerate(profile.layers), ("all", total)]:
            row = {"contender": profile.name, "layer": number}
            row |= {f"{part}_ms": round(1e3 * seconds, 3) for part, seconds in layer.items()}
            if number == "all":
                row |= {"embedding_ms": round(1e3 * profile.embedding, 3), "rest_ms": round(1e3 * profile.rest, 3)}
                row |= {"whole_ms": round(1e3 * profile.whole, 3), "largest_difference": float(f"{difference:.2g}")}
                row["attention_percent"] = round(100 * total["attention"] / profile.whole, 1)
                print(row, flush=True)
            rows.append(row)
    return rows
