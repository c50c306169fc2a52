"""Part (c): the model's own queries, keys and values on long texts, timed against naive dense attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .. import patterns
from .._api import attention
from .._backends import load as load_backend
from ..patterns import Pattern
from . import text
from .device import Device
from .model import Encoder
from .progress import Progress

LAYER = 2  # counted from 0: half way through the encoder
_SECONDS_A_CASE = 0.5
_MOST_RUNS = 20
_LONG_RUN = 1.5  # seconds: a case this slow runs twice
_CHUNKS_AT_ONCE = 4


@dataclass(frozen=True)
class Timing:
    """Seconds of one forward call: the best of `runs`, which other programs disturb least."""

    seconds: float
    runs: int


@dataclass(frozen=True)
class Case:
    """One pattern at one length.

    Attributes
    ----------
    speedup : float
        Naive dense seconds / spattn seconds.
    plan_seconds : float
        Planning, which happens once and is cached.
    error : float or None
        Largest absolute difference to the float64 reference; computed at the shortest length only.
    """

    pattern: str
    tokens: int
    timing: Timing
    speedup: float
    density: float
    efficiency: float
    plan_seconds: float
    error: float | None


def timed_patterns() -> dict[str, Pattern]:
    """What part (c) times; spattn's own dense attention is one of them."""
    return {
        "spattn dense": patterns.Full(),
        "causal": patterns.Causal(),
        "sliding window ±256": patterns.SlidingWindow(256),
        "dilated window ±256, every 4th": patterns.DilatedWindow(256, 256, dilation=4),
        "Longformer ±256 + 16 global": patterns.Longformer(512, global_tokens=16),
        "BigBird 64 (3 window, 1 global, 3 random)": patterns.BigBird(64),
        "strided 128": patterns.Strided(128),
        "fixed 128, 8 summary": patterns.Fixed(128, 8),
    }


def real_qkv(encoder: Encoder, tokenizer, tokens: int, backend: str, progress: Progress) -> list[np.ndarray]:
    """q, k and v of layer :data:`LAYER` for consecutive windows of source code, laid end to end to `tokens` tokens.

    Returns
    -------
    list of three (1, heads, tokens, head_dim) float32 arrays
    """
    window = encoder.max_len
    windows = text.chunks(tokenizer, -(-tokens // window), window)
    encoder = replace(encoder, layers=LAYER + 1)
    calls: list[tuple[np.ndarray, ...]] = []

    def record(q, k, v):
        calls.append((q, k, v))
        return attention(q, k, v, patterns.Full(), backend=backend)

    captured = []
    progress.start("real q, k, v", -(-len(windows) // _CHUNKS_AT_ONCE))
    for start in progress.each(range(0, len(windows), _CHUNKS_AT_ONCE)):
        piece = windows[start : start + _CHUNKS_AT_ONCE]
        encoder.hidden_states(piece, np.broadcast_to(np.arange(window), piece.shape), record)
        captured.append(calls[-1])
        calls.clear()
    progress.finish()
    return [_end_to_end(np.concatenate(parts))[:, :, :tokens] for parts in zip(*captured, strict=True)]


def _end_to_end(x: np.ndarray) -> np.ndarray:
    """(texts, heads, tokens, head_dim) -> (1, heads, texts * tokens, head_dim), contiguous."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(1, x.shape[1], -1, x.shape[3])


def measure(qkv: list[np.ndarray], lengths: list[int], device: Device, progress: Progress) -> dict:
    """Times naive dense attention and every pattern at every length.

    Returns
    -------
    dict
        ``dense``: tokens -> :class:`Timing`; ``cases``: list of :class:`Case`.
    """
    cases = timed_patterns()
    progress.start("timing", len(lengths) * (1 + len(cases)))
    dense, results = {}, []
    for n in lengths:
        arrays = [device.put(np.ascontiguousarray(x[:, :, :n])) for x in qkv]
        dense[n] = time_call(lambda arrays=arrays: device.dense(*arrays), device.wait)
        progress.step(f"{n} tokens")
        for name, pattern in cases.items():
            results.append(_measure_case(name, pattern, arrays, n, dense[n], device, n == min(lengths)))
            progress.step(f"{n} tokens, {name}")
    progress.finish()
    return {"dense": dense, "cases": results}


def _measure_case(name, pattern, arrays, n, dense: Timing, device: Device, check: bool) -> Case:
    start = time.perf_counter()
    plan = load_backend(device.backend).plan_for(pattern, *arrays)
    plan_seconds = time.perf_counter() - start
    timing = time_call(lambda: attention(*arrays, pattern, backend=device.backend), device.wait)
    error = None
    if check:
        got = device.get(attention(*arrays, pattern, backend=device.backend))
        want = attention(*(device.get(x).astype(np.float64) for x in arrays), pattern, backend="reference")
        error = float(np.abs(got - want).max())
    return Case(
        pattern=name, tokens=n, timing=timing, speedup=dense.seconds / timing.seconds, density=plan.density,
        efficiency=plan.efficiency, plan_seconds=plan_seconds, error=error,
    )  # fmt: skip


def time_call(call: Callable[[], object], wait: Callable[[], None]) -> Timing:
    """The best of repeated calls, the first of which plans and warms caches; slow calls are repeated less."""

    def once() -> float:
        start = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - start

    first = once()
    repeats = 1 if first > _LONG_RUN else max(3, min(_MOST_RUNS, int(_SECONDS_A_CASE / first)))
    return Timing(min(first, *(once() for _ in range(repeats))), 1 + repeats)
