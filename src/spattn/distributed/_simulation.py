"""Bytes, messages, balance and time of distributed attention, from plans alone; the sharding of least time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from .. import cpu
from ..arrays.namespace import numpy_dtype
from ..patterns.base.check import integer
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..schedule.shard import Sharding
from ..schedule.shard_totals import Totals, totals
from ._plans import Shape, call_of, whole_plan
from ._shardings import NAMES, named, shape_of
from ._traffic import NETWORKS, Network, Traffic, fastest

__all__ = ["Simulation", "heads_are_fewer_bytes", "shard", "simulate"]

_DTYPES = "float32", "float64", "float16", "bfloat16"


@dataclass(frozen=True)
class Simulation:
    """What :func:`simulate` predicts for a call.

    Parameters
    ----------
    sharding : Sharding
        The rows of each rank.
    name : str
        Name of the sharding.
    sent, received : (world_size,) int64 array
        Bytes that each rank needs to send and to receive.
    messages : (world_size,) int64 array
        Messages that each rank needs to receive.
    exchange : str
        The exchange that :func:`attention` chooses: "point_to_point", "all_to_all" or "all_gather".
    exchanges : dict of str to float
        Predicted time of each exchange on its slowest rank. An all-gather sends all rows to all ranks.
    work : (world_size,) float64 array
        Share of each rank in the computed tiles of one process. The sum exceeds 1 if tiles are computed twice.
    seconds : float
        Predicted time of the slowest rank: compute, then messages, without overlap.
    others : dict of str to float
        The same for other exchanges of keys and values: "ring", "all_gather" and "heads" (absent if the ranks do not
        divide the key-value heads). They compute the same tiles.
    """

    sharding: Sharding
    name: str
    sent: np.ndarray
    received: np.ndarray
    messages: np.ndarray
    exchange: str
    exchanges: dict[str, float]
    work: np.ndarray
    seconds: float
    others: dict[str, float]

    @property
    def balance(self) -> float:
        """Work of the slowest rank, divided by the mean: 1 is perfect."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0


def simulate(
    pattern: Any,
    shape: Sequence[int],
    world_size: int,
    *,
    sharding: str = "auto",
    bandwidth: float | None = None,
    latency: float | None = None,
    seconds: float | None = None,
    dtype: str = "float32",
    backward: bool = False,
    device: str = "cpu",
) -> Simulation:
    """Predict the exchange and the time of :func:`attention` on many ranks, without any.

    Parameters
    ----------
    pattern : Pattern, Plan, array or str
        As in :func:`spattn.attention`.
    shape : sequence of int
        (batch, heads_q, heads_kv, length, head_dim) of the whole sequence.
    world_size : int
        Number of ranks.
    sharding : str, optional
        As in :func:`shard`.
    bandwidth, latency : float, optional
        Bytes per second into each rank, and seconds per message. By default 25 GB/s and 20 µs on CPUs, 280 GB/s and
        100 µs on GPUs, as between H200s of one host.
    seconds : float, optional
        Time of the whole call in one process, forward; by default predicted for one thread of a CPU. GPUs need it.
    dtype : str, optional
        "float32", "float64", "float16" or "bfloat16".
    backward : bool, optional
        Predict the backward pass instead of the forward; its time is then 2.5 times `seconds`.
    device : {"cpu", "cuda"}, optional
        On GPUs, rows travel point-to-point, and a tile is computed by the ranks of its queries alone. That partial sums
        travel is not counted.

    Returns
    -------
    Simulation

    Raises
    ------
    ValueError
        If an argument is invalid, or if `seconds` is missing for GPUs.

    Examples
    --------
    >>> from spattn.distributed import simulate
    >>> from spattn.patterns import SlidingWindow
    >>> found = simulate(SlidingWindow(256), (1, 8, 8, 65536, 64), 16, sharding="contiguous")
    >>> int(found.received[3])  # 2 × 256 keys of 8 heads, k and v, 64 floats
    2097152
    """
    sizes, world_size = shape_of(shape), integer("world_size", world_size, 1)
    _check_dtype(dtype)
    if not isinstance(device, str) or device not in NETWORKS:
        raise ValueError(f"device: expected 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and seconds is None:
        raise ValueError("seconds: for device='cuda', pass the measured time of a forward pass on one GPU")
    network = NETWORKS[device]
    bandwidth = network.bandwidth if bandwidth is None else bandwidth
    latency = network.latency if latency is None else latency
    for name, value in (("bandwidth", bandwidth), ("latency", latency), ("seconds", seconds)):
        if value is not None and not (_is_real(value) and value >= 0 and (value > 0 or name != "bandwidth")):
            raise ValueError(f"{name}: expected a positive finite number, got {value!r}")
    plan = whole_plan(pattern, call_of(sizes, dtype), backward=backward)
    if seconds is None:
        heads = sizes.batch, sizes.heads_q, sizes.head_dim, sizes.head_dim_v
        seconds = cpu.predicted_ms(plan, *heads, dtype) / 1000
    seconds *= 2.5 if backward else 1
    names = NAMES if sharding == "auto" else (sharding,)
    options = Network(bandwidth, latency), seconds, dtype, backward, device == "cuda"
    found = (_simulated(plan, sizes, world_size, name, *options) for name in names)
    return min(found, key=lambda one: one.seconds)  # the first of equals


def shard(
    pattern: Any, shape: Sequence[int], world_size: int, sharding: str = "auto", *, dtype: str = "float32"
) -> Sharding:
    """Return which rank has which rows.

    Parameters
    ----------
    pattern : Pattern, Plan, array or str
        As in :func:`spattn.attention`.
    shape : sequence of int
        (batch, heads_q, heads_kv, length, head_dim) of the whole sequence.
    world_size : int
        Number of ranks.
    sharding : {"auto", "contiguous", "balanced", "head_tail", "striped"}, optional
        "contiguous": one chunk per rank, as in ``torch.chunk``. "balanced": one chunk per rank, with equal numbers of
        pairs. "head_tail": of ``2 * world_size`` chunks, rank r has the chunks r from either end. "striped": each rank
        has every ``world_size``-th of ``16 * world_size`` chunks. "auto": the one for which :func:`simulate` predicts
        the least time.
    dtype : str, optional
        "float32", "float64", "float16" or "bfloat16".

    Returns
    -------
    Sharding
        ``rows(rank)`` are the positions of a rank's rows.

    Examples
    --------
    >>> from spattn.distributed import shard
    >>> shard("causal", (1, 8, 8, 64, 32), 2, "head_tail").rows(0)[[0, 15, 16, 31]]
    array([ 0, 15, 48, 63])
    """
    world_size = integer("world_size", world_size, 1)
    _check_dtype(dtype)
    if sharding == "auto":
        return simulate(pattern, shape, world_size, dtype=dtype).sharding
    sizes = shape_of(shape)
    plan = whole_plan(pattern, call_of(sizes, dtype)) if sharding == "balanced" else None
    return named(sharding, sizes, world_size, plan)


def _check_dtype(dtype: Any) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(map(repr, _DTYPES))}; got {dtype!r}")


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and type(value) is not bool and isfinite(value)


def _simulated(
    plan: Plan,
    shape: Shape,
    world_size: int,
    name: str,
    network: Network,
    seconds: float,
    dtype: str,
    backward: bool,
    on_gpus: bool,
) -> Simulation:
    sharding, itemsize = named(name, shape, world_size, plan), numpy_dtype(dtype).itemsize
    of_keys = (shape.head_dim + shape.head_dim_v) * itemsize
    found, exchanged = _of_rows(plan, shape, sharding, itemsize, backward)
    bandwidth, latency = network
    exchanges = exchanged.seconds(bandwidth, latency)
    if on_gpus:
        exchanges = {"point_to_point": exchanges["point_to_point"]}
    exchange = fastest(exchanges)
    heads = _heads_of_variants(plan, shape)
    of_item = np.repeat(heads, np.diff(plan.work_indptr))
    total = max(1, of_item @ (plan.work["end"] - plan.work["begin"]))
    once = found.own_tiles / total
    work = once if on_gpus else found.tiles / total
    times = seconds * work + exchanges[exchange]

    # Backward, a ring and an all-gather send keys and values again, and their gradients.
    others, peers, of_pass = {}, world_size - 1, 2 if backward else 1
    compute = seconds * float(once.max())
    all_keys = of_pass * shape.batch * shape.heads_kv * of_keys * shape.length * peers / world_size / bandwidth
    others["ring"] = compute + of_pass * peers * latency + all_keys
    others["all_gather"] = compute + of_pass * peers.bit_length() * latency + all_keys
    if shape.heads_kv % world_size == 0:
        moved = _bytes_of_heads(shape, itemsize, world_size)
        others["heads"] = seconds / world_size + 2 * peers * latency + moved / bandwidth
    most = {kind: float(each.max()) for kind, each in exchanges.items()}
    return Simulation(
        sharding,
        name,
        exchanged.sent,
        exchanged.received,
        exchanged.messages,
        exchange,
        most,
        work,
        float(times.max()),
        others,
    )


def _heads_of_variants(plan: Plan, shape: Shape) -> np.ndarray:
    """Return the number of query heads of each variant, over the batch."""
    variant = np.broadcast_to(plan.variant, (shape.batch, shape.heads_q))
    return np.bincount(variant.ravel(), minlength=plan.variants)


def _of_rows(plan: Plan, shape: Shape, sharding: Sharding, itemsize: int, backward: bool) -> tuple[Totals, Traffic]:
    """Return what all ranks compute and exchange if rows travel."""
    variant = np.broadcast_to(plan.variant, (shape.batch, shape.heads_q))
    # Which variants each exchanged head takes part in, and the bytes of a row of such a head.
    groups = variant.reshape(-1, 1) if backward else variant.reshape(shape.batch * shape.heads_kv, -1)
    of_group = [(list(group), number) for group, number in Counter(map(tuple, groups.tolist())).items()]
    width = (shape.head_dim + shape.head_dim_v) * itemsize
    if backward:
        width += shape.head_dim_v * itemsize + max(itemsize, 4)
    found = totals(plan, sharding, of_group, _heads_of_variants(plan, shape), backward)
    largest = max(len(sharding.rows(rank)) for rank in range(sharding.world_size))
    return found, Traffic(found.sent * width, found.received * width, found.messages, largest * len(groups) * width)


def _bytes_of_heads(shape: Shape, itemsize: int, world_size: int) -> float:
    """Return the bytes that a rank receives in one pass if heads travel."""
    of_row = (shape.heads_q + shape.heads_kv) * (shape.head_dim + shape.head_dim_v) * itemsize
    return of_row * shape.batch * shape.length * (world_size - 1) / world_size**2


@kept_with_plan
def heads_are_fewer_bytes(plan: Plan, shape: Shape, dtype: str) -> bool:
    """Return whether, of four ranks with contiguous rows, one would receive more bytes in a forward and a backward pass
    than if heads travel."""
    sharding, itemsize = named("contiguous", shape, 4, plan), numpy_dtype(dtype).itemsize
    received = sum(_of_rows(plan, shape, sharding, itemsize, backward)[1].received for backward in (False, True))
    return bool(np.max(received) > 2 * _bytes_of_heads(shape, itemsize, 4))
