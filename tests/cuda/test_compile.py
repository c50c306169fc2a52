"""What nvcc makes of the kernels, without a GPU: no spilled registers, structs as the host packs them, and full tiles
that are not masked."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spattn.cuda import compile, hopper, hopper_builds, hopper_layout, hopper_params, params, portable, prebuild

NVCC = compile.find_nvcc()
SPILLS = ("LDL", "STL")  # what they load or store may belong to the line after
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc was not found")

TARGETS = [("sm_80", dtype, head_dim) for dtype in ("bfloat16", "float32") for head_dim in (64, 128)]
TARGETS += [("sm_86", "float32", 96), ("sm_90", "float16", 256), ("sm_90", "float64", 64)]


@pytest.mark.parametrize(("arch", "dtype", "head_dim"), TARGETS)
def test_registers(tmp_path, arch, dtype, head_dim):
    """Every kernel stays within 255 registers a thread and 227 KiB of shared memory, and spills nothing."""
    for source, defines in prebuild.jobs(arch, [dtype], [head_dim]):
        # Three TF32 products keep a few words of a step of thousands of instructions in local memory at head_dim 128.
        allowed = 80 if defines.get("SPATTN_TERMS") == 3 and head_dim >= 128 else 0
        check_registers(source, arch, defines, tmp_path / "kernel.cubin", 255, allowed)


def check_registers(source, arch, defines, cubin, most, allowed_spill):
    """Compiles a kernel into `cubin`; at most so many registers a thread and bytes of spills."""
    flags = [*compile.FLAGS, *compile.target(arch), *(f"-D{name}={value}" for name, value in defines.items())]
    command = [NVCC, *flags, "-Xptxas", "-v", "-o", cubin, compile.KERNELS / source]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill", report)) <= allowed_spill, report
    assert max(int(n) for n in re.findall(r"Used (\d+) registers", report)) <= most, report


# Each head dimension; the number of query tiles moves addresses only.
@pytest.mark.parametrize("row", hopper_builds.TABLE[1::2], ids=lambda row: str(row.head_dim))
def test_hopper(tmp_path, row):
    """384 threads of 168 registers are all that a multiprocessor has; the loop over full tiles knows no masks."""
    defines = hopper.variant("bfloat16", row.head_dim, hopper._MAPS[0], row.short_items)
    spill = 512 if row.head_dim > 128 else 0  # its output alone takes 128 registers a thread
    check_registers("attention_sm90.cu", hopper.ARCH, defines, tmp_path / "kernel.cubin", 168, spill)
    check_masks_are_skipped(tmp_path / "kernel.cubin", exponentials=row.step_kv // 2)


def test_hopper_merge(tmp_path):
    for head_dim in (64, 256):
        defines = hopper.variant("float16", head_dim, hopper._MAPS[0], False)
        check_registers("merge_sm90.cu", hopper.ARCH, defines, tmp_path / "kernel.cubin", 255, 0)


def check_masks_are_skipped(cubin, exponentials):
    """Full tiles branch around the masking: without the instructions that come from sm90_mask.cuh there still is a way
    around the loop of steps that takes all of a step's exponentials."""
    tool = disassembler() or pytest.skip("nvdisasm was not found; pip install nvidia-cuda-nvdisasm")
    listing = subprocess.run([tool, "-c", "-g", cubin], capture_output=True, text=True, check=True).stdout
    opcodes, origins, following = read_listing(listing)
    product = opcodes.index("HGMMA", opcodes.index("MUFU.EX2"))  # of the loop, behind the softmax of the first step
    masking = {n for n, origin in enumerate(origins) if origin == "sm90_mask.cuh" and opcodes[n][:3] not in SPILLS}
    whole, unmasked = (loop_of(product, following, without) for without in (set(), masking))
    assert sum(opcodes[number] == "FSEL" for number in masking & whole) >= exponentials  # one a logit
    assert sum(opcodes[number] == "MUFU.EX2" for number in unmasked) >= exponentials


def disassembler():
    """nvdisasm of the toolkit, of its package on PyPI, or of Triton's."""
    found = [Path(path) for path in [shutil.which("nvdisasm"), NVCC.with_name("nvdisasm")] if path]
    for package, place in (("nvidia", "*/bin/nvdisasm"), ("triton", "backends/nvidia/bin/nvdisasm")):
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations if spec else ():
            found += Path(root).glob(place)
    return next((path for path in found if path.is_file()), None)


def read_listing(listing):
    """(opcodes, source files, numbers of the instructions that may follow) of each instruction, in order."""
    labels, opcodes, origins, jumps, origin = {}, [], [], [], ""
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        elif file := re.search(r'//## File "([^"]+)"', line):
            origin = Path(file[1]).name
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(@\S+ )?\s*([A-Z0-9_.]+)(.*?);", line):
            predicate, opcode, operands = found.groups()
            opcodes.append("HGMMA" if opcode.startswith("HGMMA") else opcode)  # as against HGMMA.64x128x16.F32.BF16
            origins.append(origin)
            target = re.search(r"`\((\.L_x_\d+)\)", operands) if opcode.startswith("BRA") else None
            always = predicate is None and (opcode == "EXIT" or re.match(r"BRA\s*`", f"{opcode}{operands}"))
            jumps.append((target and target[1], bool(always)))
    following = [[] if always else [number + 1] for number, (_, always) in enumerate(jumps)]
    for number, (target, _) in enumerate(jumps):
        following[number] += [labels[target]] if target else []
    following[-1] = []
    return opcodes, origins, following


def loop_of(start, following, without):
    """The instructions on ways from `start` back to it that avoid the instructions `without`."""
    preceding = [[] for _ in following]
    for number, targets in enumerate(following):
        for target in targets:
            preceding[target].append(number)
    return reach(start, following, without) & reach(start, preceding, without)


def reach(start, neighbours, without):
    found, waiting = set(), [start]
    while waiting:
        for number in neighbours[waiting.pop()]:
            if number not in found and number not in without:
                found.add(number)
                waiting.append(number)
    return found


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


@pytest.mark.parametrize("room", hopper._MAPS)
def test_hopper_struct_layout(tmp_path, room):
    """The structs of sm90_params.cuh and merge_sm90.cu have the sizes and offsets of the host's dtypes and packing."""
    dtypes = {"Params": hopper_params.params_dtype(room), "View": hopper_layout.VIEW, "Item": hopper_layout.ITEM,
              "Unit": hopper_layout.UNIT, "Strides": hopper_layout.STRIDES}  # fmt: skip
    structs = {
        name: ({field: dtype.fields[field][1] for field in dtype.names}, dtype.itemsize)
        for name, dtype in dtypes.items()
    }
    merge = ("rows", "indptr", "sources", "heads", "partial_out", "partial_lse", "out", "lse", "partial_rows", "q_len",
             "out_stride", "heads_q", "head_dim_v", "head_blocks", "unused")  # fmt: skip
    structs["Merge"] = dict(zip(merge, [*range(0, 88, 8), 104, 108, 112, 116], strict=True)), hopper._MERGE.size
    lines = ["#include <cstddef>", '#include "merge_sm90.cu"']
    for name, (offsets, size) in structs.items():
        lines += [f"static_assert(offsetof(spattn::{name}, {field}) == {at});" for field, at in offsets.items()]
        lines.append(f"static_assert(sizeof(spattn::{name}) == {size});")
    program = tmp_path / "layout.cu"
    program.write_text("\n".join(lines))
    defines = [f"-D{name}={value}" for name, value in hopper.variant("bfloat16", 64, room, False).items()]
    command = [NVCC, *compile.FLAGS, *compile.target(hopper.ARCH), *defines, f"-I{compile.KERNELS}"]
    done = subprocess.run([*command, "-o", tmp_path / "layout.cubin", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


def test_hopper_table():
    """One row, the smallest that fits, for any problem; its registers exist; its macros are those asked for."""
    for head_dim in range(8, 257, 8):
        for short in (False, True):
            row = hopper_builds.build(head_dim, short)
            fitting = [r.head_dim for r in hopper_builds.TABLE if r.head_dim >= head_dim and r.short_items == short]
            assert row.head_dim == min(fitting) and row.short_items == short
    assert len({row[:2] for row in hopper_builds.TABLE}) == len(hopper_builds.TABLE)
    for row in hopper_builds.TABLE:
        assert 256 * row.consumer_registers + 128 * row.producer_registers <= 384 * 168 and row.reason
        assert row.consumer_registers % 8 == row.producer_registers % 8 == 0  # setmaxnreg
    sources = compile.headers("attention_sm90.cu") + compile.headers("merge_sm90.cu")
    asked = {name for path in sources for name in re.findall(r"\bSPATTN_\w+", path.read_text())} - {"SPATTN_"}
    assert asked == set(hopper.variant("float16", 64, hopper._MAPS[0], False))
