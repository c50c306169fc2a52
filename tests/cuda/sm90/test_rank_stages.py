"""The stages of ranks with GPUs: emulated on the host, and on one GPU the bits of one process."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import spattn  # noqa: E402
from spattn import patterns as p  # noqa: E402
from spattn.cuda import families  # noqa: E402
from spattn.distributed._on_gpu import OnGpu, readable  # noqa: E402
from spattn.distributed._plans import Shape, call_of, whole_plan  # noqa: E402
from spattn.distributed._shardings import NAMES, named  # noqa: E402
from spattn.testing.strategies import cases, compositions  # noqa: E402

pytestmark = pytest.mark.family("sm90")

HOPPER = families.FAMILIES[0]
GPU = SimpleNamespace(sm_count=132, name="emulated", capability=(9, 0))


class Wire:
    """Delivers rows from the whole arrays, and checks that what a rank sends are these rows."""

    def __init__(self, whole, apart=0.0):
        self.whole, self.apart, self.finished, self.bytes = whole, apart, True, 0

    def rows(self, block, number):
        heads, rows = (torch.from_numpy(x).to(self.whole[0].device) for x in block)
        return self.whole[number].flatten(0, 1)[heads][:, rows]

    def __call__(self, group, transfers, send, received):
        assert self.finished
        self.finished = not transfers
        for transfer, tensors in zip(transfers, send, strict=True):
            own = iter(tensors)
            for block in transfer.send:
                for number in range(len(self.whole)):
                    torch.testing.assert_close(next(own), self.rows(block, number), atol=self.apart, rtol=self.apart)
            assert next(own, None) is None

        def finish():
            assert not self.finished or not transfers
            self.finished = True
            for blocks in received:
                for block, tensors in blocks:
                    for number, x in enumerate(tensors):
                        x.copy_(self.rows(block, number))
                        self.bytes += x.nbytes

        return finish


class Emulated(OnGpu):
    """Computes stages in float64 from the rows that are held; its kernels read and write all rows of their tiles."""

    def allowed(self, plan):
        shape = self._shape
        at = np.arange(shape.length)
        own, index = self.pattern.variants(shape.batch, shape.heads_q)
        pairs = np.stack([x.bind(shape.length, shape.length).allows(at[:, None], at) for x in own])
        return torch.from_numpy(pairs[np.broadcast_to(index, shape[:2])])

    def whole(self, held):
        """The array, NaN at rows that are not in memory."""
        found = torch.full_like(held.x[:, :, :1], math.nan).repeat(1, 1, self._shape.length, 1)
        found[:, :, held.first : held.stop] = held.x
        return found

    def spread(self, held, touched):
        """The array, NaN at rows of no tile; the kernels read all rows from the first to the last of the tiles."""
        assert held.covers(touched) or touched.first == touched.stop
        self.copied += 0 if any(held.x.data_ptr() == x.data_ptr() for x in self.local) else held.x.shape[2]
        found = self.whole(held)
        found[:, :, torch.from_numpy(~touched.mask)] = math.nan
        return found

    def heads(self, x):
        return x.repeat_interleave(self._shape.heads_q // self._shape.heads_kv, 1)

    def write(self, held, touched, rows, values):
        """Write `values` at `rows`, (batch, heads, length) bool, which must be of tiles unless nothing reaches them."""
        assert not values[rows & torch.from_numpy(~touched.mask)].any()
        assert not rows[:, :, : held.first].any() and not rows[:, :, held.stop :].any()
        part = slice(held.first, held.stop)
        held.x[...] = torch.where(rows[:, :, part, None], values[:, :, part].to(held.x.dtype), held.x)

    def scores(self, q, k, allowed, scale):
        return torch.where(allowed, q @ k.transpose(2, 3) * scale, -math.inf)

    def _run_forward(self, stage, arrays, lse, scale):
        queries, keys, values, out = arrays
        assert out.covers(stage.queries)
        q, k, v = self.spread(queries, stage.queries), self.spread(keys, stage.keys), self.spread(values, stage.keys)
        allowed = self.allowed(self._plan)
        s = self.scores(q, self.heads(k), allowed, scale)
        own = torch.logsumexp(s, -1)
        weights = torch.where(allowed, torch.exp(s - own[..., None]), 0)
        made = torch.einsum("bhij,bhjd->bhid", weights, torch.nan_to_num(self.heads(v)))
        unread = torch.isnan(self.heads(v)[..., 0])[:, :, None] & allowed
        made[unread.any(-1)] = math.nan
        rows = torch.from_numpy(np.broadcast_to(stage.rows[self._plan.variant], lse.shape).copy())
        self.write(out, stage.queries, rows, made)
        lse[rows] = own[rows].float()

    def _run_backward(self, plan, stage, arrays, lse, results, scale):
        given = zip(arrays, (stage.queries, stage.queries, stage.keys, stage.keys, stage.queries), strict=True)
        dout, q, k, v, out = (self.spread(*x) for x in given)
        k, v, lse = self.heads(k), self.heads(v), lse.double()
        allowed = self.allowed(plan) & (lse > -math.inf)[..., None]
        weights = torch.where(allowed, torch.exp(self.scores(q, k, allowed, scale) - lse[..., None]), 0)
        delta = (dout * out).sum(-1, keepdim=True)
        of_scores = torch.where(allowed, weights * (dout @ v.transpose(2, 3) - delta), 0) * scale
        shape = self._shape
        groups = shape.batch, shape.heads_kv, shape.heads_q // shape.heads_kv, shape.length, -1

        def product(a, b):
            found = torch.nan_to_num(a) @ torch.nan_to_num(b)
            lost = (
                torch.isnan(a)
                | (allowed.transpose(2, 3) if a is not of_scores else allowed) & torch.isnan(b[..., 0])[:, :, None]
            )
            found[lost.any(-1)] = math.nan
            return found

        dq = product(of_scores, k)
        dk = product(of_scores.transpose(2, 3), q).view(groups).sum(2)
        dv = product(weights.transpose(2, 3), dout).view(groups).sum(2)
        rows = np.broadcast_to(stage.rows[plan.variant], lse.shape).copy()
        assert not stage.items.any() or results[0].covers(stage.queries)
        assert not stage.key_items.any() or results[1].covers(stage.keys)
        index = self.kinds(plan)
        keys = torch.from_numpy(np.broadcast_to(stage.key_rows[index], dk.shape[:3]).copy())
        self.write(results[0], stage.queries, torch.from_numpy(rows), dq)
        for held, x in zip(results[1:], (dk, dv), strict=True):
            self.write(held, stage.keys, keys, x)

    def kinds(self, plan):
        """The variant of each key-value head in the dK/dV work; heads with the same patterns share one."""
        shape = self._shape
        groups = np.broadcast_to(plan.variant, shape[:2]).reshape(shape.batch * shape.heads_kv, -1)
        alike = (groups == groups[:, :1]).all()
        _, kind = np.unique(groups[:, :1] if alike else groups, axis=0, return_inverse=True)
        return kind.reshape(shape.batch, shape.heads_kv)


def emulated_case(pattern, shape, name, world_size, seed):
    call = call_of(shape, "bfloat16")
    plan = HOPPER.plan_for(pattern, call, GPU, None, False)
    sharding = named(name, shape, world_size, plan)
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(shape.batch, heads, shape.length, width, generator=generator, dtype=torch.float64)
        for heads, width in ((shape.heads_q, 16), (shape.heads_kv, 16), (shape.heads_kv, 16), (shape.heads_q, 16))
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = spattn.attention(*leaves, pattern, return_lse=True, backend="cpu")
    want = [out, *torch.autograd.grad(out, leaves, dout)]
    out, lse = out.detach(), lse.detach()
    for rank in range(world_size):
        keys, rows = Wire((k, v)), Wire((q, dout, out, lse.float()[..., None]), 1e-6)
        own = Emulated(
            None,
            rank,
            sharding,
            shape,
            call,
            plan,
            lambda: HOPPER.plan_for(pattern, call, GPU, None, True),
            GPU,
            HOPPER,
            keys,
        )
        own.pattern, own.copied = pattern, 0
        own.local = [x[:, :, torch.from_numpy(sharding.rows(rank))] for x in (q, k, v, dout)]
        yield own, own.local, want, keys, rows


@settings(max_examples=25, deadline=None)
@given(
    st.one_of(cases(max_len=300), compositions(max_len=300)).filter(lambda case: case.sizes.q_len == case.sizes.kv_len),
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_emulated_ranks(case, name, world_size, seed):
    """Every row that a stage reads has come, and every row of a rank is written."""
    sizes = case.sizes
    shape = Shape(sizes.batch, sizes.heads_q, sizes.heads_kv, sizes.q_len, 16, 16)
    for own, (q, k, v, dout), want, keys, rows in emulated_case(case.pattern, shape, name, world_size, seed):
        at = torch.from_numpy(own._rows)
        own._exchange = keys
        out, lse, received = own.forward(q, k, v, 0.25)
        torch.testing.assert_close(out, want[0][:, :, at], atol=1e-9, rtol=1e-9)
        own._exchange = rows
        own.local = q, k, v, dout, out
        found = own.backward(dout, q, k, v, out, lse, received, 0.25)
        for got, expected in zip(found, want[1:], strict=True):
            torch.testing.assert_close(got, expected[:, :, at], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rank", range(4))
def test_windows_copy_rows_near_the_bounds(rank):
    """Most rows of contiguous shards are read where they are, and results have no rows of other ranks."""
    shape = Shape(1, 2, 2, 4096, 16, 16)
    case = list(emulated_case(p.SlidingWindow(60), shape, "contiguous", 4, 0))[rank]
    own, (q, k, v, dout), want, keys, rows = case
    own._exchange = keys
    out, lse, received = own.forward(q, k, v, 0.25)
    own.local, own._exchange = (q, k, v, dout, out), rows
    found = own.backward(dout, q, k, v, out, lse, received, 0.25)
    for got, expected in zip((out, *found), want, strict=True):
        torch.testing.assert_close(got, expected[:, :, own._rows], atol=1e-5, rtol=1e-5)
    assert 0 < own.copied <= 40 * 256
    for x in (out, *found):
        assert x.untyped_storage().nbytes() <= 8 * 2 * 16 * (1024 + 4 * 128)


#: Pattern, (batch, heads_q, heads_kv, length, head_dim, head_dim_v), name of the sharding, number of ranks.
ON_GPU = {
    "window": (p.SlidingWindow(100, 60), Shape(2, 4, 2, 1500, 64, 64), "contiguous", 3),
    "window, unaligned bounds": (p.SlidingWindow(100, 60), Shape(1, 16, 16, 5000, 128, 128), "contiguous", 2),
    "causal": (p.Causal(), Shape(1, 2, 2, 3000, 128, 128), "head_tail", 2),
    "causal, chunks": (p.Causal(), Shape(1, 4, 1, 1111, 64, 128), "contiguous", 4),
    "longformer": (p.longformer(60, global_tokens=tuple(range(20))), Shape(1, 4, 4, 2000, 128, 128), "contiguous", 2),
    "documents": (p.Causal() & p.Documents((700, 90, 1210)), Shape(1, 4, 2, 2000, 128, 128), "balanced", 2),
    "strided": (p.strided(32), Shape(1, 4, 4, 2048, 64, 64), "contiguous", 2),
    "dilated": (p.DilatedWindow(20, 20, 3), Shape(1, 2, 2, 1001, 64, 64), "striped", 2),
    "grid": (p.Neighborhood((40, 40), (7, 7)), Shape(1, 2, 2, 1600, 64, 64), "contiguous", 3),
    "heads": (
        p.PerHead((p.Causal(), p.SlidingWindow(90), p.strided(7), p.Full())),
        Shape(1, 4, 4, 1100, 64, 64),
        "contiguous",
        2,
    ),
    "sinks": (p.Causal() & (p.Sinks(4) | p.SlidingWindow(255, 0)), Shape(1, 8, 2, 4096, 128, 128), "contiguous", 4),
    "full": (p.Full(), Shape(1, 1, 1, 2500, 128, 128), "contiguous", 2),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("name", list(ON_GPU))
def test_ranks_on_one_gpu(name):
    """Forward and gradients of ranks have the bits of one rank; the forward and dK, dV those of spattn.attention."""
    on_one_gpu(*ON_GPU[name])


def on_one_gpu(pattern, shape, name, world_size):
    from spattn.cuda.driver import device

    call = call_of(shape, "bfloat16", None, "cuda:0")
    plan, gpu = whole_plan(pattern, call), device.get(0)
    sharding = named(name, shape, world_size, plan)
    own = plan, lambda: whole_plan(pattern, call, backward=True), gpu, families.of_call(call, gpu)
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v, dout = (
        torch.randn(shape.batch, heads, shape.length, width, generator=generator, device="cuda").bfloat16()
        for heads, width in (
            (shape.heads_q, shape.head_dim),
            (shape.heads_kv, shape.head_dim),
            (shape.heads_kv, shape.head_dim_v),
            (shape.heads_q, shape.head_dim_v),
        )
    )
    alone = named("contiguous", shape, 1, plan)
    one = OnGpu(None, 0, alone, shape, call, *own, Wire(()))
    out, lse, received = one.forward(q, k, v, call.scale)
    want = [out, *one.backward(dout, q, k, v, out, lse, received, call.scale)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = spattn.attention(*leaves, pattern)
    assert torch.equal(plain, out)
    for got, expected in zip(want[1:], torch.autograd.grad(plain, leaves, dout), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
    torch.full((1 << 28,), math.nan, device="cuda")  # freed memory holds NaN
    for rank in range(world_size):
        wire = Wire((k, v))
        of = OnGpu(None, rank, sharding, shape, call, *own, wire)
        at = torch.from_numpy(sharding.rows(rank)).cuda()
        local = [readable(x[:, :, at]) for x in (q, k, v)]
        mine, own_lse, received = of.forward(*local, call.scale)
        assert torch.equal(mine, out[:, :, at]) and torch.equal(own_lse, lse[:, :, at])
        of._exchange = Wire((q, dout, out, lse))
        found = of.backward(dout[:, :, at].contiguous(), *local, mine.contiguous(), own_lse, received, call.scale)
        for number, (got, expected) in enumerate(zip(found, want[1:], strict=True)):
            assert torch.equal(got, expected[:, :, at]), number


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_emulated_ranks_of_unlike_heads(name, world_size):
    """Rows that come for some heads alone stay in memory for later stages."""
    pattern = p.PerHead(
        (p.SlidingWindow(40), p.Causal() & p.Stride(5), p.longformer(20, global_tokens=(3, 170)), p.Full())
    )
    shape = Shape(1, 4, 4, 331, 16, 16)
    for own, (q, k, v, dout), want, keys, rows in emulated_case(pattern, shape, name, world_size, 1):
        at = torch.from_numpy(own._rows)
        own._exchange = keys
        out, lse, received = own.forward(q, k, v, 0.25)
        torch.testing.assert_close(out, want[0][:, :, at], atol=1e-9, rtol=1e-9)
        own._exchange, own.local = rows, (q, k, v, dout, out)
        found = own.backward(dout, q, k, v, out, lse, received, 0.25)
        for got, expected in zip(found, want[1:], strict=True):
            torch.testing.assert_close(got, expected[:, :, at], atol=1e-5, rtol=1e-5)
