"""What the Hopper kernels of the backward are built with for a problem: one table, each choice with its reason."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Build", "builds", "variant"]


class Build(NamedTuple):
    """Sizes of a kernel. A row serves the head dimensions up to its own that the rows before it do not."""

    head_dim: int
    results: str  # "dk dv dq", in one pass by keys, some of them, or "dq" alone by queries
    step: int  # columns of a product
    blocks: int  # row tiles in shared memory
    stages: int  # column steps in shared memory
    consumer_registers: int
    turns: bool  # whether the warpgroups start steps in turns
    reason: str


_TURNS = "turns: 6.36 against 6.63 ms dense"
_WIDE = "a result takes 128 registers a thread: dK and dV one after the other; untuned"
TABLE = (
    Build(64, "dk dv", 64, 2, 8, 216, True, f"products of 128 queries spill; {_TURNS} at head_dim 128"),
    Build(64, "dk dv dq", 64, 2, 8, 216, False, "as without dQ"),
    Build(64, "dq", 128, 2, 8, 224, False, "products of 128 keys read shared memory less often"),
    Build(128, "dk dv", 64, 2, 5, 240, True, f"dK, dV, S and dP take 192 registers a thread; {_TURNS}"),
    Build(128, "dk dv dq", 64, 1, 5, 240, False, "dS and the sums of dQ take the room of the second row tile"),
    Build(128, "dq", 64, 2, 5, 216, False, "no room for products of 128 keys; turns: 6.27 against 5.32 ms dense"),
    Build(256, "dk", 64, 1, 2, 224, True, _WIDE),
    Build(256, "dv", 64, 1, 4, 216, True, _WIDE),
    Build(256, "dq", 64, 1, 2, 224, False, _WIDE),
)


def builds(head_dim: int, one_pass: bool) -> list[Build]:
    """The kernels of a backward at a head dimension (the larger of that of q and v), that of dQ last. In one pass the
    first computes all three; wide heads have no such kernel."""
    padded = next(row.head_dim for row in TABLE if row.head_dim >= head_dim)
    rows = [row for row in TABLE if row.head_dim == padded]
    single = [row for row in rows if row.results == "dk dv dq"]
    return [*single, rows[-1]] if one_pass and single else [row for row in rows if row not in single]


def variant(row: Build, dtype: str, room: int) -> dict[str, object]:
    """Macros of a kernel, with room for so many tensor maps in the parameters."""
    return {
        "SPATTN_DTYPE": dtype,
        "SPATTN_HEAD_DIM": row.head_dim,
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
        "SPATTN_PROBLEMS": 1,  # of the forward, whose structs these kernels share
    }
