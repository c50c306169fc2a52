"""What nvcc makes of the kernels, without a GPU: no spilled registers, and structs as the host packs them."""

from __future__ import annotations

import re
import subprocess

import pytest

from spattn.cuda import compile, params, portable, prebuild

NVCC = compile.find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc was not found")

TARGETS = [("sm_80", dtype, head_dim) for dtype in ("bfloat16", "float32") for head_dim in (64, 128)]
TARGETS += [("sm_86", "float32", 96), ("sm_90", "float16", 256), ("sm_90", "float64", 64)]


@pytest.mark.parametrize(("arch", "dtype", "head_dim"), TARGETS)
def test_registers(tmp_path, arch, dtype, head_dim):
    """Every kernel stays within 255 registers a thread and 227 KiB of shared memory, and spills nothing."""
    for source, defines in prebuild.jobs(arch, [dtype], [head_dim]):
        flags = [*compile.FLAGS, *compile.target(arch), *(f"-D{name}={value}" for name, value in defines.items())]
        command = [NVCC, *flags, "-Xptxas", "-v", "-o", tmp_path / "kernel.cubin", compile.KERNELS / source]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        # Three TF32 products keep a few words of a step of thousands of instructions in local memory at head_dim 128.
        allowed = 80 if defines.get("SPATTN_TERMS") == 3 and head_dim >= 128 else 0
        assert max(int(n) for n in re.findall(r"(\d+) bytes spill", report)) <= allowed, report
        assert max(int(n) for n in re.findall(r"Used (\d+) registers", report)) <= 255


def test_struct_layout(tmp_path):
    """``struct Params`` has the size and the offsets that params.py packs."""
    fields = ["q", "k", "v", "out", "lse", "partial", "partial_lse", "first_block", "scale_log2", "query_factor",
              "heads_q", "heads_per_kv", "head_dim", "head_dim_v", "views", "merge_sources", "items", "merges", "q_len",
              "slots", "block_q"]  # fmt: skip
    print_all = "".join(f'printf("%zu ", offsetof(spattn::Params, {name}));' for name in fields)
    program = tmp_path / "layout.cu"
    program.write_text(f"""#include <cstddef>
        #include <cstdio>
        #include "params.cuh"
        int main() {{ {print_all} printf("%zu", sizeof(spattn::Params)); }}""")
    binary = tmp_path / "layout"
    subprocess.run([NVCC, f"-I{compile.KERNELS}", "-o", binary, program], check=True)
    offsets = [int(n) for n in subprocess.run([binary], capture_output=True, text=True, check=True).stdout.split()]
    call = params._CALL.size
    assert offsets[:14] == [0, 40, 80, 120, 160, 168, 176, 184, 192, 200, 204, 208, 212, 216]
    assert offsets[14:] == [call, call + 72, call + 80, call + 128, call + 176, call + 180, call + 184,
                            call + params._PLAN.size]  # fmt: skip


def test_every_default_has_a_kernel():
    """Any head dimension and dtype leads to a kernel, on devices with little and with much shared memory."""
    for shared_bytes in (99 << 10, 163 << 10, 227 << 10):
        for dtype in prebuild.DTYPES:
            for head_dim in range(1, 257):
                tile = portable.tile_within(shared_bytes, dtype, head_dim)
                assert portable.accepts(*tile)
                for precision in (None, "tf32") if dtype == "float32" else (None,):
                    _, defines = portable.variant(dtype, head_dim, head_dim, tile, False, shared_bytes, precision)
                    assert defines["SPATTN_HEAD_DIM"] >= head_dim
                assert portable._shared_bytes(tile[0], dtype, head_dim) <= shared_bytes
