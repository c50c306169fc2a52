"""Plans whose places are looked up on Hopper: tokens in another order, and keys gathered for each query tile."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import cuda, patterns
from spattn.request.call import Call
from spattn.schedule import compiler
from spattn.testing import Expectation, inputs

pytestmark = pytest.mark.family("sm90")

CLUSTERS = patterns.Clusters(np.arange(300) ** 2 % 17)
BY_HEAD = patterns.PerHead([patterns.Clusters(np.arange(300) % 7), patterns.Clusters(np.arange(300) ** 2 % 11)])
JOINED = CLUSTERS & patterns.Causal()


def scattered(share, q_len=300, kv_len=300, seed=0):
    """Pairs at random, a row and a column of them without any."""
    allowed = np.random.default_rng(seed).random((q_len, kv_len)) < share
    allowed[17] = allowed[:, 5] = False
    return patterns.interop.from_pairs(*allowed.nonzero(), q_len, kv_len)


def run(arrays, made):
    """Results, as NumPy arrays, of arrays in host memory."""
    return cuda.forward(*arrays, made, arrays[0].shape[3] ** -0.5)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("pattern", [CLUSTERS, BY_HEAD, JOINED], ids=["one", "by head", "joined"])
@pytest.mark.parametrize("block_q", [20, 64, 128])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 184, 256])
def test_orders(pattern, block_q, head_dim):
    """Of queries and of keys; by head; with lists cut into pieces whose rows are joined or merged."""
    arrays = inputs(2, 2, 1, 300, 300, head_dim, 128 if head_dim == 184 else head_dim, dtype="bfloat16")
    expected = Expectation(pattern, *arrays)
    for workers in (1, 9):
        made = compiler.plan(pattern, 300, heads=2, tile=(block_q, 64), workers=workers, ordered=True)
        assert made.q_order.size and made.kv_order.size
        expected.check(*run(arrays, made), f"{workers} workers")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("share", [0.002, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("block_q", [20, 64, 128])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 184, 256])
def test_gathered(share, block_q, head_dim):
    """Rows without keys and keys without rows among them."""
    pattern = scattered(share, 300, 417)
    arrays = inputs(1, 4, 2, 300, 417, head_dim, 128 if head_dim == 184 else head_dim, dtype="float16")
    expected = Expectation(pattern, *arrays)
    for workers in (1, 9):
        made = compiler.plan(pattern, 300, 417, heads=4, tile=(block_q, 64), workers=workers, gathered=True)
        assert made.kv_order.size and not made.q_order.size
        expected.check(*run(arrays, made), f"{workers} workers")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("block_q", [64, 128])
def test_hidden_values(assert_alike, block_q):
    """NaN and infinities reach the rows that see them; rows of large logits are computed again, from looked up keys."""
    pattern = scattered(0.05)
    q, k, v = inputs(1, 2, 2, 300, 300, 64, dtype="bfloat16")
    k[:, :, 5], v[:, :, 5] = np.nan, np.inf  # a key that no row sees
    k[:, 1, 40], v[:, 0, 80], q[:, :, 3] = np.nan, np.inf, 1e30
    for own, how in ((pattern, {"gathered": True}), (CLUSTERS, {"ordered": True})):
        results = [
            run((q, k, v), compiler.plan(own, 300, heads=2, tile=tile, **options))
            for tile, options in (((block_q, 64), how), ((128, 64), {}))
        ]
        assert np.isnan(results[0][0].astype(np.float32)).any()
        assert_alike(*results)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_many_tasks(torch):
    """More tasks than blocks, each shorter than the ring of steps: whoever waits for a stage hands over the others."""
    pattern = scattered(0.004, 4096, 4096)
    q, k, v = (torch.randn(2, 16, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for block_q in (16, 64, 128):
        plain = compiler.plan(pattern, 4096, batch=2, heads=16, tile=(128, 64))
        made = compiler.plan(pattern, 4096, batch=2, heads=16, tile=(block_q, 64), gathered=True)
        call = Call.of(q, k, v)
        (out, _), (expected, _) = (cuda.prepare(call, own)(q, k, v, 0.125) for own in (made, plain))
        torch.testing.assert_close(out, expected, atol=0.04, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.usefixtures("portable_allowed")
def test_arrays_that_hopper_cannot_read(torch):
    """The portable kernels look nothing up, and get a plan of the pattern that they can execute."""
    pattern = scattered(0.02)
    arrays = inputs(1, 2, 2, 300, 300, 64, dtype="bfloat16")
    made = compiler.plan(pattern, 300, heads=2, tile=(49, 64), gathered=True)
    shifted = []
    for x in arrays:
        x = torch.from_numpy(x.astype(np.float32)).cuda().bfloat16()
        room = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
        shifted.append(room.copy_(x))
    out, lse = cuda.prepare(Call.of(*shifted, return_lse=True), made)(*shifted, 0.125)
    out = out.float().cpu().numpy().astype(arrays[0].dtype)
    Expectation(pattern, *arrays).check(out, lse.cpu().numpy())
