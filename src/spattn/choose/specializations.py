"""Kernel specializations of the Hopper forward: a table with the measurement behind each choice.

Figures are from one H200 at 16384 tokens and 16 heads (docs/notebook/hopper_forward.md has the runs). Every row fits
227 KiB of shared memory and 65,536 registers, which are redistributed among 64 to 192 × 2 consumer threads and 128
others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..arrays import FLOAT8
from ..planning.contract.types import Plan

# The common tile shape. 128 queries need two consumer warpgroups, the maximum that the registers allow at head_dim 128.
# 64 keys follow 2-D and 3-D patterns more closely than 128 (efficiency 0.245 against 0.167 on a 13 × 13 neighborhood)
# at the same rate, because two tiles form one product. Query tiles of up to ROWS rows have one consumer warpgroup, and
# two CTAs share an SM.
TILE = (128, 64)
ROWS = 64  # rows of a warpgroup
WIDEST = (192, 64)  # three consumer warpgroups, which hide a softmax better than two where products are short
ARCH = "sm_90a"
DTYPES = ("float16", "bfloat16")
# K and V of concurrent heads may take 48 MiB of the 50-60 MB of L2; a key takes 512 bytes at head_dim 128. Half of it:
# causal 0.97, Longformer 0.9 of the rate, strided 1.03. Twice: BigBird and documents at head_dim 128 0.94.
KEYS_TOGETHER = (48 << 20) // 512
# Gathered keys need a lower limit, because their rows are reread at random.
KEYS_COPIED_TOGETHER = KEYS_TOGETHER // 8


class Specialization(NamedTuple):
    """A kernel specialization. The first row of TABLE with these rows and sufficient head_dim, head_dim_v and most_keys
    applies."""

    rows: int  # rows of a query tile
    head_dim: int
    head_dim_v: int
    most_keys: float  # maximum number of keys of a work item, see item_keys
    ctas: int  # CTAs per SM
    step_kv: int  # keys of a product
    queries: int  # query tiles in shared memory
    stages: int  # stages of K or V in shared memory
    consumer_registers: int
    producer_registers: int
    reason: str
    terms: int = 1  # bfloat16 terms of an element, see terms_of
    shares: bool = False  # whether two consumer warpgroups share the rows of a tile
    float8: bool = False  # whether q, k and v are float8

    @property
    def warpgroups(self) -> int:
        """Return the number of consumer warpgroups."""
        return self.rows // ROWS + self.shares

    @property
    def mean_dim(self) -> int:
        """Return the mean of both head dimensions, to which the duration of products is proportional."""
        return (self.head_dim + self.head_dim_v) // 2


_KEYS = "products of 128 keys: 583 TF/s dense against 454 with 64"
_QUERIES = "query tiles are the bottleneck of items of a few products: strided 0.32 ms with two tiles, 0.30 with three"
_WIDE = "the output takes 128 registers per thread, which leaves none for the scores of 128 keys; spills, untuned"
_LATENT = "DeepSeek's MLA; stages of 64 features waste none; dense 650 TF/s against 355 with the kernel for 256"
_HALVES = "half of an SM's shared memory and registers"
_THIRDS = (
    "three CTAs hide the gaps between products: 7 x 7 windows on 16 images of 56 x 56, head_dim 32, 0.040 ms against "
    "0.050; producers and writers spill, consumers do not"
)
_NEXT = (
    "a third query tile: 7 x 7 windows on 16 images of 56 x 56 0.065 ms against 0.074, shifted 0.074 against "
    "0.086; but 13 x 13 windows, which read more keys, 0.182 against 0.174"
)
_THREE = "dense 492 TF/s against 417 with two warpgroups, causal 472 against 407; from 152 registers on consumers spill"
_ANY = math.inf
TABLE = (
    Specialization(64, 64, 64, 1024, 3, 64, 3, 5, 120, 40, _THIRDS),
    Specialization(64, 64, 64, _ANY, 2, 128, 3, 5, 168, 88, _HALVES),
    Specialization(64, 128, 128, 256, 2, 64, 3, 4, 168, 88, _NEXT),
    Specialization(
        64, 128, 128, _ANY, 2, 64, 2, 5, 168, 88, f"{_HALVES}; products of 128 keys leave room for one query tile"
    ),
    Specialization(64, 192, 128, _ANY, 2, 64, 2, 8, 168, 88, f"{_HALVES}; stages of 64 features; untuned"),
    Specialization(64, 256, 256, _ANY, 1, 64, 2, 4, 240, 128, _WIDE),
    Specialization(128, 64, 64, 511, 1, 128, 3, 8, 200, 104, _QUERIES),
    Specialization(128, 64, 64, _ANY, 1, 128, 2, 8, 200, 104, f"{_KEYS}; a third query tile is no faster dense"),
    Specialization(128, 128, 128, 511, 1, 128, 3, 4, 200, 104, _QUERIES),
    Specialization(
        128, 128, 128, _ANY, 1, 128, 2, 5, 200, 104, f"{_KEYS}; a third query tile is no faster and costs a stage"
    ),
    Specialization(128, 192, 128, _ANY, 1, 128, 2, 8, 200, 104, _LATENT),
    Specialization(128, 256, 256, _ANY, 1, 64, 2, 3, 224, 56, f"{_WIDE}; no room for a third query tile"),
    Specialization(192, 64, 64, _ANY, 1, 128, 2, 8, 160, 32, _THREE),
    Specialization(192, 128, 128, _ANY, 1, 64, 2, 7, 160, 32, "for plans made for a smaller head_dim; untuned"),
)

_TERMS = "three or six products of terms hide the softmax; not tuned"
_SHARES = "two warpgroups take the iterations of an item in turns"
# For float32. Products of 64 keys leave registers for the terms of the weights.
TABLE_OF_TERMS = (
    Specialization(64, 64, 64, _ANY, 1, 64, 2, 6, 208, 88, _SHARES, terms=3, shares=True),
    Specialization(128, 64, 64, _ANY, 1, 64, 2, 5, 208, 88, _TERMS, terms=3),
    Specialization(64, 128, 128, _ANY, 1, 64, 2, 5, 248, 128, f"{_TERMS}; 128 queries do not fit", terms=3),
    Specialization(64, 64, 64, _ANY, 1, 64, 3, 8, 208, 88, _SHARES, terms=2, shares=True),
    Specialization(64, 128, 128, _ANY, 1, 64, 2, 5, 240, 128, _TERMS, terms=2),
    Specialization(128, 64, 64, _ANY, 1, 128, 2, 5, 208, 88, _KEYS, terms=2),
    Specialization(128, 128, 128, _ANY, 1, 64, 2, 3, 208, 88, _TERMS, terms=2),
)

_FLOAT8 = "three warpgroups in order: a softmax overlaps the products of others"
TABLE_OF_FLOAT8 = (
    Specialization(128, 128, 128, _ANY, 1, 128, 2, 10, 216, 72, "for tiles that 192 queries do not fit", float8=True),
    Specialization(192, 128, 128, _ANY, 1, 128, 2, 8, 160, 32, _FLOAT8, float8=True),
)


def terms_of(dtype: str, precision: str | None) -> int:
    """Return how many bfloat16 terms represent an element of a product's operands; a type of at most 16 bits is one
    term itself.

    Three terms are exact, two have 16 significant bits.
    """
    return 1 if dtype in (*DTYPES, FLOAT8) else 2 if precision else 3


def executes(block_q: int, block_kv: int) -> bool:
    """Whether the kernels execute plans with this tile shape."""
    return block_kv == TILE[1] and (1 <= block_q <= ROWS or block_q in (TILE[0], WIDEST[0]))


def rows_of(block_q: int) -> int:
    """Return the smallest query tile size of at least `block_q` rows."""
    return next(rows for rows in (ROWS, TILE[0], WIDEST[0]) if block_q <= rows)


def build(
    block_q: int, dims: tuple[int, int], keys: float = math.inf, terms: int = 1, float8: bool = False
) -> Specialization:
    """Return the specialization for `dims` (head_dim, head_dim_v), work items of `keys` keys and elements of `terms`
    terms or of float8."""
    return next(row for row in _fitting(block_q, dims, terms, float8) if keys <= row.most_keys)


def has_build(block_q: int, dims: tuple[int, int], terms: int = 1, float8: bool = False) -> bool:
    """Whether there is a specialization."""
    return any(_fitting(block_q, dims, terms, float8))


def _fitting(block_q: int, dims: tuple[int, int], terms: int, float8: bool) -> Iterator[Specialization]:
    head_dim, head_dim_v = dims
    for row in TABLE_OF_FLOAT8 if float8 else TABLE if terms == 1 else TABLE_OF_TERMS:
        fits = row.head_dim >= head_dim and row.head_dim_v >= head_dim_v
        if fits and row.rows == rows_of(block_q) and row.terms == terms:
            yield row


def variant(row: Specialization, dtype: str, room: int, problems: int = 1, gathers: bool = False) -> dict[str, object]:
    """Return the macros of a kernel with room for `room` tensor maps and `problems` problems."""
    return {
        "SPATTN_FLOAT8": int(row.float8),
        "SPATTN_DTYPE": "bfloat16" if row.float8 else dtype,
        "SPATTN_TERMS": row.terms,
        "SPATTN_WARPGROUPS": row.warpgroups,
        "SPATTN_HEAD_DIM": row.head_dim,
        "SPATTN_HEAD_DIM_V": row.head_dim_v,
        "SPATTN_BLOCK_Q": row.rows,
        "SPATTN_BLOCK_KV": TILE[1],
        "SPATTN_STEP_KV": row.step_kv,
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
    """Return the keys per work item for `build`; inf for permuted and gathered plans.

    Copying rows takes registers that some specializations for short items lack.
    """
    work = plan.work if work is None else work
    return math.inf if plan.ordered else keys_of(work["end"] - work["begin"], plan.block_q)


def keys_of(length: np.ndarray, block_q: int) -> float:
    """Return the mean keys of a work item; for small tiles those of the longest item, which determines the duration."""
    if not len(length):
        return math.inf
    return TILE[1] * float(length.max() if block_q <= ROWS else length.mean())
