#!/usr/bin/env python3
"""Variants of the float8 forward, checked and timed in one run.

    python benchmarks/kernels/float8_variants_cuda.py            # 20 s on an H200 with 16 CPU cores; needs torch
    python benchmarks/kernels/float8_variants_cuda.py --compile  # without a GPU: prints spilled bytes

A variant is the committed kernel with lines replaced. Those that compute something else (``exact`` is false) show what
a part of the kernel costs. Prints a line per variant; writes no file.
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np

from spattn.arrays import FLOAT8
from spattn.choose import specializations as builds
from spattn.cuda.driver import compile, launch
from spattn.cuda.sm90 import family
from spattn.cuda.sm90.forward import launches, params
from spattn.schedule import compiler
from spattn.schedule.tensor_maps import MAPS

HEADS, TOKENS, HEAD_DIM, CALLS, ROUNDS, SECONDS = 16, 16384, 128, 5, 4, 74
START = time.monotonic()
CONSUMER, FLOAT8_CONSUMER, SOFTMAX, TRANSPOSER = (
    f"sm90/forward/{name}.cuh" for name in ("consumer", "float8", "checked_softmax", "transposer")
)

ONE_SUM = (
    (FLOAT8_CONSUMER, "b + i * 32 / 16, i > 0);", "b + i * 32 / 16);"),
    (
        FLOAT8_CONSUMER,
        "        start_values(s, ",
        "        if (moved) scale_rows(o, rescale);\n        start_values(o, ",
    ),
    (
        FLOAT8_CONSUMER,
        "        if (moved) scale_rows(o, rescale);\n        wgmma_wait<0>();",
        "        wgmma_wait<0>();",
    ),
    (
        FLOAT8_CONSUMER,
        "        pin(s);\n#pragma unroll\n        for (int i = 0; i < kDim / 2; ++i) o[i] += s[i];",
        "        pin(o);",
    ),
)
NO_TRANSPOSE = ((TRANSPOSER, "      transpose(shared_address(shared.ring[ring.stage]));\n", ""),)
CHEAP_EXPONENTIALS = (
    (SOFTMAX, "exp2_flushed(s[i] * scale_log2 - reference[h])", "fmaxf(s[i] * scale_log2 - reference[h], 0.1f)"),
)
NO_SOFTMAX = (
    (
        CONSUMER,
        "    const Problem& own = problem_of(p, problem);\n    scores.apply(",
        "    return false;\n    const Problem& own = problem_of(p, problem);\n    scores.apply(",
    ),
)


class Variant(NamedTuple):
    """Lines to replace, (file, line, replacement); the rows of a tile."""

    name: str
    edits: tuple[tuple[str, str, str], ...] = ()
    rows: int = 128
    exact: bool = True
    most_keys: int = 1 << 20  # of a row, for results within the error bound


VARIANTS = (
    Variant("192 rows (committed)", rows=192),
    Variant("128 rows (committed)"),
    Variant("192 rows, one sum", ONE_SUM, rows=192, most_keys=1024),
    Variant("192 rows, no transposition", NO_TRANSPOSE, rows=192, exact=False),
    Variant("192 rows, cheap exponentials", CHEAP_EXPONENTIALS, rows=192, exact=False),
    Variant("192 rows, no softmax", NO_SOFTMAX, rows=192, exact=False),
)


def row_of(variant: Variant) -> builds.Specialization:
    """Return the specialization of a variant."""
    return next(one for one in COMMITTED if one.rows == variant.rows)


COMMITTED, REQUEST, BEGIN = builds.TABLE_OF_FLOAT8, launches.request, compile.begin


def image_of(number: int) -> tuple[bytes, str]:
    """Return the cubin of a variant, and the registers that ptxas reports."""
    variant, tool = VARIANTS[number], compile.find_nvcc()
    assert tool is not None, "nvcc was not found"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cuda"
        shutil.copytree(compile.SOURCES, root)
        for name, old, new in variant.edits:
            text = (root / name).read_text()
            if text.count(old) != 1:
                raise ValueError(f"{variant.name}: expected one {old!r} in {name}, found {text.count(old)}")
            (root / name).write_text(text.replace(old, new))
        source, out = Path(folder) / "unit.cu", Path(folder) / "unit.cubin"
        source.write_text(compile.translation_unit("sm90/forward/attention.cu", params.structs(MAPS[0])))
        macros = builds.variant(row_of(variant), FLOAT8, MAPS[0])
        flags = [*compile.FLAGS, *compile.target(builds.ARCH), *(f"-D{key}={value}" for key, value in macros.items())]
        command = [str(tool), *flags, f"-I{root}", "-Xptxas", "-v", "-o", str(out), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{variant.name}: {done.stderr}")
        spills = re.search(r"(\d+) bytes spill stores", done.stderr)
        serialized = " SERIALIZED PRODUCTS" if "wgmma" in done.stderr else ""
        return out.read_bytes(), f"{spills[1] if spills else '?'} bytes spilled{serialized}"


def select(number: int, image: bytes) -> None:
    """Let calls of float8 run a variant."""
    import spattn
    from spattn.cuda.driver import device

    variant = VARIANTS[number]
    builds.TABLE_OF_FLOAT8 = tuple(row_of(variant) if row.rows == variant.rows else row for row in COMMITTED)

    def request(name, row, *sizes, **others):
        found = REQUEST(name, row, *sizes, **others)
        if name != "attention" or not row.float8:
            return found
        return found._replace(defines=found.defines | {"SPATTN_VARIANT": number})

    launches.request = request
    tile = variant.rows, builds.TILE[1]
    family.HopperFloat8.accepts = lambda self, plan, backward=False: plan.tile == tile

    def plan_for(self, pattern, call, gpu, max_bytes, backward):
        each = family.workers_of(call.batch, call.heads_q, gpu.sm_count)
        return compiler.plan_for(pattern, call, tile, each, max_bytes, tile_by_tile=True)

    family.HopperFloat8.plan_for = plan_for
    spattn.clear_plan_cache()
    macros = builds.variant(row_of(variant), FLOAT8, MAPS[0]) | {"SPATTN_VARIANT": number}
    own = launch.Request("sm90/forward/attention.cu", builds.ARCH, macros, params.structs(MAPS[0]), "hopper_attention")
    with device.get() as gpu:
        launch._kernels[own.key(gpu)] = launch.Kernel(gpu, own, image)


def begin(unit: compile.Unit):
    """Compile a kernel that is no variant: those are loaded already, and their lines are not in the package's files."""
    if any("SPATTN_VARIANT" in flag for flag in unit.flags):
        raise ValueError("a problem needs more tensor maps than the variants have")
    return BEGIN(unit)


def arrays(heads: int, q_len: int, kv_len: int, offset: float = 0.0, seed: int = 0):
    """Return q, k and v."""
    import torch

    torch.manual_seed(seed)
    shapes = (1, heads, q_len, HEAD_DIM), (1, heads, kv_len, HEAD_DIM), (1, heads, kv_len, HEAD_DIM)
    q, k, v = (torch.randn(shape, device="cuda") for shape in shapes)
    return [x.to(torch.float8_e4m3fn) for x in (q, k, v + offset)]


def share_of_bound(pattern, q, k, v, q_scale: float) -> float:
    """Return the largest error of a result over its bound (docs/numerics.rst)."""
    import torch

    import spattn
    from spattn.testing import dense_mask

    out = spattn.float8_attention(q, k, v, pattern, scales=(q_scale, 1.0, 1.0)).double()
    q, k, v = q.double() * q_scale, k.double(), v.double()
    mask = torch.from_numpy(np.array(dense_mask(pattern, *q.shape[:3], k.shape[2]))).cuda()
    scale, worst = HEAD_DIM**-0.5, 0.0
    for head in range(q.shape[1]):
        qh, kh, vh, allowed = q[0, head], k[0, head], v[0, head], mask[0, head % mask.shape[1]]
        parts = [qh[:, :n] @ kh[:, :n].T for n in range(32, HEAD_DIM + 1, 32)]
        largest = torch.stack([part.abs() for part in parts]).amax(0)
        for d in range(HEAD_DIM):
            largest = torch.maximum(largest, (qh[:, d, None] * kh[None, :, d]).abs())
        delta = 2.0**-6 * scale * largest.masked_fill(~allowed, 0).amax(1, keepdim=True)
        weights = (scale * parts[-1]).masked_fill(~allowed, -math.inf).softmax(1).nan_to_num(0.0)
        want, top = weights @ vh, weights.amax(1, keepdim=True)
        error = torch.exp(2 * delta) * (1 + 2.0**-4) * (1 + 2.0**-6) - 1
        small = torch.exp(2 * delta) * 2.0**-16 * top * allowed
        bound = (error * weights + small) @ vh.abs() + 2.0**-8 * want.abs()
        worst = max(worst, float(((out[0, head] - want).abs() / bound.clamp_min(1e-300)).max()))
    return worst


def graph_of(call: Callable[[], object]):
    """Return a CUDA graph of CALLS calls."""
    import torch

    call()  # plans
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def times(graphs: dict[str, object]) -> dict[str, float]:
    """Return the median milliseconds of a call of each graph, measured in turns."""
    import torch

    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            found[name].append(start.elapsed_time(stop) / CALLS)
    return {name: statistics.median(own) for name, own in found.items()}


def main() -> None:
    """Compile all variants in parallel, then check and time one after another."""
    only_compile = "--compile" in sys.argv[1:]
    with ProcessPoolExecutor(2 if only_compile else 16, mp_context=get_context("spawn")) as pool:
        images = [pool.submit(image_of, number) for number in range(len(VARIANTS))]
        for variant, image in zip(VARIANTS, images, strict=True):
            print(f"{time.monotonic() - START:5.1f} s  {variant.name}: {image.result()[1]}", flush=True)
    if only_compile:
        return
    import torch

    import spattn
    from spattn import patterns

    compile.begin = begin
    union = patterns.Causal() & (
        patterns.SlidingWindow(30, 0) | patterns.DilatedWindow(9, 9, 7) | patterns.Columns(13, 3, 5)
    )
    problems = {"dense": patterns.Full(), "causal": patterns.Causal(), "±256": patterns.SlidingWindow(256)}
    q, k, v = arrays(HEADS, TOKENS, TOKENS)
    wide = [x.to(torch.bfloat16) for x in (q, k, v)]
    plain = {name: graph_of(lambda p=pattern: spattn.attention(*wide, p)) for name, pattern in problems.items()}
    for number, (variant, image) in enumerate(zip(VARIANTS, images, strict=True)):
        if time.monotonic() - START > SECONDS:
            print("out of time")
            break
        select(number, image.result()[0])
        words = []
        if variant.exact:
            checks = {
                "causal": (patterns.Causal(), arrays(2, 777, 777), 1.0),
                "union": (union, arrays(2, 517, 517), 1.0),
                "large scores": (patterns.Full(), arrays(1, 300, 1000), 12.0),
                "long": (patterns.Full(), arrays(1, 64, 32768, 1.0), 1.0),
            }
            for name, (pattern, own, q_scale) in checks.items():
                share = share_of_bound(pattern, *own, q_scale)
                holds = own[1].shape[2] > variant.most_keys or share <= 1
                words.append(f"{name} {share:.2f}" + ("" if holds else " WRONG"))
        for name, pattern in problems.items():
            own = graph_of(lambda p=pattern: spattn.float8_attention(q, k, v, p))
            found = times({"bfloat16": plain[name], "float8": own})
            words.append(f"{name} {found['float8']:.3f} ms, {found['bfloat16'] / found['float8']:.3f}x")
            if name == "dense":
                words.append(f"{4e-9 * HEADS * HEAD_DIM * TOKENS**2 / found['float8']:.0f} TF/s")
        print(f"{time.monotonic() - START:5.1f} s  {variant.name}: " + "; ".join(words), flush=True)


if __name__ == "__main__":
    main()
