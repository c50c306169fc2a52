"""Sparse attention as separate SDDMM, softmax and SpMM kernels over a CSR index."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import statistics
import time
import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse
import torch

from spattn import patterns as sp

_GATHER = 1 << 12  # pairs per gather of the NumPy SDDMM: the fastest of 2^9 … 2^15


@dataclass(frozen=True)
class CsrIndex:
    """The allowed pairs in CSR: the inspection of the unfused pipelines. Each form is made on first use."""

    indptr: np.ndarray
    indices: np.ndarray

    @classmethod
    def of(cls, problem) -> CsrIndex:
        """From the pattern's own index set."""
        return cls.of_pattern(problem.pattern, problem.tokens)

    @classmethod
    def of_pattern(cls, pattern: sp.Pattern, tokens: int) -> CsrIndex:
        """From the pattern's own index set."""
        indptr, indices = pattern.index_set(tokens, tokens).to_csr()
        return cls(np.asarray(indptr, dtype=np.int32), np.asarray(indices, dtype=np.int32))

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1

    @cached_property
    def counts(self) -> np.ndarray:
        """Keys of each row."""
        return np.diff(self.indptr)

    @cached_property
    def rows(self) -> np.ndarray:
        """Row of each pair."""
        return np.repeat(np.arange(self.tokens, dtype=np.int32), self.counts)

    @cached_property
    def torch_indptr(self) -> torch.Tensor:
        """int64: torch's sampled_addmm is seven times slower with int32."""
        return torch.from_numpy(self.indptr.astype(np.int64))

    @cached_property
    def torch_indices(self) -> torch.Tensor:
        """int64."""
        return torch.from_numpy(self.indices.astype(np.int64))

    @cached_property
    def torch_counts(self) -> torch.Tensor:
        """Keys of each row."""
        return torch.from_numpy(self.counts.astype(np.int64))

    @cached_property
    def zeros(self) -> torch.Tensor:
        """The index with zero values, for sampled_addmm."""
        return self.as_torch(torch.zeros(len(self.indices)))

    def as_torch(self, values: torch.Tensor) -> torch.Tensor:
        """A torch CSR matrix with these values."""
        size = (self.tokens, self.tokens)
        return torch.sparse_csr_tensor(self.torch_indptr, self.torch_indices, values, size, check_invariants=False)

    def as_scipy(self, values: np.ndarray) -> scipy.sparse.csr_matrix:
        """A SciPy CSR matrix with these values that shares the index."""
        matrix = scipy.sparse.csr_matrix((self.tokens, self.tokens), dtype=np.float32)
        matrix.data, matrix.indices, matrix.indptr = values, self.indices, self.indptr
        return matrix


def _sddmm_gather(index: CsrIndex, q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    q, k, pairs = q.numpy(), k.numpy(), len(index.indices)
    values = np.empty(pairs, dtype=np.float32)
    for first in range(0, pairs, _GATHER):
        piece = slice(first, first + _GATHER)
        np.einsum("ij,ij->i", q[index.rows[piece]], k[index.indices[piece]], out=values[piece])
    values *= np.float32(q.shape[1] ** -0.5)
    return values


def _sddmm_torch(index: CsrIndex, q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    return torch.sparse.sampled_addmm(index.zeros, q, k.t(), beta=0, alpha=q.shape[1] ** -0.5).values().numpy()


def _softmax_numpy(index: CsrIndex, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    starts = index.indptr[:-1]
    weights = np.repeat(np.maximum.reduceat(values, starts), index.counts)
    np.subtract(values, weights, out=weights)
    np.exp(weights, out=weights)
    return weights, np.add.reduceat(weights, starts)


def _softmax_torch(index: CsrIndex, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, offsets = torch.from_numpy(values), index.torch_indptr
    largest = torch.segment_reduce(values, "max", offsets=offsets)
    weights = torch.repeat_interleave(largest, index.torch_counts, output_size=len(values))
    torch.sub(values, weights, out=weights).exp_()
    return weights.numpy(), torch.segment_reduce(weights, "sum", offsets=offsets).numpy()


def _spmm_scipy(index: CsrIndex, weights: np.ndarray, v: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(index.as_scipy(weights) @ v.numpy())


def _spmm_torch(index: CsrIndex, weights: np.ndarray, v: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(index.as_torch(torch.from_numpy(weights)), v)


def _spmm_mkl(index: CsrIndex, weights: np.ndarray, v: torch.Tensor) -> torch.Tensor:
    from sparse_dot_mkl import dot_product_mkl

    return torch.from_numpy(dot_product_mkl(index.as_scipy(weights), v.numpy()))


# Kernels by library. Softmax leaves the division by the row sum to the output, which is 8 times smaller.
# NumPy: gathered rows and einsum; maximum.reduceat and add.reduceat. torch: sparse.sampled_addmm; segment_reduce;
# sparse.mm, which is MKL's.
SDDMM = {"NumPy": _sddmm_gather, "torch": _sddmm_torch}
SOFTMAX = {"NumPy": _softmax_numpy, "torch": _softmax_torch}
SPMM = {"SciPy": _spmm_scipy, "torch (MKL)": _spmm_torch, "sparse_dot_mkl": _spmm_mkl}
SCIPY, TORCH = ("NumPy", "NumPy", "SciPy"), ("torch", "torch", "torch (MKL)")  # single-library pipelines


# Forms of the index that each kernel uses, besides the CSR arrays.
_NEEDS = (
    {"NumPy": ("rows",), "torch": ("zeros",)},
    {"NumPy": ("counts",), "torch": ("torch_counts", "torch_indptr")},
    {"SciPy": (), "torch (MKL)": ("torch_indices",), "sparse_dot_mkl": ()},
)


class Pipeline:
    """One kernel of each kind, head after head; the values of all pairs go through memory in between.

    Attributes
    ----------
    stage_ms : dict of list of float
        CPU milliseconds of each stage, one entry per call.
    """

    def __init__(self, index: CsrIndex, sddmm: str, softmax: str, spmm: str):
        self.index, self.names = index, (sddmm, softmax, spmm)
        self._kernels = SDDMM[sddmm], SOFTMAX[softmax], SPMM[spmm]
        self.stage_ms: dict[str, list[float]] = {"SDDMM": [], "softmax": [], "SpMM": []}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of (1, heads, tokens, head_dim) float32 tensors."""
        sddmm, softmax, spmm = self._kernels
        out, clock = torch.empty_like(q), [0.0] * 3
        for head in range(q.shape[1]):
            at = [time.process_time()]
            values = sddmm(self.index, q[0, head], k[0, head])
            at.append(time.process_time())
            weights, sums = softmax(self.index, values)
            at.append(time.process_time())
            torch.div(spmm(self.index, weights, v[0, head]), torch.from_numpy(sums)[:, None], out=out[0, head])
            at.append(time.process_time())
            clock = [c + b - a for c, (a, b) in zip(clock, itertools.pairwise(at), strict=True)]
        for stage, seconds in zip(self.stage_ms, clock, strict=True):
            self.stage_ms[stage].append(1e3 * seconds)
        return out

    def forget(self) -> None:
        """Clear the stage times."""
        self.stage_ms = {stage: [] for stage in self.stage_ms}

    def medians(self) -> dict[str, float]:
        """Median milliseconds of each stage."""
        return {f"{stage}_ms": round(statistics.median(times), 3) for stage, times in self.stage_ms.items()}


def prepare(index: CsrIndex, names: tuple[str, ...]) -> None:
    """Make the forms of the index that these kernels use."""
    for needs, name in zip(_NEEDS, names, strict=True):
        for form in needs[name]:
            getattr(index, form)


def quiet_torch_sparse() -> None:
    """Silence torch's once-per-process warning that CSR tensors are a beta feature."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CsrIndex(np.array([0, 1], dtype=np.int32), np.array([0], dtype=np.int32)).zeros  # noqa: B018


def why_no_sparse_dot_mkl() -> str | None:
    """None if sparse_dot_mkl can be imported, else the reason; sets the path of pip's MKL."""
    try:
        found = [f for f in importlib.metadata.files("mkl") or () if f.name.startswith("libmkl_rt.so")]
        os.environ.setdefault("MKL_THREADING_LAYER", "SEQUENTIAL")
        if found:
            os.environ.setdefault("MKL_RT", str(found[0].locate().resolve()))
        import sparse_dot_mkl  # noqa: F401
    except ImportError as error:  # includes PackageNotFoundError
        return f"{error}; pip install mkl sparse_dot_mkl"
    return None
