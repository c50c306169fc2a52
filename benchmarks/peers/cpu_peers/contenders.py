"""Contenders on the CPU: all ways to compute the same attention.

A builder takes the problem, its inputs and the pass, does the work that a user would do once (plan, mask, compilation)
and returns a :class:`Contender`. Raises :class:`Unavailable` if the contender cannot run; the results list the reason.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import spattn

from . import unfused
from .problems import Inputs, Problem, mask_of


class Unavailable(Exception):
    """The contender does not run on this machine or for this problem."""


@dataclass
class Contender:
    """A call and the cost of its preparation.

    Attributes
    ----------
    call : callable
        ``() -> (out,)`` or ``() -> (out, dq, dk, dv)``, torch tensors (1, heads, tokens, head_dim).
    prepare_ms : float
        CPU time of plan, mask or index, without compilation.
    compile_ms : float or None
        CPU time of compilation and first call in this process, without the C++ compiler's process.
    allowed : {"pattern", "dense", "causal"}
        The pairs that it computes.
    """

    call: Callable[[], tuple]
    prepare_ms: float = 0.0
    compile_ms: float | None = None
    allowed: str = "pattern"


def build(name: str, problem: Problem, given: Inputs, both: bool) -> Contender:
    """Build a contender by name."""
    return _BUILDERS[name](problem, given, both)


def plan_of(problem: Problem, given: Inputs) -> spattn.Plan:
    """The plan that spattn executes on the CPU for these inputs."""
    return spattn.plan_for(problem.pattern, *given.arrays[:3], backend="cpu")


def versions() -> dict[str, str]:
    """Versions of the contenders' packages, and torch's CPU capability."""
    found = {name: _version(name) for name in ("torch", "numpy", "scipy", "natten", "mkl", "sparse_dot_mkl")}
    return found | {"torch cpu capability": torch.backends.cpu.get_cpu_capability()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _since(start: float) -> float:
    return 1e3 * (time.process_time() - start)


def _spattn(problem: Problem, given: Inputs, both: bool) -> Contender:
    q, k, v, dout, pattern = given.q, given.k, given.v, given.dout, problem.pattern
    start = time.process_time()
    plan_of(problem, given)
    prepared = _since(start)

    def forward():
        return (spattn.attention(q, k, v, pattern, backend="cpu"),)

    def forward_backward():
        out, lse = spattn.attention(q, k, v, pattern, backend="cpu", return_lse=True)
        return out, *spattn.attention_backward(dout, q, k, v, out, lse, pattern, backend="cpu")

    return Contender(forward_backward if both else forward, prepared)


def _torch_contender(function, given: Inputs, both: bool, **facts) -> Contender:
    """A differentiable torch function of q, k, v."""
    q, k, v = (
        (x.detach().clone().requires_grad_() for x in (given.q, given.k, given.v))
        if both
        else (given.q, given.k, given.v)
    )

    def forward():
        with torch.no_grad():
            return (function(q, k, v),)

    def forward_backward():
        out = function(q, k, v)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), given.dout)

    return Contender(forward_backward if both else forward, **facts)


def _sdpa_dense(problem: Problem, given: Inputs, both: bool) -> Contender:
    return _torch_contender(F.scaled_dot_product_attention, given, both, allowed="dense")


def _sdpa_causal(problem: Problem, given: Inputs, both: bool) -> Contender:
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _torch_contender(function, given, both, allowed="causal")


def _sdpa_boolean(problem: Problem, given: Inputs, both: bool) -> Contender:
    start = time.process_time()
    at = torch.arange(problem.tokens)
    mask = problem.mask_mod(0, 0, at[:, None], at[None, :])
    prepared = _since(start)

    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return _torch_contender(function, given, both, prepare_ms=prepared)


def _flex(problem: Problem, given: Inputs, both: bool) -> Contender:
    if both:
        raise Unavailable("FlexAttention has no backward pass on CPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    start = time.process_time()
    block_mask = create_block_mask(problem.mask_mod, None, None, problem.tokens, problem.tokens, device="cpu")
    prepared = _since(start)
    # Reset for each mask: from the second on, dynamo would compile for symbolic shapes or fall back to eager mode.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    start = time.process_time()
    with torch.no_grad():
        compiled(given.q, given.k, given.v, block_mask=block_mask)
    return _torch_contender(
        lambda q, k, v: compiled(q, k, v, block_mask=block_mask),
        given,
        both,
        prepare_ms=prepared,
        compile_ms=_since(start),
    )


def _banded(problem: Problem, given: Inputs, both: bool) -> Contender:
    """SDPA on slices of queries with the keys of their windows; twice as fast as one batch of padded bands."""
    side, tokens = problem.side, problem.tokens
    if not side:
        raise Unavailable("the pattern is not a window")
    step = max(1, side // 2)
    start = time.process_time()
    at = torch.arange(tokens)
    bands = []
    for first in range(0, tokens, step):
        queries, keys = slice(first, first + step), slice(max(0, first - side), first + step + side)
        bands.append((queries, keys, (at[queries, None] - at[None, keys]).abs() <= side))
    prepared = _since(start)

    def function(q, k, v):
        return torch.cat(
            [
                F.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=mask)
                for rows, keys, mask in bands
            ],
            dim=2,
        )

    return _torch_contender(function, given, both, prepare_ms=prepared)


def _numpy_masked(problem: Problem, given: Inputs, both: bool) -> Contender:
    if given.q.dtype != torch.float32:
        raise Unavailable("NumPy has no fast bfloat16 matrix product")
    q, k, v, dout = given.arrays
    start = time.process_time()
    blocked = ~mask_of(problem)
    prepared = _since(start)
    scale = np.float32(q.shape[-1] ** -0.5)

    def forward():
        s = np.matmul(q, k.swapaxes(-1, -2))
        s *= scale
        s[:, :, blocked] = -np.inf
        s -= s.max(axis=-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(axis=-1, keepdims=True)
        return s, np.matmul(s, v)

    def forward_backward():
        p, out = forward()
        dv = np.matmul(p.swapaxes(-1, -2), dout)
        ds = np.matmul(dout, v.swapaxes(-1, -2))
        ds -= (dout * out).sum(axis=-1, keepdims=True)
        ds *= p
        ds *= scale
        return tuple(torch.from_numpy(x) for x in (out, np.matmul(ds, k), np.matmul(ds.swapaxes(-1, -2), q), dv))

    return Contender(forward_backward if both else lambda: (torch.from_numpy(forward()[1]),), prepared)


def _scipy_csr(problem: Problem, given: Inputs, both: bool) -> Contender:
    if both or given.q.dtype != torch.float32:
        raise Unavailable("the SciPy pipeline is float32 and forward only")
    start = time.process_time()
    index = unfused.CsrIndex.of(problem)
    prepared = _since(start)
    pipeline = unfused.Pipeline(index, *unfused.SCIPY)
    return Contender(lambda: (pipeline(given.q, given.k, given.v),), prepared)


def _natten(problem: Problem, given: Inputs, both: bool) -> Contender:
    if both:
        raise Unavailable("NATTEN's CPU path (FlexAttention) has no backward pass")
    try:
        import natten
    except ImportError as error:
        raise Unavailable(f"NATTEN does not import: {error}") from error
    grid = problem.grid
    q, k, v = (
        x[0].transpose(0, 1).reshape(1, grid, grid, x.shape[1], x.shape[3]).contiguous()
        for x in (given.q, given.k, given.v)
    )

    def forward():
        with torch.no_grad():
            out = natten.na2d(q, k, v, kernel_size=13)
        return (out.reshape(1, grid * grid, *out.shape[3:]).transpose(1, 2),)

    return Contender(forward)


_BUILDERS = {
    "spattn": _spattn,
    "SDPA dense": _sdpa_dense,
    "SDPA causal": _sdpa_causal,
    "SDPA boolean mask": _sdpa_boolean,
    "FlexAttention": _flex,
    "banded SDPA": _banded,
    "NumPy dense masked": _numpy_masked,
    "SciPy CSR": _scipy_csr,
    "NATTEN": _natten,
}
