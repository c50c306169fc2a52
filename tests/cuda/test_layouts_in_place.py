"""Layouts on a GPU: tensor maps and strides are those of the arrays that were given, and of results like them."""

from __future__ import annotations

import pytest

import spattn
from spattn import patterns
from spattn.request.call import Call

pytestmark = [pytest.mark.family("sm80"), pytest.mark.gpu]

GRID = (18, 22)
NEAR = patterns.Neighborhood(GRID, 7)
PACKED = patterns.Causal() & patterns.Documents.from_cu_seqlens([0, 150, 151, 396])
CASES = {
    "bshd": ((3, 396), patterns.SlidingWindow(70), "bshd"),
    "bshd, prefix": ((3, 396), patterns.Prefix(patterns.Neighborhood((17, 23), 5), 5), "bshd"),
    "thd": ((396,), PACKED, "thd"),
    "grid": ((3, *GRID), NEAR, "bshd"),
}


@pytest.mark.parametrize("family", ["sm90", "sm80"], indirect=True)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_both_passes_read_and_write_in_place(torch, family, case):
    """The bits of a call of views in the usual order."""
    tokens, pattern, layout = case
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v, dout = (torch.randn(*tokens, heads, 64, **options) for heads in (4, 2, 2, 4))
    call = Call.of(q, k, v, layout=layout)
    assert [x.data_ptr() for x in (call.q, call.k, call.v)] == [x.data_ptr() for x in (q, k, v)]
    out, lse = spattn.attention(q, k, v, pattern, layout=layout, return_lse=True)
    found = spattn.attention_backward(dout, q, k, v, out, lse, pattern, layout=layout)
    assert all(x.is_contiguous() for x in (out, *found))
    batch = 1 if layout == "thd" else 3
    views = [x.reshape(batch, 396, -1, 64).transpose(1, 2) for x in (dout, q, k, v, out)]
    usual, usual_lse = spattn.attention(*views[1:4], pattern, return_lse=True)
    assert torch.equal(views[4], usual) and torch.equal(lse.reshape(usual_lse.shape), usual_lse)
    gradients = spattn.attention_backward(*views, usual_lse, pattern)
    for x, y in zip(found, gradients, strict=True):
        assert torch.equal(x.reshape(batch, 396, -1, 64).transpose(1, 2), y)
