"""CPU time of contenders that take turns."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable

SLOW_SECONDS = 8.0  # that one contender of one problem may take in all
LEAST_RUNS = 3


def interleave(
    calls: dict[str, Callable[[], object]], rounds: int, between: Callable[[], None], slow_seconds: float = SLOW_SECONDS
) -> dict[str, list[float]]:
    """Milliseconds of CPU time of each call.

    Parameters
    ----------
    calls : dict
        Name -> call; every call has compiled and planned before.
    rounds : int
        In each round every call runs once, in an order that rotates. A call too slow for all rounds runs in evenly
        spaced ones, at least three times.
    between : callable
        Runs once a round; samples the machine's ceilings.

    Notes
    -----
    The CPU time is the whole process's, so that no contender can hide work in another thread.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    every = dict.fromkeys(names, 1)
    for name in names:  # what the compiler of another contender left running or to be collected ends here
        calls[name]()
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        between()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if turn % every[name]:
                continue
            start = time.process_time()
            calls[name]()
            times[name].append(1e3 * (time.process_time() - start))
            if turn == 0:
                every[name] = _spacing(times[name][0] / 1e3, rounds, slow_seconds)
    gc.enable()
    return times


def _spacing(seconds: float, rounds: int, slow_seconds: float) -> int:
    affordable = max(min(LEAST_RUNS, rounds), int(slow_seconds / max(seconds, 1e-9)))
    return max(1, math.floor(rounds / affordable)) if affordable < rounds else 1


def summary(times: list[float]) -> dict[str, float]:
    """Median and spread in milliseconds, three decimals."""
    ordered = sorted(times)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    values = {
        "median_ms": statistics.median(ordered),
        "least_ms": ordered[0],
        "q1_ms": quartiles[0],
        "q3_ms": quartiles[2],
        "most_ms": ordered[-1],
    }
    return {key: round(value, 3) for key, value in values.items()} | {"runs": len(ordered)}
