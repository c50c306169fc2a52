"""Softmax of each row of a CSR matrix in Triton: the middle kernel of study_cuda.py's unfused pipeline."""

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(values, indptr, weights, BLOCK: tl.constexpr):
    """One row: its maximum, the sum of its exponentials, and the quotients."""
    start, stop = tl.load(indptr + tl.program_id(0)), tl.load(indptr + tl.program_id(0) + 1)
    at = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(start, stop, BLOCK):
        top = tl.maximum(top, tl.load(values + first + at, mask=first + at < stop, other=float("-inf")))
    largest = tl.max(top, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(start, stop, BLOCK):
        total += tl.exp(tl.load(values + first + at, mask=first + at < stop, other=float("-inf")) - largest)
    scale = 1 / tl.sum(total, 0)
    for first in range(start, stop, BLOCK):
        inside = first + at < stop
        weight = tl.exp(tl.load(values + first + at, mask=inside, other=float("-inf")) - largest) * scale
        tl.store(weights + first + at, weight, mask=inside)


def row_softmax(values: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Weights of the values of a CSR matrix whose rows have at least one value."""
    weights = torch.empty_like(values)
    _softmax[(len(indptr) - 1,)](values, indptr, weights, BLOCK=256)
    return weights
