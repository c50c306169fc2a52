"""Under torch.autocast, attention casts what scaled_dot_product_attention casts, and nothing else."""

import importlib

import numpy as np
import pytest

import spattn
from spattn.patterns import Causal

torch = pytest.importorskip("torch")
importlib.import_module("spattn.torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

CAUSAL = Causal()
LOW = [torch.bfloat16, torch.float16]


@pytest.fixture
def operands():
    """q, k and v in float32 that require a gradient."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 9, 8, generator=generator).requires_grad_() for _ in range(3))


def through_attention(q, k, v):
    return spattn.attention(q, k, v, CAUSAL)


def through_the_operator(q, k, v):
    return torch.ops.spattn.attention(q, k, v, CAUSAL.to_json(), None, None, "auto", None)[0]


def in_a_group(q, k, v):
    return spattn.grouped_attention([(q, k, v, CAUSAL), (q, k, v, CAUSAL)])[1]


CALLS = [through_attention, through_the_operator, in_a_group]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("call", CALLS)
def test_as_pytorch_casts(call, dtype, operands):
    """Also where a rotary embedding leaves q and k in float32 and v has the low precision already."""
    for given in (operands, (*operands[:2], operands[2].detach().to(dtype))):
        plain = call(*(x.detach().to(dtype) for x in given))
        for _ in range(2):  # the second call is a prepared one
            with torch.autocast("cpu", dtype):
                out = call(*given)
                want = scaled_dot_product_attention(*given, is_causal=True)
            assert out.dtype == want.dtype == dtype and torch.equal(out, plain)
            torch.testing.assert_close(out, want, rtol=0, atol=torch.finfo(dtype).eps)
            (mine,), (theirs,) = (torch.autograd.grad(x.float().sum(), given[:1]) for x in (out, want))
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)


def test_a_backward_inside_of_autocast(operands):
    with torch.autocast("cpu", torch.bfloat16):
        spattn.attention(*operands, CAUSAL).float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in operands)


@pytest.mark.parametrize("call", CALLS)
def test_float64_and_calls_outside_are_as_they_are(call, operands):
    """Whichever of them was prepared first; autocast of another device casts nothing, nor does it cast NumPy's."""
    wide = tuple(x.detach().double() for x in operands)
    for _ in range(2):
        assert call(*operands).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert call(*operands).dtype == torch.bfloat16
            assert call(*wide).dtype == torch.float64
            with torch.autocast("cpu", enabled=False):
                assert call(*operands).dtype == torch.float32
            given = [x.detach().numpy() for x in operands]
            assert spattn.attention(*given, CAUSAL).dtype == np.float32
        torch.set_autocast_enabled("cuda", True)
        assert call(*operands).dtype == torch.float32
        torch.set_autocast_enabled("cuda", False)
        assert call(*operands).dtype == torch.float32


def test_float64_beside_float32_is_refused(operands):
    """As by scaled_dot_product_attention, which does not cast float64."""
    q, k, v = operands
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="^v: expected dtype bfloat16 like q"):
        spattn.attention(q, k, v.double(), CAUSAL)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_graph(backend, operands):
    """A graph that was made outside of autocast is not taken inside of it, and the other way round."""
    torch._dynamo.reset()
    compiled = torch.compile(through_attention, fullgraph=True, backend=backend)
    for _ in range(2):
        assert compiled(*operands).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            out, want = compiled(*operands), through_attention(*operands)
        assert out.dtype == torch.bfloat16 and torch.equal(out, want)
    assert torch.autograd.grad(out.float().sum(), operands[:1])[0].dtype == torch.float32


def test_casts_beyond_memory():
    """MemoryError, as without autocast; PyTorch's allocator raises RuntimeError."""
    q = torch.ones(1, 1, 1, 1).expand(2**20, 2**12, 4, 8)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), pytest.raises(MemoryError):
            spattn.attention(q, q, q)


def test_plans_are_those_of_the_cast_operands():
    q = torch.ones(1, 2, 200, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = spattn.plan_for("causal", q, q, q)
    x = q.bfloat16()
    assert found is spattn.plan_for("causal", x, x, x)
