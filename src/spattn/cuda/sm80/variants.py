"""Kernel files, macros and tile shapes of both passes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "HEAD_DIMS",
    "ITEMSIZE",
    "KEYS",
    "Variant",
    "backward_variants",
    "captured_variant",
    "forward_variants",
    "tile_within",
    "variant",
]

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # head dimensions with compiled mma.sync kernels; others are zero-padded
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
KEYS = 64  # keys per iteration of the forward
_STEPS = 3  # iterations described in the backward's ``Shared`` (kSteps)
_FFMA_SIDE = 32  # rows per CTA, and features per pass, of the backward's FFMA kernel
_WIDEST = 256  # maximum of dK's plus dV's features: 128 registers per thread
_RESERVED = 1024  # shared memory that CUDA reserves per CTA, in bytes
_WARPS = 8  # per SM, limited by registers


class Variant(NamedTuple):
    """A kernel file, its macros, and its rows per CTA."""

    source: str
    macros: dict[str, object]
    rows: int = 0


def variant(source: str, dtype: str) -> Variant:
    """Return a kernel that depends on the dtype only: "forward/merge", "backward/statistics" or "backward/sum"."""
    return Variant(f"sm80/{source}.cu", {"SPATTN_DTYPE": dtype})


def tile_within(shared_bytes: int, dtype: str, head_dim: int) -> tuple[int, int]:
    """Return the tile shape for CTAs with `shared_bytes` of shared memory.

    For 16-bit types, two 16-row atoms per warp halve the shared-memory reads per product, which bound mma.sync; above
    128 columns their accumulators exceed the registers, so tiles have half the rows. Other types take as many rows as
    fit in shared memory, in float64 also in registers, since all rows reuse the same reads of K and V.
    """
    heights = [height for height in (128, 64, 32) if height <= _most_rows(dtype, head_dim)]
    dims = [_padded(dtype, head_dim)] * 2
    return next((height for height in heights if _fits(height, dtype, dims, shared_bytes)), 16), KEYS


def forward_variants(
    dtype: str,
    precision: str | None,
    head_dim: int,
    head_dim_v: int,
    tile: tuple[int, int],
    aligned: bool,
    shared_bytes: int,
) -> list[Variant]:
    """Return the one attention kernel for tiles of this shape on a device with `shared_bytes` per CTA."""
    dims = [_padded(dtype, dim) for dim in (head_dim, head_dim_v)]
    heights = range(min(tile[0], _most_rows(dtype, max(dims))), 16, -16)
    fitting = (n for n in heights if tile[0] % n == 0 and _fits(n, dtype, dims, shared_bytes))
    rows = next(fitting, 16)
    macros: dict[str, object] = {
        "SPATTN_DTYPE": dtype,
        "SPATTN_BLOCK_Q": tile[0],
        "SPATTN_BLOCK_KV": tile[1],
        "SPATTN_ROWS": rows,
        "SPATTN_KEYS": _keys(dtype, dims),
        "SPATTN_ALIGNED": int(aligned),
        "SPATTN_HEAD_DIM": dims[0],
        "SPATTN_HEAD_DIM_V": dims[1],
    }
    if ITEMSIZE[dtype] == 2:
        return [Variant("sm80/forward/attention_mma.cu", macros | {"SPATTN_ATOMS": _atoms(rows, max(dims))}, rows)]
    if dtype == "float64":
        return [Variant("sm80/forward/attention_ffma.cu", macros, rows)]
    terms = {"SPATTN_ATOMS": 1, "SPATTN_TERMS": 1 if precision else 3}
    return [Variant("sm80/forward/attention_tf32.cu", macros | terms, rows)]


def _padded(dtype: str, head_dim: int) -> int:
    """Pad a head dimension to one that the forward kernels are compiled for."""
    if ITEMSIZE[dtype] == 2:
        return next(size for size in HEAD_DIMS if size >= head_dim)
    return -(-head_dim // 32) * 32


def _most_rows(dtype: str, head_dim: int) -> int:
    """Return the maximum number of rows per CTA that leaves each thread enough registers."""
    highest = 64 if dtype == "float64" else 128
    return highest // 2 if head_dim > 128 and dtype != "float32" else highest


def _atoms(rows: int, head_dim: int) -> int:
    """Return the 16-row atoms per warp: two if their accumulators fit in registers.

    For 128 columns on sm_90 ptxas spills the row sums: 13 accesses in a loop of 256 products. One atom spills nothing
    but is slower (H200, dense, 16384 tokens: 232 against 269 TFLOP/s).
    """
    return 2 if rows % 32 == 0 and head_dim <= 128 else 1


def _keys(dtype: str, dims: list[int]) -> int:
    """Return the keys per iteration: half if the output takes most registers."""
    return KEYS // 2 if dtype == "float32" and max(dims) > 128 else KEYS


def _fits(rows: int, dtype: str, dims: list[int], shared_bytes: int) -> bool:
    return forward_shared_bytes(rows, dtype, dims) <= shared_bytes


def forward_shared_bytes(rows: int, dtype: str, dims: list[int]) -> int:
    """Return the bytes of the attention kernel's ``Shared``; loading a kernel checks its actual size."""
    keys, itemsize = _keys(dtype, dims), ITEMSIZE[dtype]
    if dtype == "float64":
        tiles = rows * (dims[0] + KEYS + 16) + 2 * KEYS * 32
    else:
        tiles = rows * max(dims) + keys * sum(dims)
    return -(-(tiles * itemsize + 4 * (rows + 2 * keys)) // 128) * 128


def backward_variants(
    dtype: str,
    precision: str | None,
    head_dim: int,
    head_dim_v: int,
    by_keys: bool,
    aligned: bool,
    shared_bytes: int,
) -> list[Variant]:
    """Return the dK/dV or dQ kernels for a device with `shared_bytes` per CTA.

    If registers cannot hold both dK and dV, these are two kernels, each of which recomputes P.
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


def captured_variant(
    dtype: str, precision: str | None, head_dim: int, head_dim_v: int, aligned: bool, tables: int, shared_bytes: int
) -> Variant:
    """Return the kernel for gradients of `tables` captured arrays: a dQ kernel that accumulates these instead of dQ."""
    (own,) = backward_variants(dtype, precision, head_dim, head_dim_v, False, aligned, shared_bytes)
    macros = own.macros | {"SPATTN_TABLES": tables}
    if "SPATTN_ROWS" not in macros:
        return Variant(own.source, macros, own.rows)
    dims, columns, itemsize = (int(str(macros[f"SPATTN_HEAD_DIM{x}"])) for x in ("", "_V")), 32, ITEMSIZE[dtype]
    padded = list(dims)
    fitting = (
        rows
        for rows in (64, 32)
        if backward_shared_bytes(padded, True, rows, columns, 1, itemsize, True) + _RESERVED <= shared_bytes
    )
    rows = next(fitting, 16)
    macros |= {"SPATTN_ROWS": rows, "SPATTN_ATOMS": 1, "SPATTN_COLUMNS": columns, "SPATTN_STAGES": 1}
    return Variant(own.source, macros, rows)


def _tensor_cores(
    macros: dict[str, object], dims: list[int], scores: int, values: int, itemsize: int, shared_bytes: int
) -> Variant:
    """Return a tensor-core kernel. Each warp gets two 16-row atoms if the sums leave registers for products of 32
    columns: this halves the reads of columns, which bound 16-bit ``mma.sync``."""
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
    """Return (rows per CTA, columns per iteration, stages) at the highest occupancy; fewer rows if no CTA fits."""
    sizes = [(columns, stages) for columns in (64, 32)[atoms - 1 :] for stages in (2, 1)]
    for rows in (64, 32):
        for blocks in range(_WARPS * 16 * atoms // rows, 0, -1):
            for columns, stages in sizes:
                needed = backward_shared_bytes(dims, scores, rows, columns, stages, itemsize)
                if columns * atoms * 16 <= rows * 32 and blocks * (needed + _RESERVED) <= shared_bytes + _RESERVED:
                    return rows, columns, stages
    return 16, 32, 1


def backward_shared_bytes(
    dims: list[int], scores: bool, rows: int, columns: int, stages: int, itemsize: int, captured: bool = False
) -> int:
    """Return the bytes of a tensor-core kernel's ``Shared``; loading a kernel checks its actual size."""
    tiles = rows * itemsize * sum(dims) if scores else rows * itemsize * dims[0] + 128
    told = 4 * rows + _STEPS * (4 * columns + 20) + 8 * stages * columns
    told += 4 * rows * (columns + 1) if captured else 0
    return -(-(tiles + stages * columns * itemsize * sum(dims) + told) // 128) * 128
