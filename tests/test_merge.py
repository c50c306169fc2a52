"""Merging attention over disjoint sets of keys, against one call over all of them."""

import numpy as np
import pytest

import spattn
from spattn import patterns as p

PARTS = (slice(0, 3), slice(3, 4), slice(4, 12))


def axes(x, layout):
    return {"bhsd": x, "bshd": x.transpose(0, 2, 1, 3), "thd": x[0].transpose(1, 0, 2)}[layout]


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
@pytest.mark.parametrize("q_len", [4, 5], ids=["as many queries as heads", "others"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_all_layouts(layout, q_len, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, n, 8)).astype(dtype) for n in (q_len, 12, 12))
    found = [
        spattn.attention(*(axes(x, layout) for x in (q, k[:, :, own], v[:, :, own])), layout=layout, return_lse=True)
        for own in PARTS
    ]
    out, lse = spattn.merge_attentions(*zip(*found, strict=True), layout=layout)
    want = spattn.attention(*(axes(x, layout) for x in (q, k, v)), layout=layout, return_lse=True)
    for got, expected in zip((out, lse), want, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=0, atol={"float16": 4e-3, "float32": 3e-6}.get(dtype, 1e-13))


def test_rows_without_keys():
    """They add nothing, whatever their results are; a row that has none anywhere is 0."""
    outs = [np.full((1, 1, 3, 2), fill) for fill in (np.nan, 2.0)]
    lses = [np.full((1, 1, 3), -np.inf), np.array([[[0.0, 1.0, -np.inf]]])]
    outs[1][0, 0, 2] = np.inf
    out, lse = spattn.merge_attentions(iter(outs), iter(lses))
    assert out[0, 0].tolist() == [[2, 2], [2, 2], [0, 0]] and lse[0, 0].tolist() == [0, 1, -np.inf]


def test_pytorch_differentiates_it():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 12, 12))
    halves = [spattn.attention(q, k[:, :, own], v[:, :, own], return_lse=True) for own in PARTS]
    merged = torch.autograd.grad(spattn.merge_attentions(*zip(*halves, strict=True))[0].square().sum(), (q, k, v))
    whole = torch.autograd.grad(spattn.attention(q, k, v).square().sum(), (q, k, v))
    for got, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, expected)


OUT, LSE = np.zeros((1, 2, 3, 4), np.float32), np.zeros((1, 2, 3), np.float32)


@pytest.mark.parametrize(
    "outs, lses, options, error, message",
    [
        ([], [], {}, ValueError, "expected sequences of the same length"),
        ([OUT], [LSE, LSE], {}, ValueError, "got 1 and 2"),
        (None, [LSE], {}, TypeError, "^outs: expected a sequence of arrays, got NoneType"),
        ([OUT.tolist()], [LSE], {}, TypeError, r"^outs\[0\]: expected a NumPy, PyTorch, CuPy or JAX array, got list"),
        ([OUT.astype(int)], [LSE], {}, TypeError, r"^outs\[0\]: expected one of float32, .* got int64"),
        ([OUT], [LSE.astype(np.float16)], {}, TypeError, r"^lses\[0\]: expected one of float32, float64, got float16"),
        ([np.ma.array(OUT)], [LSE], {}, TypeError, "plain array"),
        ([OUT, OUT.astype(np.float64)], [LSE, LSE], {}, TypeError, r"^outs\[1\]: expected dtype float32"),
        ([OUT, OUT[:, :, :2]], [LSE, LSE], {}, ValueError, r"^outs\[1\]: expected shape"),
        ([OUT], [LSE], {"layout": "bshd"}, ValueError, r"^lses: expected shape \(1, 3, 2\) in layout 'bshd'"),
        ([OUT], [LSE], {"layout": "bdsh"}, ValueError, "^layout: expected one of"),
    ],
)
def test_what_is_refused(outs, lses, options, error, message):
    with pytest.raises(error, match=message):
        spattn.merge_attentions(outs, lses, **options)


def test_keywords_of_other_functions_get_a_hint():
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'; write pattern=\"causal\""):
        spattn.attention(OUT, OUT, OUT, is_causal=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'patern'$"):
        spattn.attention(OUT, OUT, OUT, patern=p.Causal())
    with pytest.raises(TypeError, match="got strided itself; call it"):
        spattn.attention(OUT, OUT, OUT, p.strided)
    with pytest.raises(TypeError, match=r"^plan: expected a Plan"):
        spattn.explain("causal")
