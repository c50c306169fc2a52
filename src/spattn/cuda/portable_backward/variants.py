"""Which kernels compute a pass, with which macros."""

from __future__ import annotations

from typing import NamedTuple

from ..portable.variants import HEAD_DIMS, ITEMSIZE

__all__ = ["Variant", "of_pass", "shared_bytes_of", "variant"]

_FFMA_SIDE = 32  # rows of the other's, and features that it takes at a time
_WIDEST = 256  # features of both sums of a pass by keys: 128 registers a thread
_STEPS = 3  # that its shared memory tells of
_RESERVED = 1024  # bytes of shared memory that every block takes beside its own
_WARPS = 8  # that an SM has registers for


class Variant(NamedTuple):
    """A kernel file, its macros, and the rows of its blocks."""

    source: str
    macros: dict[str, object]
    rows: int


def variant(name: str, dtype: str) -> tuple[str, dict[str, object]]:
    """(source, macros) of a kernel that depends on the dtype alone: "statistics" or "sum"."""
    return f"portable_backward/{name}.cu", {"SPATTN_DTYPE": dtype}


def of_pass(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    by_keys: bool,
    aligned: bool,
    shared_bytes: int,
    precision: str | None = None,
) -> list[Variant]:
    """The kernels of a pass on a device whose blocks have so much shared memory.

    One, but where the sums of dK and dV do not both fit into the registers: then one for each, which finds the weights
    for itself.
    """
    macros: dict[str, object] = {"SPATTN_DTYPE": dtype, "SPATTN_BY_KEYS": int(by_keys)}
    if ITEMSIZE[dtype] != 2 and precision is None:
        padded = (-(-dim // _FFMA_SIDE) * _FFMA_SIDE for dim in (head_dim, head_dim_v))
        macros |= zip(("SPATTN_HEAD_DIM", "SPATTN_HEAD_DIM_V"), padded, strict=True)
        return [Variant("portable_backward/backward_ffma.cu", macros, _FFMA_SIDE)]
    dims = [next(size for size in HEAD_DIMS if size >= dim) for dim in (head_dim, head_dim_v)]
    macros |= {"SPATTN_HEAD_DIM": dims[0], "SPATTN_HEAD_DIM_V": dims[1], "SPATTN_ALIGNED": int(aligned)}
    results = [(1, 0)] if not by_keys else [(1, 1)] if sum(dims) <= _WIDEST else [(1, 0), (0, 1)]
    return [_tensor_cores(macros, dims, *one, ITEMSIZE[dtype], shared_bytes) for one in results]


def _tensor_cores(
    macros: dict[str, object], dims: list[int], scores: int, values: int, itemsize: int, shared_bytes: int
) -> Variant:
    """Two atoms of 16 rows a warp halve its reads of the columns, which is what bounds ``mma.sync`` at 16 bits: where
    their sums leave registers for the products of 32 columns."""
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
    return Variant(f"portable_backward/backward_{'mma' if itemsize == 2 else 'tf32'}.cu", macros | own, rows)


def _sizes(dims: list[int], scores: bool, atoms: int, itemsize: int, shared_bytes: int) -> tuple[int, int, int]:
    """(rows of a block, columns of a step, steps in shared memory): the best with which as many blocks as possible fit
    on an SM; fewer rows where not even one fits."""
    sizes = [(columns, stages) for columns in (64, 32)[atoms - 1 :] for stages in (2, 1)]
    for rows in (64, 32):
        for blocks in range(_WARPS * 16 * atoms // rows, 0, -1):
            for columns, stages in sizes:
                needed = shared_bytes_of(dims, scores, rows, columns, stages, itemsize)
                if columns * atoms * 16 <= rows * 32 and blocks * (needed + _RESERVED) <= shared_bytes + _RESERVED:
                    return rows, columns, stages
    return 16, 32, 1


def shared_bytes_of(dims: list[int], scores: bool, rows: int, columns: int, stages: int, itemsize: int) -> int:
    """What ``Shared`` of a tensor-core kernel takes, in bytes; the kernel's own number is checked when it is loaded."""
    tiles = rows * itemsize * sum(dims) if scores else rows * itemsize * dims[0] + 128
    told = 4 * rows + _STEPS * (4 * columns + 20) + 8 * stages * columns
    return -(-(tiles + stages * columns * itemsize * sum(dims) + told) // 128) * 128
