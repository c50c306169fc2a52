"""Kernel specializations of the Hopper backward, each with the reason for its sizes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Specialization", "builds", "variant"]


class Specialization(NamedTuple):
    """Sizes of a specialization; it covers head dimensions of q and v up to its own that no earlier row covers."""

    head_dim: int
    head_dim_v: int
    results: str  # of a dK/dV kernel ("dk dv", "dk" or "dv"), the fused one ("dk dv dq") or the dQ kernel ("dq")
    step: int  # columns per product
    blocks: int  # row tiles in shared memory
    stages: int  # column stages in shared memory
    consumer_registers: int
    turns: bool  # True if the warpgroups take turns (ping-pong)
    reason: str


_TURNS = "turns: 6.36 against 6.63 ms dense"
_WIDE = "a result takes 128 registers per thread: separate dK and dV kernels; untuned"
_LATENT = "DeepSeek's MLA: dK, dV, S and dP would take 224 registers; dense 342 TF/s against 226 with kernels for 256"
TABLE = (
    Specialization(64, 64, "dk dv", 64, 2, 8, 216, True, f"products of 128 queries spill; {_TURNS} at head_dim 128"),
    Specialization(64, 64, "dk dv dq", 64, 2, 8, 216, False, "as without dQ"),
    Specialization(64, 64, "dq", 128, 2, 8, 224, False, "products of 128 keys read shared memory less often"),
    Specialization(128, 128, "dk dv", 64, 2, 5, 240, True, f"dK, dV, S and dP take 192 registers per thread; {_TURNS}"),
    Specialization(128, 128, "dk dv dq", 64, 1, 5, 240, False, "dS and the dQ sums replace the second row tile"),
    Specialization(
        128, 128, "dq", 64, 2, 5, 216, False, "no room for products of 128 keys; turns: 6.27 against 5.32 ms dense"
    ),
    Specialization(192, 128, "dk", 64, 1, 5, 224, True, _LATENT),
    Specialization(192, 128, "dv", 64, 2, 4, 216, True, _LATENT),
    Specialization(192, 128, "dq", 64, 1, 5, 224, False, _LATENT),
    Specialization(256, 256, "dk", 64, 1, 2, 224, True, _WIDE),
    Specialization(256, 256, "dv", 64, 1, 4, 216, True, _WIDE),
    Specialization(256, 256, "dq", 64, 1, 2, 224, False, _WIDE),
)


def builds(dims: tuple[int, int], one_pass: bool) -> list[Specialization]:
    """Return the kernels of a backward for `dims` (head_dim, head_dim_v), the dQ kernel last.

    With `one_pass`, the first is the fused kernel if one is specialized for these.
    """
    padded = next(row[:2] for row in TABLE if row.head_dim >= dims[0] and row.head_dim_v >= dims[1])
    rows = [row for row in TABLE if row[:2] == padded]
    single = [row for row in rows if row.results == "dk dv dq"]
    return [*single, rows[-1]] if one_pass and single else [row for row in rows if row not in single]


def variant(row: Specialization, dtype: str, room: int) -> dict[str, object]:
    """Return the macros of a kernel with `room` tensor maps in its parameters."""
    return {
        "SPATTN_DTYPE": dtype,
        "SPATTN_HEAD_DIM": row.head_dim,
        "SPATTN_HEAD_DIM_V": row.head_dim_v,
        "SPATTN_BY_KEYS": int(row.results != "dq"),
        "SPATTN_SCORES": int(row.results != "dv"),
        "SPATTN_VALUES": int("dv" in row.results),
        "SPATTN_QUERIES": int(row.results == "dk dv dq"),
        "SPATTN_STEP": row.step,
        "SPATTN_BLOCKS": row.blocks,
        "SPATTN_STAGES": row.stages,
        "SPATTN_CONSUMER_REGISTERS": row.consumer_registers,
        "SPATTN_TURNS": int(row.turns),
        "SPATTN_MAPS": room,
        "SPATTN_FLOAT8": 0,
        "SPATTN_PROBLEMS": 1,  # a size in the forward's params.cuh, whose structs the backward uses
    }
