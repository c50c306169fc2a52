"""What the Hopper kernels are built with for a problem: one table, each choice with the measurement behind it.

Figures are of one H200, 16384 tokens, 16 heads (docs/hopper.md has the runs). Every row fits 227 KiB of shared memory
and 384 threads of 168 registers, which the warpgroups redistribute: 2 × 128 consumer threads and 128 others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...plan._types import Plan

# Queries and keys of a plan's tiles. 128 queries are two consumer warpgroups, as many as the registers hold at head_dim
# 128. 64 keys follow 2-D and 3-D patterns more closely than 128 (efficiency 0.245 against 0.167 on a 13 × 13
# neighbourhood) and run at the same rate, because two tiles make one product.
TILE = (128, 64)
_FEW_STEPS = 4  # products: items shorter than this on average are short
ARCH = "sm_90a"
DTYPES = ("float16", "bfloat16")
# Of the 50-60 MB of L2, 24 MiB are for keys and values of heads that run side by side: 512 bytes a key and its value at
# head_dim 128.
KEYS_TOGETHER = (24 << 20) // 512


class Build(NamedTuple):
    """Sizes of a kernel. A row serves the head dimensions up to its own that the rows before it do not."""

    head_dim: int
    short_items: bool
    step_kv: int  # keys of one product
    queries: int  # query tiles in shared memory
    stages: int  # key or value steps in shared memory
    consumer_registers: int
    producer_registers: int
    reason: str


_KEYS = "products of 128 keys: 583 TF/s dense against 454 with 64"
_QUERIES = "query tiles are the bottleneck of items of a few products: strided 0.32 ms with two tiles, 0.30 with three"
_WIDE = "the output takes 128 registers a thread, which leaves none for the logits of 128 keys; spills, untuned"
TABLE = (
    Build(64, False, 128, 2, 8, 200, 104, f"{_KEYS}; a third query tile is no faster dense"),
    Build(64, True, 128, 3, 8, 200, 104, _QUERIES),
    Build(128, False, 128, 2, 5, 200, 104, f"{_KEYS}; a third query tile is no faster dense and takes a step's room"),
    Build(128, True, 128, 3, 4, 200, 104, _QUERIES),
    Build(256, False, 64, 2, 3, 208, 88, _WIDE),
    Build(256, True, 64, 2, 3, 208, 88, f"{_WIDE}; no room for a third query tile"),
)


def build(head_dim: int, short_items: bool) -> Build:
    """The table's row for a head dimension (the larger of that of q and v) and a plan of short items, or not."""
    return next(row for row in TABLE if row.head_dim >= head_dim and row.short_items == short_items)


def variant(dtype: str, head_dim: int, room: int, short_items: bool, problems: int = 1) -> dict[str, object]:
    """Macros for problems of one type, with room for so many of them and so many tensor maps in the parameters."""
    row = build(head_dim, short_items)
    return {
        "SPATTN_DTYPE": dtype,
        "SPATTN_HEAD_DIM": row.head_dim,
        "SPATTN_BLOCK_Q": TILE[0],
        "SPATTN_BLOCK_KV": TILE[1],
        "SPATTN_STEP_KV": row.step_kv,
        "SPATTN_MAPS": room,
        "SPATTN_PROBLEMS": problems,
        "SPATTN_QUERIES": row.queries,
        "SPATTN_STAGES": row.stages,
        "SPATTN_CONSUMER_REGISTERS": row.consumer_registers,
        "SPATTN_PRODUCER_REGISTERS": row.producer_registers,
    }


def has_short_items(plan: Plan) -> bool:
    """Whether a plan's items take few products on average."""
    length = plan.work["end"] - plan.work["begin"]
    return bool(len(length)) and are_short(length)


def are_short(length: np.ndarray) -> bool:
    """Whether items of so many tiles, at least one item, take few products on average."""
    return float(length.mean()) * TILE[1] < _FEW_STEPS * 128
