"""Gradients that PyTorch records of tensors on the GPU."""

from __future__ import annotations

import pytest

import spattn
from spattn import patterns

pytestmark = [pytest.mark.family("sm90"), pytest.mark.gpu, pytest.mark.usefixtures("hopper_kernels")]

WINDOW = patterns.SlidingWindow(40, 3)


@pytest.fixture
def leaves(torch):
    return [torch.randn(2, heads, 200, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)]


def test_recorded_gradients_are_those_of_the_backward(torch, leaves):
    """To the last bit, also of a gradient that comes with strides of 0, and on another stream."""
    with torch.no_grad():
        out, lse = spattn.attention(*leaves, WINDOW, return_lse=True)
        expected = spattn.attention_backward(torch.ones_like(out), *leaves, out, lse, WINDOW, dlse=2 * lse)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            recorded, its_lse = spattn.attention(*leaves, WINDOW, return_lse=True)
            got = torch.autograd.grad(recorded.sum() + its_lse.square().sum(), leaves)
        torch.cuda.synchronize()
        assert torch.equal(recorded, out) and all(map(torch.equal, got, expected))


def test_steps_in_a_graph(torch, leaves):
    """A captured step of forward and backward replays with other values."""
    for _ in range(2):
        spattn.attention(*leaves, WINDOW).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(spattn.attention(*leaves, WINDOW).sum(), leaves)
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    expected = torch.autograd.grad(spattn.attention(*leaves, WINDOW).sum(), leaves)
    assert all(map(torch.equal, got, expected))
