"""Score operands of traced functions, as the dispatch prepares them, and attention by the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spattn.arrays import dtype_name
from spattn.request.score import ScoreOperands, TableType
from spattn.score.evaluate import evaluate
from spattn.score.program import program_of
from spattn.score.tracing import trace
from spattn.testing import eps


def traced(function: Callable[..., Any]) -> ScoreOperands:
    """A function with its captured values; gradients of all floating tables are wanted."""
    found = trace(function)
    types = tuple(
        TableType(dtype_name(x), x.shape, tuple(np.floor_divide(x.strides, x.itemsize))) for x in found.tables
    )
    wanted = tuple(dtype_name(x) == "bfloat16" or x.dtype.kind == "f" for x in found.tables)
    return ScoreOperands(program_of(found.graph), found.parameters, found.tables, types, None, wanted)


def dense(dtype, operands, q, k, v, mask, scale, dout, dlse, *, order=0, ulps=None):
    """Out, lse, dq, dk, dv and the terms of tables' gradients by the formula, with every step rounded to `dtype`.

    Other values of `order` permute keys and features, sum scores sequentially, or use powers of 2, as kernels do.
    Unless `ulps` is None the backward takes weights and delta from the rounded results, as kernels do, with an error of
    as many units in the last place.
    """
    wide = np.promote_types(dtype, np.float32)
    group, rng = q.shape[1] // k.shape[1], np.random.default_rng(order)
    keys, features, columns = (
        rng.permutation(n) if order else np.arange(n) for n in (k.shape[2], *q.shape[3:], v.shape[3])
    )
    grid = np.ix_(*map(np.arange, q.shape[:2]), np.arange(k.shape[2] - q.shape[2], k.shape[2]), keys)
    inputs = dict(zip("bhqk", grid, strict=True), offset=k.shape[2] - q.shape[2])
    mask, (q, k, v, dout) = mask[..., keys], (x.astype(wide) for x in (q, k, v, dout))
    q, dout = q[..., features], dout[..., columns]
    k, v = (np.repeat(x[:, :, keys][..., own], group, axis=1) for x, own in ((k, features), (v, columns)))
    program = operands.program
    indices = tuple(x for use in program.captured for x in use.indices)
    graph = program.graph._replace(results=program.graph.results + indices)

    def rounded(x):
        return x.astype(dtype).astype(wide)

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        s = rounded(rounded(in_sequence(q, k) if order & 1 else q @ k.swapaxes(2, 3)) * wide.type(scale))
        found = evaluate(graph, inputs | {"score": s}, operands.parameters, operands.tables, wide)
        s, derivative, *rest = (np.broadcast_to(x, s.shape) for x in found)
        s = np.where(mask, s, -np.inf)
        largest = s.max(axis=3, keepdims=True, initial=-np.inf)
        p = s - np.where(largest == -np.inf, 0, largest)
        p = np.exp2(p * wide.type(np.log2(np.e))) if order & 2 else np.exp(p)
        total = p.sum(axis=3, keepdims=True)
        lse = largest + np.log(total)
        p = rounded(p / np.where(total == 0, 1, total))
        out = rounded(p @ v)
        if ulps is not None:
            wrong = np.where(total == 0, 0, lse + ulps * np.spacing(np.where(total == 0, 1, lse)))
            p, out_read = rounded(np.exp(s - wrong)), out + ulps * np.spacing(out.astype(dtype)).astype(wide)
    dp = rounded(dout @ v.swapaxes(2, 3))
    delta = ((p * dp).sum(3) if ulps is None else (dout * out_read).sum(3)) - dlse
    of_score = np.where(p != 0, p * (dp - rounded(delta)[..., None]), 0)
    ds = rounded(np.where(of_score != 0, of_score * np.where(of_score != 0, derivative, 0), 0) * wide.type(scale))
    terms = []
    of_uses, rest = rest[: len(program.captured)], iter(rest[len(program.captured) :])
    for use, of_use in zip(program.captured, of_uses, strict=True):
        index = [next(rest) for _ in use.indices]
        if use.name == "look_up" and operands.wanted[use.number]:
            own = np.where(of_score != 0, of_score * np.where(of_score != 0, of_use, 0), 0)
            terms.append((use.number, *(x[..., np.argsort(keys)] for x in (own, *index))))

    def over_group(x, *own):
        x = x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)
        back = np.empty_like(x)
        back[:, :, own[0][:, None], own[1][None, :]] = x
        return back.astype(dtype)

    dq, result = np.empty_like(q), np.empty_like(out)
    with np.errstate(invalid="ignore"):
        dq[..., features], result[..., columns] = ds @ k, out
    dk, dv = over_group(ds.swapaxes(2, 3) @ q, keys, features), over_group(p.swapaxes(2, 3) @ dout, keys, columns)
    return result.astype(dtype), lse[..., 0], dq.astype(dtype), dk, dv, terms


def in_sequence(q, k):
    """``q @ k.T``, one product after another."""
    total = np.zeros((*q.shape[:3], k.shape[2]), q.dtype)
    for d in range(q.shape[3]):
        total += q[..., d, None] * k[..., None, :, d]
    return total


def sum_terms(shape, terms, index):
    """Sum terms by element of a table; indices may count from the end, and those out of range have no element."""
    inside = np.ones(terms.shape, bool)
    for length, x in zip(shape, index, strict=True):
        inside &= (x >= -length) & (x < length)
    found = np.zeros(shape, terms.dtype)
    if not shape:
        return terms.sum()
    np.add.at(found, tuple(x[inside].astype(np.int64) for x in index), terms[inside])
    return found


def assert_table_gradients(actual, operands, exact, lossy, dtype, what):
    """Every element within the sum of its terms' bounds.

    `exact` and each of `lossy` are terms of `dense` for arrays of `dtype`. A term's bound is twice its largest error,
    the largest error of its row, and two roundings. An element may have few terms, too few to bound their sum by the
    largest error of sums.
    """
    for number, found in enumerate(actual):
        if not operands.wanted[number]:
            assert found is None
            continue
        shape, total, error = operands.tables[number].shape, 0, 0
        for at, (table, terms, *index) in enumerate(exact):
            if table == number:
                wrong = np.max([np.abs(low[at][1].astype(terms.dtype) - terms) for low in lossy], axis=0)
                bound = 2 * wrong + wrong.max(axis=-1, keepdims=True) + 2 * eps(dtype) * np.abs(terms)
                total = total + sum_terms(shape, terms, index)
                error = error + sum_terms(shape, np.where(terms, bound, 0), index)
        assert found.shape == shape
        wrong = np.abs(found - total) > error + eps(found.dtype) * np.abs(total)
        assert not wrong.any(), (
            f"{what} {number}: {found[wrong][:4]}, expected {np.broadcast_to(total, shape)[wrong][:4]}"
        )
