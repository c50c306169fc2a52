"""Score functions in the portable kernels, run on the CPU by an emulator of CUDA threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.arrays.operand import Operand, row_major
from spattn.cuda.driver import compile
from spattn.cuda.host import score as host_score
from spattn.cuda.host.backward_pass import BackwardPass
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.sm80 import backward as portable_backward
from spattn.cuda.sm80 import forward as portable
from spattn.cuda.sm80 import kernels, params
from spattn.cuda.sm80.backward import captured
from spattn.dispatch.scores import read
from spattn.planning.contract.validated import validated
from spattn.request.call import Call
from spattn.request.dropout import Dropout, words
from spattn.testing import assert_within_bound, dense_mask, dropout_mask, inputs, random

from .. import test_dropout as of_dropout
from ..test_dropout import SEED, SHARE
from .score_trees import dense, operands, random_score

COMPILER, HERE = shutil.which("g++"), Path(__file__).parent
INCLUDE = next((path for path in (Path("/usr/local/cuda/include"),) if path.is_dir()), None)
pytestmark = [
    pytest.mark.family("sm80"),
    pytest.mark.skipif(COMPILER is None or INCLUDE is None, reason="no C++ compiler and CUDA headers were found"),
]

BATCH, HEADS, HEADS_KV, DIM, SCALE = 1, 2, 1, 8, 0.7


class Emulated:
    """A kernel, compiled at first use; :class:`~spattn.cuda.driver.launch.Kernel`."""

    def __init__(self, folder, source, macros, structs, entry, text):
        name, forward = source.split("/")[-1].removesuffix(".cu"), "/forward/" in source
        namespace = "spattn::sm80" if forward else "spattn::sm80_backward"
        struct = {"sum": "Rows", "captured": "Accumulated"}.get(entry, "Params")
        unit = f'#include "{HERE}/emulated.h"\n{text}{compile.translation_unit(source, structs)}'
        unit += f"\nusing namespace {namespace};\nRUN({namespace}::{entry}, {struct})\n"
        stem = f"{name}{len(list(folder.glob('*.cpp')))}"
        file, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
        file.write_text(unit)
        flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{folder}/cuda", f"-I{INCLUDE}"]
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        subprocess.run([*map(str, (COMPILER, *flags, *defines, "-o", library, file))], check=True)
        self._library = ctypes.CDLL(str(library))
        self.threads = (ctypes.c_int * 3).in_dll(self._library, "launch_shape")[0]

    def launch(self, blocks, given, stream):
        assert len(given) == self._library.params_bytes()
        self._library.run(blocks, given)


def copy_sources(folder):
    """The kernels' sources, for a C++ compiler."""
    for path in compile.SOURCES.rglob("*.cu*"):
        text = path.read_text()
        text = re.sub(r"extern __shared__ (.*)\[\];", r"static \1[1 << 18];", text)
        to = folder / "cuda" / path.relative_to(compile.SOURCES)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text)
    shutil.copy(HERE / "emulated_ptx.cuh", folder / "cuda/sm80/ptx.cuh")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """Kernels on the host."""
    folder = tmp_path_factory.mktemp("kernels")
    copy_sources(folder)

    @functools.cache
    def found(source, macros, entry, text, tables):
        return Emulated(folder, source, dict(macros), params.structs_of(source, tables), entry, text)

    return found


@pytest.fixture
def emulated(kernel, monkeypatch):
    """Device memory on the host; arrays stay allocated as long as the fixture."""
    kept = []

    def upload(device, arrays):
        arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        kept.append(arrays)
        return arrays, {name: x.ctypes.data for name, x in arrays.items()}

    def load(device, one):
        tables = one.defines.get("SPATTN_TABLES", 0)
        return kernel(one.source, tuple(one.defines.items()), one.entry, one.text, tables)

    def allocate(nbytes):
        kept.append(np.zeros(nbytes + 8, np.uint8))
        return kept[-1].ctypes.data

    for module in (kernels, captured):
        monkeypatch.setattr(module, "kernel", load)
    monkeypatch.setattr(kernels, "load_kernels", lambda device, requests: [load(device, one) for one in requests])
    monkeypatch.setattr(params, "upload", upload)
    monkeypatch.setattr(host_score, "upload", upload)
    monkeypatch.setattr(host_score, "keep_if_captured", lambda *_: None)
    monkeypatch.setattr(host_score, "_blocks", {})
    monkeypatch.setattr(captured, "clear", lambda at, nbytes, stream: ctypes.memset(at, 0, nbytes))
    kernels.load.cache_clear()
    kernels.load_common.cache_clear()
    yield SimpleNamespace(allocate=allocate, kept=kept)
    kernels.load.cache_clear()
    kernels.load_common.cache_clear()


def operand(x):
    return Operand(x.ctypes.data, x.shape, row_major(x.shape))


GPU = type("Gpu", (contextlib.nullcontext,), {"shared_bytes": 163 << 10, "sm_count": 2, "arch": "sm_80", "ordinal": 0})


def check(emulated, score, pattern, q_len, kv_len, dtype="float64", precision=None, nonfinite=None):
    """Results, gradients of q, k, v and of captured arrays; `nonfinite` is the flag of a backward that has summed."""
    gpu = GPU()
    q, k, v = inputs(BATCH, HEADS, HEADS_KV, q_len, kv_len, DIM, DIM, dtype=dtype)
    wide = "float64" if dtype == "float64" else "float32"
    dout, dlse = random(q.shape, dtype, seed=99), random((BATCH, HEADS, q_len), wide, seed=98)
    mask = dense_mask(pattern, BATCH, HEADS, q_len, kv_len)
    expected = dense(score, (q, k, v, dout), mask, SCALE, dlse)
    call = Call.of(q, k, v, scale=SCALE, precision=precision)
    object.__setattr__(call, "score", score)
    tables = [np.ascontiguousarray(x).reshape(x.shape) for x in score.tables]
    bound = host_score.Binder(call, gpu).bind(0, score, [operand(x) for x in tables], (q_len, kv_len), None)
    made = validated(plan(pattern, q_len, kv_len, tiling=Tiling(tile=(64, 64)), batch=BATCH, heads=HEADS))
    out, lse = np.full_like(q, np.nan), np.full((BATCH, HEADS, q_len), np.nan, wide)
    arrays, options = [operand(x) for x in (q, k, v, out)], (dtype, SCALE, emulated.allocate, precision, bound)
    portable.forward(ForwardPass(gpu, 0, made, *arrays, lse.ctypes.data, *options))
    gradients = captured.CapturedGradients(call)
    results = [np.full(x.shape, np.nan, dtype) for x in (q, k, v)]
    found = [np.full(score.types[number].shape, np.nan, wide) for number in gradients.wanted]
    own = BackwardPass(gpu, 0, made, *map(operand, (dout, q, k, v, out, lse, dlse, *results)), *options)
    portable_backward.backward(own)
    if nonfinite is None:
        gradients.enqueue(own, [operand(x) for x in found], 0)
    else:  # as after a backward that has summed: 2.0 for every element
        flag = np.array([nonfinite], np.int32)
        words = np.zeros((gradients._total, 10), np.uint64)
        words[:, 5] = 2
        own.table_sums = host_score.TableSums("", words.ctypes.data, ())
        gradients.enqueue(own, [operand(x) for x in found], flag.ctypes.data)
        if not nonfinite:
            return found
    wanted = [*expected[:5], *(expected[5 + number] for number in gradients.wanted)]
    lossy = np.dtype("float16" if precision else dtype)
    low = [dense(score, (q, k, v, dout), mask, SCALE, np.float32(dlse), lossy, factor) for factor in (1, 1.5)]
    for number, (got, want) in enumerate(zip((out, lse, *results, *found), wanted, strict=True)):
        if dtype == "float64":
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * max(1, np.abs(want).max()), err_msg=str(number))
        else:
            lost = [x[number] if number < 5 else x[5 + gradients.wanted[number - 5]] for x in low]
            lost = [want + (4 if dtype == "float32" else 1) * (x.astype(float) - want) for x in lost]
            assert_within_bound(got, want, lost, "float16" if number == 1 else lossy, str(number))
    return found


KERNELS = [("float64", None), ("float32", None), ("float32", "tf32"), ("bfloat16", None)]
RNG = np.random.default_rng(3)
OF_HEAD, RELATIVE, OF_QUERY, OF_KEY = (RNG.normal(size=shape) for shape in (HEADS, (HEADS, 90), (1, 7), (1, 9)))
OF_PAIR, BIAS, PLANE = (RNG.normal(size=shape) for shape in (11, (1, HEADS, 70, 70), (17, 17)))
CAP = np.array(2.5)


def every_class(s, b, h, q, k):
    """Indices of all scopes, two uses of one array, and one without axes."""
    s = s * (1 + 0.1 * OF_QUERY[b, q % 7]) + OF_HEAD[h] * (k - q) * 0.02 + OF_KEY[b, k % 9]
    s = s + RELATIVE[h, k - q] + 0.3 * RELATIVE[0, abs(q - k) // 2] + OF_PAIR[(q * 3 + k) % 11]
    return CAP * np.tanh(s / CAP) + PLANE[q // 8 - k // 8, q % 8 - k % 8]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "precision"), KERNELS)
def test_every_class(emulated, monkeypatch, dtype, precision):
    """In tiles of consecutive and of other tokens. Accumulators of some elements at a time give the same bits."""
    score = operands(every_class)
    assert {one.shape for one in score.types} >= {(), (HEADS,), (HEADS, 90), (1, 7), (1, 9), (11,), (17, 17)}
    for pattern in (patterns.Neighborhood((8, 8), 5), patterns.strided(8)):
        check(emulated, score, pattern, 64, 64, dtype, precision)
    found = check(emulated, score, patterns.Causal(), 60, 70, dtype, precision)
    monkeypatch.setattr(captured, "_MOST", 97)
    for x, y in zip(found, check(emulated, score, patterns.Causal(), 60, 70, dtype, precision), strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.slow
def test_biases(emulated, monkeypatch):
    """Where each element has one pair, its gradient is stored without an accumulator."""
    score = operands(lambda s, b, h, q, k: s + BIAS[b, h, q, k])
    assert captured._one_pair_each(score.program, 0, SimpleNamespace(q_offset=10, batch=1, heads_q=HEADS))
    assert not captured._one_pair_each(score.program, 0, SimpleNamespace(q_offset=-10, batch=1, heads_q=HEADS))
    check(emulated, score, patterns.SlidingWindow(9, 9), 60, 70)
    score = operands(lambda s, b, h, q, k: s + BIAS[0, 1, q, k])
    assert not captured._one_pair_each(score.program, 0, SimpleNamespace(q_offset=10, batch=1, heads_q=HEADS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_second_pass_replaces_sums_that_are_not_finite(emulated, dtype):
    score = operands(lambda s, b, h, q, k: s + RELATIVE[h, k - q])
    given = emulated, score, patterns.Causal(), 60, 70, dtype
    (exact,) = check(*given)
    (found,) = check(*given, nonfinite=1)
    assert found.tobytes() == exact.tobytes()
    (found,) = check(*given, nonfinite=0)
    assert (found == 2).all()


@pytest.mark.slow
def test_random_tree(emulated):
    check(emulated, random_score(0, smooth=True), patterns.Causal(), 40, 50)


@pytest.mark.parametrize("modified", [False, True], ids=["plain", "score and sinks"])
@pytest.mark.parametrize(("dtype", "precision"), KERNELS)
def test_dropout(emulated, monkeypatch, dtype, precision, modified):
    """Dropout with and without a score function, whose array gets a gradient too."""

    def launch_words(device, stream, seed, batch, heads_q, q_len, kv_len, allocate):
        rows = np.moveaxis(words(seed, batch, heads_q, q_len, "query", kv_len - q_len), 0, 3)
        emulated.kept.extend([np.ascontiguousarray(rows), words(seed, batch, heads_q, kv_len, "key")])
        return tuple(x.ctypes.data for x in emulated.kept[-2:])

    monkeypatch.setattr(host_score, "launch_words", launch_words)
    q_len, kv_len, wide = 70, 131, "float64" if dtype == "float64" else "float32"
    q, k, v = inputs(BATCH, HEADS, HEADS_KV, q_len, kv_len, DIM, DIM, dtype=dtype)
    dout, dlse = random(q.shape, dtype, seed=99), random((BATCH, HEADS, q_len), wide, seed=98)
    table = random((HEADS, 7, 5), wide, seed=7)
    given = (of_dropout.function(table) if modified else None, None, Dropout.of(SHARE, SEED))
    score = read(*given, q, k, v, "cpu", "bhsd", backward=True).operands
    pattern, gpu = patterns.Stride(5) | patterns.SlidingWindow(9, 3) | patterns.GlobalTokens([0, 40]), GPU()
    call = Call.of(q, k, v, scale=SCALE, precision=precision)
    object.__setattr__(call, "score", score)
    tables = [operand(np.ascontiguousarray(x)) for x in score.tables]
    bound = host_score.Binder(call, gpu).bind(0, score, tables, (q_len, kv_len), emulated.allocate)
    made = validated(plan(pattern, q_len, kv_len, tiling=Tiling(tile=(64, 64)), batch=BATCH, heads=HEADS))
    out, lse = np.full_like(q, np.nan), np.full((BATCH, HEADS, q_len), np.nan, wide)
    options = (dtype, SCALE, emulated.allocate, precision, bound)
    portable.forward(ForwardPass(gpu, 0, made, *map(operand, (q, k, v, out)), lse.ctypes.data, *options))
    results = [np.full(x.shape, np.nan, dtype) for x in (q, k, v)]
    own = BackwardPass(gpu, 0, made, *map(operand, (dout, q, k, v, out, lse, dlse, *results)), *options)
    portable_backward.backward(own)
    if modified:
        results.append(np.full(table.shape, np.nan, wide))
        captured.CapturedGradients(call).enqueue(own, [operand(results[-1])], 0)
    allowed = dense_mask(pattern, BATCH, HEADS, q_len, kv_len)
    kept = dropout_mask(SEED, SHARE, BATCH, HEADS, q_len, kv_len)
    named = {"table": table} if modified else {}
    want = of_dropout.formula(q, k, v, dout, dlse, allowed, kept, SHARE, scale=SCALE, **named)
    most = 3e-3 if precision else {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}[dtype]
    for x, exact in zip((out, lse, *results), (*want[:5], want[5][:HEADS]), strict=False):
        assert np.abs(np.asarray(x, np.float64) - exact).max() <= most * np.abs(exact).max()
