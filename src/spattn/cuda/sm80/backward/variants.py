"""Kernel files and macros of the portable backward."""

from __future__ import annotations

from typing import NamedTuple

from ..forward.variants import HEAD_DIMS, ITEMSIZE

__all__ = ["Variant", "of_pass", "shared_bytes_of", "variant"]

_FFMA_SIDE = 32  # rows per CTA, and features per pass, of the FFMA kernel
_WIDEST = 256  # features of dK and dV together: 128 registers per thread
_STEPS = 3  # iterations described in shared memory
_RESERVED = 1024  # bytes of shared memory reserved per CTA
_WARPS = 8  # per SM, limited by registers


class Variant(NamedTuple):
    """A kernel file, its macros, and the rows per CTA."""

    source: str
    macros: dict[str, object]
    rows: int


def variant(name: str, dtype: str) -> tuple[str, dict[str, object]]:
    """(source, macros) of a kernel that depends on the dtype only: "statistics" or "sum"."""
    return f"sm80/backward/{name}.cu", {"SPATTN_DTYPE": dtype}


def of_pass(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    by_keys: bool,
    aligned: bool,
    shared_bytes: int,
    precision: str | None = None,
) -> list[Variant]:
    """Kernels of the dK/dV or dQ part on a device with `shared_bytes` per CTA.

    One, or separate dK and dV kernels, each of which recomputes the weights, if the registers do not hold both sums.
    """
    macros: dict[str, object] = {"SPATTN_DTYPE": dtype, "SPATTN_BY_KEYS": int(by_keys)}
    if ITEMSIZE[dtype] != 2 and precision is None:
        padded = (-(-dim // _FFMA_SIDE) * _FFMA_SIDE for dim in (head_dim, head_dim_v))
        macros |= zip(("SPATTN_HEAD_DIM", "SPATTN_HEAD_DIM_V"), padded, strict=True)
        return [Variant("sm80/backward/backward_ffma.cu", macros, _FFMA_SIDE)]
    dims = [next(size for size in HEAD_DIMS if size >= dim) for dim in (head_dim, head_dim_v)]
    macros |= {"SPATTN_HEAD_DIM": dims[0], "SPATTN_HEAD_DIM_V": dims[1], "SPATTN_ALIGNED": int(aligned)}
    results = [(1, 0)] if not by_keys else [(1, 1)] if sum(dims) <= _WIDEST else [(1, 0), (0, 1)]
    return [_tensor_cores(macros, dims, *one, ITEMSIZE[dtype], shared_bytes) for one in results]


def _tensor_cores(
    macros: dict[str, object], dims: list[int], scores: int, values: int, itemsize: int, shared_bytes: int
) -> Variant:
    """A tensor-core kernel. Two 16-row atoms per warp, if the sums leave registers for products of 32 columns: they
    halve the reads of columns, which bound ``mma.sync`` at 16 bits."""
    atoms = 2 if itemsize == 2 and dims[0] * scores + dims[1] * values <= _WIDEST // 2 else 1
    rows, columns, stages = _sizes(dims, bool(scores), atoms, itemsize, shared_bytes)
    own = {
        "SPATTN_SCORES": scores,
        "SPATTN_VALUES": values,
        "SPATTN_ROWS": rows,
        "SPATTN_ATOMS": atoms,
        "SPATTN_COLUMNS": columns,
        "SPATTN_STAGES": stages,
    }
    return Variant(f"sm80/backward/backward_{'mma' if itemsize == 2 else 'tf32'}.cu", macros | own, rows)


def _sizes(dims: list[int], scores: bool, atoms: int, itemsize: int, shared_bytes: int) -> tuple[int, int, int]:
    """(rows per CTA, columns per iteration, stages): the best sizes at the highest occupancy; fewer rows if not even
    one CTA fits."""
    sizes = [(columns, stages) for columns in (64, 32)[atoms - 1 :] for stages in (2, 1)]
    for rows in (64, 32):
        for blocks in range(_WARPS * 16 * atoms // rows, 0, -1):
            for columns, stages in sizes:
                needed = shared_bytes_of(dims, scores, rows, columns, stages, itemsize)
                if columns * atoms * 16 <= rows * 32 and blocks * (needed + _RESERVED) <= shared_bytes + _RESERVED:
                    return rows, columns, stages
    return 16, 32, 1


def shared_bytes_of(dims: list[int], scores: bool, rows: int, columns: int, stages: int, itemsize: int) -> int:
    """Bytes of a tensor-core kernel's ``Shared``; loading a kernel checks its actual size."""
    tiles = rows * itemsize * sum(dims) if scores else rows * itemsize * dims[0] + 128
    told = 4 * rows + _STEPS * (4 * columns + 20) + 8 * stages * columns
    return -(-(tiles + stages * columns * itemsize * sum(dims) + told) // 128) * 128
