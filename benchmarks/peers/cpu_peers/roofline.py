"""Lower bounds of a kernel's time: arithmetic, exponentials and memory at measured ceilings."""

from __future__ import annotations

from spattn import cpu

from .contenders import plan_of
from .problems import HEAD_DIM, HEADS, Inputs, Problem

FORWARD_FLOPS = 4 * HEAD_DIM  # per allowed pair: two products
BACKWARD_FLOPS = 10 * HEAD_DIM  # five products
CEILINGS = ("exp_fp32", "read_l1", "read_l2", "read_l3", "read_dram", "gemm_fp32", "gemm_bf16", "amx_registers")


def flops_per_pair(both: bool) -> int:
    """Flops per allowed pair of one head."""
    return FORWARD_FLOPS + (BACKWARD_FLOPS if both else 0)


def packed_bytes(dtype: str) -> int:
    """Bytes per element of K and V as the selected kernel reads them."""
    return 2 if dtype == "bfloat16" and cpu.info()["in use"] in ("amx", "avx512bf16") else 4


def row(problem: Problem, given: Inputs, dtype: str, both: bool, median_ms: float, ceilings) -> dict:
    """spattn's row of the roofline table.

    Notes
    -----
    Products and exponentials use the same vector units and add up; reads overlap with them. So no kernel can execute
    this plan faster than ``attainable_ms = max(products + exp, L2, DRAM)``; ``attained_pct`` is its ratio to the
    median. K and V are read once per tile from L2 in the packed precision: bfloat16 if the kernel multiplies bfloat16
    pairs (AMX and `vdpbf16ps`), else float32. DRAM transfers q, k, v and out once.
    """
    plan = plan_of(problem, given)
    reference = ceilings.reference(dtype)
    ceiling, pairs = ceilings.median(reference), plan.nnz * HEADS
    tile_pairs = plan.tiles * plan.block_q * plan.block_kv * HEADS
    products = flops_per_pair(both) * tile_pairs / ceiling / 1e6
    exponentials = (2 if both else 1) * tile_pairs / ceilings.median("exp_fp32") / 1e6
    packed = packed_bytes(dtype)
    l2 = plan.tiles * HEADS * plan.block_kv * 2 * HEAD_DIM * packed / ceilings.median("read_l2") / 1e6
    dram = 4 * given.q.numel() * given.q.element_size() / ceilings.median("read_dram") / 1e6
    stages = (
        {"products": products + exponentials, "L2": l2, "DRAM": dram}
        if not both
        else {"products": products + exponentials}
    )
    attainable = max(stages.values())
    bound = max(stages, key=stages.get)
    gflops = flops_per_pair(both) * pairs / median_ms / 1e6
    return {
        "problem": f"{problem.title}, N = {problem.tokens}",
        "dtype": dtype,
        "pass": "forward + backward" if both else "forward",
        "median_ms": round(median_ms, 2),
        "ceiling": reference,
        "ceiling_gflops": round(ceiling, 1),
        "gflops_on_allowed_pairs": round(gflops, 1),
        "share_of_ceiling_pct": round(100 * gflops / ceiling, 1),
        "tile": f"{plan.block_q} × {plan.block_kv}",
        "efficiency_pct": round(100 * plan.efficiency, 1),
        "share_of_ceiling_on_tiles_pct": round(100 * products / median_ms, 1),
        "products_ms": round(products, 2),
        "exp_ms": round(exponentials, 2),
        "l2_ms": None if both else round(l2, 2),
        "dram_ms": None if both else round(dram, 2),
        "attainable_ms": round(attainable, 2),
        "attained_pct": round(100 * attainable / median_ms, 1),
        "bound": "products and exp" if bound == "products" else f"reads from {bound}",
    }
