"""Score functions in the portable float32 and float64 backward, run on the CPU by an emulator of CUDA threads."""

from __future__ import annotations

import ctypes
import functools
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
from spattn.cuda.sm80 import backward as portable_backward
from spattn.cuda.sm80 import kernels, params
from spattn.cuda.sm80.backward import captured
from spattn.planning.contract.validated import validated
from spattn.request.call import Call
from spattn.testing import dense_mask, inputs, random

from .score_trees import dense, operands, random_score

COMPILER = shutil.which("g++")
INCLUDE = next((path for path in (Path("/usr/local/cuda/include"),) if path.is_dir()), None)
pytestmark = [
    pytest.mark.family("sm80"),
    pytest.mark.skipif(COMPILER is None or INCLUDE is None, reason="no C++ compiler and CUDA headers were found"),
]

BATCH, HEADS, HEADS_KV, DIM, SCALE = 1, 2, 1, 8, 0.7


class Emulated:
    """A kernel, compiled at first use; :class:`~spattn.cuda.driver.launch.Kernel`."""

    def __init__(self, folder, source, macros, structs, entry, text):
        entry = f"spattn::sm80_backward::{entry}"
        struct = {"sum": "Rows", "captured": "Accumulated"}.get(entry.rpartition(":")[2], "Params")
        unit = f'#include "{Path(__file__).parent}/emulated.h"\n{text}{compile.translation_unit(source, structs)}'
        unit += f"\nusing namespace spattn::sm80_backward;\nRUN({entry}, {struct})\n"
        number = len(list(folder.iterdir()))
        file, library = folder / f"kernel{number}.cpp", folder / f"kernel{number}.so"
        file.write_text(unit)
        flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{compile.SOURCES}", f"-I{INCLUDE}"]
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        subprocess.run([*map(str, (COMPILER, *flags, *defines, "-o", library, file))], check=True)
        self._library, self.threads = ctypes.CDLL(str(library)), 256

    def launch(self, blocks, given, stream):
        assert len(given) == self._library.params_bytes()
        self._library.run(blocks, given)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """Kernels on the host."""
    folder = tmp_path_factory.mktemp("kernels")

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

    def load(device, source, macros, text="", tables=0):
        entry = source.rpartition("/")[2].removesuffix(".cu").partition("_")[0]
        return kernel(source, tuple(macros.items()), entry, text, tables)

    def allocate(nbytes):
        kept.append(np.zeros(nbytes + 8, np.uint8))
        return kept[-1].ctypes.data

    monkeypatch.setattr(kernels, "_kernel", load)
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


def check(emulated, score, pattern, q_len, kv_len, dtype="float64"):
    """Gradients of q, k, v and of captured arrays."""
    gpu = SimpleNamespace(shared_bytes=163 << 10, sm_count=2, arch="sm_80", ordinal=0)
    gpu = type("Gpu", (), vars(gpu))()
    q, k, v = inputs(BATCH, HEADS, HEADS_KV, q_len, kv_len, DIM, DIM, dtype=dtype)
    dout, dlse = random(q.shape, dtype, seed=99), random((BATCH, HEADS, q_len), dtype, seed=98)
    mask = dense_mask(pattern, BATCH, HEADS, q_len, kv_len)
    out, lse, *expected = dense(score, (q, k, v, dout), mask, SCALE, dlse)
    out, lse = np.ascontiguousarray(out, dtype), np.ascontiguousarray(lse, dtype)
    call = Call.of(q, k, v, scale=SCALE)
    object.__setattr__(call, "score", score)
    tables = [np.ascontiguousarray(x).reshape(x.shape) for x in score.tables]
    bound = host_score.Binder(call, gpu).bind(0, score, [operand(x) for x in tables])
    made = validated(plan(pattern, q_len, kv_len, tiling=Tiling(tile=(64, 64)), batch=BATCH, heads=HEADS))
    results = [np.full(x.shape, np.nan, dtype) for x in (q, k, v)]
    arrays = [operand(x) for x in (dout, q, k, v, out, lse, dlse, *results)]
    own = BackwardPass(gpu, 0, made, *arrays, dtype, SCALE, emulated.allocate, None, bound)
    portable_backward.backward(own)
    gradients = captured.CapturedGradients(call)
    found = [np.full(score.types[number].shape, np.nan, dtype) for number in gradients.wanted]
    gradients.enqueue(own, [operand(x) for x in found])
    tolerance = 1e-10 if dtype == "float64" else 2e-4
    wanted = [expected[3 + number] for number in gradients.wanted]
    for number, (got, want) in enumerate(zip((*results, *found), (*expected[:3], *wanted), strict=True)):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1, np.abs(want).max()), err_msg=str(number))
    return found


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
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_class(emulated, monkeypatch, dtype):
    """In tiles of consecutive and of other tokens. Accumulators of some elements at a time give the same bits."""
    score = operands(every_class)
    assert {one.shape for one in score.types} >= {(), (HEADS,), (HEADS, 90), (1, 7), (1, 9), (11,), (17, 17)}
    for pattern in (patterns.Neighborhood((8, 8), 5), patterns.strided(8)):
        check(emulated, score, pattern, 64, 64, dtype)
    found = check(emulated, score, patterns.Causal(), 60, 70, dtype)
    monkeypatch.setattr(captured, "_MOST", 97)
    for x, y in zip(found, check(emulated, score, patterns.Causal(), 60, 70, dtype), strict=True):
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
    check(emulated, score, patterns.SlidingWindow(9, 9), 60, 70)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_trees(emulated, seed):
    check(emulated, random_score(seed, smooth=True), patterns.Causal(), 40, 50)
