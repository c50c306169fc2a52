"""What the Hopper kernels of the backward are built with for a problem: one table, each choice with its reason."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["Build", "builds", "variant"]


class Build(NamedTuple):
    """Sizes of a kernel. A row serves the head dimensions up to its own that the rows before it do not."""

    head_dim: int
    by_keys: bool
    scores: bool  # computes dK, or dQ
    values: bool  # computes dV
    step: int  # columns of a product
    blocks: int  # row tiles in shared memory
    stages: int  # column steps in shared memory
    consumer_registers: int
    reason: str


_WIDE = "a result takes 128 registers a thread: dK and dV one after the other; untuned"
TABLE = (
    Build(64, True, True, True, 64, 2, 8, 216, "products of 128 queries would spill"),
    Build(64, False, True, False, 128, 2, 8, 224, "products of 128 keys read shared memory less often"),
    Build(
        128, True, True, True, 64, 2, 5, 240, "dK and dV take 128 registers a thread, S and dP of 64 queries as many"
    ),
    Build(128, False, True, False, 64, 2, 5, 216, "products of 128 keys have no room in shared memory"),
    Build(256, True, True, False, 64, 1, 2, 224, _WIDE),
    Build(256, True, False, True, 64, 1, 4, 216, _WIDE),
    Build(256, False, True, False, 64, 1, 2, 224, _WIDE),
)


def builds(head_dim: int) -> list[Build]:
    """The kernels of a backward at a head dimension (the larger of that of q and v)."""
    padded = next(row.head_dim for row in TABLE if row.head_dim >= head_dim)
    return [row for row in TABLE if row.head_dim == padded]


def variant(row: Build, dtype: str, room: int) -> dict[str, object]:
    """Macros of a kernel, with room for so many tensor maps in the parameters."""
    return {
        "SPATTN_DTYPE": dtype,
        "SPATTN_HEAD_DIM": row.head_dim,
        "SPATTN_BY_KEYS": int(row.by_keys),
        "SPATTN_SCORES": int(row.scores),
        "SPATTN_VALUES": int(row.values),
        "SPATTN_STEP": row.step,
        "SPATTN_BLOCKS": row.blocks,
        "SPATTN_STAGES": row.stages,
        "SPATTN_CONSUMER_REGISTERS": row.consumer_registers,
        "SPATTN_TURNS": int(os.environ.get("SPATTN_TURNS", "1")),
        "SPATTN_MAPS": room,
    }
