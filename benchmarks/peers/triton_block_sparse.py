"""Block-sparse float32 attention in Triton, forward: a contender of acsr_cuda.py.

Queries are cut into blocks of BLOCK_Q, keys into blocks of BLOCK_KV. Full blocks and partial blocks each have a CSR
index; a partial block stores one word of BLOCK_KV bits per query. A program runs an online softmax over one query block
of one head, full blocks first; programs with the most blocks start first.
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def _step(s, v, top, total, acc, PRECISION: tl.constexpr):
    """Online softmax update with one block of scores (in powers of two) and values."""
    new = tl.maximum(top, tl.max(s, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)  # rows without a pair so far
    p = tl.exp2(s - finite[:, None])
    shrink = tl.exp2(top - finite)
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision=PRECISION)
    return new, total * shrink + tl.sum(p, 1), acc


@triton.jit
def _forward(
    q,
    k,
    v,
    out,
    order,
    whole_indptr,
    whole_indices,
    partial_indptr,
    partial_indices,
    words,
    tokens,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One query block of one head."""
    row = tl.load(order + tl.program_id(1))
    base = tl.program_id(0).to(tl.int64) * tokens * HEAD_DIM
    channel = tl.arange(0, HEAD_DIM)[None, :]
    bit = tl.arange(0, BLOCK_KV)[None, :]
    query = tl.arange(0, BLOCK_Q)
    at_q = base + (row * BLOCK_Q + query)[:, None] * HEAD_DIM + channel
    at_kv = base + tl.arange(0, BLOCK_KV)[:, None] * HEAD_DIM + channel
    queries = tl.load(q + at_q) * scale
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)
    for i in range(tl.load(whole_indptr + row), tl.load(whole_indptr + row + 1)):
        at = at_kv + tl.load(whole_indices + i) * (BLOCK_KV * HEAD_DIM)
        s = tl.dot(queries, tl.trans(tl.load(k + at)), input_precision=PRECISION)
        top, total, acc = _step(s, tl.load(v + at), top, total, acc, PRECISION)
    for i in range(tl.load(partial_indptr + row), tl.load(partial_indptr + row + 1)):
        at = at_kv + tl.load(partial_indices + i) * (BLOCK_KV * HEAD_DIM)
        s = tl.dot(queries, tl.trans(tl.load(k + at)), input_precision=PRECISION)
        word = tl.load(words + i * BLOCK_Q + query)
        s = tl.where(((word[:, None] >> bit) & 1) != 0, s, float("-inf"))
        top, total, acc = _step(s, tl.load(v + at), top, total, acc, PRECISION)
    tl.store(out + at_q, acc / total[:, None])


def layout(mask: torch.Tensor, block_q: int, block_kv: int) -> list[torch.Tensor]:
    """Launch order of the rows, CSR of full blocks, CSR of partial blocks, and their words, for a square mask."""
    side = len(mask)
    if side % block_q or side % block_kv or not mask.any(1).all():
        raise ValueError("mask: the length must be a multiple of the blocks, and every query needs a key")
    cells = mask.view(side // block_q, block_q, side // block_kv, block_kv).transpose(1, 2)
    pairs = cells.sum((2, 3))
    whole = pairs == block_q * block_kv
    partial = (pairs > 0) & ~whole
    order = torch.argsort((pairs > 0).sum(1), descending=True, stable=True).int()
    bits = torch.arange(block_kv, device=mask.device)
    words = (cells[partial].long() << bits).sum(-1)
    return [order, *_rows(whole), *_rows(partial), words if block_kv > 32 else words.int()]


def _rows(blocks: torch.Tensor) -> list[torch.Tensor]:
    """CSR index of a boolean block table."""
    indptr = torch.nn.functional.pad(blocks.sum(1).cumsum(0), (1, 0))
    return [indptr.int(), blocks.nonzero()[:, 1].int()]


def attention(mask: torch.Tensor, precision: str, block_q: int, block_kv: int, warps: int, stages: int) -> Callable:
    """Attention over a mask: a function of contiguous q, k, v of batch 1."""
    blocks = layout(mask, block_q, block_kv)

    def call(q, k, v):
        out = torch.empty_like(q)
        scale = math.log2(math.e) / math.sqrt(q.shape[3])
        constants = {"HEAD_DIM": q.shape[3], "BLOCK_Q": block_q, "BLOCK_KV": block_kv, "PRECISION": precision}
        grid = (q.shape[1], q.shape[2] // block_q)
        _forward[grid](q, k, v, out, *blocks, q.shape[2], scale, **constants, num_warps=warps, num_stages=stages)
        return out

    return call
