"""Check the properties that every pattern must have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import reference
from ..index_set import AffineRows
from ..patterns import Full, Pattern, from_json
from ..schedule.compiler import plan as make_plan
from .arrays import inputs
from .bounds import assert_within_bound, dense_mask, naive_orders
from .contract import check_plan, execute

__all__ = ["Expectation", "check_pattern"]


_MOST_TOKENS_OF_ENDS = 10_000
Forward = Callable[[np.ndarray, np.ndarray, np.ndarray, Pattern], tuple[np.ndarray, np.ndarray]]


def check_pattern(
    pattern: Pattern, q_len: int, kv_len: int | None = None, *, batch: int = 1, heads: int | None = None
) -> None:
    """Assert that a pattern has all properties that spattn relies on.

    These are: :meth:`~spattn.patterns.Pattern.runs` and :meth:`~spattn.patterns.Pattern.ends` agree with the predicate;
    the plan visits each allowed pair once, and its execution gives the result of :mod:`spattn.reference`; the laws of
    composition hold; masked keys do not change the result; ``from_json(to_json())`` restores the pattern. Use
    :class:`Expectation` to check kernels.

    Parameters
    ----------
    pattern : Pattern
    q_len, kv_len : int
        Lengths in tokens; `kv_len` defaults to `q_len`. Keep them small: every pair is evaluated.
    batch, heads : int, optional
        Sizes for patterns that differ between batch entries or heads; `heads` defaults to the pattern's heads.

    Examples
    --------
    >>> import spattn
    >>> check_pattern(spattn.patterns.longformer(8, global_tokens=2), 100)
    """
    kv_len = q_len if kv_len is None else kv_len
    heads = max(1, pattern.sizes()[1]) if heads is None else heads
    lengths = batch, heads, q_len, kv_len
    check_index_set(pattern, *lengths)
    for own in pattern.variants(batch, heads)[0]:
        check_ends(own, q_len)
    check_laws(pattern, *lengths)
    check_round_trip(pattern, *lengths)
    check_planned(pattern, *lengths)
    check_unseen_keys(pattern, *lengths)


def check_index_set(pattern: Pattern, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    """Check that the index set equals the predicate."""
    expected = dense_mask(pattern, batch, heads, q_len, kv_len)
    for b, h, index_set in _index_sets(pattern, batch, heads, q_len, kv_len):
        dense = index_set.to_dense()
        assert np.array_equal(dense, expected[b, h]), (
            f"{pattern!r}, batch entry {b}, head {h}, {q_len} × {kv_len}: index set and predicate differ at "
            f"(row, key) {np.argwhere(dense != expected[b, h])[:5].tolist()}"
        )
        assert index_set.nnz == expected[b, h].sum(), (
            f"{pattern!r}: expected nnz {expected[b, h].sum()}, got {index_set.nnz}"
        )


def check_ends(pattern: Pattern, q_len: int, further: tuple[int, int] = (1, 66)) -> None:
    """Check the ends of one head's pattern at two lengths, which exceed both ends by `further` tokens.

    The masks of the ends are equal, and pairs between the ends are all allowed or all masked. Ends of more than 10,000
    tokens are skipped.
    """
    ends = pattern.ends(q_len)
    if ends is None or sum(ends[:2]) > _MOST_TOKENS_OF_ENDS:
        return
    first, last, between = ends
    lengths = [first + last + more for more in further]
    masks = [dense_mask(pattern, 1, 1, q_len, kv_len)[0, 0] for kv_len in lengths]
    what = f"{pattern!r}, {q_len} queries, {ends}: at {lengths[0]} and {lengths[1]} keys"
    assert np.array_equal(masks[0][:, :first], masks[1][:, :first]), f"{what} the first keys differ"
    near = [mask[:, len(mask[0]) - last :] for mask in masks]
    assert np.array_equal(*near), f"{what} the last keys differ"
    assert all((mask[:, first : len(mask[0]) - last] == between).all() for mask in masks), f"{what} the middle differs"


def check_laws(pattern: Pattern, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    """Check the laws of composition: ``p & Full == p``, ``p | p == p``, ``~~p == p``, ``p | ~p == Full``, etc."""
    mask = dense_mask(pattern, batch, heads, q_len, kv_len)
    laws = {
        "p & Full": (pattern & Full(), mask),
        "p | p": (pattern | pattern, mask),
        "p & p": (pattern & pattern, mask),
        "~~p": (~~pattern, mask),
        "~p": (~pattern, ~mask),
        "p - p": (pattern - pattern, np.zeros_like(mask)),
        "p | ~p": (pattern | ~pattern, np.ones_like(mask)),
    }
    for law, (composed, expected) in laws.items():
        for b, h, index_set in _index_sets(composed, batch, heads, q_len, kv_len):
            assert np.array_equal(index_set.to_dense(), expected[b, h]), f"{law} is wrong for p = {pattern!r}"


def check_round_trip(pattern: Pattern, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    """Check that ``from_json(to_json())`` returns an equal pattern."""
    read = from_json(json.dumps(pattern._description()))
    assert read == pattern and hash(read) == hash(pattern), f"{pattern!r} reads back as {read!r}"
    lengths = batch, heads, q_len, kv_len
    assert np.array_equal(dense_mask(read, *lengths), dense_mask(pattern, *lengths))


def check_planned(pattern: Pattern, batch: int, heads: int, q_len: int, kv_len: int, **options: Any) -> None:
    """Check that the plan visits each pair of the index set once, and that executing it gives the reference result."""
    made = make_plan(pattern, q_len, kv_len, batch=batch, heads=heads, **options)
    variants, _ = pattern.variants(batch, heads)
    check_plan(made, [own.index_set(q_len, kv_len) for own in variants])
    q, k, v = inputs(batch, heads, heads, q_len, kv_len, 8, 4, dtype="float64")
    for actual, expected in zip(execute(made, q, k, v, 0.3), reference.attend(q, k, v, pattern, 0.3), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-12)


def check_unseen_keys(
    pattern: Pattern, batch: int, heads: int, q_len: int, kv_len: int, forward: Forward | None = None
) -> None:
    """Check that NaN at keys to which no query of a head attends does not change the result.

    `forward` takes ``q, k, v, pattern`` and returns ``out, lse``; by default, the reference backend.
    """
    forward = forward or reference.attend
    q, k, v = inputs(batch, heads, heads, q_len, kv_len, 8)
    expected = forward(q, k, v, pattern)
    unseen = ~dense_mask(pattern, batch, heads, q_len, kv_len).any(axis=2)
    k[unseen], v[unseen] = np.nan, np.nan
    for got, want in zip(forward(q, k, v, pattern), expected, strict=True):
        assert np.array_equal(got, want), f"{pattern!r}: masked keys change the result"


class Expectation:
    """Reference result and error bound of a problem, to check any number of implementations.

    Parameters
    ----------
    pattern, q, k, v, scale
        As for :func:`spattn.attention`.

    Examples
    --------
    >>> import spattn
    >>> q, k, v = inputs(q_len=20)
    >>> expectation = Expectation(spattn.patterns.Causal(), q, k, v)
    >>> expectation.check(*spattn.attention(q, k, v, "causal", return_lse=True))
    """

    def __init__(
        self, pattern: Pattern, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None
    ) -> None:
        self.pattern, self.dtype = pattern, q.dtype
        mask = dense_mask(pattern, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        self.naive = naive_orders(q, k, v, mask, scale)
        # Extended precision for float64, if NumPy supports it.
        precision = np.longdouble if q.dtype == np.float64 else np.float64
        self.reference = reference.attend(q, k, v, pattern, scale, precision)

    def check(self, out: np.ndarray, lse: np.ndarray, what: str = "") -> None:
        """Assert that both results have the right dtype and are within the error bound.

        Parameters
        ----------
        out, lse : arrays
            Results of :func:`spattn.attention`.
        what : str, optional
            Name of the implementation in messages.
        """
        assert out.dtype == self.dtype, f"{what}: out: expected {self.dtype}, got {out.dtype}"
        assert lse.dtype == np.promote_types(self.dtype, np.float32), f"{what}: lse: got {lse.dtype}"
        for name, got, want, low in zip(("out", "lse"), (out, lse), self.reference, self.naive, strict=True):
            assert_within_bound(got, want, low, self.dtype, f"{what} {name} of {self.pattern!r}")


def _index_sets(
    pattern: Pattern, batch: int, heads: int, q_len: int, kv_len: int
) -> Iterator[tuple[int, int, AffineRows]]:
    variants, index = pattern.variants(batch, heads)
    made = [own.index_set(q_len, kv_len) for own in variants]
    for b, h in np.ndindex(batch, heads):
        yield b, h, made[np.broadcast_to(index, (batch, heads))[b, h]]
