"""CPU time of calls, alone or in turns."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable

SLOW_SECONDS = 8.0  # budget of one contender of one problem
LEAST_RUNS = 3


def repeated_ms(call: Callable[[], object], seconds: float, most: int) -> list[float]:
    """Milliseconds of CPU time of each of several calls, after an untimed one.

    As many calls as fit into `seconds`, at least 3 and at most `most`.
    """
    start = time.process_time()
    call()
    repeats = max(3, min(most, int(seconds / max(time.process_time() - start, 1e-6))))
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        taken.append(1e3 * (time.process_time() - start))
    return taken


def medians_in_turns(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
    slow_seconds: float = math.inf,
    least_seconds: float = 0.0,
) -> dict[str, float]:
    """Median milliseconds of calls that alternate, after an untimed one of each.

    Parameters
    ----------
    calls : dict
        Callables by name.
    rounds : int
        Timed runs of each call.
    clock : callable
        In seconds; CPU time unless given.
    slow_seconds : float
        A call whose first run takes longer runs once, and that run counts.
    least_seconds : float
        A shorter call is repeated in each turn until it has taken about that long; the mean of a turn counts.
    """

    def seconds(call: Callable[[], object], repeats: int = 1) -> float:
        start = clock()
        for _ in range(repeats):
            call()
        return (clock() - start) / repeats

    taken, repeats = {}, {}
    for name, call in calls.items():
        first = seconds(call)
        taken[name] = [first] if first > slow_seconds else []
        if not taken[name]:
            repeats[name] = max(1, math.ceil(least_seconds / max(seconds(call), 1e-9))) if least_seconds else 1
    for _ in range(rounds):
        for name, times in repeats.items():
            taken[name].append(seconds(calls[name], times))
    return {name: 1e3 * statistics.median(times) for name, times in taken.items()}


def interleave(
    calls: dict[str, Callable[[], object]], rounds: int, between: Callable[[], None], slow_seconds: float = SLOW_SECONDS
) -> dict[str, list[float]]:
    """Milliseconds of CPU time of calls that alternate.

    Parameters
    ----------
    calls : dict
        Callables by name, already compiled and planned.
    rounds : int
        Each round runs every call once, in rotating order. A call too slow for all rounds runs in evenly spaced ones,
        at least three times.
    between : callable
        Runs once per round, to sample the machine's ceilings.

    Notes
    -----
    CPU time is the whole process's, so a contender cannot hide work in another thread.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    every = dict.fromkeys(names, 1)
    for name in names:  # finish compilers' background work and collect their garbage before timing
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
    """Median, quartiles and extremes in milliseconds, and the number of runs."""
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
