"""Time of steps on several GPUs. Needs PyTorch, and a process group if ranks compute together."""

from __future__ import annotations

import statistics
from collections.abc import Callable

ROUNDS, WARM, ROUND_MS, MOST_STEPS = 5, 2, 60, 8


def milliseconds(step: Callable[[], object], together: bool) -> float:
    """Return the median time of a step over rounds, of the slowest rank if all compute `together`.

    A round is several short steps, one after the other, as in the layers of a model.
    """
    import torch
    import torch.distributed as dist

    times, steps = [], 1
    for number in range(WARM + ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if together:
            dist.barrier()
        start.record()
        for _ in range(steps):
            step()
        stop.record()
        stop.synchronize()
        taken = torch.tensor(start.elapsed_time(stop) / steps, device="cuda")
        if together:
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        if number == WARM - 1:
            steps = max(1, min(MOST_STEPS, round(ROUND_MS / taken.item())))
        elif number >= WARM:
            times.append(taken.item())
    return round(statistics.median(times), 3)
