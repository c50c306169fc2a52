"""The properties that every pattern has, as one call."""

from __future__ import annotations

import importlib.util

import numpy as np

from .. import patterns, reference
from ..patterns import Full, from_dict
from ..plan import plan as make_plan
from .arrays import inputs
from .budget import assert_within_budget, dense_mask, naive_orders
from .contract import check_plan, execute

__all__ = ["check_backend", "check_pattern", "check_picture"]


def check_pattern(pattern, q_len: int, kv_len: int | None = None, *, batch: int = 1, heads: int | None = None) -> None:
    """AssertionError unless a pattern keeps every promise that spattn makes for it.

    The closed form equals the predicate; the plan equals both, its tiles are disjoint, and executing it equals
    :mod:`spattn.reference`; the laws of composition hold; a key that is not allowed changes nothing; the pattern survives
    ``to_dict``. Write ``check_backend`` beside it to run real kernels.

    Parameters
    ----------
    pattern : Pattern
    q_len, kv_len : int
        Lengths in tokens; `kv_len` defaults to `q_len`. Everything is evaluated cell by cell: keep them small.
    batch, heads : int, optional
        For patterns that tell batch entries or heads apart; `heads` defaults to the pattern's own number.

    Examples
    --------
    >>> import spattn
    >>> check_pattern(spattn.patterns.Longformer(8, global_tokens=2), 100)
    """
    kv_len = q_len if kv_len is None else kv_len
    heads = max(1, pattern.sizes()[1]) if heads is None else heads
    lengths = batch, heads, q_len, kv_len
    check_index_set(pattern, *lengths)
    check_laws(pattern, *lengths)
    check_round_trip(pattern, *lengths)
    check_planned(pattern, *lengths)
    check_unseen_keys(pattern, *lengths)


def check_index_set(pattern, batch, heads, q_len, kv_len) -> None:
    """The closed form equals the predicate."""
    expected = dense_mask(pattern, batch, heads, q_len, kv_len)
    for b, h, index_set in _index_sets(pattern, batch, heads, q_len, kv_len):
        dense = index_set.to_dense()
        assert np.array_equal(dense, expected[b, h]), (
            f"{pattern!r}, batch entry {b}, head {h}, {q_len} × {kv_len}: index set and predicate differ at "
            f"{np.argwhere(dense != expected[b, h])[:5].tolist()} (row, key)"
        )
        assert index_set.nnz == expected[b, h].sum(), f"{pattern!r}: nnz {index_set.nnz}, not {expected[b, h].sum()}"


def check_laws(pattern, batch, heads, q_len, kv_len) -> None:
    """``p & Full == p``, ``p | p == p``, ``~~p == p``, ``p - p`` is empty, ``p | ~p`` is full."""
    mask = dense_mask(pattern, batch, heads, q_len, kv_len)
    laws = {
        "p & Full": (pattern & Full(), mask), "p | p": (pattern | pattern, mask), "p & p": (pattern & pattern, mask),
        "~~p": (~~pattern, mask), "~p": (~pattern, ~mask), "p - p": (pattern - pattern, np.zeros_like(mask)),
        "p | ~p": (pattern | ~pattern, np.ones_like(mask)),
    }  # fmt: skip
    for law, (composed, expected) in laws.items():
        for b, h, index_set in _index_sets(composed, batch, heads, q_len, kv_len):
            assert np.array_equal(index_set.to_dense(), expected[b, h]), f"{law} is wrong for p = {pattern!r}"


def check_round_trip(pattern, batch, heads, q_len, kv_len) -> None:
    """``from_dict(to_dict())`` is the same pattern, through JSON text."""
    import json

    read = from_dict(json.loads(json.dumps(pattern.to_dict())))
    assert read == pattern and hash(read) == hash(pattern), f"{pattern!r} reads back as {read!r}"
    assert np.array_equal(dense_mask(read, batch, heads, q_len, kv_len), dense_mask(pattern, batch, heads, q_len, kv_len))


def check_planned(pattern, batch, heads, q_len, kv_len, **options) -> None:
    """The plan visits the index set, each pair once, and executing it gives the reference's result."""
    made = make_plan(pattern, q_len, kv_len, batch=batch, heads=heads, **options)
    variants, _ = pattern.variants(batch, heads)
    check_plan(made, [own.index_set(q_len, kv_len) for own in variants])
    q, k, v = inputs(batch, heads, heads, q_len, kv_len, 8, 4, dtype="float64")
    for actual, expected in zip(execute(made, q, k, v, 0.3), reference.attend(q, k, v, pattern, 0.3), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-12)


def check_unseen_keys(pattern, batch, heads, q_len, kv_len, forward=None) -> None:
    """NaN at keys that no query of a head may see changes nothing at all.

    `forward` takes ``q, k, v, pattern`` and returns ``out, lse``; the reference by default.
    """
    forward = forward or reference.attend
    q, k, v = inputs(batch, heads, heads, q_len, kv_len, 8)
    expected = forward(q, k, v, pattern)
    unseen = ~dense_mask(pattern, batch, heads, q_len, kv_len).any(axis=2)
    k[unseen], v[unseen] = np.nan, np.nan
    for got, want in zip(forward(q, k, v, pattern), expected, strict=True):
        assert np.array_equal(got, want), f"{pattern!r}: keys that nobody may see change the result"


def check_backend(forward, pattern, q, k, v, scale=None, what: str = "") -> None:
    """AssertionError unless a backend's result is within the error budget of the reference.

    Parameters
    ----------
    forward : callable
        Takes ``q, k, v, pattern, scale`` and returns ``out, lse`` as NumPy arrays.
    pattern, q, k, v, scale
        As for :func:`spattn.attention`.
    what : str, optional
        Name of the backend for the message.
    """
    out, lse = forward(q, k, v, pattern, scale)
    mask = dense_mask(pattern, *q.shape[:3], k.shape[2])
    low_out, low_lse = naive_orders(q, k, v, mask, scale)
    # A float64 result is judged by extended precision, where NumPy has it.
    out64, lse64 = reference.attend(q, k, v, pattern, scale, np.longdouble if q.dtype == np.float64 else np.float64)
    assert out.dtype == q.dtype, f"{what}: out: expected {q.dtype}, got {out.dtype}"
    assert lse.dtype == np.promote_types(q.dtype, np.float32), f"{what}: lse: got {lse.dtype}"
    assert_within_budget(out, out64, low_out, q.dtype, f"{what} out of {pattern!r}")
    assert_within_budget(lse, lse64, low_lse, q.dtype, f"{what} lse of {pattern!r}")


def check_picture(pattern, q_len: int, kv_len: int | None = None) -> None:
    """``spattn.patterns.draw`` makes a picture; needs matplotlib."""
    assert importlib.util.find_spec("matplotlib"), "matplotlib: expected to be installed (pip install matplotlib)"
    axes = patterns.draw(pattern, q_len, q_len if kv_len is None else kv_len)
    assert axes is not None


def _index_sets(pattern, batch, heads, q_len, kv_len):
    variants, index = pattern.variants(batch, heads)
    made = [own.index_set(q_len, kv_len) for own in variants]
    for b, h in np.ndindex(batch, heads):
        yield b, h, made[np.broadcast_to(index, (batch, heads))[b, h]]
