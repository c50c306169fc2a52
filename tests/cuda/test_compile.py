"""What nvcc makes of the kernels, without a GPU: no spilled registers, structs as the host packs them, and full tiles
that are not masked."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from spattn.arrays import FLOAT8
from spattn.choose import specializations as builds
from spattn.cuda import prebuild
from spattn.cuda.driver import compile, structs
from spattn.cuda.host.score import generated
from spattn.cuda.sm80 import forward as portable
from spattn.cuda.sm80 import params, variants
from spattn.cuda.sm90.forward import params as hopper_params
from spattn.cuda.sm90.forward.terms import SPLIT_STRUCTS, split_macros
from spattn.schedule.tensor_maps import MAPS

from .score_trees import operands

NVCC = compile.find_nvcc()
SPILLS = ("LDL", "STL")  # what they load or store may belong to the line after
pytestmark = [pytest.mark.family("sm80"), pytest.mark.skipif(NVCC is None, reason="nvcc was not found")]

# Those that need most registers, on several architectures: compiling all of them would take minutes.
TARGETS = [("sm_80", "bfloat16", 128), ("sm_80", "float32", 128)]
TARGETS += [("sm_90", "float16", 256), ("sm_90", "float64", 64)]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype", "head_dim"), TARGETS)
def test_registers(tmp_path, arch, dtype, head_dim):
    """Every kernel stays within 255 registers a thread and 227 KiB of shared memory, and spills next to nothing."""
    for source, defines, own in prebuild.kernels(arch, [dtype], [head_dim]):
        # Three TF32 products keep a few words of a step of thousands of instructions in local memory at head_dim 128.
        allowed = 80 if defines.get("SPATTN_TERMS") == 3 and head_dim >= 128 else 0
        if source.endswith(("backward_ffma.cu", "backward_tf32.cu")):  # a few words, for one more CTA an SM
            allowed = 32
        check_registers(source, arch, defines, own, tmp_path / "kernel.cubin", 255, allowed)


def nvcc(unit, arch, defines, cubin):
    """Compiles a translation unit into `cubin`; what nvcc did, with its report of registers."""
    file = cubin.with_suffix(".cu")
    file.write_text(unit)
    flags = [*compile.FLAGS, *compile.target(arch), *(f"-D{name}={value}" for name, value in defines.items())]
    command = [NVCC, *flags, f"-I{compile.SOURCES}", "-Xptxas", "-v", "-o", cubin, file]
    return subprocess.run(command, capture_output=True, text=True)


def check_registers(source, arch, defines, structs, cubin, most, allowed_spill, text=""):
    """Compiles a kernel into `cubin`; at most so many registers a thread and bytes of spills. ptxas's report."""
    done = nvcc(text + compile.translation_unit(source, structs), arch, defines, cubin)
    report = done.stderr
    assert done.returncode == 0, report
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill", report)) <= allowed_spill, report
    assert max(int(n) for n in re.findall(r"Used (\d+) registers", report)) <= most, report
    return report


def threads(row):
    """Of a CTA: its consumer warpgroups, and one beside."""
    return 128 * (row.warpgroups + 1)


@pytest.mark.slow
@pytest.mark.parametrize("row", builds.TABLE, ids=lambda row: f"{row.rows} {row.head_dim} {row.most_keys}")
def test_hopper(tmp_path, row):
    """The threads of an SM share 65536 registers; the loop over full tiles knows no masks."""
    room = MAPS[0]
    defines = builds.variant(row, "bfloat16", room)
    # An output of 256 features alone takes 128 registers a thread; where three CTAs share an SM, or consumers are three
    # warpgroups, producers have 40 or 32.
    spill = 450 if row.rows > 128 else 200 if row.head_dim_v > 128 or row.ctas > 2 else 0
    own = hopper_params.structs(room)
    most = 65536 // (row.ctas * threads(row)) // 8 * 8
    check_registers("sm90/forward/attention.cu", builds.ARCH, defines, own, tmp_path / "kernel.cubin", most, spill)
    check_masks_are_skipped(tmp_path / "kernel.cubin", row.step_kv // 2, spills=row.head_dim_v > 128)


@pytest.mark.slow
@pytest.mark.parametrize("row", builds.TABLE_OF_TERMS, ids=lambda row: f"{row.terms} {row.rows} {row.head_dim}")
def test_hopper_terms(tmp_path, row):
    """float32: the terms of the weights take registers too; of the widest output some words are spilled."""
    most, own = 65536 // (row.ctas * threads(row)) // 8 * 8, hopper_params.structs(MAPS[0])
    spill = 200 if row.terms == 3 and row.head_dim == 128 else 0
    defines = builds.variant(row, "float32", MAPS[0])
    check_registers("sm90/forward/attention.cu", builds.ARCH, defines, own, tmp_path / "kernel.cubin", most, spill)
    check_masks_are_skipped(tmp_path / "kernel.cubin", row.step_kv // 2, spills=spill > 0)
    macros = split_macros(row)
    check_registers("sm90/forward/split.cu", builds.ARCH, macros, SPLIT_STRUCTS, tmp_path / "split.cubin", 64, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "gathers"), [(0, False), (0, True), (1, False)])
def test_hopper_float8(tmp_path, row, gathers):
    """float8: of three warpgroups the producer spills, not the consumers, and ptxas serializes no products."""
    row, own = builds.TABLE_OF_FLOAT8[row], hopper_params.structs(MAPS[0])
    defines, most = builds.variant(row, FLOAT8, MAPS[0], gathers=gathers), 65536 // threads(row) // 8 * 8
    cubin = tmp_path / "kernel.cubin"
    report = check_registers("sm90/forward/attention.cu", builds.ARCH, defines, own, cubin, most, 550)
    assert "serialized" not in report
    check_masks_are_skipped(cubin, row.step_kv // 2, spills=False)


@pytest.mark.slow
@pytest.mark.parametrize("row", builds.TABLE, ids=lambda row: f"{row.rows} {row.head_dim} {row.most_keys}")
def test_hopper_groups(tmp_path, row):
    """Several problems take no more registers: their numbers and scales are in uniform ones."""
    problems, room = hopper_params.GROUPS[0]
    defines, most = builds.variant(row, "bfloat16", room, problems), 65536 // (row.ctas * threads(row)) // 8 * 8
    spill = 700 if row.head_dim_v > 128 or row.ctas > 2 or row.rows > 128 else 80
    own = hopper_params.structs(room, problems)
    check_registers("sm90/forward/attention.cu", builds.ARCH, defines, own, tmp_path / "kernel.cubin", most, spill)
    check_masks_are_skipped(tmp_path / "kernel.cubin", row.step_kv // 2, spills=True)


def test_hopper_merge(tmp_path):
    for dims in ((64, 64), (192, 128), (256, 256)):
        room = MAPS[0]
        defines = builds.variant(builds.build(128, dims), "float16", room)
        own = hopper_params.structs(room)
        check_registers("sm90/forward/merge.cu", builds.ARCH, defines, own, tmp_path / "kernel.cubin", 255, 0)


def check_masks_are_skipped(cubin, exponentials, spills):
    """Full tiles branch around the masking: without the instructions that come from mask.cuh there still is a way
    around the loop of steps that takes all of a step's exponentials. The loop spills nothing, unless it may."""
    tool = disassembler() or pytest.skip("nvdisasm was not found; pip install nvidia-cuda-nvdisasm")
    listing = subprocess.run([tool, "-c", "-g", cubin], capture_output=True, text=True, check=True).stdout
    opcodes, origins, following = read_listing(listing)
    product = opcodes.index("HGMMA", opcodes.index("MUFU.EX2"))  # of the loop, behind the softmax of the first step
    masking = {n for n, origin in enumerate(origins) if origin == "mask.cuh" and opcodes[n][:3] not in SPILLS}
    whole, unmasked = (loop_of(product, following, without) for without in (set(), masking))
    assert sum(opcodes[number] == "FSEL" for number in masking & whole) >= exponentials  # one a logit
    assert sum(opcodes[number] == "MUFU.EX2" for number in unmasked) >= exponentials
    assert spills or not any(opcodes[number][:3] in SPILLS for number in whole)


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
            opcodes.append("HGMMA" if opcode[1:].startswith("GMMA.") else opcode)  # HGMMA.64x128x16.F32.BF16, QGMMA
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


SOURCES = {"sm80/forward": "sm80/forward/merge.cu", "sm80/backward": "sm80/backward/sum.cu"}
STRUCTS = {
    name: (params.structs_of(source), "sm_80", {"SPATTN_DTYPE": "float64"}) for name, source in SOURCES.items()
} | {
    f"sm90/forward, {room} maps": (
        hopper_params.structs(room),
        builds.ARCH,
        builds.variant(builds.TABLE[0], "bfloat16", room),
    )
    for room in MAPS
}
STRUCTS |= {
    f"sm90/forward, {problems} problems": (
        hopper_params.structs(room, problems),
        builds.ARCH,
        builds.variant(builds.TABLE[0], "bfloat16", room, problems),
    )
    for problems, room in hopper_params.GROUPS
}


@pytest.mark.parametrize("structs", STRUCTS)
def test_structs(tmp_path, structs):
    """The structs of params.cuh are those that the host packs; each field that lies elsewhere is named."""
    own, arch, defines = STRUCTS[structs]
    source = SOURCES.get(structs, f"{structs.split(',')[0]}/params.cuh")
    done = nvcc(compile.translation_unit(source, own), arch, defines, tmp_path / "same.cubin")
    assert done.returncode == 0, done.stderr
    moved = {name: np.dtype([("pad", "i8", 2), *fields(dtype)])[list(dtype.names)] for name, dtype in own.items()}
    done = nvcc(compile.translation_unit(source, moved), arch, defines, tmp_path / "moved.cubin")
    assert done.returncode != 0
    named = set(re.findall(r"spattn::\w+::(\w+::\w+)", done.stderr))
    assert named >= {f"{name}::{field}" for name, dtype in own.items() for field in dtype.names}


def fields(dtype):
    return [(name, dtype.fields[name][0]) for name in dtype.names]


def test_packer():
    """All numbers of nested structs and arrays, each at its place, whatever lies between them."""
    inner = np.dtype([("count", "i4"), ("at", "i8", 2)], align=True)
    dtype = np.dtype([("first", "i4"), ("inner", inner, 2), ("scale", "f8"), ("last", "f4")], align=True)
    packed = np.frombuffer(structs.packer(dtype).pack(1, 2, 3, 4, 5, 6, 7, 0.5, 0.25), dtype)
    assert [packed[name].item() for name in ("first", "scale", "last")] == [1, 0.5, 0.25]
    assert packed["inner"]["count"].tolist() == [[2, 5]] and packed["inner"]["at"].tolist() == [[[3, 4], [6, 7]]]


ROOMS = (99 << 10, 163 << 10, 227 << 10)  # of a block, on devices with little and with much shared memory


def test_every_default_has_a_kernel():
    """Any head dimension and dtype leads to a kernel, on devices with little and with much shared memory."""
    for shared_bytes in ROOMS:
        for dtype in prebuild.DTYPES:
            for head_dim in range(1, 257):
                tile = variants.tile_within(shared_bytes, dtype, head_dim)
                assert portable.accepts(*tile)
                for precision in (None, "tf32") if dtype == "float32" else (None,):
                    (own,) = variants.forward_variants(dtype, precision, head_dim, head_dim, tile, False, shared_bytes)
                    assert own.macros["SPATTN_HEAD_DIM"] >= head_dim and own.rows == tile[0]
                    assert forward_shared_bytes(own) <= shared_bytes


# (dtype, precision): kernels of the forward and the backward. TF32 products are as exact as float32 in the forward,
# where each is split into three; the backward computes float32 by fused multiply-adds.
PRODUCTS = {
    ("float16", None): ("mma", "mma"),
    ("bfloat16", None): ("mma", "mma"),
    ("float32", None): ("tf32", "ffma"),
    ("float32", "tf32"): ("tf32", "tf32"),
    ("float64", None): ("ffma", "ffma"),
}


def test_every_precision_has_its_kernels():
    """No head dimension, alignment or device gets fewer products than its precision needs."""
    sizes = itertools.product(ROOMS, PRODUCTS.items(), (1, 64, 129, 256), (1, 64, 129, 256), (False, True))
    for room, ((dtype, precision), (forward, backward)), *dims, aligned in sizes:
        tile = variants.tile_within(room, dtype, max(dims))
        (own,) = variants.forward_variants(dtype, precision, *dims, tile, aligned, room)
        assert own.source == f"sm80/forward/attention_{forward}.cu"
        assert own.macros.get("SPATTN_TERMS") == ((1 if precision else 3) if forward == "tf32" else None)
        for by_keys in (False, True):
            found = variants.backward_variants(dtype, precision, *dims, by_keys, aligned, room)
            assert {own.source for own in found} == {f"sm80/backward/backward_{backward}.cu"}


def test_every_tile_has_a_kernel():
    """Several CTAs compute a tile that exceeds the registers or the shared memory of one, each as many rows."""
    for shared_bytes, dtype in itertools.product(ROOMS, prebuild.DTYPES):
        for block_q, dims in itertools.product(range(16, 257, 16), ((64, 64), (128, 40), (40, 256), (256, 256))):
            (own,) = variants.forward_variants(dtype, None, *dims, (block_q, 64), False, shared_bytes)
            assert portable.accepts(block_q, 64) and block_q % own.rows == 0 and own.rows % 16 == 0
            assert forward_shared_bytes(own) <= shared_bytes and own.rows == own.macros["SPATTN_ROWS"]
            assert own.source == f"sm80/forward/attention_{PRODUCTS[dtype, None][0]}.cu"


def forward_shared_bytes(own):
    """The shared memory of a forward CTA, as the host computes it."""
    dims = [own.macros[name] for name in ("SPATTN_HEAD_DIM", "SPATTN_HEAD_DIM_V")]
    return variants.forward_shared_bytes(own.rows, own.macros["SPATTN_DTYPE"], dims)


def test_every_default_has_a_backward():
    """So does a backward, for heads of q and v of any sizes, with room for the rows of its blocks."""
    kinds = [(dtype, None) for dtype in prebuild.DTYPES] + [("float32", "tf32")]
    sizes = list(itertools.product((1, 32, 40, 64, 96, 128, 129, 192, 256), repeat=2))
    for shared_bytes, (dtype, precision), by_keys in itertools.product(ROOMS, kinds, (False, True)):
        for head_dim, head_dim_v in sizes:
            found = variants.backward_variants(dtype, precision, head_dim, head_dim_v, by_keys, True, shared_bytes)
            for own in found:
                dims = [own.macros[name] for name in ("SPATTN_HEAD_DIM", "SPATTN_HEAD_DIM_V")]
                assert dims[0] >= head_dim and dims[1] >= head_dim_v
                if "SPATTN_COLUMNS" in own.macros:
                    assert backward_shared_bytes(own) <= shared_bytes
            results = [(own.macros.get("SPATTN_SCORES"), own.macros.get("SPATTN_VALUES")) for own in found]
            expected = ([(1, 1)], [(1, 0), (0, 1)]) if by_keys else ([(1, 0)],)
            assert results in ([(None, None)], *expected)


def backward_shared_bytes(own):
    """What the host thinks that a block of the backward takes."""
    dims = [own.macros[name] for name in ("SPATTN_HEAD_DIM", "SPATTN_HEAD_DIM_V")]
    sizes = [own.macros[f"SPATTN_{name}"] for name in ("SCORES", "ROWS", "COLUMNS", "STAGES")]
    return variants.backward_shared_bytes(dims, *sizes, variants.ITEMSIZE[own.macros["SPATTN_DTYPE"]])


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 40), (256, 96)], ids=str)
def test_shared_bytes(tmp_path, dims, by_keys):
    """It is what it takes."""
    for room, (dtype, precision) in itertools.product(ROOMS[::2], (("float16", None), ("float32", "tf32"))):
        for own in variants.backward_variants(dtype, precision, *dims, by_keys, False, room):
            unit = compile.translation_unit("sm80/backward/mma_steps.cuh", {})
            unit += f'\nstatic_assert(sizeof(spattn::sm80_backward::Shared) == {backward_shared_bytes(own)}, "");'
            done = nvcc(unit, "sm_80", own.macros, tmp_path / "kernel.cubin")
            assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float32", "tf32"), ("float32", None)])
def test_gradients_of_captured_arrays(tmp_path, dtype, precision):
    """Kernels of all head dimensions and shared memories compile, and take the shared memory that the host computes."""
    score = operands(lambda s, b, h, q, k: s * OF_HEADS[h] + OF_PAIRS[h, q - k, k % 9] + OF_PAIRS[h, q - k, 0])
    text, _ = generated(score.program, score.types, ((0, False), (1, False)))
    structs = params.structs_of("sm80/backward/", 2)
    for head_dim, room in itertools.product((40, 128, 256), ROOMS[::2]):
        own = variants.captured_variant(dtype, precision, head_dim, 64, False, 2, room)
        unit = text + compile.translation_unit(own.source, structs)
        if "SPATTN_ROWS" in own.macros:
            sizes = [own.macros[f"SPATTN_{name}"] for name in ("HEAD_DIM", "HEAD_DIM_V", "ROWS")]
            itemsize = variants.ITEMSIZE[dtype]
            needed = variants.backward_shared_bytes(sizes[:2], True, sizes[2], 32, 1, itemsize, True)
            assert needed <= room
            unit += f'\nstatic_assert(sizeof(spattn::sm80_backward::Shared) == {needed}, "");'
        done = nvcc(unit, "sm_80", own.macros, tmp_path / "kernel.cubin")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 40), (96, 256)], ids=str)
def test_forward_shared_bytes(tmp_path, dims, dtype):
    """The host computes the shared memory of the forward exactly, for tiles split into several CTAs too."""
    for room, block_q in itertools.product(ROOMS[::2], (48, 256)):
        (own,) = variants.forward_variants(dtype, None, *dims, (block_q, 64), False, room)
        header = own.source if dtype == "float64" else "sm80/forward/mma_attention.cuh"
        unit = compile.translation_unit(header, {})
        unit += f'\nstatic_assert(sizeof(spattn::sm80::Shared) == {forward_shared_bytes(own)}, "");'
        done = nvcc(unit, "sm_80", own.macros, tmp_path / "kernel.cubin")
        assert done.returncode == 0, done.stderr


OF_HEADS, OF_PAIRS = np.ones(4, np.float32), np.ones((4, 9, 9), np.float32)
FUNCTIONS = {
    "softcap": lambda s, b, h, q, k: OF_HEADS[h] * np.tanh(s / OF_HEADS[h]),
    "alibi": lambda s, b, h, q, k: s + OF_HEADS[h] * (k - q),
    "bias": lambda s, b, h, q, k: s + OF_PAIRS[h, q, k],
}
SCORED = [("bfloat16", None, 128), ("float32", None, 64), ("float32", "tf32", 64), ("float64", None, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "precision", "head_dim"), SCORED)
def test_scores(tmp_path, dtype, precision, head_dim, name):
    """Every kernel compiles with each score function and spills at most 256 bytes."""
    tile, score = variants.tile_within(ROOMS[1], dtype, head_dim), operands(FUNCTIONS[name])
    text, _ = generated(score.program, score.types)
    found = variants.forward_variants(dtype, precision, head_dim, head_dim, tile, True, ROOMS[1])
    for by_keys in (False, True):
        found += variants.backward_variants(dtype, precision, head_dim, head_dim, by_keys, True, ROOMS[1])
    for own in found:
        structs = params.structs_of(own.source)
        check_registers(own.source, "sm_80", own.macros, structs, tmp_path / "kernel.cubin", 255, 256, text)


def test_hopper_table():
    """One row, the smallest that fits, for any problem; its registers exist; its macros are those asked for."""
    head_dims = (8, 64, 72, 128, 136, 192, 200, 256)
    for block_q, *dims, keys in itertools.product(
        (1, 49, 64, 128, 192), head_dims, head_dims, (0, 256, 257, 1024, math.inf)
    ):
        assert builds.has_build(block_q, dims) == (block_q < 192 or max(dims) <= 128)
        if not builds.has_build(block_q, dims):
            continue
        row = builds.build(block_q, dims, keys)
        rows = 64 if block_q <= 64 else block_q
        fitting = [r for r in builds.TABLE if r.rows == rows and r.head_dim >= dims[0] and r.head_dim_v >= dims[1]]
        fitting = [r for r in fitting if keys <= r.most_keys]
        assert row in fitting and row[1:4] == min(r[1:4] for r in fitting)
        assert row.mean_dim == (160 if 128 < dims[0] <= 192 and dims[1] <= 128 else row.head_dim)
    assert len({row[:4] for row in builds.TABLE}) == len(builds.TABLE)
    for row in (*builds.TABLE, *builds.TABLE_OF_TERMS, *builds.TABLE_OF_FLOAT8):
        asked = (threads(row) - 128) * row.consumer_registers + 128 * row.producer_registers
        given = min(65536 // (row.ctas * threads(row)), 255) // 8 * 8  # at launch; more are never granted
        assert asked <= given * threads(row) and row.reason
        assert row.consumer_registers % 8 == row.producer_registers % 8 == 0  # setmaxnreg
    sources = compile.headers("sm90/forward/attention.cu") + compile.headers("sm90/forward/merge.cu")
    texts = [path.read_text() for path in sources]
    asked, defined = (
        {name for text in texts for name in re.findall(pattern, text)}
        for pattern in (r"\bSPATTN_\w+", r"#define (SPATTN_\w+)")
    )
    assert asked - defined - {"SPATTN_"} == set(builds.variant(builds.TABLE[0], "float16", MAPS[0]))
