"""Which kernels compute a pass, with which macros."""

from __future__ import annotations

from typing import NamedTuple

from ..portable.variants import HEAD_DIMS, ITEMSIZE

__all__ = ["Variant", "of_pass", "shared_bytes_of", "variant"]

_ROWS = 64  # of a tensor-core kernel's blocks: a slab
_FFMA_SIDE = 32  # rows of the other's, and features that it takes at a time
_WIDEST = 256  # features of both sums of a pass by keys: 128 registers a thread
_RESERVED = 1024  # bytes of shared memory that every block takes beside its own
_SIZES = (64, 2), (64, 1), (32, 2), (32, 1)  # columns of a step, and steps in shared memory, the best first


class Variant(NamedTuple):
    """A kernel file, its macros, and the rows of its blocks."""

    source: str
    macros: dict[str, object]
    rows: int


def variant(name: str, dtype: str) -> tuple[str, dict[str, object]]:
    """(source, macros) of a kernel that depends on the dtype alone: "statistics" or "sum"."""
    return f"portable_backward/{name}.cu", {"SPATTN_DTYPE": dtype}


def of_pass(
    dtype: str, head_dim: int, head_dim_v: int, by_keys: bool, aligned: bool, shared_bytes: int
) -> list[Variant]:
    """The kernels of a pass on a device whose blocks have so much shared memory.

    One, but where the sums of dK and dV do not both fit into the registers: then one for each, which finds the weights
    for itself.
    """
    macros: dict[str, object] = {"SPATTN_DTYPE": dtype, "SPATTN_BY_KEYS": int(by_keys)}
    if ITEMSIZE[dtype] != 2:
        padded = (-(-dim // _FFMA_SIDE) * _FFMA_SIDE for dim in (head_dim, head_dim_v))
        macros |= zip(("SPATTN_HEAD_DIM", "SPATTN_HEAD_DIM_V"), padded, strict=True)
        return [Variant("portable_backward/backward_ffma.cu", macros, _FFMA_SIDE)]
    dims = [next(size for size in HEAD_DIMS if size >= dim) for dim in (head_dim, head_dim_v)]
    macros |= {"SPATTN_HEAD_DIM": dims[0], "SPATTN_HEAD_DIM_V": dims[1], "SPATTN_ALIGNED": int(aligned)}
    results = [(1, 0)] if not by_keys else [(1, 1)] if sum(dims) <= _WIDEST else [(1, 0), (0, 1)]
    found = []
    for scores, values in results:
        columns, stages = _sizes(ITEMSIZE[dtype], dims, bool(scores), shared_bytes)
        own = {"SPATTN_SCORES": scores, "SPATTN_VALUES": values, "SPATTN_COLUMNS": columns, "SPATTN_STAGES": stages}
        found.append(Variant("portable_backward/backward_mma.cu", macros | own, _ROWS))
    return found


def _sizes(itemsize: int, dims: list[int], scores: bool, shared_bytes: int) -> tuple[int, int]:
    """The best sizes with which two blocks fit on an SM, else those with which one does."""
    for blocks in (2, 1):
        for columns, stages in _SIZES:
            needed = shared_bytes_of(itemsize, dims, scores, columns, stages)
            if blocks * (needed + _RESERVED) <= shared_bytes + _RESERVED:
                return columns, stages
    return _SIZES[-1]


def shared_bytes_of(itemsize: int, dims: list[int], scores: bool, columns: int, stages: int) -> int:
    """What ``Shared`` of a tensor-core kernel takes, in bytes; the kernel's own number is checked when it is loaded."""
    rows = _ROWS * itemsize * (dims[0] + dims[1]) if scores else _ROWS * itemsize * dims[0] + 128
    positions = 4 * (_ROWS + 3 * (columns + 2)) + 8 * stages * columns
    return -(-(rows + stages * columns * itemsize * sum(dims) + positions) // 128) * 128
