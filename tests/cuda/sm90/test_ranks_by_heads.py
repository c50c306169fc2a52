"""Heads of a rank have the bits of the whole call, computed together or one after the other."""

import functools

import pytest

torch = pytest.importorskip("torch")

import spattn  # noqa: E402
from spattn import patterns as p  # noqa: E402
from spattn.cuda import families  # noqa: E402
from spattn.cuda.driver import device  # noqa: E402
from spattn.distributed._by_heads import ByHeads, OnHopper  # noqa: E402
from spattn.distributed._plans import Shape, call_of, whole_plan  # noqa: E402
from spattn.distributed._shardings import named  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.family("sm90")]

PATTERNS = {
    "causal": p.Causal(),  # long enough for fused gradients
    "strided": p.strided(64),
    "longformer": p.longformer(200, global_tokens=33),
    "union": p.Causal() & (p.Sinks(5) | p.SlidingWindow(300, 0) | p.DilatedWindow(40, 0, 7)),
    "documents": p.Causal() & p.Documents((1700, 90, 1310)) | p.SlidingWindow(7),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("heads", [(16, 16), (8, 4)], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_bits(name, heads, ranks):
    pattern, length, head_dim = PATTERNS[name], 8200 if name == "causal" else 3100, 64 if name == "strided" else 128
    sizes = [(1, of, length, head_dim) for of in (heads[0], *heads[1:] * 2, heads[0])]
    q, k, v, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = spattn.attention(*leaves, pattern)
    want = out.detach(), *torch.autograd.grad(out, leaves, dout)
    shape = Shape(1, *heads, length, head_dim, head_dim)
    call = call_of(shape, "bfloat16", device="cuda")
    plan, gpu = whole_plan(pattern, call), device.get(0)
    later = functools.partial(whole_plan, pattern, call, backward=True)
    kernels = OnHopper(plan, later, call, ranks, gpu, families.of_call(call, gpu))
    for rank in range(ranks):
        q_, k_, v_, dout_ = (x.chunk(ranks, 1)[rank].contiguous() for x in (q, k, v, dout))
        results = [torch.full_like(x, torch.nan) for x in (q_, q_, k_, v_)]
        lse = torch.full(q_.shape[:3], torch.nan, device="cuda")
        made = ByHeads(lambda: None, named("contiguous", shape, ranks, plan), shape, q.device, kernels)
        for backward in (False, True):
            for part in made._parts if kernels.in_parts(backward) else [made._all]:
                of = map(part.of, (dout_, q_, k_, v_, results[0], lse))
                if backward:
                    kernels.backward(list(of), list(map(part.of, results[1:])))
                else:
                    kernels.forward(*list(of)[1:])
        for name_, got, whole in zip(("out", "dq", "dk", "dv"), results, want, strict=True):
            assert torch.equal(got, whole.chunk(ranks, 1)[rank]), (name_, rank)
    assert kernels.in_parts(True) == (name != "causal" or heads == (8, 4))  # the others are fused
