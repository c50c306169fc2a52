"""Specializations of the Hopper kernels: one table, each choice with its measurement.

Measured on one H200 with 16384 tokens and 16 heads (runs in docs/hopper.md). Every row fits 227 KiB of shared memory
and 384 threads with 168 registers, which the warpgroups redistribute: 2 × 128 consumer threads and 128 others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..planning.contract.types import Plan

# Query and key tile of most plans. 128 queries are two consumer warpgroups, the most that fit the register file at
# head_dim 128. 64 keys fit 2-D and 3-D patterns better than 128 (efficiency 0.245 instead of 0.167 on a 13 × 13
# neighbourhood) at the same throughput, because one product covers two tiles. Smaller query tiles of up to ROWS are one
# warpgroup, with two CTAs per SM.
TILE = (128, 64)
ROWS = 64  # rows of a warpgroup
FEWER = 56  # keys of a product if no key box has more: 7 × 7 neighbours at head_dim 32 take 47.8 µs instead of 49.5
ARCH = "sm_90a"
DTYPES = ("float16", "bfloat16")
# 24 MiB of the 50-60 MB of L2 hold keys and values of heads that run concurrently: 512 bytes per key and value at
# head_dim 128.
KEYS_TOGETHER = (24 << 20) // 512
# Gathered keys get less, because rows are reread at random.
KEYS_COPIED_TOGETHER = KEYS_TOGETHER // 4


class Build(NamedTuple):
    """Sizes of a specialization; a row covers head_dims up to its own that earlier rows do not."""

    rows: int  # rows of a query tile
    head_dim: int
    most_keys: float  # largest item_keys of a plan
    ctas: int  # CTAs per SM
    step_kv: int  # keys of one product
    queries: int  # query tiles in shared memory
    stages: int  # pipeline stages of keys or values in shared memory
    consumer_registers: int
    producer_registers: int
    reason: str


_KEYS = "products of 128 keys: 583 TFLOP/s dense instead of 454 with 64"
_QUERIES = "query tiles are the bottleneck of short items: strided 0.32 ms with two tiles, 0.30 ms with three"
_WIDE = "the output takes 128 registers a thread, which leaves none for the scores of 128 keys; spills, untuned"
_HALVES = "half of an SM's shared memory and registers"
_THIRDS = (
    "three CTAs hide the latency between products: windows of 7 x 7 on 16 images of 56 x 56, head_dim 32, take "
    "0.040 ms instead of 0.050; producer and writer warps spill, consumers do not"
)
_NEXT = (
    "a third query tile: windows of 7 x 7 on 16 images of 56 x 56 take 0.065 ms instead of 0.074, shifted ones 0.074 "
    "instead of 0.086; but 13 x 13 windows, which read more keys, 0.182 instead of 0.174"
)
_ANY = math.inf
TABLE = (
    Build(64, 64, 1024, 3, 64, 3, 5, 120, 40, _THIRDS),
    Build(64, 64, _ANY, 2, 128, 3, 5, 168, 88, _HALVES),
    Build(64, 128, 256, 2, 64, 3, 4, 168, 88, _NEXT),
    Build(64, 128, _ANY, 2, 64, 2, 5, 168, 88, f"{_HALVES}; products of 128 keys leave room for one query tile"),
    Build(64, 256, _ANY, 1, 64, 2, 4, 240, 128, _WIDE),
    Build(128, 64, 511, 1, 128, 3, 8, 200, 104, _QUERIES),
    Build(128, 64, _ANY, 1, 128, 2, 8, 200, 104, f"{_KEYS}; a third query tile is no faster dense"),
    Build(128, 128, 511, 1, 128, 3, 4, 200, 104, _QUERIES),
    Build(128, 128, _ANY, 1, 128, 2, 5, 200, 104, f"{_KEYS}; a third query tile is no faster and costs one stage"),
    Build(128, 256, _ANY, 1, 64, 2, 3, 224, 56, f"{_WIDE}; no room for a third query tile"),
)


def rows_of(block_q: int) -> int:
    """Rows of the query tile that holds `block_q` queries."""
    return ROWS if block_q <= ROWS else TILE[0]


def build(block_q: int, head_dim: int, keys: float = math.inf) -> Build:
    """The table row for a head_dim (the larger of q's and v's) and `keys` keys per item."""
    fitting = (row for row in TABLE if row.rows == rows_of(block_q) and row.head_dim >= head_dim)
    return next(row for row in fitting if keys <= row.most_keys)


def variant(
    row: Build, dtype: str, room: int, problems: int = 1, gathers: bool = False, cells: int = TILE[1]
) -> dict[str, object]:
    """Macros of a specialization; `room` is the number of tensor maps in the kernel parameters, `cells` the largest
    number of keys in a key box."""
    fewer = row.step_kv == TILE[1] and cells <= FEWER
    return {
        "SPATTN_DTYPE": dtype,
        "SPATTN_HEAD_DIM": row.head_dim,
        "SPATTN_BLOCK_Q": row.rows,
        "SPATTN_BLOCK_KV": TILE[1],
        "SPATTN_STEP_KV": row.step_kv,
        "SPATTN_COLUMNS": FEWER if fewer else row.step_kv,
        "SPATTN_MAPS": room,
        "SPATTN_PROBLEMS": problems,
        "SPATTN_GATHERS": int(gathers),
        "SPATTN_QUERIES": row.queries,
        "SPATTN_STAGES": row.stages,
        "SPATTN_CTAS": row.ctas,
        "SPATTN_CONSUMER_REGISTERS": row.consumer_registers,
        "SPATTN_PRODUCER_REGISTERS": row.producer_registers,
    }


def item_keys(plan: Plan, work: np.ndarray | None = None) -> float:
    """Keys per item of a plan, or of `work` derived from it. Gathered plans ignore it (inf): the short-item
    specialization lacks the registers that row copies need."""
    work = plan.work if work is None else work
    return math.inf if plan.ordered else keys_of(work["end"] - work["begin"], plan.block_q)


def keys_of(length: np.ndarray, block_q: int) -> float:
    """Keys per item of these lengths in tiles: the maximum for small tiles, to avoid a tail; otherwise the mean."""
    if not len(length):
        return math.inf
    return TILE[1] * float(length.max() if block_q <= ROWS else length.mean())
