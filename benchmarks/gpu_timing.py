"""Time of calls on a GPU, and the error of their results. Needs PyTorch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import numpy as np

SETS = 2  # input sets; one at 16384 tokens is 201 MB, more than three times L2
WARM, ROUNDS, TARGET_MS = 3, 15, 4.0
SLOW_MS, SLOW_ROUNDS = 1000.0, 3  # a call that takes longer than SLOW_MS is measured once in each of SLOW_ROUNDS rounds
ROWS = 48  # checked against float64, in two heads
TOLERANCE = 8e-3  # relative error of a bfloat16 result, twice what rounding gives
SPIN_CYCLES, MOST_SPIN_CYCLES = 1 << 22, 1 << 30  # 2 ms and half a second


def host_us(call: Callable[[], object], calls: int = 400) -> float:
    """Median host time of one call in µs; synchronizes now and then, so the queue never fills."""
    import torch

    taken = []
    for number in range(calls + 50):
        if number % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        taken.append(1e6 * (time.perf_counter() - start))
    return statistics.median(taken[50:])


def gpu_ms(call: Callable[[], object], rounds: int = 15, least_ms: float = 3.0) -> float:
    """Median time of a call between two CUDA events around enough calls to last `least_ms`."""
    import torch

    start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
    repeats, times = 1, []
    for number in range(rounds + 3):
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / repeats)
        if number < 3:
            repeats = max(1, math.ceil(least_ms / times[-1]))
    return statistics.median(times[3:])


def graph_us(call: Callable[[], object], replays: int = 300, calls: int = 1) -> float:
    """Time of a call in µs, in back-to-back replays of a CUDA graph of `calls` calls."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return 1e3 * gpu_ms(graph.replay, 5, replays * 0.01) / calls


def measure(calls: dict[str, Callable], rounds: int, target_ms: float = TARGET_MS) -> dict[str, list[float]]:
    """Milliseconds of a call, once per round and contender; one measurement takes about `target_ms`.

    Calls take the number of an input set, 0 to ``SETS - 1``.
    """
    import torch

    def once(call, repeats):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for i in range(repeats):
            call(i % SETS)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / repeats

    for call in calls.values():
        call(0)  # plans, compiles
    first = {name: once(call, 1) for name, call in calls.items()}
    slow = {name for name, taken in first.items() if taken > SLOW_MS}
    repeats = {
        name: 1 if name in slow else max(2, math.ceil(target_ms / once(call, WARM))) for name, call in calls.items()
    }
    times = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in calls.items():
            if name not in slow or number < SLOW_ROUNDS:
                times[name].append(once(call, repeats[name]))
    return times


def queued_ms(calls: dict[str, Callable], rounds: int = ROUNDS, repeats: int = 16) -> dict[str, list[float]]:
    """Milliseconds of a call on the GPU alone, once per round and contender.

    A spin kernel occupies the stream until `repeats` calls are enqueued behind it, so no host time counts. Calls take
    the number of an input set, 0 to ``SETS - 1``.
    """
    import torch

    cycles = SPIN_CYCLES

    def once(call):
        nonlocal cycles
        while cycles <= MOST_SPIN_CYCLES:
            start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
            torch.cuda._sleep(cycles)
            start.record()
            for i in range(repeats):
                call(i % SETS)
            stop.record()
            too_short = start.query()  # the GPU reached the first call before the last one was enqueued
            stop.synchronize()
            if not too_short:
                return start.elapsed_time(stop) / repeats
            cycles *= 2
        raise RuntimeError(
            f"enqueuing {repeats} calls takes longer than {MOST_SPIN_CYCLES} cycles: do they synchronize?"
        )

    for call in calls.values():
        for i in range(2 * SETS):
            call(i % SETS)  # plans, compiles, encodes tensor maps
    torch.cuda.synchronize()
    times = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            taken = once(call)
            if number:  # the first round warms up
                times[name].append(taken)
    return times


def worst_error(pattern, q, k, v, out) -> float:
    """Largest relative error against float64 of sampled non-empty rows of the first and the last head."""
    import torch

    tokens = q.shape[2]
    sampled = np.unique(np.r_[0, tokens - 1, np.random.default_rng(0).integers(0, tokens, ROWS)])
    worst = 0.0
    for head in (0, q.shape[1] - 1):
        allows = pattern.at(0, head).bind(tokens, tokens).allows
        allowed = np.broadcast_to(allows(sampled[:, None], np.arange(tokens)[None]), (len(sampled), tokens))
        rows, allowed = sampled[allowed.any(1)], torch.from_numpy(allowed[allowed.any(1)]).to(q.device)
        scores = q[0, head, rows].double() @ k[0, head].double().T * q.shape[3] ** -0.5
        expected = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v[0, head].double()
        error = torch.linalg.norm(out[0, head, rows].double() - expected) / torch.linalg.norm(expected)
        worst = max(worst, float(error) if torch.isfinite(error) else math.inf)
    return worst


def without_gradients(call: Callable, sets: list) -> Callable:
    """Return `call` of set `i`, of as many of its arrays as there are before dout, without recording gradients."""
    import torch

    def forward(i):
        with torch.no_grad():
            return call(*sets[i][:-1])

    return forward


def gradient_error(pattern, sets, forward: Callable, backward: Callable, *, score=None, sinks=None, kept=None) -> float:
    """Largest relative error against float64 of sampled rows of out and dq of the first set.

    Those of the first and the last head; with `kept`, the pairs that dropout keeps in the first head and the share that
    it drops, of the first.
    """
    import torch

    (q, k, v, dout), worst = sets[0][:4], 0.0
    out, dq = forward(0), backward(0)[0]
    heads_q, tokens = q.shape[1:3]
    rows = np.unique(np.r_[0, tokens - 1, np.random.default_rng(0).integers(0, tokens, ROWS)])
    at, keys = torch.from_numpy(rows).to(q.device)[:, None], torch.arange(tokens, device=q.device)[None]
    allows = pattern.bind(tokens, tokens).allows(rows[:, None], np.arange(tokens)[None])
    allowed = torch.from_numpy(np.broadcast_to(allows, (len(rows), tokens)).copy()).to(q.device)
    for head in (0, heads_q - 1) if kept is None else (0,):
        of_key = head // (heads_q // k.shape[1])
        qh = q[0, head, rows].double().requires_grad_()
        s = qh @ k[0, of_key].double().T * q.shape[3] ** -0.5
        s = (s if score is None else score(s, 0, head, at, keys)).masked_fill(~allowed, -math.inf)
        if sinks is not None:
            s = torch.cat([s, sinks[head].double().expand(len(rows), 1)], 1)
        weights = s.softmax(-1)[:, :tokens]
        if kept is not None:
            weights = weights * torch.from_numpy(kept[0][rows]).to(q.device) / (1 - kept[1])
        want = weights @ v[0, of_key].double()
        (wanted,) = torch.autograd.grad(want, qh, dout[0, head, rows].double())
        for found, exact in ((out, want.detach()), (dq, wanted)):
            error = torch.linalg.norm(found[0, head, rows] - exact) / torch.linalg.norm(exact)
            worst = max(worst, float(error) if torch.isfinite(error) else math.inf)
    return worst
