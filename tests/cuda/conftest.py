"""Fixtures of the CUDA tests: problems, the kernel family of a test, and arrays of each library."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os

import numpy as np
import pytest

import spattn
from spattn import cuda, patterns
from spattn.arrays import namespace_of, to_host
from spattn.cuda.driver import compile, device, jobs
from spattn.cuda.sm80 import backward as portable_backward
from spattn.cuda.sm80 import forward as portable
from spattn.cuda.sm90 import maps
from spattn.cuda.sm90.family import HopperFloat32
from spattn.cuda.sm90.forward import params
from spattn.testing import Expectation, GradientExpectation

# By default JAX preallocates three quarters of the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# (pattern, q_len, kv_len)
LONGER = {
    "full": (patterns.Full(), 200, 333),
    "causal, more keys": (patterns.Causal(), 260, 391),
    "causal, more queries": (patterns.Causal(), 391, 260),
    "decoding": (patterns.Causal(), 1, 517),
    "window": (patterns.SlidingWindow(70), 400, 400),
    "dilated": (patterns.DilatedWindow(20, 20, 3), 401, 401),
    "strided": (patterns.strided(16), 400, 400),
    "fixed": (patterns.fixed(32, 8), 384, 384),
    "longformer": (patterns.longformer(64, global_tokens=(0, 1, 200)), 400, 400),
    "neighborhood": (patterns.Neighborhood((18, 22), 7), 396, 396),
    "neighborhood 3-D": (patterns.Neighborhood((6, 8, 9), (3, 5, 5)), 432, 432),
    "neighborhood dilated": (patterns.Neighborhood((18, 24), 3, 3), 432, 432),
    "shifted windows": (patterns.windowed((16, 24), (8, 8), 4), 384, 384),
    "columns": (patterns.Columns(13, 3, 5) & patterns.Causal(), 300, 300),
    "some empty rows": (patterns.BlockLocal(50) & ~patterns.SlidingWindow(20, 90), 300, 300),
    "tiles of two shapes": (patterns.PeriodicWindow(2, 0, 0) & patterns.BigBird(1, 1, 0, 0), 7, 7),
    "nothing": (patterns.Full() - patterns.Full(), 150, 150),
    "per head": (patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30), patterns.strided(12))), 260, 260),
    "per batch entry": (patterns.Documents(((100, 150), (30, 40, 180))), 250, 250),
}
PROBLEMS = {name: patterns.registry.example(name) for name in patterns.registry.names()} | {
    f"longer: {name}": problem for name, problem in LONGER.items()
}


# The value of SPATTN_CUDA_KERNEL that selects each kernel family. "auto" prefers sm90 on a GPU that supports it.
FAMILIES = {"sm80": "portable", "sm90": "auto"}


def named_families(test):
    """The kernel families of a test: the values of its parameter `family`, else the arguments of its mark `family`."""
    for mark in test.iter_markers("parametrize"):
        names, values = mark.args[:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        if "family" in names:
            return [value if len(names) == 1 else value[names.index("family")] for value in values]
    mark = test.get_closest_marker("family")
    return [mark.args[0] if len(mark.args) == 1 else mark.args] if mark else []


def pytest_generate_tests(metafunc):
    """Fail the collection of a test that names no known kernel family, or another one than its folder."""
    test = metafunc.definition
    named, folder = named_families(test), test.path.parent.name
    known = [folder] if folder in FAMILIES else list(FAMILIES)
    if not named or not all(family in known for family in named):
        raise pytest.Collector.CollectError(
            f"{test.nodeid}: mark the kernel family with pytest.mark.family, one of {known}; got {named}"
        )


_previous_family = [""]


@pytest.fixture(autouse=True)
def family(request, monkeypatch):
    """Select the kernel family that the test names, whatever the GPU and the environment prefer.

    The family is the argument of the mark ``family``. A test of several families is parametrized with this fixture
    (``indirect``); it skips on a GPU that cannot run the family.
    """
    chosen = getattr(request, "param", None) or request.node.get_closest_marker("family").args[0]
    if _previous_family[0] != chosen:  # cached plans fit the kernels that planned them
        spattn.clear_plan_cache()
        _previous_family[0] = chosen
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", FAMILIES[chosen])
    if hasattr(request, "param") and chosen == "sm90":
        request.getfixturevalue("hopper_kernels")
    return chosen


@pytest.fixture
def hopper_kernels(monkeypatch):
    """Skip unless the GPU runs the sm90 kernels, and fail a test whose call falls back to the portable kernels.

    Returns the replaced ``portable.forward``.
    """
    if device.get().capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    original = portable.forward
    monkeypatch.setattr(portable, "forward", lambda call: pytest.fail("the portable kernels were called"))
    monkeypatch.setattr(portable_backward, "backward", lambda call: pytest.fail("the portable kernels were called"))
    monkeypatch.setattr(HopperFloat32, "fewest_queries", 0)
    return original


class Card:
    """The attributes of an H200 that the planner reads."""

    name, capability, sm_count, shared_bytes, ordinal = "Card", (9, 0), 132, 227 << 10, 0


@pytest.fixture
def card(monkeypatch):
    """Plan for the GPU `Card`; no real GPU is needed."""
    own = Card()
    monkeypatch.setattr(device, "get", lambda ordinal=None: own)
    spattn.clear_plan_cache()
    return own


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty cache of kernels, and no compilation of an earlier test."""
    monkeypatch.setenv("SPATTN_CACHE_DIR", str(tmp_path / "cache"))
    compile._compiler_key.cache_clear()
    own = jobs._Jobs()
    monkeypatch.setattr(jobs, "_jobs", own)
    yield tmp_path / "cache"
    own.end()


@pytest.fixture
def nvcc(tmp_path, monkeypatch, place):
    """A script in place of nvcc."""
    from .fake_nvcc import Compiler  # tests/test_suite_names.py copies this file elsewhere

    compiler = Compiler(tmp_path / "toolkit")
    monkeypatch.setenv("SPATTN_NVCC", str(compiler.path))
    return compiler


@pytest.fixture
def tensor_maps(monkeypatch):
    """Replace functions of libcuda: an encoded tensor map is its address, then its sizes, strides and box."""

    def encode(target, dtype, rank, address, sizes, strides, box, *_):
        image = (address or 0).to_bytes(8, "little") + ctypes.string_at(sizes, 8 * rank)
        image += ctypes.string_at(strides, 8 * (rank - 1)) + ctypes.string_at(box, 4 * rank)
        ctypes.memmove(target, image.ljust(128, b"\0"), 128)
        return 0

    def replace(target, address):
        ctypes.memmove(target, (address or 0).to_bytes(8, "little"), 8)
        return 0

    pointer, number = ctypes.c_void_p, ctypes.c_int
    encoded = pointer, number, number, *[pointer] * 5, *[number] * 4
    functions = {
        "cuTensorMapEncodeTiled": ctypes.CFUNCTYPE(number, *encoded)(encode),
        "cuTensorMapReplaceAddress": ctypes.CFUNCTYPE(number, pointer, pointer)(replace),
    }
    for module in (maps, params):
        monkeypatch.setattr(module, "address", lambda name: ctypes.cast(functions[name], pointer).value)


@pytest.fixture
def assert_alike():
    """``assert_alike(results, expected)``: the same NaN and infinities, other values within 2 %."""

    def check(results, expected):
        for one, other in zip(results, expected, strict=True):
            np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=0.02, atol=0.02)

    return check


@pytest.fixture
def portable_allowed(hopper_kernels, monkeypatch):
    """Allow the fallback to the portable kernels; returns the list of the calls that took it."""
    calls = []
    monkeypatch.setattr(portable, "forward", lambda call: (calls.append(call), hopper_kernels(call)))
    return calls


@pytest.fixture(params=PROBLEMS)
def problem(request):
    """(pattern, q_len, kv_len): each of `PROBLEMS`, or those that a test names with ``indirect=True``."""
    return PROBLEMS[request.param]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason="CuPy is not installed")


def on_gpu(x: np.ndarray, kind: str):
    """Convert a NumPy array to another library, in device memory; "numpy" and "torch-cpu" stay on the host."""
    library = kind.removesuffix("-cpu")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    module = importlib.import_module(library)
    match kind:
        case "torch" | "torch-cpu":
            tensor = namespace_of(module.empty(0)).from_numpy(np.array(x))
            return tensor if kind == "torch-cpu" else tensor.cuda()
        case "cupy":
            try:
                return module.asarray(x)
            except (TypeError, ValueError) as error:
                pytest.skip(f"this CuPy has no {x.dtype}: {error}")
        case "jax":
            return module.device_put(x, module.devices("gpu")[0])
    return x


@pytest.fixture
def arrays():
    """``arrays(kind)(x)`` converts the NumPy array ``x`` by `on_gpu`."""
    return lambda kind: lambda x: on_gpu(x, kind)


@pytest.fixture
def attend():
    """``attend(kind)``: a forward pass from NumPy to NumPy that runs on the GPU with arrays of that library."""

    def of_kind(kind: str):
        def forward(q, k, v, pattern, scale=None):
            q, k, v = (on_gpu(x, kind) for x in (q, k, v))
            scale = q.shape[3] ** -0.5 if scale is None else scale
            out, lse = cuda.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cuda"), scale)
            assert namespace_of(out) is namespace_of(lse) is namespace_of(q)
            assert namespace_of(out).device(out) == namespace_of(q).device(q)
            return to_host(out), to_host(lse)

        return forward

    return of_kind


@pytest.fixture
def check_gradients():
    """``check_gradients(pattern, q, k, v)`` compares the GPU's gradients with the reference for arrays of each library.

    A second backward pass must have the same bits.
    """

    def run(pattern, q, k, v, scale=None, *, kinds=("numpy",), with_dlse=True, made=None):
        expectation = GradientExpectation(pattern, q, k, v, scale, with_dlse=with_dlse)
        for kind in kinds:
            dout, *operands = (on_gpu(x, kind) for x in (expectation.dout, q, k, v))
            dlse = on_gpu(expectation.dlse, kind) if with_dlse else None
            own = spattn.plan_for(pattern, *operands, backend="cuda") if made is None else made
            out, lse = spattn.attention(*operands, own, scale=scale, return_lse=True, backend="cuda")
            arguments = dout, *operands, out, lse, own
            got = spattn.attention_backward(*arguments, dlse=dlse, scale=scale, backend="cuda")
            again = spattn.attention_backward(*arguments, dlse=dlse, scale=scale, backend="cuda")
            for x, twin, like in zip(got, again, operands, strict=True):
                assert namespace_of(x) is namespace_of(like) and namespace_of(x).device(x) == namespace_of(like).device(
                    like
                )
                np.testing.assert_array_equal(to_host(x), to_host(twin))
            expectation.check(tuple(map(to_host, got)), kind)

    return run


@pytest.fixture
def check(attend):
    """``check(pattern, q, k, v)`` compares the GPU's results with the reference for arrays of each library."""

    def run(pattern, q, k, v, scale=None, *, kinds=("numpy",), forward=None):
        expectation = Expectation(pattern, q, k, v, scale)
        for kind in kinds:
            expectation.check(*(forward or attend(kind))(q, k, v, pattern, scale), kind)

    return run
