"""Hypothesis strategies for registered patterns, compositions, sizes, dtypes and layouts.

Requires ``hypothesis`` (``pip install hypothesis``).
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from .. import patterns
from ..patterns.base.class_registry import pattern_class
from ._draw import Draw, Sizes
from .arrays import DTYPES, LAYOUTS

__all__ = ["Case", "Draw", "Problem", "Sizes", "cases", "compositions", "dtypes", "layouts", "problems", "sizes"]


class Case(NamedTuple):
    """A pattern with matching sizes.

    Parameters
    ----------
    pattern : Pattern
        Pattern before ``bind()``.
    sizes : Sizes
        Matching batch, heads_q, heads_kv, q_len and kv_len.
    """

    pattern: patterns.Pattern
    sizes: Sizes


class Problem(NamedTuple):
    """A case with the arguments of its inputs: ``inputs(*problem.shape, ...)``.

    Parameters
    ----------
    case : Case
        Pattern and sizes.
    head_dim, head_dim_v : int
        Head dimensions of queries and keys, and of values.
    dtype : str
        Name in :data:`spattn.testing.DTYPES`.
    layout : tuple of three str
        Names in :data:`spattn.testing.LAYOUTS` for q, k and v.
    seed : int
        Seed of the random values.
    """

    case: Case
    head_dim: int
    head_dim_v: int
    dtype: str
    layout: tuple[str, str, str]
    seed: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return batch, heads_q, heads_kv, q_len, kv_len, head_dim, head_dim_v."""
        s = self.case.sizes
        return s.batch, s.heads_q, s.heads_kv, s.q_len, s.kv_len, self.head_dim, self.head_dim_v


@st.composite
def sizes(draw: st.DrawFn, max_len: int = 160, max_batch: int = 2, max_heads: int = 4, min_len: int = 1) -> Sizes:
    """Draw sizes, mostly with equal lengths, sometimes with fewer queries (decoding) or more queries than keys.

    Parameters
    ----------
    max_len, max_batch, max_heads : int, optional
        Maximum lengths, batch size and query heads.
    min_len : int, optional
        Minimum lengths.

    Returns
    -------
    strategy of Sizes
    """
    kv_len = draw(st.integers(min_len, max_len))
    q_len = draw(st.one_of(st.just(kv_len), st.integers(min_len, kv_len), st.integers(min_len, max_len)))
    heads_kv = draw(st.integers(1, max_heads))
    group = draw(st.integers(1, max_heads // heads_kv))
    return Sizes(draw(st.integers(1, max_batch)), group * heads_kv, heads_kv, q_len, kv_len)


@st.composite
def cases(
    draw: st.DrawFn,
    name: str | None = None,
    max_len: int = 160,
    max_batch: int = 2,
    max_heads: int = 4,
    min_len: int = 1,
) -> Case:
    """Draw registered patterns with matching sizes, by :meth:`spattn.patterns.Pattern.random`.

    Parameters
    ----------
    name : str, optional
        Registered name of the pattern, by default any.
    max_len, max_batch, max_heads : int, optional
        Maximum lengths, batch size and query heads, unless the pattern has fixed sizes.
    min_len : int, optional
        Minimum lengths.

    Returns
    -------
    strategy of Case

    Examples
    --------
    >>> from hypothesis import find
    >>> case = find(cases("sliding_window"), lambda case: case.pattern.right == -1)
    >>> case.pattern.index_set(case.sizes.q_len, case.sizes.kv_len).nnz > 0
    True
    """
    name = draw(st.sampled_from(patterns.registry.names())) if name is None else name
    drawn = draw(sizes(max_len, max_batch, max_heads, min_len))
    return Case(*pattern_class(name).random(Draw(draw, min_len), drawn))


@st.composite
def compositions(draw: st.DrawFn, max_len: int = 160, max_batch: int = 2, max_heads: int = 4, depth: int = 3) -> Case:
    """Draw compositions of registered patterns with ``& | - ~``.

    Parameters
    ----------
    max_len, max_batch, max_heads : int, optional
        Maximum lengths, batch size and query heads.
    depth : int, optional
        Maximum nesting depth of operators.

    Returns
    -------
    strategy of Case
    """
    drawn = draw(sizes(max_len, max_batch, max_heads))

    def compose(depth: int) -> patterns.Pattern:
        operator = draw(st.sampled_from("&|-~")) if depth and draw(st.integers(0, 3)) else ""
        match operator:
            case "&":
                return compose(depth - 1) & compose(depth - 1)
            case "|":
                return compose(depth - 1) | compose(depth - 1)
            case "-":
                return compose(depth - 1) - compose(depth - 1)
            case "~":
                return ~compose(depth - 1)
        return Draw(draw).pattern(drawn)

    return Case(compose(depth), drawn)


def dtypes() -> st.SearchStrategy[str]:
    """Draw names in :data:`spattn.testing.DTYPES`.

    Returns
    -------
    strategy of str
    """
    return st.sampled_from(list(DTYPES))


def layouts() -> st.SearchStrategy[tuple[str, str, str]]:
    """Draw names in :data:`spattn.testing.LAYOUTS` for q, k and v; often contiguous.

    Returns
    -------
    strategy of tuple of three str
    """
    return st.one_of(st.just(("contiguous",) * 3), st.tuples(*(st.sampled_from(list(LAYOUTS)) for _ in range(3))))


@st.composite
def problems(
    draw: st.DrawFn,
    case: st.SearchStrategy[Case] | None = None,
    dtype: str | None = None,
    layout: tuple[str, str, str] | None = None,
) -> Problem:
    """Draw problems for :func:`spattn.attention`.

    Parameters
    ----------
    case : strategy of Case, optional
        By default any registered pattern or composition.
    dtype : str, optional
        Fixed dtype, by default any.
    layout : tuple of three str, optional
        Fixed layouts of q, k and v, by default any.

    Returns
    -------
    strategy of Problem
    """
    head_dim = draw(st.sampled_from([8, 16, 24, 32, 64, 80, 128]))
    return Problem(
        draw(st.one_of(cases(), compositions()) if case is None else case),
        head_dim,
        draw(st.one_of(st.just(head_dim), st.sampled_from([8, 40, 64]))),
        draw(dtypes()) if dtype is None else dtype,
        draw(layouts()) if layout is None else layout,
        draw(st.integers(0, 2**32 - 1)),
    )
