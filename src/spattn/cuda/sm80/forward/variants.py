"""Kernel file, macros and tile shape for each problem."""

from __future__ import annotations

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # compiled sizes of the mma.sync kernel; others are zero-padded
LARGEST_TF32_BLOCK_Q = 128  # 8 warps of 255 registers per thread fill an SM
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
KEYS = 64  # per iteration


def tile_within(shared_bytes: int, dtype: str, head_dim: int) -> tuple[int, int]:
    """Tile shape for CTAs with `shared_bytes` of shared memory.

    16-bit types: two 16-row atoms per warp halve the shared-memory reads per product, which bound mma.sync; above 128
    columns their accumulators exceed the registers, so tiles are half as high. Others: as many rows as shared memory
    holds, since all rows reuse the same reads of K and V; in float64 as many as the registers allow.
    """
    if ITEMSIZE[dtype] == 2:
        return (128 if head_dim <= 128 else 64), KEYS
    highest = 64 >> (head_dim > 128) if dtype == "float64" else 128
    heights = [height for height in (128, 64, 32, 16) if height <= highest]
    fitting = [height for height in heights if shared_bytes_of(height, dtype, head_dim) <= shared_bytes]
    return (fitting or heights[-1:])[0], KEYS


def variant(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    tile: tuple[int, int],
    aligned: bool,
    shared_bytes: int,
    precision: str | None = None,
) -> tuple[str, dict[str, object]]:
    """Kernel file and macros for a problem on a device with `shared_bytes` per CTA; ValueError if no "tf32" kernel
    fits."""
    defines: dict[str, object] = {
        "SPATTN_DTYPE": dtype,
        "SPATTN_BLOCK_Q": tile[0],
        "SPATTN_BLOCK_KV": tile[1],
        "SPATTN_ALIGNED": int(aligned),
    }
    if ITEMSIZE[dtype] == 2:
        dims = [next(size for size in HEAD_DIMS if size >= dim) for dim in (head_dim, head_dim_v)]
        defines |= {"SPATTN_ATOMS": atoms(tile[0], max(dims)), "SPATTN_KEYS": KEYS}
        source = "sm80/forward/attention_mma.cu"
    elif dtype == "float32" and _tf32_fits(tile[0], max(head_dim, head_dim_v), shared_bytes):
        dims = [_tf32_columns(dim) for dim in (head_dim, head_dim_v)]
        defines |= {"SPATTN_ATOMS": 1, "SPATTN_KEYS": _tf32_keys(max(dims)), "SPATTN_TERMS": 1 if precision else 3}
        source = "sm80/forward/attention_tf32.cu"
    elif precision is not None:
        raise ValueError(
            f"precision: tiles of {tile[0]} × {tile[1]} do not fit the {precision!r} kernel; use spattn.cuda.tile()"
        )
    else:
        slice_columns = 256 // ITEMSIZE[dtype]
        dims = [-(-dim // slice_columns) * slice_columns for dim in (head_dim, head_dim_v)]
        source = "sm80/forward/attention_ffma.cu"
    return source, {**defines, "SPATTN_HEAD_DIM": dims[0], "SPATTN_HEAD_DIM_V": dims[1]}


def merge_variant(dtype: str) -> tuple[str, dict[str, object]]:
    """Kernel file and macros of the combine kernel."""
    return "sm80/forward/merge.cu", {"SPATTN_DTYPE": dtype}


def atoms(block_q: int, head_dim: int) -> int:
    """16-row atoms per warp: two if their accumulators fit into the registers.

    For 128 columns on sm_90 ptxas spills the row sums: 13 accesses in a loop of 256 products. One atom spills nothing
    but is 16 % slower (H200, dense, 16384 tokens: 232 against 269 TFLOP/s).
    """
    return 2 if block_q % 32 == 0 and head_dim <= 128 else 1


def shared_bytes_of(block_q: int, dtype: str, head_dim: int) -> int:
    """Bytes of a kernel's ``Shared``; loading a kernel checks its actual size."""
    itemsize = ITEMSIZE[dtype]
    positions = 4 * (block_q + 2 * KEYS)
    if itemsize == 2:
        return (block_q + 2 * KEYS) * next(size for size in HEAD_DIMS if size >= head_dim) * itemsize + positions
    columns = -(-head_dim * itemsize // 256) * 256
    multiply_add = block_q * (columns + (KEYS + 16) * itemsize) + 2 * KEYS * 256 + positions
    if dtype == "float32" and block_q <= LARGEST_TF32_BLOCK_Q:
        return min(multiply_add, _tf32_shared_bytes(block_q, head_dim))
    return multiply_add


def _tf32_fits(block_q: int, head_dim: int, shared_bytes: int) -> bool:
    return block_q <= LARGEST_TF32_BLOCK_Q and _tf32_shared_bytes(block_q, head_dim) <= shared_bytes


def _tf32_shared_bytes(block_q: int, head_dim: int) -> int:
    columns = _tf32_columns(head_dim)
    return (block_q + 2 * _tf32_keys(columns)) * columns * 4 + 4 * (block_q + 2 * KEYS)


def _tf32_columns(head_dim: int) -> int:
    return -(-head_dim // 32) * 32


def _tf32_keys(columns: int) -> int:
    """Keys per iteration: fewer if the output takes most registers."""
    return KEYS if columns <= 128 else KEYS // 2
