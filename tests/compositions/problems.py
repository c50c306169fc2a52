"""Arrays of a composition, what attention makes of them by :mod:`.oracle`, and how close to that results must be."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spattn.arrays import to_host
from spattn.testing import DTYPES, eps

from . import draws, oracle
from .draws import Arrays, Case, Source
from .oracle import Results

RELATIVE = 1e-11  # of float64 results, to the largest of them
LEAST = {"float16": 2.0**-24}  # the distance of numbers near 0, where a dtype has few exponents


@dataclass(frozen=True)
class Problem:
    """Arrays of a composition, whose log-sum-exp may have a gradient."""

    case: Case
    dtype: str
    arrays: Arrays
    with_dlse: bool
    scale: float
    mask: np.ndarray

    @functools.cached_property
    def attention(self) -> oracle.Attention:
        q, k, v, dout, dlse = self.arrays
        return oracle.Attention(q, k, v, self.mask, self.scale, dout, dlse if self.with_dlse else None)

    @property
    def results(self) -> Results:
        return self.attention.results

    @functools.cached_property
    def bounds(self) -> Results:
        """How far results may be off: float64's by `RELATIVE`, others' by what rounding errors of the dtype can amount
        to, in whatever order a kernel takes its steps."""
        if self.dtype == "float64":
            return self.attention.exact_to(RELATIVE)
        return self.attention.bounds(eps(DTYPES[self.dtype]), LEAST.get(self.dtype, 0.0))

    def wrong(self, got: Sequence[Any], names: Sequence[str] = Results._fields) -> list[str]:
        """What of these results is wrong; they may be of any library, and lie on a GPU."""
        return oracle.wrong([to_host(x) for x in got], self.results, self.bounds, names)


def of_arrays(
    case: Case, dtype: str, arrays: Arrays, with_dlse: bool, scale: float | None = None, mask: np.ndarray | None = None
) -> Problem:
    """By default of the scale that calls have by default, and of the composition's mask."""
    scale = oracle.default_scale(arrays.q.shape[3]) if scale is None else scale
    return Problem(case, dtype, arrays, with_dlse, scale, case.allowed() if mask is None else mask)


def make_problem(
    source: Source,
    case: Case,
    dtype: str,
    dim: int,
    dim_v: int,
    scale: float | None = None,
    mask: np.ndarray | None = None,
) -> Problem:
    """The same of arrays that are drawn."""
    arrays = draws.draw_arrays(source, case.sizes, dim, dim_v, DTYPES[dtype])
    return of_arrays(case, dtype, arrays, source.choice([False, True]), scale, mask)
