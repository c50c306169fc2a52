"""Strides, alignment, size: any array that a library can make."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import cuda, patterns
from spattn.arrays import namespace_of
from spattn.cuda.host import repeat
from spattn.testing import LAYOUTS, inputs

pytestmark = [pytest.mark.family("sm80"), pytest.mark.gpu]

PATTERN = patterns.SlidingWindow(40, 20)


def run(q, k, v, pattern=PATTERN):
    return cuda.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cuda"), q.shape[3] ** -0.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_layouts(check, layout, dtype):
    check(PATTERN, *inputs(2, 4, 2, 150, 150, 64, dtype=dtype, layout=layout))


def test_torch_layouts(torch):
    """Views of one memory give the bits that copies of them give."""
    base = torch.randn(2, 200, 4, 3 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    x = base.permute(0, 2, 1, 3)
    views = {
        "batch, rows, heads": x[..., :64],
        "misaligned": x[..., 1:65],
        "columns apart": x[..., : 2 * 64 : 2],
        "rows apart": x[:, :, ::2, 64:128],
        "one head for all": x[:, :1, :, :64].expand(-1, 4, -1, -1),
        "one row for all": x[:, :, :1, :64].expand(-1, -1, 150, -1),
        "overlapping": base.as_strided((2, 4, 150, 64), (9000, 800, 1, 1)),
        "transposed": torch.randn(2, 4, 64, 200, device="cuda", dtype=torch.bfloat16).mT,
    }
    for name, view in views.items():
        q, k, v = view, view.flip(2), view
        got = run(q, k, v)
        expected = run(*(t.contiguous() for t in (q, k, v)))
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b), name


def test_negated_view(torch):
    """PyTorch may hold a negation as a flag on the tensor."""
    x = torch.randn(1, 2, 100, 64, device="cuda")
    flagged = torch._neg_view(x)
    for a, b in zip(run(flagged, x, x), run(-x, x, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_layout_of_the_result(torch, order):
    """The result lies in memory as q does, so a model's reshape of it copies nothing."""
    back = [order.index(axis) for axis in range(4)]
    q = torch.randn(*(((2, 4, 100, 64)[axis]) for axis in order), device="cuda").permute(back)
    out, lse = run(q, q, q)
    assert out.stride() == q.stride() and out.shape == q.shape and lse.is_contiguous()


def test_cupy_layouts(cupy):
    base = cupy.random.standard_normal((2, 150, 4, 130), dtype=np.float32).transpose(0, 2, 1, 3)
    for x in (base[..., :64], base[..., 1:65], base[:, :, ::-1, :64], base[..., :128:2]):
        for a, b in zip(run(x, x, x), run(*[cupy.ascontiguousarray(x)] * 3), strict=True):
            assert cupy.array_equal(a, b)


def test_offsets_beyond_32_bits(torch):
    """Rows, heads and batch entries whose element offsets pass 2³¹ and 2³²."""
    free, _ = torch.cuda.mem_get_info()
    elements = 5 << 30
    if free < 2 * elements + (1 << 30):
        pytest.skip(f"needs {2 * elements >> 30} GiB of GPU memory, {free >> 30} GiB are free")
    store = torch.empty(elements, device="cuda", dtype=torch.bfloat16)
    for strides in ((1 << 31, 1 << 30, 1 << 23, 1), (4096, 1 << 31, 1 << 24, 1), (1 << 32, 64 << 10, 64, 1)):
        view = store.as_strided((2, 2, 65, 64), strides)
        values = torch.randn(2, 2, 65, 64, device="cuda", dtype=torch.bfloat16)
        view.copy_(values)
        for a, b in zip(run(view, view, view), run(values, values, values), strict=True):
            assert torch.equal(a, b)


def test_no_write_outside_the_result(torch, monkeypatch):
    """Bytes around the result keep their values."""
    guard = torch.full((1 << 20,), 7.0, device="cuda", dtype=torch.bfloat16)
    q, k, v = torch.randn(3, 1, 2, 77, 72, device="cuda", dtype=torch.bfloat16)
    kind = namespace_of(q)
    original = kind.empty
    places = []

    def inside_guard(like, shape, dtype, order=None):
        if dtype != "bfloat16":
            return original(like, shape, dtype, order)
        size = int(np.prod(shape))
        places.append((4096, size))
        return guard[4096 : 4096 + size].view(shape)

    with monkeypatch.context() as patch:
        patch.setattr(repeat, "Repeated", lambda general, *args: general)
        patch.setattr(kind, "empty", inside_guard)
        out, _ = run(q, k, v)
    start, size = places[-1]
    assert torch.equal(out, run(q, k, v)[0])
    assert (guard[:start] == 7).all() and (guard[start + size :] == 7).all()
