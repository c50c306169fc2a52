"""Score functions of the Hopper kernels without a GPU: registers, parameters, cache keys, grouped launches."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.arrays.operand import Operand, row_major
from spattn.cuda.driver import compile
from spattn.cuda.host.backward_pass import BackwardPass
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.host.score import IDENTITY, BoundScore, TableSums
from spattn.cuda.sm90.backward import params as backward_params
from spattn.cuda.sm90.backward import prepared as backward_prepared
from spattn.cuda.sm90.forward import group, launches, params, prepared
from spattn.cuda.sm90.forward.heads import with_packed_heads
from spattn.planning.contract.validated import validated
from spattn.schedule.tensor_maps import MAPS

from .test_wgmma_scores import SCORES, choose, kernels, text_of

pytestmark = pytest.mark.family("sm90")

NVCC = compile.find_nvcc()
SOFTCAP, ALIBI = (BoundScore(text_of(score), at) for score, at in zip(SCORES.values(), (77, 88), strict=True))
EACH = {"none": IDENTITY, "softcap": SOFTCAP, "alibi": ALIBI}
# Bytes. Positions and captured values take registers of threads whose accumulators leave few: 612 at most in the dK/dV
# kernels of 128 and more dimensions, in which 192 or more of 240 registers are sums and products.
SPILLS = {"forward": 288, "backward": 640}
SPILLS_OF_THREE_CTAS = 400  # whose producers have 40 registers


def named(kernel):
    source, _, defines, _, text = kernel
    names = "HEAD_DIM", "BLOCK_Q", "BY_KEYS", "VALUES", "QUERIES", "GATHERS", "PROBLEMS", "MAPS"
    sizes = [f"{name.lower()} {defines[f'SPATTN_{name}']}" for name in names if f"SPATTN_{name}" in defines]
    return f"{source.split('/')[1]} {next(name for name, one in EACH.items() if one.text == text)} {' '.join(sizes)}"


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="nvcc was not found")
@pytest.mark.parametrize(
    "kernel", {named(kernel): kernel for kernel in kernels()}.values(), ids={named(kernel): 0 for kernel in kernels()}
)
def test_registers(tmp_path, kernel):
    """The registers of a CTA suffice, products are not serialized, and few words are spilled."""
    source, arch, defines, structs, text = kernel
    file, flags = tmp_path / "kernel.cu", [*compile.FLAGS, *compile.target(arch)]
    file.write_text(text + compile.translation_unit(source, structs))
    command = [NVCC, *flags, *(f"-D{name}={value}" for name, value in defines.items()), f"-I{compile.SOURCES}"]
    done = subprocess.run([*command, "-Xptxas", "-v", "-o", tmp_path / "cubin", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "serialized" not in done.stdout + done.stderr
    threads = 128 * (defines.get("SPATTN_BLOCK_Q", 128) // 64 + 1) * defines.get("SPATTN_CTAS", 1)
    assert max(int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)) <= 65536 // threads // 8 * 8
    spilled = max(int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr))
    three = defines.get("SPATTN_CTAS") == 3
    assert spilled <= (SPILLS_OF_THREE_CTAS if three else SPILLS[source.split("/")[1]])


class Device(SimpleNamespace):
    """Equal to itself only, as a device is."""

    __hash__, __eq__ = object.__hash__, object.__eq__


@pytest.fixture
def gpu(monkeypatch, tensor_maps):
    """A device without memory; kernels are their requests."""

    def upload(device, arrays):
        return None, {name: 1 << 20 | number << 12 for number, name in enumerate(arrays)}

    for module in (prepared, group, backward_prepared):
        monkeypatch.setattr(module, "upload", upload)
    for module in (launches, backward_prepared):
        monkeypatch.setattr(module, "load_kernels", lambda device, requests: requests)
    return Device(ordinal=0, sm_count=132)


def arrays_of(q_len, kv_len):
    shapes = (2, 4, q_len, 64), (2, 2, kv_len, 64), (2, 2, kv_len, 64), (2, 4, q_len, 64)
    return [Operand(base << 30, shape, row_major(shape)) for base, shape in enumerate(shapes, 1)]


def forward_call(gpu, score, q_len=260, kv_len=391, rows=128):
    made = validated(
        plan(patterns.Causal(), q_len, kv_len, tiling=Tiling(tile=(rows, 64), workers=9), batch=2, heads=4)
    )
    return ForwardPass(gpu, 0, made, *arrays_of(q_len, kv_len), 0, "bfloat16", 0.125, None, score=score)


def backward_call(gpu, score):
    made = validated(plan(patterns.Causal(), 260, 391, tiling=Tiling(tile=(128, 64)), batch=2, heads=4))
    q, k, v, out = arrays_of(260, 391)
    lse = Operand(5 << 30, (2, 4, 260), row_major((2, 4, 260)))
    return BackwardPass(gpu, 0, made, out, q, k, v, out, lse, None, q, k, v, "bfloat16", 0.125, None, score=score)


@pytest.mark.parametrize("score", EACH.values(), ids=EACH)
def test_forward_parameters(gpu, score):
    """The first query's position in the plan, which `moved` is added to, and the address of what is captured."""
    call = forward_call(gpu, score, 200, 4000)
    ready = prepared.prepare(call)
    to = params.Addresses(
        *(x.pointer for x in (call.q, call.k, call.v, call.out)), 555, 666, 777, -0.5, 7, score.address
    )
    found = np.frombuffer(ready.template.fill(0, [to]), params.params_dtype(MAPS[0]))["problems"][0, 0]
    assert (found["q_offset"], found["moved"]) == (3800, 7)
    (merging,) = ready._merges
    assert merging is not None and merging.kernel.text == ""
    assert found["score"] == score.address and ready.attention.text == score.text


@pytest.mark.parametrize("score", EACH.values(), ids=EACH)
def test_backward_parameters(gpu, score):
    call = backward_call(gpu, score)
    ready = backward_prepared.BackwardPlan(call.plan, gpu, 2, 4, 2).ready(call)
    for number, launched in enumerate(ready._launched):
        to = backward_params.Addresses(*range(1, len(backward_params.Addresses._fields)), first=(20, 30))
        filled = ready._template.fill(number, to, (0,) * 5, 0)
        (found,) = np.frombuffer(filled, backward_params.params_dtype(MAPS[0]))
        assert found["q_offset"] == 131 and launched.kernel.entry == "hopper_backward"
        assert launched.kernel.text == score.text and found["score"] == to.score
        assert found["words"] == to.words and list(found["first"]) == [20, 30, *[0] * (backward_params.TABLES - 2)]
    assert len(ready._launched) == 2 and ready._statistics.text == ready._sum.text == ""


def test_cache_keys(gpu):
    """Calls that differ in their score function have kernels of their own; the values are no part of it."""
    given = [IDENTITY, SOFTCAP, ALIBI, ALIBI._replace(address=99)]
    call = forward_call(gpu, IDENTITY)
    found = [prepared.prepare(replace(call, score=score)) for score in given]
    call = backward_call(gpu, IDENTITY)
    made = backward_prepared.BackwardPlan(call.plan, gpu, 2, 4, 2)
    for readies in (found, [made.ready(replace(call, score=score)) for score in given]):
        assert readies[2] is readies[3] and len(set(map(id, readies))) == 3


def test_sums_of_arrays_of_other_sizes(gpu, monkeypatch):
    """Their elements begin at other accumulators, even if all addresses are those of an earlier call."""
    written = []
    monkeypatch.setattr(backward_prepared, "Launch", lambda *arguments, **options: arguments)
    monkeypatch.setattr(backward_prepared, "start", lambda launches, counter: written.append(launches))
    choose(monkeypatch, True)
    call = replace(backward_call(gpu, ALIBI), allocate=lambda nbytes: 1 << 40)
    made = backward_prepared.BackwardPlan(call.plan, gpu, 2, 4, 2)
    for first in ((0, 8), (0, 16), (0, 8)):
        own = replace(call, table_sums=TableSums(ALIBI.text, 1 << 41, first))
        ready = made.ready(own)
        assert ready.sums_tables and ready.run(own)
    assert written[0] is written[2] is not written[1]
    many = TableSums(ALIBI.text, 1 << 41, tuple(range(backward_params.TABLES + 1)))
    assert not backward_prepared.BackwardPlan(call.plan, gpu, 2, 4, 2).ready(replace(call, table_sums=many)).sums_tables


def test_heads_are_not_packed(gpu):
    """The rows of a tile share a head."""
    call = forward_call(gpu, IDENTITY, 4, 391)
    assert with_packed_heads(call).q.shape == (2, 2, 8, 64)
    scored = replace(call, score=ALIBI)
    assert with_packed_heads(scored) is scored


def test_groups(gpu):
    """A launch has one score function, and each of its problems its own values and lengths."""
    scores = [ALIBI, SOFTCAP, IDENTITY, ALIBI._replace(address=99), IDENTITY, SOFTCAP]
    sizes = [(260, 391), (100, 120), (140, 140), (300, 300), (130, 600), (50, 70)]
    rows = [128] * 5 + [64]
    calls = [forward_call(gpu, score, *each, n) for score, each, n in zip(scores, sizes, rows, strict=True)]
    parts = [group.part_of(call) for call in calls]
    together = sorted(group.cut(parts), key=min)
    assert together == [[0, 3], [1], [2, 4], [5]]
    for numbers in together:
        made = group.prepare([parts[number] for number in numbers])
        assert all(scores[number].text == made.attention.text for number in numbers)
        to = [params.Addresses(1, 2, 3, 4, 5, 6, 7, 1.0, 0, scores[number].address) for number in numbers]
        dtype = params.params_dtype(*(made.attention.defines[name] for name in ("SPATTN_MAPS", "SPATTN_PROBLEMS")))
        (filled,) = np.frombuffer(made.template.fill(0, to), dtype)
        for number, found in zip(numbers, filled["problems"], strict=False):
            q_len, kv_len = sizes[number]
            assert found["q_offset"] == kv_len - q_len and found["score"] == scores[number].address
