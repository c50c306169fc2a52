"""Part (c): forward time on the model's own queries, keys and values of long texts, against naive dense attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from spattn import Plan, attention, patterns, plan_for
from spattn.patterns import Pattern

from . import text
from .budget import Budget
from .device import Device
from .model import Encoder
from .progress import Progress
from .results import Case, Timing, Timings

LAYER = 2  # counted from 0: half way through the encoder
_MOST_ROUNDS = 25
_SLOW = 1.0  # seconds of a call whose first run counts: cold caches do not matter
_SETTLE_SECONDS = 0.03  # by default, OpenBLAS's threads spin for 2**26 cycles after their last product
_CHUNKS_AT_ONCE = 4


def timed_patterns() -> dict[str, Pattern]:
    """The patterns of part (c), spattn's own dense attention among them."""
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


def real_qkv(
    encoder: Encoder, tokenizer: Any, tokens: int, backend: str, progress: Progress, budget: Budget
) -> list[np.ndarray]:
    """q, k and v of layer :data:`LAYER` for consecutive windows of source code, concatenated to `tokens` tokens.

    Returns
    -------
    list of three (1, heads, tokens, head_dim) float32 arrays
        Of fewer tokens where the budget is spent.
    """
    window = encoder.max_len
    windows = text.chunks(tokenizer, -(-tokens // window), window)
    encoder = replace(encoder, layers=LAYER + 1)
    calls: list[tuple[np.ndarray, ...]] = []

    def record(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        calls.append((q, k, v))
        return attention(q, k, v, patterns.Full(), backend=backend)

    captured: list[tuple[np.ndarray, ...]] = []
    progress.start(f"(c) q, k, v of {tokens} tokens of source", -(-len(windows) // _CHUNKS_AT_ONCE))
    for start in progress.each(range(0, len(windows), _CHUNKS_AT_ONCE)):
        if captured and not budget.left:
            break
        piece = windows[start : start + _CHUNKS_AT_ONCE]
        encoder.hidden_states(piece, np.broadcast_to(np.arange(window), piece.shape), record)
        captured.append(calls[-1])
        calls.clear()
    progress.finish()
    return [_concatenate(np.concatenate(parts))[:, :, :tokens] for parts in zip(*captured, strict=True)]


def _concatenate(x: np.ndarray) -> np.ndarray:
    """(texts, heads, tokens, head_dim) -> (1, heads, texts * tokens, head_dim), contiguous."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(1, x.shape[1], -1, x.shape[3])


def measure(qkv: list[np.ndarray], lengths: list[int], device: Device, progress: Progress, budget: Budget) -> Timings:
    """Time naive dense attention and every pattern at every length, the contenders in turns.

    Lengths that would exceed the budget are omitted, all but the first.
    """
    result, seconds, last = Timings({}, [], []), 0.0, 0
    for number, n in enumerate(lengths):
        predicted = seconds * (n / last) ** 2 if last else 0.0  # of one round, by the round at the length before
        if n > qkv[0].shape[2] or predicted > budget.left:
            result.omitted.extend(lengths[number:])
            break
        own = budget.share(1 / (2 ** (len(lengths) - number) - 1))  # each length has half the time of the next one
        seconds, last = _measure_length(n, qkv, device, result, progress, own, check=not number), n
    progress.finish()
    return result


def _measure_length(
    n: int, qkv: list[np.ndarray], device: Device, result: Timings, progress: Progress, budget: Budget, check: bool
) -> float:
    """Add one length to `result`, with the errors if `check`; return the seconds of one call of every contender."""
    q, k, v = (device.put(np.ascontiguousarray(x[:, :, :n])) for x in qkv)
    arrays = q, k, v
    seconds = budget.left
    progress.start(f"(c) {n} tokens: plans" + (" and errors" if check else ""))
    plans, plan_seconds = _plans(arrays, device)
    errors = _errors(arrays, device) if check else {}
    progress.start(f"(c) {n} tokens: {len(plans) + 1} contenders in turns", seconds)
    calls: dict[str, Callable[[], object]] = {
        name: partial(attention, *arrays, pattern, backend=device.backend) for name, pattern in timed_patterns().items()
    }
    calls[""] = partial(device.dense, *arrays)  # last: its BLAS threads may spin for a while
    timings = take_turns(calls, device.wait, seconds, progress.step)
    dense = result.dense[n] = timings.pop("")
    result.cases.extend(
        Case(
            pattern=name,
            tokens=n,
            timing=timing,
            speedup=dense.seconds / timing.seconds,
            density=plans[name].density,
            efficiency=plans[name].efficiency,
            plan_seconds=plan_seconds[name],
            error=errors.get(name),
        )
        for name, timing in timings.items()
    )
    return dense.seconds + sum(timing.seconds for timing in timings.values())


def _plans(arrays: tuple[Any, Any, Any], device: Device) -> tuple[dict[str, Plan], dict[str, float]]:
    """The backend's plan of each pattern, and the seconds of planning."""
    plans, seconds = {}, {}
    for name, pattern in timed_patterns().items():
        start = time.perf_counter()
        plans[name] = plan_for(pattern, *arrays, backend=device.backend)
        seconds[name] = time.perf_counter() - start
    return plans, seconds


def _errors(arrays: tuple[Any, Any, Any], device: Device) -> dict[str, float]:
    """Largest absolute difference from the float64 reference, for each pattern."""
    errors = {}
    q, k, v = (device.get(x).astype(np.float64) for x in arrays)
    for name, pattern in timed_patterns().items():
        got = device.get(attention(*arrays, pattern, backend=device.backend))
        errors[name] = float(np.abs(got - attention(q, k, v, pattern, backend="reference")).max())
    return errors


def take_turns(
    calls: dict[str, Callable[[], object]],
    wait: Callable[[], None],
    seconds: float,
    step: Callable[[float, str], None] = lambda seconds, name: None,
) -> dict[str, Timing]:
    """Time the calls in rounds for about `seconds`.

    The first round warms caches and counts only for slow calls; each later round starts with a pause. Every call is
    timed at least once; a call that takes longer than the remaining time has no further turn.

    Parameters
    ----------
    calls : dict
        Name -> call.
    wait : callable
        Synchronises with the device after a call.
    seconds : float
        Time budget, the first round included.
    step : callable
        Receives seconds and name of each call.

    Returns
    -------
    dict
        Name -> :class:`Timing`.
    """

    def once(name: str) -> float:
        start = time.perf_counter()
        calls[name]()
        wait()
        taken = time.perf_counter() - start
        step(taken, name)
        return taken

    budget = Budget(seconds)
    first = {name: once(name) for name in calls}
    runs = {name: [taken] if taken > _SLOW else [] for name, taken in first.items()}
    for _ in range(_MOST_ROUNDS):
        time.sleep(_SETTLE_SECONDS)
        due = [name for name in calls if not runs[name] or first[name] < budget.left]
        for name in due:
            if not runs[name] or first[name] < budget.left:
                runs[name].append(once(name))
        if not due:
            break
    return {name: Timing(float(np.median(own)), len(own)) for name, own in runs.items()}
