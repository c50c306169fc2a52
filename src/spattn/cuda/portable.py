"""The kernels for every GPU from compute capability 8.0: ``mma.sync`` for 16-bit types and, by TF32 products, for
float32; fused multiply-adds for float64, and for float32 where a tile is too large for the former.

They execute any plan whose query tiles are multiples of 16 tokens.
"""

from __future__ import annotations

from .device import Device
from .launch import Kernel, kernel
from .params import Call, PlanOnDevice, pack, plan_on_device

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # what the mma.sync kernel is compiled for; others are padded with zeros
LARGEST_HEAD_DIM = HEAD_DIMS[-1]
LARGEST_BLOCK_Q = 256
LARGEST_TF32_BLOCK_Q = 128  # 8 warps of 255 registers a thread are all that a multiprocessor has
LARGEST_GRID = 2**31 - 1
MERGE_WARPS = 4  # kWarps of merge.cu
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_KEYS = 64


def tile(device: Device, dtype: str, head_dim: int) -> tuple[int, int]:
    """(block_q, block_kv) that suits a head dimension (the larger of that of q and v)."""
    return tile_within(device.shared_bytes, dtype, head_dim)


def tile_within(shared_bytes: int, dtype: str, head_dim: int) -> tuple[int, int]:
    """The tile for blocks of so much shared memory.

    16-bit types: two 16-row atoms a warp halve the shared-memory reads per product, which is what bounds mma.sync; past
    128 columns their accumulators no longer fit into the registers, so tiles are half as high.
    Others: as many rows as shared memory holds, because every row more reuses the same reads of K and V; in float64 no
    more than the accumulators leave registers for.
    """
    if _ITEMSIZE[dtype] == 2:
        return (128 if head_dim <= 128 else 64), _KEYS
    highest = 64 >> (head_dim > 128) if dtype == "float64" else 128
    heights = [height for height in (128, 64, 32, 16) if height <= highest]
    fitting = [height for height in heights if _shared_bytes(height, dtype, head_dim) <= shared_bytes]
    return (fitting or heights[-1:])[0], _KEYS


def accepts(block_q: int, block_kv: int) -> bool:
    """Whether the kernels can execute plans with tiles of this shape."""
    return block_q % 16 == 0 and 16 <= block_q <= LARGEST_BLOCK_Q and block_kv % _KEYS == 0


def fits(device: Device, block_q: int, dtype: str, head_dim: int) -> bool:
    """Whether query tiles of this height leave room for the rest in a block's shared memory."""
    return _shared_bytes(block_q, dtype, head_dim) <= device.shared_bytes


def forward(call: Call) -> None:
    """Enqueue the attention kernel, and the merge kernel where the plan has merges; the context must be current."""
    batch, heads_q = call.q.shape[:2]
    plan = plan_on_device(call.plan, call.device, batch, heads_q)
    partial, partial_lse = workspace(call)
    if plan.items:
        launch_all(call, plan, attention_kernel(call, plan), plan.items, partial, partial_lse)
    if plan.merges:
        blocks = -(-plan.merges // MERGE_WARPS)
        launch_all(call, plan, merge_kernel(call, plan), blocks, partial, partial_lse)


def launch_all(call: Call, plan: PlanOnDevice, ready: Kernel, blocks: int, partial: int, partial_lse: int) -> None:
    """Launch a kernel over a flat list of blocks, in as many grids as it takes."""
    for first in range(0, blocks, LARGEST_GRID):
        params = pack(call, plan, partial, partial_lse, first)
        ready.launch(min(blocks - first, LARGEST_GRID), params, call.stream)


def attention_kernel(call: Call, plan: PlanOnDevice) -> Kernel:
    """The kernel for a call's dtype, dimensions and alignment."""
    head_dim, head_dim_v, aligned = call.q.shape[3], call.v.shape[3], call.aligned(_ITEMSIZE[call.dtype])
    key = call.dtype, call.precision, head_dim, head_dim_v, aligned
    found = plan.kernels.get(key)
    if found is None:
        tile = call.plan.block_q, call.plan.block_kv
        room = call.device.shared_bytes
        source, defines = variant(call.dtype, head_dim, head_dim_v, tile, aligned, room, call.precision)
        found = plan.kernels[key] = kernel(call.device, source, call.device.arch, defines, "attention")
    return found


def merge_kernel(call: Call, plan: PlanOnDevice) -> Kernel:
    """The kernel for rows that several work items computed or that may attend to nothing."""
    found = plan.kernels.get((call.dtype,))
    if found is None:
        defines = {"SPATTN_DTYPE": call.dtype}
        found = plan.kernels[(call.dtype,)] = kernel(call.device, "merge.cu", call.device.arch, defines, "merge")
    return found


def workspace(call: Call) -> tuple[int, int]:
    """Addresses of the partial rows and of their lse, for work items that share rows; (0, 0) when there are none."""
    batch, heads_q = call.q.shape[:2]
    rows = batch * heads_q * call.plan.slots * call.plan.block_q
    if rows == 0:
        return 0, 0
    itemsize = 8 if call.dtype == "float64" else 4
    partial_bytes = -(-rows * call.v.shape[3] * itemsize // 256) * 256
    partial = call.allocate(partial_bytes + rows * itemsize)
    return partial, partial + partial_bytes


def variant(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    tile: tuple[int, int],
    aligned: bool,
    shared_bytes: int,
    precision: str | None = None,
) -> tuple[str, dict[str, object]]:
    """Kernel file and macros for a problem on a device whose blocks have so much shared memory.

    Raises
    ------
    ValueError
        If `precision` is "tf32" and its kernel has no room for tiles of this shape.
    """
    defines: dict[str, object] = {
        "SPATTN_DTYPE": dtype,
        "SPATTN_BLOCK_Q": tile[0],
        "SPATTN_BLOCK_KV": tile[1],
        "SPATTN_ALIGNED": int(aligned),
    }
    if _ITEMSIZE[dtype] == 2:
        dims = [next(size for size in HEAD_DIMS if size >= dim) for dim in (head_dim, head_dim_v)]
        defines |= {"SPATTN_ATOMS": atoms(tile[0], max(dims)), "SPATTN_KEYS": _KEYS}
        source = "attention_mma.cu"
    elif dtype == "float32" and _tf32_fits(tile[0], max(head_dim, head_dim_v), shared_bytes):
        dims = [_tf32_columns(dim) for dim in (head_dim, head_dim_v)]
        defines |= {"SPATTN_ATOMS": 1, "SPATTN_KEYS": _tf32_keys(max(dims)), "SPATTN_TERMS": 1 if precision else 3}
        source = "attention_tf32.cu"
    elif precision is not None:
        raise ValueError(f"precision: no {precision!r} kernel has room for the plan's tiles of {tile[0]} × {tile[1]}")
    else:
        slice_columns = 256 // _ITEMSIZE[dtype]
        dims = [-(-dim // slice_columns) * slice_columns for dim in (head_dim, head_dim_v)]
        source = "attention_ffma.cu"
    return source, {**defines, "SPATTN_HEAD_DIM": dims[0], "SPATTN_HEAD_DIM_V": dims[1]}


def atoms(block_q: int, head_dim: int) -> int:
    """16-row atoms a warp: two where their accumulators fit into the registers.

    For 128 columns on sm_90 ptxas keeps the row sums in local memory: 13 accesses in a loop of 256 products. One atom
    needs none and is slower by 16 % all the same (H200, dense, 16384 tokens: 232 against 269 TFLOP/s).
    """
    return 2 if block_q % 32 == 0 and head_dim <= 128 else 1


def _shared_bytes(block_q: int, dtype: str, head_dim: int) -> int:
    """What ``Shared`` of a kernel takes, in bytes; the kernel's own number is checked when it is loaded."""
    itemsize = _ITEMSIZE[dtype]
    positions = 4 * (block_q + 2 * _KEYS)
    if itemsize == 2:
        return (block_q + 2 * _KEYS) * next(size for size in HEAD_DIMS if size >= head_dim) * itemsize + positions
    columns = -(-head_dim * itemsize // 256) * 256
    multiply_add = block_q * (columns + (_KEYS + 16) * itemsize) + 2 * _KEYS * 256 + positions
    if dtype == "float32" and block_q <= LARGEST_TF32_BLOCK_Q:
        return min(multiply_add, _tf32_shared_bytes(block_q, head_dim))
    return multiply_add


def _tf32_fits(block_q: int, head_dim: int, shared_bytes: int) -> bool:
    return block_q <= LARGEST_TF32_BLOCK_Q and _tf32_shared_bytes(block_q, head_dim) <= shared_bytes


def _tf32_shared_bytes(block_q: int, head_dim: int) -> int:
    columns = _tf32_columns(head_dim)
    return (block_q + 2 * _tf32_keys(columns)) * columns * 4 + 4 * (block_q + 2 * _KEYS)


def _tf32_columns(head_dim: int) -> int:
    return -(-head_dim // 32) * 32


def _tf32_keys(columns: int) -> int:
    """Keys of one step: fewer where the output takes most registers."""
    return _KEYS if columns <= 128 else _KEYS // 2
