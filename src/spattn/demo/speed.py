"""Part (c): the model's own queries, keys and values on long texts, timed against naive dense attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .. import patterns
from ..api.attention import attention
from ..api.plans import plan
from ..patterns import Pattern
from ..planning import Plan
from . import text
from .device import Device
from .model import Encoder
from .progress import Progress

LAYER = 2  # counted from 0: half way through the encoder
_SECONDS_A_LENGTH = 5
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 25
_SETTLE_SECONDS = 0.1  # OpenBLAS's threads keep a core busy for some 2**26 cycles after their last product
_CHUNKS_AT_ONCE = 4


@dataclass(frozen=True)
class Timing:
    """Seconds of one forward call: the median of `runs`."""

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
        "Longformer ±256 + 16 global": patterns.longformer(512, global_tokens=16),
        "BigBird 64 (3 window, 1 global, 3 random)": patterns.BigBird(64),
        "strided 128": patterns.strided(128),
        "fixed 128, 8 summary": patterns.fixed(128, 8),
    }


def real_qkv(encoder: Encoder, tokenizer: Any, tokens: int, backend: str, progress: Progress) -> list[np.ndarray]:
    """q, k and v of layer :data:`LAYER` for consecutive windows of source code, laid end to end to `tokens` tokens.

    Returns
    -------
    list of three (1, heads, tokens, head_dim) float32 arrays
    """
    window = encoder.max_len
    windows = text.chunks(tokenizer, -(-tokens // window), window)
    encoder = replace(encoder, layers=LAYER + 1)
    calls: list[tuple[np.ndarray, ...]] = []

    def record(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
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


def measure(qkv: list[np.ndarray], lengths: list[int], device: Device, progress: Progress) -> dict[str, Any]:
    """Times naive dense attention and every pattern at every length, the contenders in turns.

    Returns
    -------
    dict
        ``dense``: tokens -> :class:`Timing`; ``cases``: list of :class:`Case`.
    """
    progress.start("timing", len(lengths))
    dense, results = {}, []
    for n in lengths:
        q, k, v = (device.put(np.ascontiguousarray(x[:, :, :n])) for x in qkv)
        arrays = q, k, v
        plans, plan_seconds = _plans(arrays, device)
        errors = _errors(arrays, device) if n == min(lengths) else {}
        calls: dict[str, Callable[[], object]] = {
            name: partial(attention, *arrays, pattern, backend=device.backend)
            for name, pattern in timed_patterns().items()
        }
        calls[""] = partial(device.dense, *arrays)  # last: its BLAS threads go on spinning for a while
        timings = take_turns(calls, device.wait)
        dense[n] = timings.pop("")
        results += [
            Case(
                pattern=name,
                tokens=n,
                timing=timing,
                speedup=dense[n].seconds / timing.seconds,
                density=plans[name].density,
                efficiency=plans[name].efficiency,
                plan_seconds=plan_seconds[name],
                error=errors.get(name),
            )
            for name, timing in timings.items()
        ]
        progress.step(f"{n} tokens done")
    progress.finish()
    return {"dense": dense, "cases": results}


def _plans(arrays: tuple[Any, Any, Any], device: Device) -> tuple[dict[str, Plan], dict[str, float]]:
    """Each pattern's plan as the backend makes it, and the seconds that took."""
    plans, seconds = {}, {}
    for name, pattern in timed_patterns().items():
        start = time.perf_counter()
        plans[name] = plan(pattern, backend=device.backend, like=arrays)
        seconds[name] = time.perf_counter() - start
    return plans, seconds


def _errors(arrays: tuple[Any, Any, Any], device: Device) -> dict[str, float]:
    """Largest absolute difference to the float64 reference, for each pattern."""
    errors = {}
    q, k, v = (device.get(x).astype(np.float64) for x in arrays)
    for name, pattern in timed_patterns().items():
        got = device.get(attention(*arrays, pattern, backend=device.backend))
        errors[name] = float(np.abs(got - attention(q, k, v, pattern, backend="reference")).max())
    return errors


def take_turns(calls: dict[str, Callable[[], object]], wait: Callable[[], None]) -> dict[str, Timing]:
    """Times every call once a round, after a round that warms caches; a pause before each, at least three rounds."""

    def once(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - start

    warm = sum(once(call) for call in calls.values())
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(_SECONDS_A_LENGTH / warm)))
    seconds = []
    for _ in range(rounds):
        time.sleep(_SETTLE_SECONDS)
        seconds.append([once(call) for call in calls.values()])
    medians = np.median(seconds, axis=0)
    return {name: Timing(float(median), rounds) for name, median in zip(calls, medians, strict=True)}
