"""What the Hopper kernels are built with for a problem: one table, each choice with the measurement behind it.

Figures are of one H200, 16384 tokens, 16 heads (docs/hopper.md has the runs). Every row fits 227 KiB of shared memory
and 384 threads of 168 registers, which the warpgroups redistribute: 2 × 128 consumer threads and 128 others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..planning.contract.types import Plan

# Queries and keys of most plans' tiles. 128 queries are two consumer warpgroups, as many as the registers hold at
# head_dim 128. 64 keys follow 2-D and 3-D patterns more closely than 128 (efficiency 0.245 against 0.167 on a 13 × 13
# neighbourhood) and run at the same rate, because two tiles make one product. Plans with fewer queries a tile run too:
# up to ROWS of them are one warpgroup, and two CTAs share an SM.
TILE = (128, 64)
ROWS = 64  # of a warpgroup
FEWER = 56  # keys of a product where no box of keys has more: 7 × 7 neighbours at head_dim 32 take 47.8 µs, else 49.5
ARCH = "sm_90a"
DTYPES = ("float16", "bfloat16")
# Of the 50-60 MB of L2, 24 MiB are for keys and values of heads that run side by side: 512 bytes a key and its value at
# head_dim 128.
KEYS_TOGETHER = (24 << 20) // 512
# Of keys that are copied one by one fewer, whose rows are read again and again from everywhere.
KEYS_COPIED_TOGETHER = KEYS_TOGETHER // 4


class Build(NamedTuple):
    """Sizes of a kernel. A row serves the head dimensions up to its own that the rows before it do not."""

    rows: int  # of a query tile
    head_dim: int
    most_keys: float  # of the items of a plan: see item_keys
    ctas: int  # of an SM
    step_kv: int  # keys of one product
    queries: int  # query tiles in shared memory
    stages: int  # key or value steps in shared memory
    consumer_registers: int
    producer_registers: int
    reason: str


_KEYS = "products of 128 keys: 583 TF/s dense against 454 with 64"
_QUERIES = "query tiles are the bottleneck of items of a few products: strided 0.32 ms with two tiles, 0.30 with three"
_WIDE = "the output takes 128 registers a thread, which leaves none for the logits of 128 keys; spills, untuned"
_HALVES = "half of the shared memory and registers of an SM"
_THIRDS = (
    "three CTAs hide what is between products: windows of 7 x 7 on 16 images of 56 x 56, head_dim 32, 0.040 ms against "
    "0.050; producers and writers spill, consumers do not"
)
_NEXT = (
    "a third query tile: windows of 7 x 7 on 16 images of 56 x 56 0.065 ms against 0.074, shifted ones 0.074 against "
    "0.086; but 13 x 13 windows 0.182 against 0.174, which read more keys"
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
    Build(128, 128, _ANY, 1, 128, 2, 5, 200, 104, f"{_KEYS}; a third query tile is no faster and takes a step's room"),
    Build(128, 256, _ANY, 1, 64, 2, 3, 224, 56, f"{_WIDE}; no room for a third query tile"),
)


def rows_of(block_q: int) -> int:
    """Rows of the query tile that computes so many."""
    return ROWS if block_q <= ROWS else TILE[0]


def build(block_q: int, head_dim: int, keys: float = math.inf) -> Build:
    """The table's row for a head dimension (the larger of that of q and v) and items of so many keys."""
    fitting = (row for row in TABLE if row.rows == rows_of(block_q) and row.head_dim >= head_dim)
    return next(row for row in fitting if keys <= row.most_keys)


def variant(
    row: Build, dtype: str, room: int, problems: int = 1, gathers: bool = False, cells: int = TILE[1]
) -> dict[str, object]:
    """Macros for problems of one type, with room for so many of them and so many tensor maps in the parameters; of
    plans whose places are looked up, if `gathers`; `cells` is how many boxes of keys have at most."""
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
    """Keys of the items of a plan, or of other work items that are made of it. Where rows are copied one by one nothing
    depends on it: that takes registers which short items leave to others."""
    work = plan.work if work is None else work
    return math.inf if plan.ordered else keys_of(work["end"] - work["begin"], plan.block_q)


def keys_of(length: np.ndarray, block_q: int) -> float:
    """Keys of items of so many tiles: of the longest one where tiles are small, so that nobody waits for it; on average
    where they are not."""
    if not len(length):
        return math.inf
    return TILE[1] * float(length.max() if block_q <= ROWS else length.mean())
