"""What attention() and attention_backward() refuse, by name, and what they take although it looks odd."""

import sys
import warnings
from decimal import Decimal
from fractions import Fraction
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import spattn
from spattn.arrays import NUMPY, namespace_of
from spattn.testing import DTYPES, inputs, random

ARRAYS = ("q", "k", "v", "dout", "out", "lse")


def arguments(convert=lambda x: x, **changed):
    """The arrays of a forward and a backward call of 20 queries, 20 keys and the causal mask; some are changed."""
    q, k, v = inputs(1, 2, q_len=20, head_dim=8)
    out, lse = spattn.attention(q, k, v, "causal", return_lse=True)
    mask = np.tri(20, dtype=bool)
    made = {"q": q, "k": k, "v": v, "dout": random(out.shape), "out": out, "lse": lse, "pattern": mask}
    return {name: changed.get(name, convert)(x) for name, x in made.items()}


def call(q, k, v, dout, out, lse, pattern):
    """Both passes, the backward for the out and lse of the call."""
    return spattn.attention(q, k, v, pattern), *spattn.attention_backward(dout, q, k, v, out, lse, pattern)


def backward(dout, q, k, v, out, lse, pattern):
    return spattn.attention_backward(dout, q, k, v, out, lse, pattern)


# -- the default -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_key_is_allowed_unless_a_pattern_says_otherwise(backend):
    q, k, v = inputs(2, 4, 2, q_len=70, kv_len=50, head_dim=16)
    out, lse = spattn.attention(q, k, v, backend=backend, return_lse=True)
    full = spattn.attention(q, k, v, spattn.patterns.Full(), backend=backend, return_lse=True)
    assert np.array_equal(out, full[0]) and np.array_equal(lse, full[1])
    assert not np.array_equal(out, spattn.attention(q, k, v, "causal", backend=backend))
    args = random(out.shape), q, k, v, out, lse
    gradients = spattn.attention_backward(*args, backend=backend)
    for got, want in zip(gradients, spattn.attention_backward(*args, "full", backend=backend), strict=True):
        assert np.array_equal(got, want)


def test_the_default_is_that_of_torch():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, inputs(1, 2, q_len=30, kv_len=50, dtype="float64"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(spattn.attention(q, k, v), expected, rtol=1e-12, atol=1e-12)


# -- arrays that are more than their values ----------------------------------------------------------------------------


def masked_tensor(torch, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype"
        from torch.masked import masked_tensor

        return masked_tensor(x, torch.ones_like(x, dtype=torch.bool))


def fake(torch, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


def block_compressed(torch, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a beta state"
        return x.to_sparse_csr()


ODD_TENSORS = {
    "meta": (lambda torch, x: x.to("meta"), "got a meta tensor, which has no values"),
    "coordinates": (lambda torch, x: x.to_sparse(), r"got a tensor of layout torch.sparse_coo; use .to_dense\(\)"),
    "rows": (block_compressed, r"got a tensor of layout torch.sparse_csr; use .to_dense\(\)"),
    "mkldnn": (lambda torch, x: x.to_mkldnn(), r"got a tensor of layout torch._mkldnn; use .to_dense\(\)"),
    "nested": (lambda torch, x: torch.nested.nested_tensor([*x]), "got a nested tensor; .*Documents"),
    "jagged": (lambda torch, x: torch.nested.nested_tensor([*x], layout=torch.jagged), "got a nested tensor; .*Doc"),
    "masked": (masked_tensor, "got a MaskedTensor with operations of its own"),
    "fake": (fake, "got a FakeTensor with operations of its own"),
    "quantized": (
        lambda torch, x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        r"got a quantized .*\.dequantize\(\)",
    ),
}
OF_BOOLS = ("meta", "nested", "jagged", "fake")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name, odd", [*((name, odd) for name in ARRAYS for odd in ODD_TENSORS), *(("pattern", odd) for odd in OF_BOOLS)]
)
def test_odd_tensors_are_refused(name, odd):
    torch = pytest.importorskip("torch")
    make, words = ODD_TENSORS[odd]
    call(**arguments(torch.from_numpy) | {"pattern": "causal"})  # which prepares such calls of plain tensors
    given = arguments(torch.from_numpy, **{name: lambda x: make(torch, torch.from_numpy(x))})
    for pattern in [given["pattern"], *(["causal"] if name != "pattern" else [])]:
        with pytest.raises(TypeError, match=f"^{name}: expected a plain array, {words}") as raised:
            call(**given | {"pattern": pattern})
        assert "cuda" not in str(raised.value).lower()


@pytest.mark.parametrize("transform, name", [(t, name) for t in ("grad", "jvp") for name in ARRAYS])
def test_tensors_under_a_transformation_are_refused(transform, name):
    torch = pytest.importorskip("torch")
    given = arguments(torch.from_numpy)
    run = {
        "grad": lambda f, x: torch.func.grad(f)(x),
        "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    }[transform]
    # PyTorch's derivatives wrap whatever is touched.
    with pytest.raises(TypeError, match="^q: expected a plain array, got a tensor inside a transformation of torch"):
        run(lambda x: call(**given | {name: x})[0].sum(), given[name])


@pytest.mark.parametrize("name", [*ARRAYS, "pattern"])
def test_whole_batches_of_calls_are_taken(name):
    """By vmap; but for a batch of masks, whose values are nowhere."""
    torch = pytest.importorskip("torch")
    given = arguments(torch.from_numpy)
    run = torch.func.vmap(lambda x: call(**given | {name: x}))
    if name == "pattern":
        with pytest.raises(ValueError, match="^pattern: must not differ between batch entries under torch.func.vmap"):
            run(given[name][None])
        return
    for got, want in zip(run(given[name][None]), call(**given), strict=True):
        assert torch.equal(got[0], want)


@pytest.mark.parametrize("name", [*ARRAYS, "pattern"])
def test_masked_arrays_are_refused(name):
    given = arguments(**{name: np.ma.masked_array})
    with pytest.raises(TypeError, match=rf"^{name}: expected a plain array, got a masked array; use .filled\(\)"):
        call(**given)


def test_views_and_subclasses_that_are_their_values():
    """The same bits as from the plain arrays: negation as a flag, parameters, memory maps."""
    torch = pytest.importorskip("torch")
    plain = arguments(torch.from_numpy)
    expected = call(**plain)

    def negated(x):
        view = torch.complex(-x, -x).conj().imag
        assert view.is_neg() and torch.equal(view, x)
        return view

    def parameter(x):
        return torch.nn.Parameter(x, requires_grad=False)

    for convert in (negated, parameter):
        given = {name: x if name == "pattern" else convert(x) for name, x in plain.items()}
        for got, want in zip(call(**given), expected, strict=True):
            assert type(got) is torch.Tensor and torch.equal(got, want)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8)], ids=str)
def test_tensors_without_elements(shape):
    """They have no memory, and need none."""
    torch = pytest.importorskip("torch")
    empty, lse = torch.zeros(shape), torch.zeros(shape[:3])
    out = spattn.attention(empty, empty, empty)
    assert out.shape == shape and out.dtype == torch.float32
    assert [x.shape for x in spattn.attention_backward(empty, empty, empty, empty, empty, lse)] == [shape] * 3


def test_subclasses_of_numpy_that_are_their_values(tmp_path):
    def mapped(x):
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        file.write_bytes(x.tobytes())
        return np.memmap(file, x.dtype, "r", shape=x.shape)

    matrix = {name: lambda x: x for name in ARRAYS} | {"pattern": np.matrix}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        for given in (arguments(mapped), arguments(**matrix)):
            for got, want in zip(call(**given), call(**arguments()), strict=True):
                assert type(got) is np.ndarray and np.array_equal(got, want)


@pytest.mark.parametrize("name", ARRAYS)
def test_complex_tensors_are_named_by_their_dtype(name):
    torch = pytest.importorskip("torch")
    given = arguments(torch.from_numpy, **{name: lambda x: torch.complex(*[torch.from_numpy(x)] * 2).conj()})
    with pytest.raises(TypeError, match=f"^{name}: expected .*float32.*, got complex64"):
        call(**given)


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("device", ["mps:0", "xpu:1", "hpu:0"])
def test_a_device_that_is_neither_cpu_nor_cuda_is_named(device, backend):
    torch = pytest.importorskip("torch")

    kind, index = device.split(":")
    Elsewhere = type("Elsewhere", (torch.Tensor,), {"device": SimpleNamespace(type=kind, index=int(index))})
    q, k, v = (torch.from_numpy(x).as_subclass(Elsewhere) for x in inputs())
    with pytest.raises(ValueError, match=f"^q: expected an array in host memory or on a CUDA .*, got one on {device}"):
        spattn.attention(q, k, v, backend=backend)


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_on_another_device_than_q(monkeypatch, name):
    given = arguments()
    spattn.clear_plan_cache()  # its keys have no devices of NumPy arrays
    monkeypatch.setattr(NUMPY, "device", lambda x: "cuda:3" if x is given[name] else "cpu")
    where = ("k", "cuda:3", "cpu") if name == "q" else (name, "cpu", "cuda:3")
    with pytest.raises(ValueError, match="^{}: expected device {} like q, got {}$".format(*where)):
        backward(**given)


@pytest.mark.parametrize("platform, name", [("cpu", "cpu"), ("gpu", "cuda:3"), ("cuda", "cuda:3"), ("tpu", "tpu:3")])
def test_devices_of_jax(platform, name):
    jax = namespace_of(pytest.importorskip("jax").numpy.zeros(1))
    device = SimpleNamespace(platform=platform, local_hardware_id=3)
    assert jax.device(SimpleNamespace(devices=lambda: [device])) == name


def test_frameworks_that_another_thread_is_importing(monkeypatch):
    """Their modules are there before their classes."""
    for name in ("torch", "cupy", "jax"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    q, k, v = inputs()
    assert np.array_equal(spattn.attention(q, k, v), spattn.attention(q.copy(), k, v))
    with pytest.raises(TypeError, match="^v: expected a NumPy, .*, got list"):
        spattn.attention(q, k, [])


# -- numbers and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale",
    [
        True,
        False,
        np.True_,
        np.bool_(False),
        1j,
        np.complex64(1),
        "0.5",
        b"1",
        Decimal("0.5"),
        Fraction(1, 2),
        np.array(0.5),
        np.array([0.5]),
        [0.5],
        np.timedelta64(1),
        object(),
    ],
    ids=lambda scale: type(scale).__name__,
)
def test_scale_that_is_no_number(scale):
    given = arguments()
    pattern = f"^scale must be an int or float, got {type(scale).__name__}$"
    with pytest.raises(TypeError, match=pattern):
        spattn.attention(*inputs(), scale=scale)
    with pytest.raises(TypeError, match=pattern):
        spattn.attention_backward(*(given[name] for name in ("dout", "q", "k", "v", "out", "lse")), scale=scale)


def test_scale_that_is_a_tensor():
    """A learned one would get no gradient."""
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="^scale must be an int or float, got Tensor"):
        spattn.attention(*map(torch.from_numpy, inputs()), scale=torch.tensor(0.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "scale, got",
    [
        (10**400, "inf"),
        (-(10**400), "-inf"),
        (10**5000, "inf"),
        (np.longdouble("1e400"), "inf"),
        (float("nan"), "nan"),
        (np.float16("-inf"), "-inf"),
    ],
    ids=["int", "negative int", "int that cannot be printed", "longdouble", "nan", "float16"],
)
def test_scale_beyond_every_number(dtype, scale, got):
    with pytest.raises(ValueError, match=f"^scale must be finite, got {got}$"):
        spattn.attention(*inputs(dtype=dtype), scale=scale)


@pytest.mark.parametrize("scale", [3.5e38, -1e300, 10**39])
def test_scale_beyond_the_numbers_of_the_kernels(scale):
    for dtype in ("float32", "float16", "bfloat16"):
        with pytest.raises(ValueError, match=r"^scale must not exceed 3\.403e\+38 unless q is float64"):
            spattn.attention(*inputs(dtype=dtype), scale=scale)
    q, k, v = inputs(dtype="float64")
    expected = spattn.attention(q * 0.5, k, v, scale=0.5)
    factor = abs(scale) * np.sign(scale)
    np.testing.assert_allclose(spattn.attention(q * (0.25 / factor), k, v, scale=scale), expected, rtol=1e-10)


@pytest.mark.parametrize(
    "scale", [np.longdouble(0.25), np.float16(0.25), np.float32(0.25), np.float64(0.25)], ids=lambda x: x.dtype.name
)
def test_scale_of_any_real_type(scale):
    q, k, v = inputs()
    assert np.array_equal(spattn.attention(q, k, v, scale=scale), spattn.attention(q, k, v, scale=0.25))


@pytest.mark.parametrize("scale", [2, np.int8(2), np.uint64(2)])
def test_scale_of_any_integer_type(scale):
    q, k, v = inputs()
    assert np.array_equal(spattn.attention(q, k, v, scale=scale), spattn.attention(q, k, v, scale=2.0))


@pytest.mark.parametrize("torch_too", [False, True])
@pytest.mark.parametrize("bad", [None, 5, b"cpu", ["cpu"], np.array("cpu"), {}], ids=repr)
def test_backend_that_is_no_name(bad, torch_too):
    given = arguments(pytest.importorskip("torch").from_numpy if torch_too else lambda x: x)
    q, k, v = (given[name] for name in "qkv")
    for attend in (
        lambda: spattn.attention(q, k, v, backend=bad),
        lambda: spattn.attention_backward(given["dout"], q, k, v, given["out"], given["lse"], backend=bad),
    ):
        with pytest.raises(TypeError, match=f"^backend: expected a name, got {type(bad).__name__}$"):
            attend()


@pytest.mark.parametrize("bad", [None, 1, "yes", [], np.array(True)], ids=repr)
def test_return_lse_that_is_no_bool(bad):
    with pytest.raises(TypeError, match=f"^return_lse: expected a bool, got {type(bad).__name__}$"):
        spattn.attention(*inputs(), return_lse=bad)


@pytest.mark.parametrize("flag", [True, np.True_])
def test_return_lse_of_either_bool(flag):
    out, lse = spattn.attention(*inputs(), return_lse=flag)
    assert out.shape[:3] == lse.shape


@pytest.mark.parametrize("bad", [5, b"tf32", True, np.array("tf32"), ["tf32"]], ids=repr)
def test_precision_that_is_no_name(bad):
    with pytest.raises(TypeError, match=f"^precision: expected None or 'tf32', got {type(bad).__name__}$"):
        spattn.attention(*inputs(), precision=bad)
