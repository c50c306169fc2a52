#!/usr/bin/env python3
"""Attacks unions of patterns from outside: random compositions, judged by masks and softmax of this file's own.

    python tools/attack_unions.py --isa all --count 4000 --seed 1 --jobs 2 --json unions.json
    python tools/attack_unions.py --isa avx2 --seed 1 --draw 17            # one draw again, with its reproducer
    python tools/attack_unions.py --part misc --isa all                    # threads, forks, pickles, decoding, NaN …
    python tools/attack_unions.py --device cuda --kernel portable --count 2000

The masks are written from the formulas of docs/patterns-definitions.rst, the attention and its gradients from their
definitions, in NumPy and float64. Of the package only what is public is called. Every draw is a function of seed and
number alone. Draws run in a process for each instruction set, which is started anew behind a draw that ended it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import copy
import dataclasses
import functools
import itertools
import json
import math
import operator
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

HERE = Path(__file__).resolve()
RESTART = 77  # exit status of a worker whose device cannot go on


def _worker_imports():
    """Imports NumPy and the package; waits where somebody is installing it right now."""
    for left in reversed(range(30)):
        try:
            import ml_dtypes
            import numpy as np

            import spattn
            import spattn.patterns
            from spattn.patterns.papers import deepspeed

            return np, ml_dtypes, spattn, spattn.patterns, deepspeed
        except (ImportError, AttributeError, OSError):
            if not left:
                raise
            for name in [name for name in sys.modules if name.split(".")[0] == "spattn"]:
                del sys.modules[name]
            time.sleep(4)
    raise AssertionError


np, ml_dtypes, spattn, patterns, deepspeed = _worker_imports()
P = patterns


# --- the oracle: attention and its gradients, and how far a result may be off -----------------------------------------


@dataclasses.dataclass
class Result:
    """The five results of a call in float64 with the largest error that each element may have."""

    value: dict[str, np.ndarray]
    bound: dict[str, np.ndarray]


def unit_roundoffs(dtype, device):
    """Half an ulp of 1 in which sums are made, and in which results (and 16-bit weights) are stored."""
    sums = 2.0**-53 if dtype == "float64" else 2.0**-24
    if device == "cuda" and dtype != "float64":
        sums *= 4  # three TF32 products for a float32 one (2^-22), and tensor cores that round towards zero
    stored = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    return sums, stored


def oracle(q, k, v, dout, dlse, mask, scale, dtype, device, isa):
    """Dense softmax attention in float64, its gradients, and a bound of the rounding errors of each element.

    The bound is computed from the inputs, element by element, as textbooks do it (Higham, chapter 3): with u the unit
    roundoff of the sums, a sum of n products is off by at most n·u times the sum of their magnitudes.

    - A logit is off by ``es = (d + 4)·u·scale·Σ|q||k|``, a weight relatively by twice the worst of its row, by the sum
      over n keys, ``n·u``, and by 32u of an exponential; together ``c``. With 16-bit inputs weights may be rounded to
      16 bits, which adds two of their roundoffs w. So out is off by ``(c + 2w)·Σ p|v|`` and by its own rounding.
    - lse is off by the worst logit, the sum, and by its own rounding. bfloat16 on AMX adds 6e-3, for
      the row sum is of rounded weights there: docs/numerics.rst says 2.6e-3 at the most, this script saw 4.9e-3.
      float16 on AMX is split in two bfloat16 terms, |low| ≤ 2^-8·|x|, and the product of both low terms is left out:
      a logit is off by 2^-16·scale·Σ|q||k| there. That was found by this script; the page does not say it of lse.
    - The backward finds weights from lse: relatively off by the worst logit and by the error of lse. dS = P∘(dP − δ) is
      off by that times |dP| + |δ|, by the error of dP, and by that of δ, which is made of the rounded out; 16-bit dS is
      rounded once more. dq, dk and dv are sums of these; their own length comes in as n·u again.

    Everything is a bound of worst cases, so that a correct kernel stays far below it, but it still scales with what is
    summed: a result that no pair contributes to must be exactly 0, and a row without keys has out 0 and lse −inf.
    Weights below 1e-33 (1e-300) may be 0. float64 has 1e-12 in place of its exponential's 32u. A pair too many or too
    few moves lse by about 1/n, more than the bound of every dtype but bfloat16 on AMX.
    """
    batch, heads, q_len, head_dim = q.shape
    heads_kv, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group = heads // heads_kv
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    u, w = unit_roundoffs(dtype, device)
    narrow = 2 * w if dtype in ("float16", "bfloat16") else 0.0
    least = 2.0**-1000 if dtype == "float64" else 2.0**-110  # smaller weights may be 0
    tiny = 2.0**-23 if dtype == "float16" else 0.0  # float16's weights and gradients of logits may be subnormal
    small = 1e-12 if dtype == "float64" else 32 * u

    kt, vt = k.swapaxes(-1, -2), v.swapaxes(-1, -2)
    logits = np.where(mask, scale * (q @ kt), -np.inf)
    magnitude = np.where(mask, abs(scale) * (np.abs(q) @ np.abs(kt)), 0.0)
    count = mask.sum(-1, dtype=float)
    if kv_len:
        top = logits.max(-1)
        worst = magnitude.max(-1)
    else:
        top, worst = np.full(logits.shape[:-1], -np.inf), np.zeros(logits.shape[:-1])
    shift = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(logits - shift[..., None])
    total = weights.sum(-1)
    full = total > 0
    p = weights / np.where(full, total, 1.0)[..., None]
    lse = np.where(full, shift + np.log(np.where(full, total, 1.0)), -np.inf)
    out = p @ v

    abs_v, abs_k, abs_q, abs_dout = np.abs(v), np.abs(k), np.abs(q), np.abs(dout)
    es = 2 * (head_dim + 4) * u * worst
    if dtype == "float16" and device == "cpu" and isa == "amx":
        es = es + 1.01 * 2.0**-16 * worst
    c = 2 * es + 2 * count * u + small
    out_bound = (c + narrow)[..., None] * (p @ abs_v) + 2 * w * np.abs(out)
    out_bound += (tiny + least) * (mask.astype(float) @ abs_v)
    finite_lse = np.where(full, lse, 0.0)
    lse_bound = es + (count + 16) * u + small + 2 * u * (worst + np.abs(finite_lse))
    if dtype == "bfloat16" and device == "cpu" and isa == "amx":
        lse_bound = lse_bound + 6e-3
    lse_bound = np.where(full, lse_bound, 0.0)

    dp = np.where(mask, dout @ vt, 0.0)
    delta = (dout * out).sum(-1) - np.where(full, dlse, 0.0)
    ds = p * (dp - delta[..., None])
    cp = 2 * es + lse_bound + small
    delta_error = (abs_dout * out_bound).sum(-1) + 2 * (head_dim_v + 2) * u * (abs_dout * np.abs(out)).sum(-1)
    delta_error += 2 * u * np.abs(dlse)
    dp_error = 2 * (head_dim_v + 2) * u * (abs_dout @ np.abs(vt))
    ds_size = np.abs(dp) + np.abs(delta)[..., None]
    ds_error = p * (cp[..., None] * ds_size + dp_error + delta_error[..., None] + 4 * u * ds_size)
    ds_error += narrow * np.abs(ds) + (tiny + least * ds_size) * mask
    p_error = p * (cp[..., None] + narrow + 4 * u) + (tiny + least) * mask

    def by_group(x):
        return x.reshape(batch, heads_kv, group, *x.shape[2:]).sum(2)

    abs_ds, ds_t = np.abs(ds), ds.swapaxes(-1, -2)
    terms = q_len * group
    dq = scale * (ds @ k)
    dq_bound = abs(scale) * (ds_error @ abs_k + 2 * (kv_len + 4) * u * (abs_ds @ abs_k)) + 2 * w * np.abs(dq)
    dk = by_group(scale * (ds_t @ q))
    dk_bound = by_group(abs(scale) * ((ds_error + 2 * (terms + 4) * u * abs_ds).swapaxes(-1, -2) @ abs_q))
    dk_bound += 2 * w * np.abs(dk)
    dv = by_group(p.swapaxes(-1, -2) @ dout)
    dv_bound = by_group((p_error + 2 * (terms + 4) * u * p).swapaxes(-1, -2) @ abs_dout) + 2 * w * np.abs(dv)
    if dtype == "float16":  # results that are subnormal
        for bound, value in ((out_bound, out), (dq_bound, dq), (dk_bound, dk), (dv_bound, dv)):
            bound += np.where(value != 0, 2.0**-24, 0.0)
            bound[np.abs(value) + bound > 65504] = np.inf  # infinity is float16's number for it
    return Result(
        {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv},
        {"out": out_bound, "lse": lse_bound, "dq": dq_bound, "dk": dk_bound, "dv": dv_bound},
    )


def misses(expected, got):
    """What is beyond its bound, one line each, and the largest share of a bound that was used."""
    lines, used = [], 0.0
    for name, value in got.items():
        want, bound = expected.value[name], expected.bound[name]
        if value.shape != want.shape:
            lines.append(f"{name}: shape {value.shape}, expected {want.shape}")
            continue
        with np.errstate(invalid="ignore"):
            error = np.where(value == want, 0.0, np.abs(value - want))  # both −inf: equal
        bad = ~(error <= bound)
        if bad.any():
            at = tuple(int(n) for n in np.argwhere(bad)[0])
            lines.append(
                f"{name}: {int(bad.sum())} of {bad.size} beyond the bound; first at {at}: got {value[at]!r}, "
                f"expected {want[at]!r} ± {bound[at]:.3g}"
            )
        positive = (bound > 0) & np.isfinite(error)
        if positive.any() and not bad.any():
            used = max(used, float((error[positive] / bound[positive]).max()))
    return lines, used


# --- patterns of predicates that the package does not know ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Remainder(P.Pattern):
    """``(a·q + b·k + c·q·k) % modulus < below``."""

    a: int
    b: int
    c: int
    modulus: int
    below: int

    def allows(self, q, k):
        """The formula."""
        return (self.a * q + self.b * k + self.c * (q * k)) % self.modulus < self.below


@dataclasses.dataclass(frozen=True)
class Bits(P.Pattern):
    """``((q ^ k) & bits) == 0``."""

    bits: int

    def allows(self, q, k):
        """The formula."""
        return ((q ^ k) & self.bits) == 0


@dataclasses.dataclass(frozen=True)
class Floors(P.Pattern):
    """``|q // a − k // b| ≤ c`` or ``q − k`` is a multiple of `step`."""

    a: int
    b: int
    c: int
    step: int

    def allows(self, q, k):
        """The formula."""
        return (np.abs(q // self.a - k // self.b) <= self.c) | ((q - k) % self.step == 0)


@dataclasses.dataclass(frozen=True)
class Wedge(P.Pattern):
    """``k ≤ q·a / b`` and ``k ≥ q·c / b − d``, in integers."""

    a: int
    b: int
    c: int
    d: int

    def allows(self, q, k):
        """The formula."""
        return (k * self.b <= q * self.a) & ((k + self.d) * self.b >= q * self.c)


# --- leaves: a pattern of the package, and its mask by the formula of the page ----------------------------------------


class Dice:
    """Random choices, and the sizes of the call that patterns are drawn for."""

    def __init__(self, rng, batch, heads, heads_kv):
        self.rng, self.batch, self.heads, self.heads_kv = rng, batch, heads, heads_kv

    def int(self, least, most):
        """An integer between both, which may be equal."""
        return int(self.rng.integers(least, max(least, most) + 1))

    def chance(self, share):
        """True in so many cases."""
        return bool(self.rng.random() < share)

    def pick(self, things):
        """One of them."""
        return things[int(self.rng.integers(len(things)))]

    def step(self):
        """A stride or a dilation; mostly small ones, which have common divisors."""
        return self.pick((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 10, 12, 16, 17, 24, 32))

    def lead(self, alike=0.7):
        """Leading axes for arrays: none, heads, or batch entries and heads."""
        if self.chance(alike):
            return ()
        return (self.heads,) if self.chance(0.5) else (self.batch, self.heads)

    def density(self):
        """How many pairs of a random array are allowed."""
        return self.pick((0.0, 0.01, 0.03, 0.1, 0.3, 0.5, 0.9, 1.0))


def led(array, lead, own):
    """An array with leading axes `lead` as (batch or 1, heads or 1, *own axes)."""
    return array.reshape((1,) * (2 - len(lead)) + array.shape[: len(lead)] + array.shape[array.ndim - own :])


def grid_of(r, n):
    """A random grid of n tokens, of one to three axes."""
    grid, rest = [], n
    for _ in range(r.int(0, 2)):
        divisors = [d for d in range(1, rest + 1) if rest % d == 0]
        inner = [d for d in divisors if 1 < d < rest]
        d = r.pick(inner) if inner and r.chance(0.85) else r.pick(divisors)
        grid.append(d)
        rest //= d
    grid.append(rest)
    r.rng.shuffle(grid)
    return tuple(int(x) for x in grid)


def coordinates(x, grid):
    """Row-major coordinates; only the first one is negative or too large where x is no token."""
    found = []
    for length in grid[:0:-1]:
        found.append(x % length)
        x = x // length
    return [x, *found[::-1]]


def full(r, m, n):
    return lambda: P.Full(), lambda p, j: (p == p) & (j == j)


def causal(r, m, n):
    return lambda: P.Causal(), lambda p, j: j <= p


def sliding(r, m, n):
    left, right = (None if r.chance(0.12) else r.int(0, r.pick((2, 10, n))) for _ in range(2))
    if r.chance(0.4):
        right = 0

    def allow(p, j):
        low = j >= p - left if left is not None else (j == j) & (p == p)
        return low & (j <= p + right) if right is not None else low

    return lambda: P.SlidingWindow(left, right), allow


def dilated(r, m, n):
    left, right, d = r.int(0, r.pick((2, 5, 12))), r.int(0, r.pick((0, 3, 9))), r.step()

    def allow(p, j):
        return ((j - p) % d == 0) & ((j - p) // d >= -left) & ((j - p) // d <= right)

    return lambda: P.DilatedWindow(left, right, d), allow


def periodic(r, m, n):
    period, offset = r.int(1, max(2, r.pick((4, 12, n)))), r.pick((0, 0, 1, 3, 50))
    left, right = r.int(0, r.pick((1, 3, 9))), r.int(0, r.pick((0, 2, 5)))

    def allow(p, j):
        x = (j - offset) % period - (p - offset) % period
        return (-left <= x) & (x <= right)

    return lambda: P.PeriodicWindow(period, left, right, offset), allow


def block_local(r, m, n):
    block, offset = r.int(1, r.pick((4, 17, 40, n))), r.pick((0, 0, 1, 5, 37))
    return lambda: P.BlockLocal(block, offset), lambda p, j: (p - offset) // block == (j - offset) // block


def global_tokens(r, m, n):
    queries, keys = r.pick(((True, True), (True, True), (True, False), (False, True), (False, False)))
    if r.chance(0.5):
        tokens = r.int(0, r.pick((1, 4, n)))
        listed = range(tokens)
    else:
        tokens = tuple(sorted({r.int(0, n + 3) for _ in range(r.int(0, 4))}))
        listed = tokens
    table = np.array(list(listed), dtype=np.int64)

    def allow(p, j):
        return (keys & np.isin(j, table)) | (queries & np.isin(p, table))

    return lambda: P.GlobalTokens(tokens, queries, keys), allow


def sinks(r, m, n):
    count = r.int(0, r.pick((1, 4, 9, n + 2)))
    return lambda: P.Sinks(count), lambda p, j: (j < count) & (p == p)


def stride(r, m, n):
    s = r.step()
    offset = 0 if r.chance(0.5) else r.int(0, s - 1)
    return lambda: P.Stride(s, offset), lambda p, j: (p - j) % s == offset


def columns(r, m, n):
    period = r.int(1, r.pick((4, 9, 33, n)))
    start = r.int(0, period - 1)
    stop = r.int(start + 1, period)
    return lambda: P.Columns(period, start, stop), lambda p, j: (start <= j % period) & (j % period < stop) & (p == p)


def lengths_of(r, n):
    """Lengths of documents of at most n tokens, some of them empty."""
    found, left = [], n
    for _ in range(r.int(1, 6)):
        length = r.int(0 if r.chance(0.2) else min(1, left), min(left, r.pick((3, 20, n))))
        found.append(length)
        left -= length
    if r.chance(0.5):
        found.append(left)
    if found[0] == 0:
        found = found[1:] or [1 if n else 0]
    return tuple(found)


def same_document(lengths, x):
    ends = np.cumsum(lengths, dtype=np.int64)
    found = np.searchsorted(ends, x, side="right")
    return np.where((x >= 0) & (found < len(ends)), found, -1)


def documents(r, m, n):
    each = [lengths_of(r, n) for _ in range(r.batch if r.chance(0.3) else 1)]
    value = tuple(each) if len(each) > 1 or r.batch == 1 and r.chance(0.1) else each[0]

    def allow(p, j):
        found = [(same_document(x, p) == same_document(x, j)) & (same_document(x, p) >= 0) for x in each]
        return np.stack(found)[:, None] if len(found) > 1 else found[0]

    return lambda: P.Documents(value), allow


def prefix_lm(r, m, n):
    each = [r.int(0, r.pick((2, n))) for _ in range(r.batch if r.chance(0.3) else 1)]
    value = tuple(each) if len(each) > 1 else each[0]

    def allow(p, j):
        found = [(j < x) | (j <= p) for x in each]
        return np.stack(found)[:, None] if len(found) > 1 else found[0]

    return lambda: P.PrefixLM(value), allow


def prefix(r, m, n):
    tokens = r.int(0, min(n, r.pick((1, 4, n))))
    name = r.pick(POSITIONS + GRIDS * 2)
    make, inner = LEAVES[name](r, min(m, n - tokens), n - tokens) if n > tokens else full(r, m, n)

    def allow(p, j):
        behind = np.asarray(inner(p - tokens, j[:, tokens:] - tokens))
        wide = np.zeros((*behind.shape[:-1], n), bool)
        wide[..., tokens:] = behind
        return (p >= 0) & ((p < tokens) | (j < tokens) | wide)

    return lambda: P.Prefix(make(), tokens), allow


def queries_at(r, m, n):
    if r.chance(0.5):
        positions = r.int(-3, n + 5)
        at = positions + np.arange(m)
    else:
        positions = at = r.rng.integers(-2, n + 6, m)
    last = int(at.max()) if m else -1
    length = max(n, last + 1)
    name = r.pick([x for x in POSITIONS if x != "prefix"])
    make, inner = LEAVES[name](r, m, length)
    return lambda: P.QueriesAt(make(), positions), lambda p, j: inner(at[:, None], j)


def vertical_slash(r, m, n):
    chosen = tuple(sorted({r.int(0, n + 2) for _ in range(r.int(0, 5))}))
    diagonals = tuple(sorted({r.int(0, n + 2) for _ in range(r.int(0, 5))}))

    def allow(p, j):
        return (np.isin(j, chosen) | np.isin(p - j, diagonals)) & (j <= p)

    return lambda: P.VerticalSlash(chosen, diagonals), allow


def column_intervals(r, m, n):
    lead, is_causal, two = r.lead(), r.chance(0.4), r.chance(0.4)
    bounds = [r.rng.integers(-2, n + 3, (*lead, n)) for _ in range(4 if two else 2)]
    if r.chance(0.5):
        bounds[1] = bounds[0] + r.rng.integers(-2, max(1, n // 3) + 1, (*lead, n))

    def allow(p, j):
        s = [led(x, lead, 1)[..., None, :] for x in bounds]
        hidden = (s[0] <= p) & (p < s[1])
        if two:
            hidden = hidden | ((s[2] <= p) & (p < s[3]))
        return ~hidden & (j <= p) if is_causal else ~hidden

    return lambda: P.ColumnIntervals(*bounds, causal=is_causal), allow


def row_intervals(r, m, n):
    lead = r.lead()
    start = r.rng.integers(-2, n + 2, (*lead, m))
    kind = r.int(0, 3)
    if kind == 0:
        stop = start + r.rng.integers(-3, max(2, n // 4), (*lead, m))
    elif kind == 1:
        stop = r.rng.integers(-2, n + 4, (*lead, m))
    elif kind == 2:  # many equal rows
        start = np.repeat(start[..., ::7], 7, -1)[..., :m]
        stop = start + r.int(0, 20)
    else:
        stop = np.where(r.rng.random((*lead, m)) < 0.6, start, n)  # mostly empty
    start, stop = np.ascontiguousarray(start), np.ascontiguousarray(stop)
    if r.chance(0.3):
        start, stop = start.astype(np.int32), stop.astype(np.int32)

    def allow(p, j):
        return (led(start, lead, 1)[..., None] <= j) & (j < led(stop, lead, 1)[..., None])

    return lambda: P.RowIntervals(start, stop), allow


def clusters(r, m, n):
    lead, many, given = r.lead(), r.int(1, r.pick((2, 5, 12))), r.chance(0.4)
    labels = r.rng.integers(-1, many, (*lead, n))
    q_labels = r.rng.integers(-1, many + 1, (*lead, m)) if given else None

    def allow(p, j):
        keys = led(labels, lead, 1)[..., None, :]
        if given:
            mine = led(q_labels, lead, 1)[..., None]
        else:
            at = p[:, 0]
            mine = np.where(at >= 0, led(labels, lead, 1)[..., np.maximum(at, 0)], -1)[..., None]
        return (mine >= 0) & (keys == mine)

    return lambda: P.Clusters(labels, q_labels), allow


def csr(r, m, n):
    dense = r.rng.random((m, n)) < r.density()
    indptr = np.concatenate([[0], np.cumsum(dense.sum(1))])
    indices = np.nonzero(dense)[1]
    return lambda: P.CSR(indptr, indices, n), lambda p, j: dense


def from_pairs(r, m, n):
    dense = r.rng.random((m, n)) < r.density() / 3
    row, key = np.nonzero(dense)
    order = r.rng.permutation(len(row))
    return lambda: P.from_pairs(row[order], key[order], m, n), lambda p, j: dense


def row_runs(r, m, n):
    lead, runs = r.lead(0.8), r.int(1, 3)
    shape = (*lead, m)
    dense = np.zeros((*shape, n), bool)
    start, step, count = (np.zeros((*shape, runs), np.int64) for _ in range(3))
    for at in np.ndindex(*shape):
        for run in range(runs):
            first, by = r.int(0, max(0, n - 1)), r.step()
            keys = np.arange(first, n, by)[: r.int(0, 9)] if n else np.zeros(0, int)
            if r.chance(0.3) or not len(keys) or dense[at][keys].any():
                start[(*at, run)], step[(*at, run)] = -5, 0  # absent: any start and step
            else:
                dense[at][keys] = True
                start[(*at, run)], step[(*at, run)], count[(*at, run)] = first, by, len(keys)
    return lambda: P.RowRuns(start, step, count), lambda p, j: led(dense, lead, 2)


def mask(r, m, n):
    lead = r.lead()
    dense = r.rng.random((*lead, m, n)) < r.density()
    if r.chance(0.3):
        dense &= r.rng.random((*lead, m, 1)) < 0.4  # empty rows
    return lambda: P.Mask(dense), lambda p, j: led(dense, lead, 2)


def array(r, m, n):
    dense = r.rng.random((m, n)) < r.density()
    return lambda: dense, lambda p, j: dense


def block_layout(r, m, n):
    lead = r.lead()
    bq = bk = r.int(1, r.pick((3, 8, 20, max(1, n))))
    if r.chance(0.3):
        bk = r.int(1, r.pick((3, 16, 64)))
    layout = r.rng.random((*lead, -(-n // bq), -(-n // bk))) < r.density()

    def allow(p, j):
        rows = p[:, 0] // bq
        fine = (rows >= 0) & (rows < layout.shape[-2])
        found = led(layout, lead, 2)[..., np.clip(rows, 0, max(0, layout.shape[-2] - 1)), :][..., j[0] // bk]
        return found & fine[:, None]

    block = bq if bq == bk and r.chance(0.7) else (bq, bk)
    return lambda: P.BlockLayout(layout, block), allow


def key_blocks(r, m, n):
    bq, bk, many = r.int(1, r.pick((4, 16, 70))), r.int(1, r.pick((4, 16, 70))), r.int(1, 4)
    kind = r.int(0, 4)
    lead = {0: (r.batch, r.heads_kv), 1: (r.heads_kv,)}.get(kind, ())
    rows, cols = -(-n // bq), -(-n // bk)
    blocks = r.rng.integers(-1, cols, (*lead, rows, many))

    def allow(p, j):
        listed = (blocks[..., None] == np.arange(cols)).any(-2)
        layout = led(listed, lead, 2)
        if lead:
            layout = np.repeat(layout, r.heads // r.heads_kv, 1)
        at = p[:, 0] // bq
        fine = (at >= 0) & (at < rows)
        return layout[..., np.clip(at, 0, max(0, rows - 1)), :][..., j[0] // bk] & fine[:, None]

    return lambda: P.KeyBlocks(blocks, bq, bk), allow


def key_padding(r, m, n):
    shape = r.pick(((n,), (n,), (r.batch, n), (r.batch, 1, 1, n)))
    valid = r.rng.random(shape) < r.pick((0.3, 0.8))
    if r.chance(0.6):
        valid = np.broadcast_to(np.arange(n) < r.int(0, n), shape).copy()
        if r.chance(0.5):
            valid = valid[..., ::-1]
    if r.chance(0.3):
        valid = valid.astype(np.int64)

    def allow(p, j):
        return valid.astype(bool).reshape(-1, 1, 1, n)[..., j[0]] & (p == p)

    return lambda: P.KeyPadding(valid), allow


def per_head(r, m, n):
    many = r.pick([x for x in range(1, r.heads + 1) if r.heads % x == 0])
    parts = [LEAVES[r.pick(POSITIONS + GRIDS + LISTED)](Dice(r.rng, 1, 1, 1), m, n) for _ in range(many)]

    def allow(p, j):
        found = [np.broadcast_to(as4(a(p, j)), (1, 1, *np.broadcast_shapes(p.shape, j.shape))) for _, a in parts]
        return np.concatenate([x for x in found for _ in range(r.heads // many)], 1)

    return lambda: P.PerHead(tuple(make() for make, _ in parts)), allow


def per_batch(r, m, n):
    parts = [LEAVES[r.pick(POSITIONS + GRIDS + LISTED)](Dice(r.rng, 1, 1, 1), m, n) for _ in range(r.batch)]

    def allow(p, j):
        return np.concatenate(
            [np.broadcast_to(as4(a(p, j)), (1, 1, *np.broadcast_shapes(p.shape, j.shape))) for _, a in parts]
        )

    return lambda: P.PerBatch(tuple(make() for make, _ in parts)), allow


def strided(r, m, n):
    s = r.step()
    return lambda: P.Strided(s), lambda p, j: (j <= p) & ((p - j < s) | ((p - j) % s == 0))


def fixed(r, m, n):
    block = r.int(1, r.pick((6, 16, 40)))
    summary = r.int(1, min(block, 5))

    def allow(p, j):
        return (j <= p) & ((j // block == p // block) | (j % block >= block - summary))

    return lambda: P.Fixed(block, summary), allow


def longformer(r, m, n):
    window, d = 2 * r.int(1, r.pick((2, 6, 20))), r.pick((1, 1, 2, 3, 4))
    tokens = r.int(0, 3) if r.chance(0.5) else tuple(sorted({r.int(0, n + 1) for _ in range(r.int(0, 3))}))
    table = np.arange(tokens) if isinstance(tokens, int) else np.array(tokens, np.int64)

    def allow(p, j):
        near = ((j - p) % d == 0) & (np.abs(j - p) <= window // 2 * d)
        return near | np.isin(j, table) | np.isin(p, table)

    return lambda: P.Longformer(window, d, tokens), allow


@functools.lru_cache(8192)
def sample(seed, head, row, many, candidates):
    """Floyd's sample of `many` of so many candidates, by the words of Philox, as the page defines it."""
    words = np.random.Philox(key=seed, counter=[0, 0, head, row]).random_raw(max(1, many))
    taken = []
    for t in range(many):
        last = candidates - many + t
        number = int(words[t]) % (last + 1)
        taken.append(last if number in taken else number)
    return tuple(taken)


def drawn_layout(seed, heads, blocks, many, candidates):
    """(heads, blocks, blocks): the random blocks of each row, of those that ``candidates(row)`` lists in order."""
    found = np.zeros((heads, blocks, blocks), bool)
    for row in range(blocks):
        listed = candidates(row)
        for head in range(heads):
            for number in sample(seed, head, row, min(many, len(listed)), len(listed)):
                found[head, row, listed[number]] = True
    return found


def by_blocks(layout, block):
    """The predicate of (heads, rows, columns) of blocks; rows that are not there allow nothing."""

    def allow(p, j):
        rows = p[:, 0] // block
        fine = (rows >= 0) & (rows < layout.shape[-2])
        found = layout[None][..., np.clip(rows, 0, layout.shape[-2] - 1), :][..., j[0] // block]
        return found & fine[:, None]

    return allow


def bigbird(r, m, n):
    block, window, many = r.int(1, r.pick((4, 10, 32))), r.int(1, 4), r.int(0, 3)
    fixed_blocks, seed, is_causal = r.int(0, 2), r.int(0, 5), r.chance(0.4)
    blocks = -(-n // block)

    def has(a, b):
        return (np.abs(a - b) <= window // 2) | (b < fixed_blocks) | (a < fixed_blocks)

    def candidates(row):
        b = np.arange(blocks)
        return b[~has(row, b) & (b < row if is_causal else b == b)]

    layout = drawn_layout(seed, r.heads if many else 1, blocks, many, candidates)
    drawn = by_blocks(layout, block)

    def allow(p, j):
        found = has(p // block, j // block) | drawn(p, j)
        return found & (j <= p) if is_causal else found

    return lambda: P.BigBird(block, window, fixed_blocks, many, seed, is_causal), allow


def axial(r, m, n):
    grid = grid_of(r, n)
    axis = r.int(-len(grid), len(grid) - 1)

    def allow(p, j):
        pairs = list(zip(coordinates(p, grid), coordinates(j, grid), strict=True))
        del pairs[axis]
        return functools.reduce(operator.and_, [a == b for a, b in pairs], (p == p) & (j == j))

    return lambda: P.Axial(grid, axis), allow


def windowed(r, m, n):
    grid = grid_of(r, n)
    window = tuple(r.int(1, x) for x in grid)
    shift = tuple(r.int(0, w - 1) if r.chance(0.6) else 0 for w in window)

    def allow(p, j):
        found = (p == p) & (j == j)
        for x, y, length, w, s in zip(coordinates(p, grid), coordinates(j, grid), grid, window, shift, strict=True):
            found = found & ((x - s) % length // w == (y - s) % length // w) & ((x < s) == (y < s))
        return found

    return lambda: P.Windowed(grid, window, shift), allow


def neighborhood(r, m, n):
    grid = grid_of(r, n)
    kernel = tuple(r.int(1, min(x, r.pick((3, 7, x)))) for x in grid)
    dilation = tuple(r.int(1, x // w) if r.chance(0.4) else 1 for x, w in zip(grid, kernel, strict=True))
    step = tuple(r.int(1, w) if r.chance(0.3) else 1 for w in kernel)
    is_causal = tuple(r.chance(0.3) for _ in grid)

    def axis(x, y, length, w, d, s, c):
        g, u, z = x % d, x // d, y // d
        size = length // d + np.where(g < length % d, 1, 0)
        if c:
            leader = np.minimum(u // s * s + s - 1, size - 1)
            near = (z <= u) & (leader - z < w)
        else:
            leader = np.minimum(u // s * s + s // 2, size - 1)
            after = w // 2 + w % 2 - 1
            centre = np.minimum(np.maximum(leader, w // 2), size - 1 - after)
            near = (-(w // 2) <= z - centre) & (z - centre <= after)
        return (x % d == y % d) & near

    def allow(p, j):
        found = (p == p) & (j == j)
        for x, y, *sizes in zip(
            coordinates(p, grid), coordinates(j, grid), grid, kernel, dilation, step, is_causal, strict=True
        ):
            found = found & axis(x, y, *sizes)
        return found

    return lambda: P.Neighborhood(grid, kernel, dilation, step, is_causal), allow


def per_axis(r, m, n):
    grid = grid_of(r, n)
    alone = Dice(r.rng, 1, 1, 1)
    parts = [LEAVES[r.pick(AXIS)](alone, x, x) for x in grid]

    def allow(p, j):
        found = (p == p) & (j == j)
        for x, y, (_, inner) in zip(coordinates(p, grid), coordinates(j, grid), parts, strict=True):
            found = found & inner(x, y)
        return found

    return lambda: P.PerAxis(grid, tuple(make() for make, _ in parts)), allow


def divisor(r, n):
    return r.pick([x for x in range(1, min(n, 32) + 1) if n % x == 0])


def spread(ranges, way, layout, horizontal):
    """Global blocks of DeepSpeed's layouts, in place."""
    for start, stop in ranges:
        if way == "bidirectional":
            layout[..., start:stop] = True
            if horizontal:
                layout[..., start:stop, :] = True
        else:
            layout[..., start:, start:stop] = True


def ds_fixed(r, m, n):
    block, local = divisor(r, n), r.int(1, 5)
    size = r.pick([x for x in range(1, local + 1) if local % x == 0])
    way = r.pick(("bidirectional", "unidirectional"))
    horizontal, kinds = way == "bidirectional" and r.chance(0.3), r.int(1, local // size)
    blocks = n // block
    rows, cols = np.ogrid[:blocks, :blocks]
    layout = np.repeat((rows // local == cols // local)[None], r.heads if kinds > 1 else 1, 0)
    if way == "unidirectional":
        layout &= cols <= rows
    for head in range(len(layout)):
        first = local - (1 + head % kinds) * size
        whole = blocks - blocks % local
        starts = list(range(first, whole, local))
        if blocks % local:
            starts.append(max(min(whole + first, blocks - size), 0))
        spread([(x, x + size) for x in starts], way, layout[head], horizontal)
    return lambda: deepspeed.Fixed(block, local, size, way, horizontal, kinds), by_blocks(layout, block)


def ds_ranges(r, blocks):
    starts = tuple(sorted({r.int(0, blocks - 1) for _ in range(r.int(0, 2))}))
    if r.chance(0.5):
        return starts, None, [(x, x + 1) for x in starts]
    stops = tuple(min(blocks, x + r.int(1, 2)) for x in starts)
    return starts, stops, list(zip(starts, stops, strict=True))


def ds_variable(r, m, n):
    block = divisor(r, n)
    blocks = n // block
    sizes = tuple(r.int(1, 4) for _ in range(r.int(1, 3)))
    starts, stops, ranges = ds_ranges(r, blocks)
    way = r.pick(("bidirectional", "unidirectional"))
    horizontal, many, seed = way == "bidirectional" and r.chance(0.3), r.pick((0, 0, 1, 2)), r.int(0, 4)
    bounds = list(itertools.accumulate(itertools.islice(itertools.chain(sizes, itertools.repeat(sizes[-1])), blocks)))
    window = np.searchsorted(bounds, np.arange(blocks), side="right")
    local = window[:, None] == window[None]
    if way == "unidirectional":
        local = local & np.tri(blocks, dtype=bool)
    drawn = drawn_layout(seed, r.heads if many else 1, blocks, many, lambda row: np.arange(blocks))
    layout = drawn | local
    spread(ranges, way, layout, horizontal)
    return (
        lambda: deepspeed.Variable(block, many, sizes, starts, stops, way, horizontal, seed),
        by_blocks(layout, block),
    )


def ds_bslongformer(r, m, n):
    block, window = divisor(r, n), r.int(1, 4)
    blocks = n // block
    starts, stops, ranges = ds_ranges(r, blocks)
    way = r.pick(("bidirectional", "unidirectional"))
    rows, cols = np.ogrid[:blocks, :blocks]
    layout = (np.abs(rows - cols) <= window // 2)[None].copy()
    for start, stop in ranges:
        layout[..., start:stop] = True
        layout[..., start:stop, :] = True
    if way == "unidirectional":
        layout &= cols <= rows
    return lambda: deepspeed.BSLongformer(block, window, starts, stops, way), by_blocks(layout, block)


def ds_bigbird(r, m, n):
    block, many, window, size, seed = divisor(r, n), r.int(0, 2), r.int(1, 3), r.int(0, 2), r.int(0, 4)
    blocks = n // block
    many, window, size = min(many, blocks), min(window, blocks), min(size, blocks)
    way = r.pick(("bidirectional", "unidirectional"))
    rows, cols = np.ogrid[:blocks, :blocks]
    every = way == "bidirectional"
    layout = drawn_layout(
        seed, r.heads if many else 1, blocks, many, lambda row: np.arange(blocks if every else row + 1)
    )
    layout = layout | (np.abs(rows - cols) <= window // 2) | (rows < size) | (cols < size)
    if not every:
        layout = layout & (cols <= rows)
    return lambda: deepspeed.BigBird(block, many, window, size, way, seed), by_blocks(layout, block)


def ds_local(r, m, n):
    block, window = divisor(r, n), r.int(1, 4)
    blocks = n // block
    way = r.pick(("bidirectional", "unidirectional"))
    rows, cols = np.ogrid[:blocks, :blocks]
    layout = (np.abs(rows - cols) <= window // 2)[None]
    if way == "unidirectional":
        layout = layout & (cols <= rows)
    return lambda: deepspeed.LocalSlidingWindow(block, window, way), by_blocks(layout, block)


def chunked(r, m, n):
    c, offset = r.int(1, r.pick((5, 20, n))), r.pick((0, 0, 3))
    return (
        lambda: P.chunked_causal(c, offset),
        lambda p, j: (j <= p) & ((p - offset) // c == (j - offset) // c),
    )


def a_shape(r, m, n):
    count, w = r.int(0, 5), r.int(1, 12)
    return lambda: P.a_shape(count, w), lambda p, j: (j <= p) & ((j < count) | (p - j < w))


def tri_shape(r, m, n):
    count, w, last = r.int(0, 5), r.int(1, 12), r.int(0, n)
    return (
        lambda: P.tri_shape(count, w, last, n),
        lambda p, j: (j <= p) & ((j < count) | (p - j < w) | (p >= n - last)),
    )


def shared_prefix(r, m, n):
    count = r.int(1, max(1, n // 3))
    lengths = lengths_of(r, max(1, n - count)) if n > count else ()
    if sum(lengths) + count > n:
        return causal(r, m, n)

    def allow(p, j):
        mine = same_document((count, *lengths), p)
        return (j <= p) & ((j < count) | ((mine == same_document((count, *lengths), j)) & (mine >= 0)))

    return lambda: P.shared_prefix(count, lengths), allow


def cu_seqlens(r, m, n):
    many = r.int(1, 4)
    cuts_q = np.concatenate([[0], np.sort(r.rng.integers(0, m + 1, many - 1)), [m]])
    cuts_k = np.concatenate([[0], np.sort(r.rng.integers(0, n + 1, many - 1)), [n]])
    left, is_causal = r.pick((-1, 0, 3, 10)), r.chance(0.6)
    right = r.pick((-1, 0, 2))
    row_of = np.repeat(np.arange(many), np.diff(cuts_q))
    key_of = np.repeat(np.arange(many), np.diff(cuts_k))
    place = np.arange(m) - cuts_q[1:][row_of] + cuts_k[1:][row_of]  # in keys: the last query beside the last key
    i, j = place[:, None], np.arange(n)
    dense = row_of[:, None] == key_of
    if is_causal or right >= 0:
        dense = dense & (j <= i + (0 if is_causal else right))
    if left >= 0:
        dense = dense & (j >= i - left)

    def make():
        return P.from_flash_attention((left, right), is_causal, cu_seqlens_q=cuts_q, cu_seqlens_k=cuts_k)

    return make, lambda p, j: dense


def discovered(r, m, n):
    one = Dice(r.rng, 1, 1, 1)
    parts = [LEAVES[r.pick(POSITIONS + GRIDS)](one, m, n) for _ in range(r.int(1, 3))]
    p, j = np.arange(m)[:, None] + n - m, np.arange(n)[None]
    dense = functools.reduce(operator.or_, [np.broadcast_to(as4(a(p, j)), (1, 1, m, n)) for _, a in parts])[0, 0]
    dense = dense ^ (r.rng.random((m, n)) < r.pick((0, 0, 0.01, 0.1)))
    grid = grid_of(r, n) if r.chance(0.3) else None
    return lambda: P.discover(dense, grid), lambda p, j: dense


def remainder(r, m, n):
    a, b, c, modulus = r.int(-3, 3), r.int(-3, 3), r.int(-2, 2), r.int(1, 19)
    below = r.int(0, modulus)
    return (
        lambda: Remainder(a, b, c, modulus, below),
        lambda p, j: (a * p + b * j + c * p * j) % modulus < below,
    )


def bits(r, m, n):
    b = r.int(0, 127)
    return lambda: Bits(b), lambda p, j: ((p ^ j) & b) == 0


def floors(r, m, n):
    a, b, c, s = r.int(1, 20), r.int(1, 20), r.int(0, 3), r.int(1, 40)
    return lambda: Floors(a, b, c, s), lambda p, j: (np.abs(p // a - j // b) <= c) | ((p - j) % s == 0)


def wedge(r, m, n):
    a, b, c, d = r.int(-2, 5), r.int(1, 4), r.int(-2, 4), r.int(0, 15)
    return lambda: Wedge(a, b, c, d), lambda p, j: (j * b <= p * a) & ((j + d) * b >= p * c)


def empty(r, m, n):
    return r.pick(
        (
            (lambda: P.Sinks(0), lambda p, j: (p != p) & (j == j)),
            (lambda: ~P.Full(), lambda p, j: (p != p) & (j == j)),
            (lambda: P.GlobalTokens(()), lambda p, j: (p != p) & (j == j)),
            (lambda: P.Causal() - P.Causal(), lambda p, j: (p != p) & (j == j)),
            (lambda: P.Mask(np.zeros((m, n), bool)), lambda p, j: np.zeros((m, n), bool)),
            (lambda: P.RowIntervals(np.full(m, 3), np.full(m, 3)), lambda p, j: np.zeros((m, n), bool)),
        )
    )


LEAVES = {
    f.__name__: f
    for f in (
        full, causal, sliding, dilated, periodic, block_local, global_tokens, sinks, stride, columns, documents,
        prefix_lm, prefix, queries_at, vertical_slash, column_intervals, row_intervals, clusters, csr,
        from_pairs, row_runs, mask, array, block_layout, key_blocks, key_padding, per_head, per_batch, strided,
        fixed, longformer, bigbird, axial, windowed, neighborhood, per_axis, ds_fixed, ds_variable,
        ds_bslongformer, ds_bigbird, ds_local, chunked, a_shape, tri_shape, shared_prefix, cu_seqlens,
        discovered, remainder, bits, floors, wedge, empty,
    )
}  # fmt: skip
AXIS = (
    "full causal sliding dilated periodic block_local sinks stride columns strided fixed longformer chunked a_shape"
).split()
STRIDES = "dilated dilated stride strided columns fixed longformer periodic per_axis bigbird".split()
POSITIONS = [*AXIS, "global_tokens", "vertical_slash", "prefix", "documents", "block_layout", "key_padding"]
GRIDS = "axial windowed neighborhood neighborhood per_axis per_axis".split()
LISTED = "csr from_pairs row_runs mask row_intervals clusters column_intervals block_layout key_blocks".split()
BANDS = "sliding sinks global_tokens block_local causal documents a_shape chunked tri_shape".split()
BANDS += ["shared_prefix", "prefix_lm"]
WORDS = "remainder bits floors wedge".split()
BLOCKS = "block_layout key_blocks bigbird ds_fixed ds_variable ds_bslongformer ds_bigbird ds_local block_local".split()
TOLD_APART = "per_head per_batch mask clusters row_intervals bigbird key_padding documents column_intervals".split()
DEEPSPEED = [name for name in LEAVES if name.startswith("ds_")]
CAPS = "causal sliding documents key_padding block_local mask row_intervals clusters".split()


def as4(found):
    """As (batch or 1, heads or 1, q_len, kv_len)."""
    return found.reshape((1,) * (4 - found.ndim) + found.shape)


# --- trees of operators -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Leaf:
    """A pattern that is made by `make`, with its mask."""

    name: str
    make: object
    mask: np.ndarray

    def build(self):
        """The pattern, or a bool array."""
        return self.make()

    def shown(self):
        """Its kind."""
        return self.name


@dataclasses.dataclass
class Node:
    """An operator and its operands; ``~`` has one."""

    op: str
    children: list

    @property
    def mask(self):
        """What NumPy says of the masks."""
        masks = [child.mask for child in self.children]
        if self.op == "~":
            return ~masks[0]
        if self.op == "-":
            return functools.reduce(lambda a, b: a & ~b, masks)
        return functools.reduce(operator.or_ if self.op == "|" else operator.and_, masks)

    def build(self):
        """The same of the package's patterns."""
        built = [child.build() for child in self.children]
        if self.op == "~":
            return ~built[0]
        combine = {"|": operator.or_, "&": operator.and_, "-": operator.sub}[self.op]
        found = built[0]
        for other in built[1:]:
            if isinstance(found, np.ndarray) and isinstance(other, np.ndarray):
                found = P.Mask(found)
            found = combine(found, other)
        return found

    def shown(self):
        """As it is written."""
        if self.op == "~":
            return "~" + self.children[0].shown()
        return "(" + f" {self.op} ".join(child.shown() for child in self.children) + ")"


def leaf(r, m, n, names):
    """A random leaf of one of these kinds that suits the lengths."""
    while True:
        name = r.pick(names)
        if n == 0 and name not in AXIS or name in DEEPSPEED and (m > n or n < 1):
            name = r.pick(AXIS)
        if name in ("per_axis", "axial", "windowed", "neighborhood") and n < 1:
            continue
        make, allow = LEAVES[name](r, m, n)
        p, j = np.arange(m)[:, None] + (n - m), np.arange(n)[None]
        return Leaf(name, make, as4(np.asarray(allow(p, j), bool)))


def random_tree(r, m, n):
    """A union of three to six operands; in a part of the draws with intersections, differences and complements."""
    every = [*LEAVES]
    theme = r.pick(
        (every, every, every, STRIDES, STRIDES + GRIDS, GRIDS + ["prefix"], LISTED + STRIDES, BANDS, BANDS + STRIDES,
         BLOCKS, TOLD_APART + STRIDES, WORDS + STRIDES + BANDS, POSITIONS)
    )  # fmt: skip

    def operand(depth):
        kind = r.rng.random()
        if depth and kind < 0.10:
            return Node("&", [operand(depth - 1), leaf(r, m, n, CAPS if r.chance(0.6) else theme)])
        if depth and kind < 0.18:
            return Node("-", [operand(depth - 1), operand(depth - 1)])
        if depth and kind < 0.22:
            return Node("~", [operand(depth - 1)])
        if depth and kind < 0.27:
            return Node(r.pick("|&"), [operand(depth - 1) for _ in range(r.int(2, 3))])
        return leaf(r, m, n, theme)

    depth = r.pick((0, 0, 1, 1, 2))
    tree = Node("|", [operand(depth) for _ in range(r.int(3, 6))])
    kind = r.rng.random()
    if kind < 0.2:
        tree = Node("&", [tree, leaf(r, m, n, CAPS)])
    elif kind < 0.3:
        tree = Node("-", [tree, operand(0)])
    elif kind < 0.34:
        tree = Node("&", [tree, Node("|", [operand(0) for _ in range(r.int(2, 3))])])
    elif kind < 0.36:
        tree = Node("~", [tree])
    return tree


def smaller(tree):
    """Trees with one operand less, or with an operand in place of an operator."""
    if isinstance(tree, Leaf):
        return
    yield from tree.children
    if tree.op != "~":
        for at in range(len(tree.children)):
            rest = tree.children[:at] + tree.children[at + 1 :]
            if len(rest) > 1:
                yield Node(tree.op, rest)
    for at, child in enumerate(tree.children):
        for less in smaller(child):
            yield Node(tree.op, [*tree.children[:at], less, *tree.children[at + 1 :]])


# --- cases ------------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """The package said no, by ValueError or TypeError."""


@dataclasses.dataclass
class Case:
    """A call: sizes, dtype, arrays, how it is made, and the tree of its pattern."""

    number: int
    q_len: int
    kv_len: int
    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float | None
    mode: str
    tile: tuple | None
    box: tuple | None
    workers: int
    memory: str
    layout: str
    tree: object
    arrays: tuple
    selection: object = None

    def shown(self):
        """All but the arrays and the pattern."""
        names = "q_len kv_len batch heads heads_kv head_dim head_dim_v dtype scale mode tile box workers memory layout"
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names.split())


def length_of(rng, large):
    """Mostly up to 120 tokens, in half of the draws a number with many divisors."""
    kind = rng.random()
    most = 24 if kind < 0.15 else 120 if kind < 0.86 else 200 if kind < 0.97 else 400
    if large and rng.random() < 0.3:
        most = 700
    n = int(rng.integers(1, most + 1))
    if rng.random() < 0.5:
        options = [a * b for a in range(2, 27) for b in range(2, 27) if n * 0.7 <= a * b <= n]
        n = int(rng.choice(options)) if options else n
    return n


def make_case(seed, number, device):
    """The case of this seed and number."""
    rng = np.random.default_rng([seed, number])
    n = length_of(rng, device == "cuda")
    kind = rng.random()
    if kind < 0.66:
        m = n
    elif kind < 0.72:
        m = 1
    elif kind < 0.9:
        m = int(rng.integers(1, n + 1))
    else:
        m = n + int(rng.integers(1, max(2, n // 3)))
    if rng.random() < 0.004:
        m, n = (int(x) for x in rng.choice(((0, 5), (5, 0), (0, 0)), axis=0))
    heads = int(rng.choice((1, 1, 2, 2, 3, 4, 6)))
    heads_kv = int(rng.choice([x for x in range(1, heads + 1) if heads % x == 0]))
    batch = int(rng.choice((1, 1, 1, 2, 3))) if n <= 200 else 1
    if device == "cuda":
        head_dim = head_dim_v = int(rng.choice((64, 64, 128)))
        dtype = str(rng.choice(("float32", "float16", "bfloat16", "bfloat16")))
    else:
        head_dim = int(rng.choice((8, 8, 16, 16, 32, 32, 5, 17, 24)))
        head_dim_v = head_dim if rng.random() < 0.8 else int(rng.choice((4, 8, 19, 32)))
        dtype = str(rng.choice(("float64", "float32", "float32", "float16", "bfloat16")))
    scale = None if rng.random() < 0.85 else float(rng.choice((0.0, -0.3, 0.1, 0.7)))
    kind = rng.random()
    mode = "pattern" if kind < 0.56 else "plan" if kind < 0.93 else "grouped" if kind < 0.97 else "array"
    bq = int(rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 24, 32, 33, 48, 49, 64, 96, 100, 128)))
    bkv = int(rng.choice((64, 64, 64, 128, 192, 256)))
    if device == "cuda":
        bq, bkv = int(rng.choice((16, 32, 64, 128, 128, 128))), int(rng.choice((64, 64, 128)))
    box = None
    if mode == "plan" and rng.random() < 0.15:
        axes = [1, 1, 1][: int(rng.integers(1, 4))]
        rest = bq
        for prime in (2, 2, 2, 2, 2, 2, 2, 3, 5, 7, 11):
            if rest % prime == 0:
                axes[int(rng.integers(len(axes)))] *= prime
                rest //= prime
        box = tuple(axes) if rest == 1 else None
    workers = int(rng.choice((1, 1, 2, 3, 8, 32)))
    kind = rng.random()
    memory = "contiguous" if kind < 0.7 else "heads inside" if kind < 0.85 else "padded" if kind < 0.95 else "reversed"
    if device != "cpu" and memory == "reversed":
        memory = "contiguous"  # PyTorch has no negative strides
    layout = "bnhd" if rng.random() < 0.06 else "bhnd"
    dice = Dice(rng, batch, heads, heads_kv)
    tree = random_tree(dice, m, n)
    selection = random_selection(dice, n) if device == "cuda" and rng.random() < 0.12 else None
    if selection:
        mode = "pattern"
    arrays = (
        rng.standard_normal((batch, heads, m, head_dim)),
        rng.standard_normal((batch, heads_kv, n, head_dim)),
        rng.standard_normal((batch, heads_kv, n, head_dim_v)),
        rng.standard_normal((batch, heads, m, head_dim_v)),
        rng.standard_normal((batch, heads, m)) * (rng.random() < 0.3),
    )
    if rng.random() < 0.15:  # keys of large logits and values, which rows must not notice that do not see them
        few = rng.random((batch, heads_kv, n, 1)) < rng.choice((0.01, 0.05, 0.3))
        arrays[1][...] *= np.where(few, rng.choice((10.0, 60.0)), 1.0)
        arrays[2][...] *= np.where(few, rng.choice((1.0, 30.0, 500.0)), 1.0)
    return Case(
        number, m, n, batch, heads, heads_kv, head_dim, head_dim_v, dtype, scale, mode,
        (bq, bkv) if mode == "plan" and rng.random() < 0.9 else None, box, workers, memory, layout, tree, arrays,
        selection,
    )  # fmt: skip


def random_selection(r, n):
    """What makes a selection on a GPU, and its mask: lengths, blocks, documents, or columns and diagonals."""
    i = r.int(0, 3)
    if i == 0:
        lengths, left = r.rng.integers(0, n + 1, r.batch), r.chance(0.4)
        j = np.arange(n)
        valid = j >= n - lengths[:, None] if left else j < lengths[:, None]
        return ("KeyPadding", (lengths,), {"left": left}), lambda p, j: valid[:, None, None]
    if i == 1:
        many = r.int(1, 5)
        cuts = np.concatenate([[0], np.sort(r.rng.integers(0, n + 1, many))])
        lengths = np.diff(cuts)
        return (
            "Documents",
            (cuts,),
            {},
        ), lambda p, j: (same_document(lengths, p) == same_document(lengths, j)) & (same_document(lengths, p) >= 0)
    if i == 2:
        bq, bk = r.pick((16, 64, 128)), r.pick((16, 64, 128))
        rows, cols = -(-n // bq), -(-n // bk)
        blocks = r.rng.integers(-1, cols, (rows, r.int(1, 3)))
        layout = (blocks[..., None] == np.arange(cols)).any(-2)[None]

        def allow(p, j):
            at = p[:, 0] // bq
            fine = (at >= 0) & (at < rows)
            return layout[..., np.clip(at, 0, max(0, rows - 1)), :][..., j[0] // bk] & fine[:, None]

        return ("KeyBlocks", (blocks,), {"block_q": bq, "block_kv": bk}), allow
    chosen, diagonals = np.unique(r.rng.integers(0, n, 4)), np.unique(r.rng.integers(0, n, 4))
    return (
        "VerticalSlash",
        (chosen, diagonals),
        {},
    ), lambda p, j: (np.isin(j, chosen) | np.isin(p - j, diagonals)) & (j <= p)


def own_dtype(x, dtype):
    """A float64 array rounded to the dtype, in NumPy."""
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


class Arrays:
    """Where arrays live: NumPy's on the host, or PyTorch's on a device."""

    def __init__(self, device):
        self.device = device

    def put(self, x, dtype, memory="contiguous"):
        """A float64 array as one of the dtype, lying in memory as asked, and its exact values in float64."""
        host = own_dtype(x, dtype)
        exact = host.astype(np.float64)
        if self.device != "cpu":
            import torch

            host = torch.from_numpy(exact).to(getattr(torch, dtype))
            host = host.cuda() if self.device == "cuda" else host
        if memory == "heads inside":
            host = host.swapaxes(1, 2)
            host = (host.copy() if self.device == "cpu" else host.contiguous()).swapaxes(1, 2)
        elif memory == "padded":
            if self.device == "cpu":
                wide = np.full((*host.shape[:-1], host.shape[-1] + 3), np.nan, host.dtype)
            else:
                wide = host.new_full((*host.shape[:-1], host.shape[-1] + 8), math.nan)
            wide[..., : host.shape[-1]] = host
            host = wide[..., : host.shape[-1]]
        elif memory == "reversed":
            host = np.ascontiguousarray(host[:, :, ::-1])[:, :, ::-1]
        return host, exact

    def get(self, x):
        """As float64 on the host."""
        return x.astype(np.float64) if isinstance(x, np.ndarray) else x.double().cpu().numpy()


def pattern_and_mask(case, tree):
    """What is built of the package and of NumPy."""
    shape = (case.batch, case.heads, case.q_len, case.kv_len)
    allowed = np.broadcast_to(tree.mask, shape)
    pattern = tree.build()
    if case.selection:
        (name, arrays, options), allow = case.selection
        import torch

        from spattn import selections

        selected = getattr(selections, name)(
            *(torch.from_numpy(np.asarray(x, np.int32)).cuda() for x in arrays), **options
        )
        if isinstance(pattern, np.ndarray):
            pattern = P.Mask(pattern)
        pattern = pattern & selected
        p, j = np.arange(case.q_len)[:, None] + (case.kv_len - case.q_len), np.arange(case.kv_len)[None]
        allowed = allowed & as4(np.asarray(allow(p, j)))
    return pattern, allowed


def index_set_misses(case, pattern, allowed):
    """What is wrong with the index set of one batch entry and head."""
    if case.selection or isinstance(pattern, np.ndarray):
        return []
    batch, heads = pattern.sizes()
    b, h = case.number % case.batch, case.number % case.heads
    head = h
    if heads not in (0, case.heads):
        # Asked by numbers of its own heads, of which a call has a multiple; a BigBird beside draws for each of those.
        head = h // (case.heads // heads)
        own = allowed.reshape(case.batch, heads, case.heads // heads, *allowed.shape[2:])
        if (own != own[:, :, :1]).any():
            return []
    found = pattern.index_set(case.q_len, case.kv_len, batch=b if batch != 1 else 0, head=head if heads != 1 else 0)
    dense = found.to_dense()
    if not np.array_equal(dense, allowed[b, h]):
        at = tuple(int(x) for x in np.argwhere(dense != allowed[b, h])[0])
        return [f"index_set: batch {b}, head {h}: pair {at} is {bool(dense[at])}, expected {bool(allowed[b, h][at])}"]
    return []


def plan_misses(plan, allowed):
    """Whether the plan counts the pairs of its variants."""
    variant = np.broadcast_to(plan.variant, allowed.shape[:2])
    counts = allowed.sum((2, 3))
    lines = []
    total = 0
    for number in range(plan.variants):
        found = counts[variant == number]
        total += int(found[0]) if len(found) else 0
        if len(found) and (found != found[0]).any():
            lines.append("plan: heads that have different pairs have one variant")
    if len(np.unique(variant)) == plan.variants and total != plan.nnz:
        lines.append(f"plan.nnz: {plan.nnz}, expected {total}")
    return lines


def call(case, pattern, put):
    """The five results of the package, as its arrays, and the exact inputs; then the plan, if one was made."""
    arrays = [put.put(x, case.dtype, case.memory) for x in case.arrays[:4]]
    q, k, v, dout = (x for x, _ in arrays)
    lse_dtype = "float64" if case.dtype == "float64" else "float32"
    dlse, exact_dlse = put.put(case.arrays[4], lse_dtype)
    plan = None
    target = pattern
    if case.mode == "array" and not isinstance(pattern, np.ndarray):
        target = np.array(np.broadcast_to(case.tree.mask, (case.batch, case.heads, case.q_len, case.kv_len)))
    if case.mode == "plan":
        if isinstance(pattern, np.ndarray):
            pattern = P.Mask(pattern)
        options = {"workers": case.workers}
        if case.tile:
            options["tile"] = case.tile
            if case.box:
                options["box"] = case.box
        target = plan = spattn.plan(pattern, case.q_len, case.kv_len, batch=case.batch, heads=case.heads, **options)
    given = (q, k, v, dout)
    if case.layout == "bnhd":
        given = tuple(x.swapaxes(1, 2) for x in given)
    q, k, v, dout = given
    options = {"scale": case.scale, "layout": case.layout}
    if case.mode == "grouped":
        ((out, lse),) = spattn.grouped_attention([(q, k, v, target)], return_lse=True, **options)
    else:
        out, lse = spattn.attention(q, k, v, target, return_lse=True, **options)
    options["dlse"] = dlse if exact_dlse.any() else None
    grads = spattn.attention_backward(dout, q, k, v, out, lse, target, **options)
    results = (out, *grads)
    if case.layout == "bnhd":
        results = tuple(x.swapaxes(1, 2) for x in results)
    out, dq, dk, dv = results
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, [x for _, x in arrays] + [exact_dlse], plan


def attempt(case, tree, device, isa, thorough):
    """(misses, share of the bound that was used). Raises Refused, or whatever went wrong."""
    put = Arrays(device)
    shrunk = dataclasses.replace(case, tree=tree)
    try:
        pattern, allowed = pattern_and_mask(shrunk, tree)
        lines = index_set_misses(shrunk, pattern, allowed) if thorough else []
        results, inputs, plan = call(shrunk, pattern, put)
    except (ValueError, TypeError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    if plan is not None:
        lines += plan_misses(plan, allowed)
    scale = case.scale if case.scale is not None else 1 / math.sqrt(case.head_dim)
    expected = oracle(*inputs, allowed, scale, case.dtype, "cuda" if device == "cuda" else "cpu", isa)
    found, used = misses(expected, {name: put.get(x) for name, x in results.items()})
    return lines + found, used


def outcome(case, tree, device, isa, thorough=True):
    """("ok" | "wrong" | "crashed" | "refused", what was said, share of the bound)."""
    for again in (True, False):
        try:
            lines, used = attempt(case, tree, device, isa, thorough)
            return ("wrong" if lines else "ok"), lines, used
        except Refused as error:
            return "refused", [str(error)], 0.0
        except ImportError as error:
            if again:  # somebody is installing the package
                time.sleep(5)
                continue
            return "crashed", [last_line(error)], 0.0
        except Exception as error:
            return "crashed", [last_line(error)], 0.0
    raise AssertionError


def last_line(error):
    """The last line of a traceback, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    return traceback.format_exception_only(error)[-1].strip() + place


def shrink(case, kind, device, isa, seconds=25.0):
    """A smaller tree that fails in the same way."""
    tree, until = case.tree, time.monotonic() + seconds
    found = True
    while found and time.monotonic() < until:
        found = False
        for less in smaller(tree):
            if time.monotonic() > until:
                break
            if outcome(case, less, device, isa)[0] == kind:
                tree, found = less, True
                break
    return tree


def pattern_text(tree):
    """repr of the pattern; with its arrays where the text is short."""
    try:
        pattern = tree.build()
        shown = repr(pattern)
        text = None if isinstance(pattern, np.ndarray) else pattern.text()
    except Exception as error:
        return f"{tree.shown()} (not built: {last_line(error)})"
    return shown + (f"\n    text: {text}" if text and len(text) < 6000 else "")


# --- part "unions" ----------------------------------------------------------------------------------------------------


def work_on_unions(args, report):
    """Draws one case after another and reports."""
    counts = collections.Counter()
    refusals, said = collections.Counter(), collections.Counter()
    used = collections.defaultdict(float)
    dtypes = collections.Counter()
    warnings.simplefilter("always")

    def on_warning(message, category, *_):
        said[f"{category.__name__}: {re.sub(r'[0-9]+', 'N', str(message))[:160]}"] += 1

    warnings.showwarning = on_warning
    until = time.monotonic() + args.seconds
    last = time.monotonic()

    def tell():
        report(
            "counts", counts=dict(counts), refusals=dict(refusals), warnings=dict(said), used=dict(used),
            dtypes=dict(dtypes),
        )  # fmt: skip
        for counter in (counts, refusals, said, dtypes):
            counter.clear()

    for number in range(args.start, args.start + args.count):
        if time.monotonic() > until:
            break
        report.at(number)
        counts["drawn"] += 1
        case = make_case(args.seed, number, args.device)
        kind, lines, share = outcome(case, case.tree, args.device, args.isa, thorough=number % 2 == 0 or args.draw >= 0)
        counts[kind] += 1
        counts[f"mode {case.mode}"] += 1
        dtypes[case.dtype] += 1
        used[case.dtype] = max(used[case.dtype], share)
        if kind == "refused":
            refusals[re.sub(r"[0-9]+", "N", lines[0])[:220]] += 1
        if kind in ("wrong", "crashed"):
            tree = shrink(case, kind, args.device, args.isa)
            again = outcome(case, tree, args.device, args.isa)
            report(
                "failure", failure=kind, number=number, seed=args.seed, isa=args.isa, kernel=args.kernel,
                device=args.device, says=lines, shrunk_says=again[1], case=case.shown(), drawn=case.tree.shown(),
                shrunk=tree.shown(), pattern=pattern_text(tree),
            )  # fmt: skip
            if args.device == "cuda" and kind == "crashed" and not device_lives():
                tell()
                report.close()
                os._exit(RESTART)
        if args.draw >= 0:
            print(f"draw {number}: {kind} {lines}\n{case.shown()}\n{case.tree.shown()}\n{pattern_text(case.tree)}")
        if counts["drawn"] >= 50 or time.monotonic() - last > 5:
            tell()
            last = time.monotonic()
    tell()


def device_lives():
    """Whether the GPU still computes."""
    try:
        import torch

        torch.cuda.synchronize()
        return float(torch.ones(3, device="cuda").sum()) == 3
    except Exception:
        return False


# --- part "misc" ------------------------------------------------------------------------------------------------------


def bits_of(results):
    """The bytes of some arrays, for comparisons of every bit."""
    return b"".join(np.ascontiguousarray(x).tobytes() for x in results)


def drawn_call(args, number, mode="pattern", tree=None):
    """A case that the package accepts, with its pattern (never a bare array), arrays and allowed pairs, or None."""
    case = make_case(args.seed + 1000, number, "cpu")
    case = dataclasses.replace(case, mode=mode, layout="bhnd", memory="contiguous", scale=None)
    try:
        pattern, allowed = pattern_and_mask(case, tree or case.tree)
        if isinstance(pattern, np.ndarray):
            pattern = P.Mask(pattern)
        pattern.index_set(case.q_len, case.kv_len)
        arrays = [own_dtype(x, case.dtype) for x in case.arrays[:4]]
        both(arrays, pattern)
    except (ValueError, TypeError):
        return None
    return case, pattern, arrays, allowed


def drawn_calls(args, base):
    """Endless cases of these numbers on."""
    for number in itertools.count(base):
        found = drawn_call(args, number)
        if found:
            yield found


def both(arrays, pattern, **options):
    """All results of a forward and a backward."""
    q, k, v, dout = arrays
    out, lse = spattn.attention(q, k, v, pattern, return_lse=True, **options)
    return out, lse, *spattn.attention_backward(dout, q, k, v, out, lse, pattern, **options)


def judge(case, arrays, allowed, results, isa):
    """What is beyond its bound."""
    scale = 1 / math.sqrt(case.head_dim)
    inputs = [x.astype(np.float64) for x in arrays]
    expected = oracle(*inputs, np.zeros(inputs[3].shape[:3]), allowed, scale, case.dtype, "cpu", isa)
    names = ("out", "lse", "dq", "dk", "dv")
    return misses(expected, {name: x.astype(np.float64) for name, x in zip(names, results, strict=False)})[0]


def attack_threads(args, rounds):
    """Threads that call with different unions at once, and plan them at once: the bits of serial calls."""
    calls = drawn_calls(args, 0)
    for turn in range(rounds):
        some = [next(calls) for _ in range(12)]
        alone = [bits_of(both(arrays, pattern)) for _, pattern, arrays, _ in some]
        if turn % 2 == 0:
            spattn.clear_plan_cache()
        jobs = [some[at % len(some)] for at in range(48)]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda job: bits_of(both(job[2], job[1])), jobs))
        for at, got in enumerate(found):
            if got != alone[at % len(some)]:
                yield f"another result in a thread: draw {jobs[at][0].number}, {jobs[at][0].shown()}\n{jobs[at][1]!r}"
        yield None


def attack_fork(args, rounds):
    """A child that was forked after planning computes with kept and with new plans what its parent computes."""
    calls = drawn_calls(args, 5000)
    for _ in range(rounds):
        some = [next(calls) for _ in range(4)]
        before = [bits_of(both(arrays, pattern)) for _, pattern, arrays, _ in some[:2]]
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(read)
                found = [bits_of(both(arrays, pattern)) for _, pattern, arrays, _ in some]
                with os.fdopen(write, "wb") as pipe:
                    pickle.dump(found, pipe)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(write)
        until = time.monotonic() + 60
        with os.fdopen(read, "rb") as pipe:
            import select

            ready = select.select([pipe], [], [], 60)[0]
            data = pipe.read() if ready else b""
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.01)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            yield f"a forked child hangs: draws {[x[0].number for x in some]}"
            continue
        after = before + [bits_of(both(arrays, pattern)) for _, pattern, arrays, _ in some[2:]]
        if status or pickle.loads(data) != after:
            yield f"a forked child ends with {status}, or finds other results: draws {[x[0].number for x in some]}"
        yield None


def array_patterns(rng, m, n, batch, heads):
    """Patterns with arrays or lists, each as (constructor, list of what is given)."""
    labels = rng.integers(-1, 4, n)
    dense = rng.random((m, n)) < 0.2
    blocks = -(-n // 5)
    return {
        "Mask": (P.Mask, [dense]),
        "Mask by head": (P.Mask, [rng.random((heads, m, n)) < 0.2]),
        "Mask of a view": (P.Mask, [(rng.random((n, m)) < 0.2).T]),
        "BlockLayout": (lambda x: P.BlockLayout(x, 5), [rng.random((blocks, blocks)) < 0.3]),
        "RowIntervals": (P.RowIntervals, [rng.integers(0, n, m), rng.integers(0, n + 1, m)]),
        "RowIntervals int32": (P.RowIntervals, [rng.integers(0, n, m, np.int32), rng.integers(0, n + 1, m, np.int32)]),
        "ColumnIntervals": (P.ColumnIntervals, [rng.integers(0, n, n), rng.integers(0, n + 1, n)]),
        "Clusters": (P.Clusters, [labels]),
        "Clusters of queries": (P.Clusters, [labels, rng.integers(-1, 4, m)]),
        "KeyPadding": (P.KeyPadding, [rng.random((batch, n)) < 0.6]),
        "KeyPadding of integers": (P.KeyPadding, [(rng.random(n) < 0.6).astype(np.int64)]),
        "KeyBlocks": (lambda x: P.KeyBlocks(x, 5, 5), [rng.integers(-1, blocks, (blocks, 2))]),
        "CSR": (
            lambda a, b: P.CSR(a, b, n),
            [np.concatenate([[0], np.cumsum(dense.sum(1))]), np.nonzero(dense)[1]],
        ),
        "CSR int32": (
            lambda a, b: P.CSR(a, b, n),
            [np.concatenate([[0], np.cumsum(dense.sum(1))]).astype(np.int64), np.nonzero(dense)[1].astype(np.int32)],
        ),
        "RowRuns": (
            P.RowRuns,
            [rng.integers(0, max(1, n // 2), (m, 1)), np.ones((m, 1), int), rng.integers(0, n // 2 + 1, (m, 1))],
        ),
        "QueriesAt": (lambda x: P.QueriesAt(P.Causal(), x), [rng.integers(0, n, m)]),
        "operator |": (lambda x: P.Sinks(1) | x, [dense.copy()]),
        "operator & of an array first": (lambda x: x & P.Causal(), [dense.copy()]),
        "operator -": (lambda x: P.Causal() - x, [dense.copy()]),
        "discover": (P.discover, [dense.copy()]),
        "from_pairs": (lambda a, b: P.from_pairs(a, b, m, n), list(np.nonzero(dense))),
        "cu_seqlens": (P.Documents.from_cu_seqlens, [np.array([0, n // 3, n // 3, n])]),
        "flash attention": (
            lambda a, b: P.from_flash_attention(causal=True, cu_seqlens_q=a, cu_seqlens_k=b),
            [np.array([0, m // 2, m]), np.array([0, n // 3, n])],
        ),
        "GlobalTokens of a list": (lambda x: P.GlobalTokens(x), [[0, n // 2]]),
        "Documents of a list": (lambda x: P.Documents(x), [[n // 3, n - n // 3]]),
        "VerticalSlash of lists": (lambda a, b: P.VerticalSlash(a, b), [[0, 2], [0, 1, 5]]),
        "PerHead of a list": (lambda x: P.PerHead(x), [[P.Causal() for _ in range(heads)]]),
        "PerBatch of a list": (lambda x: P.PerBatch(x), [[P.Causal() for _ in range(batch)]]),
    }


def change(x):
    """Changes an array or a list in place, so that another pattern would come of it."""
    if isinstance(x, list):
        x[:] = [P.Sinks(1) for _ in x] if x and isinstance(x[0], P.Pattern) else [1 for _ in x]
    elif x.dtype == bool:
        np.logical_not(x, out=x)
    else:
        x[...] = np.where(x > 0, x - 1, 1) if x.ndim else x


def attack_mutated(args, rounds):
    """Arrays that a caller changes after the pattern is made, before or after the first plan; plans' own arrays."""
    for turn in range(rounds):
        rng = np.random.default_rng([args.seed, 7, turn])
        m = n = int(rng.integers(6, 90))
        batch, heads = 2, 2
        arrays = [rng.standard_normal((batch, heads, n, 8)).astype(np.float32) for _ in range(4)]
        for name, (make, given) in array_patterns(rng, m, n, batch, heads).items():
            union = P.DilatedWindow(1, 1, 3) | make(*copy.deepcopy(given)) | P.Sinks(1)
            want, text = bits_of(both(arrays, union)), union.text()
            for planned_before in (False, True):
                spattn.clear_plan_cache()
                mine = copy.deepcopy(given)
                pattern = P.DilatedWindow(1, 1, 3) | make(*mine) | P.Sinks(1)
                if planned_before:
                    both(arrays, pattern)
                number = hash(pattern)
                for x in mine:
                    change(x)
                if planned_before:
                    other = P.DilatedWindow(1, 1, 3) | make(*copy.deepcopy(given)) | P.Sinks(1)
                    if bits_of(both(arrays, other)) != want:
                        yield f"{name}: an equal pattern has another result after an array was changed"
                if bits_of(both(arrays, pattern)) != want:
                    yield f"{name}: another result after the array was changed (planned before: {planned_before})"
                if pattern.text() != text or pattern != union or hash(pattern) != number:
                    yield f"{name}: another pattern after the array was changed (planned before: {planned_before})"
            yield None
        # a bool array given as the pattern is read anew by every call
        dense = rng.random((m, n)) < 0.3
        for _ in range(3):
            case = dataclasses.replace(make_case(args.seed, 0, "cpu"), head_dim=8, head_dim_v=8, dtype="float32")
            lines = judge(case, arrays, np.broadcast_to(dense, (2, 2, m, n)), both(arrays, dense), args.isa)
            if lines:
                yield f"a bool array that was changed between calls: {lines}"
            np.logical_not(dense, out=dense)
        plan = spattn.plan(P.Causal() | P.Stride(3) | P.Columns(5, 0, 1), n)
        for field in dataclasses.fields(plan):
            held = getattr(plan, field.name)
            if isinstance(held, np.ndarray) and held.size:
                try:
                    held.flags.writeable = True
                except ValueError:
                    continue
                yield f"plan.{field.name} can be made writeable"
        yield None


def attack_pickled(args, rounds):
    """Patterns and plans that were pickled, copied, or written as text or JSON: equal, with the same bits."""
    calls = drawn_calls(args, 10000)
    for _ in range(rounds):
        case, pattern, arrays, _ = next(calls)
        want = bits_of(both(arrays, pattern))
        where = f"draw {case.number}: {case.tree.shown()}, {case.shown()}"
        others = {"pickle": pickle.loads(pickle.dumps(pattern)), "deepcopy": copy.deepcopy(pattern)}
        text = pattern.text()
        if text is not None:
            others["text"] = P.from_text(text)
            others["JSON"] = P.from_dict(json.loads(json.dumps(pattern.to_dict())))
            if others["text"].text() != text:
                yield f"another text of what was read from text: {where}"
        elif not any(name in case.tree.shown() for name in WORDS):
            yield f"no text: {where}"
        for name, other in others.items():
            if other != pattern or hash(other) != hash(pattern) or repr(other) != repr(pattern):
                yield f"{name}: not equal: {where}"
            if bits_of(both(arrays, other)) != want:
                yield f"{name}: another result: {where}"
            spattn.clear_plan_cache()
            if bits_of(both(arrays, other)) != want:
                yield f"{name}, planned anew: another result: {where}"
        plan = spattn.plan(pattern, like=tuple(arrays[:3]))
        for name, other in {
            "the plan of the call": plan,
            "a pickled plan": pickle.loads(pickle.dumps(plan)),
            "a copied plan": copy.deepcopy(plan),
        }.items():
            got = both(arrays, other)
            if bits_of(got[:2]) != want[: len(bits_of(got[:2]))]:
                yield f"{name}: another forward: {where}"
        yield None


def growing(rng, batch=1, heads=1):
    """A union of patterns that suit every length, and its mask at (q_len, kv_len); others by batch entry or head."""
    if batch > 1 or heads > 1:
        parts = [growing(rng) for _ in range(max(batch, heads))]
        kind, axis = (P.PerBatch, 0) if batch > 1 else (P.PerHead, 1)
        common = growing(rng) if rng.random() < 0.3 else None
        pattern = kind(tuple(x for x, _ in parts))

        def stacked(m, n):
            found = np.concatenate([allowed(m, n) for _, allowed in parts], axis)
            return found | common[1](m, n) if common else found

        return (pattern | common[0] if common else pattern), stacked
    dice = Dice(rng, 1, 1, 1)
    names = (
        "causal sliding dilated periodic block_local global_tokens sinks stride columns vertical_slash strided fixed "
        "longformer chunked a_shape prefix_lm remainder floors wedge bits"
    ).split()
    if dice.chance(0.5):  # whose keys all lie at both ends, mostly
        names = "sinks sinks sliding sliding a_shape dilated global_tokens longformer".split()
    parts = []
    for _ in range(dice.int(3, 5)):
        make, allow = LEAVES[dice.pick(names)](dice, 40, 40)
        if dice.chance(0.3):
            other, cap = LEAVES[dice.pick(("causal", "sliding", "stride", "sinks"))](dice, 40, 40)
            sign = dice.chance(0.5)
            parts.append(
                (
                    (lambda a=make, b=other, s=sign: a() & b() if s else a() - b()),
                    (lambda p, j, a=allow, b=cap, s=sign: a(p, j) & (b(p, j) if s else ~b(p, j))),
                )
            )
        else:
            parts.append((make, allow))
    capped = dice.chance(0.6)

    def allowed(m, n):
        p, j = np.arange(m)[:, None] + (n - m), np.arange(n)[None]
        found = functools.reduce(operator.or_, [np.broadcast_to(as4(a(p, j)), (1, 1, m, n)) for _, a in parts])
        return found & (j <= p) if capped else found

    pattern = functools.reduce(operator.or_, [make() for make, _ in parts])
    return (P.Causal() & pattern if capped else pattern), allowed


def attack_decode(args, rounds):
    """Steps of generation, in a cache that is longer than what is used: lengths that grow, jump and shrink."""
    for turn in range(rounds):
        rng = np.random.default_rng([args.seed, 11, turn])
        heads, batch = int(rng.choice((1, 2, 4))), int(rng.choice((1, 1, 2)))
        apart = rng.random() < 0.4
        pattern, allowed = growing(rng, batch if apart else 1, heads if apart and batch == 1 else 1)
        dtype = str(rng.choice(("float64", "float32", "float16", "bfloat16")))
        new = int(rng.choice((1, 1, 1, 2, 3, 9)))
        case = dataclasses.replace(make_case(args.seed, 0, "cpu"), head_dim=16, head_dim_v=16, dtype=dtype, scale=None)
        cache = [own_dtype(rng.standard_normal((batch, 1, 330, 16)), dtype) for _ in range(2)]
        queries, douts = (own_dtype(rng.standard_normal((batch, heads, 330, 16)), dtype) for _ in range(2))
        start = int(rng.choice((1, 5, 60, 120, 190)))
        steps = [*range(start, start + 45), start + 100, start + 101, start, start + 3, 128, 129, 64, 65, 63, 1, 2]
        for n in steps:
            if new > n and rng.random() < 0.5:
                continue
            arrays = queries[:, :, :new], cache[0][:, :, :n], cache[1][:, :, :n], douts[:, :, :new]
            held = pattern if n % 9 else pickle.loads(pickle.dumps(pattern))
            results = both(arrays, held) if n % 3 == 0 else spattn.attention(*arrays[:3], held, return_lse=True)
            mask_ = np.broadcast_to(allowed(new, n), (batch, heads, new, n))
            lines = judge(case, arrays, mask_, results, args.isa)
            if lines:
                yield f"decoding, turn {turn}, q_len={new}, kv_len={n}, {dtype}, heads={heads}: {lines}\n{pattern!r}"
                break
        yield None


def attack_lengths(args, rounds):
    """One union at many lengths and tiles in turn, in one process: no plan of another length is taken."""
    for turn in range(rounds):
        rng = np.random.default_rng([args.seed, 31, turn])
        pattern, allowed = growing(rng)
        dtype = str(rng.choice(("float64", "float32", "float16", "bfloat16")))
        case = dataclasses.replace(make_case(args.seed, 0, "cpu"), head_dim=16, head_dim_v=16, dtype=dtype, scale=None)
        for _ in range(20):
            n = int(rng.choice((1, 2, 17, 63, 64, 65, 127, 128, 129, int(rng.integers(1, 260)))))
            m = int(rng.choice((n, n, 1, int(rng.integers(1, n + 1)), n + int(rng.integers(0, 9)))))
            arrays = [own_dtype(rng.standard_normal((1, 2, m if at in (0, 3) else n, 16)), dtype) for at in range(4)]
            target = pattern
            if rng.random() < 0.4:
                target = spattn.plan(pattern, m, n, tile=(int(rng.choice((1, 6, 16, 33, 64))), 64), workers=3)
            lines = judge(case, arrays, np.broadcast_to(allowed(m, n), (1, 2, m, n)), both(arrays, target), args.isa)
            if lines:
                yield f"turn {turn}, q_len={m}, kv_len={n}, {dtype}: {lines}\n{pattern!r}"
        yield None


def attack_alike(args, rounds):
    """Patterns that are nearly the same, or of the same bytes, one after another: each has its own pairs."""
    for turn in range(rounds):
        rng = np.random.default_rng([args.seed, 37, turn])
        n = int(rng.choice((12, 24, 36, 60)))
        p, j = np.arange(n)[:, None], np.arange(n)[None]
        start, stop = np.sort(rng.integers(0, n + 1, (2, n)), 0)
        dense = rng.random((n, n)) < 0.3
        labels = rng.integers(0, 3, n)
        half, third = n // 2, n // 3
        layout = rng.random((6, 6)) < 0.4
        wide = rng.random((3, 12)) < 0.4
        valid = rng.random(n) < 0.5
        none = np.zeros((n, n), bool)
        rows = (start[:, None] <= j) & (j < stop[:, None])
        swapped = (stop[:, None] <= j) & (j < start[:, None])
        keys = (start <= p) & (p < stop)
        same = labels[:, None] == labels
        known = [
            (P.RowIntervals(start, stop), rows),
            (P.RowIntervals(stop, start), swapped),
            (P.RowIntervals(start.astype(np.int32), stop.astype(np.int32)), rows),
            (P.ColumnIntervals(start, stop), ~keys),
            (P.ColumnIntervals(start, stop, causal=True), ~keys & (j <= p)),
            (P.ColumnIntervals(start, stop, start, stop), ~keys),
            (P.Mask(dense), dense),
            (P.Mask(dense.T), dense.T),
            (P.Mask(np.asfortranarray(dense)), dense),
            (P.Mask(dense[::-1]), dense[::-1]),
            (P.Mask(dense[:, ::-1]), dense[:, ::-1]),
            (P.Mask(dense[None]), dense),
            (P.Mask(~dense), ~dense),
            (~P.Mask(dense), ~dense),
            (P.GlobalTokens(3), (p < 3) | (j < 3)),
            (P.GlobalTokens((3,)), (p == 3) | (j == 3)),
            (P.GlobalTokens(3, True, False), (p < 3) & (j == j)),
            (P.GlobalTokens(3, False, True), (j < 3) & (p == p)),
            (P.Sinks(3), (j < 3) & (p == p)),
            (P.Documents((half, third)), same_docs((half, third), p, j)),
            (P.Documents((third, half)), same_docs((third, half), p, j)),
            (P.Documents((n,)), none | True),
            (P.PrefixLM(3), (j < 3) | (j <= p)),
            (P.PrefixLM((3,)), (j < 3) | (j <= p)),
            (P.SlidingWindow(2, 0), (j <= p) & (p - j <= 2)),
            (P.SlidingWindow(0, 2), (j >= p) & (j - p <= 2)),
            (P.SlidingWindow(2), np.abs(p - j) <= 2),
            (P.SlidingWindow(2, None), j >= p - 2),
            (P.SlidingWindow(None, 2), j <= p + 2),
            (P.DilatedWindow(2, 0, 3), (j <= p) & (p - j <= 6) & ((p - j) % 3 == 0)),
            (P.DilatedWindow(2, 3, 1), (j >= p - 2) & (j <= p + 3)),
            (P.Stride(4), (p - j) % 4 == 0),
            (P.Stride(4, 1), (p - j) % 4 == 1),
            (P.Columns(4, 0, 1), (j % 4 == 0) & (p == p)),
            (P.Columns(4, 1, 4), (j % 4 != 0) & (p == p)),
            (P.BlockLocal(4), p // 4 == j // 4),
            (P.BlockLocal(4, 1), (p - 1) // 4 == (j - 1) // 4),
            (P.Clusters(labels), same),
            (P.Clusters(labels, labels[::-1]), labels[::-1][:, None] == labels),
            (P.Clusters(labels + 5), same),
            (P.BlockLayout(layout, n // 6), layout[p // (n // 6), j // (n // 6)]),
            (P.BlockLayout(layout.T, n // 6), layout.T[p // (n // 6), j // (n // 6)]),
            (P.BlockLayout(wide, (n // 3, n // 12)), wide[p // (n // 3), j // (n // 12)]),
            (P.BlockLayout(wide.reshape(12, 3), (n // 12, n // 3)), wide.reshape(12, 3)[p // (n // 12), j // (n // 3)]),
            (P.KeyPadding(valid), valid & (p == p)),
            (P.KeyPadding(~valid), ~valid & (p == p)),
            (P.KeyPadding(valid.astype(np.int64)), valid & (p == p)),
            (P.Axial((3, n // 3), 0), p % (n // 3) == j % (n // 3)),
            (P.Axial((3, n // 3), 1), p // (n // 3) == j // (n // 3)),
            (P.Axial((n // 3, 3), 0), p % 3 == j % 3),
            (P.Axial((n // 3, 3), 1), p // 3 == j // 3),
            (P.Causal(), j <= p),
            (P.QueriesAt(P.Causal(), 1), j <= p + 1),
            (P.QueriesAt(P.Causal(), -1), j <= p - 1),
            (P.QueriesAt(P.Causal(), np.arange(n)[::-1]), j <= n - 1 - p),
            (P.Prefix(P.Causal(), 2), (p < 2) | (j <= p)),
        ]
        arrays = [rng.standard_normal((1, 1, n, 8)) for _ in range(4)]
        case = dataclasses.replace(make_case(args.seed, 0, "cpu"), head_dim=8, dtype="float64", scale=None)
        base, base_mask = P.DilatedWindow(1, 0, 5), (p - j == 0) | (p - j == 5)
        for at in rng.permutation(len(known)):
            pattern, allowed = known[int(at)]
            for union, mask_ in (
                (base | pattern | P.Sinks(1), base_mask | allowed | (j < 1)),
                (base - pattern, base_mask & ~allowed),
                (base & pattern, base_mask & allowed),
                (pattern - base, allowed & ~base_mask),
                (pattern, allowed),
            ):
                lines = judge(case, arrays, np.broadcast_to(mask_, (1, 1, n, n)), both(arrays, union), args.isa)
                if lines:
                    yield f"n={n}, turn {turn}: {lines}\n{union!r}"
        for (one, a), (two, b) in itertools.combinations(known, 2):
            if one == two and not np.array_equal(a, b):
                yield f"equal, but other pairs: {one!r}, {two!r}"
        yield None


def same_docs(lengths, p, j):
    """Whether both lie in one document."""
    return (same_document(lengths, p) == same_document(lengths, j)) & (same_document(lengths, p) >= 0)


def attack_pairs(args, rounds):
    """Two or three operands, in every order: the pairs that a plan visits are those of the mask, each once.

    Unions of many operands cover what is lost of one pair; those of two do not, and a plan alone takes milliseconds.
    """
    from spattn.testing import plan_pairs

    names = [x for x in LEAVES if x not in ("array", "per_head", "per_batch", "bigbird", "full", "empty")]
    wrapped = ["prefix"] * 8 + ["queries_at"] * 4 + STRIDES + GRIDS
    for turn in range(rounds):
        rng = np.random.default_rng([args.seed, 41, turn])
        dice = Dice(rng, 1, 1, 1)
        n = dice.int(2, dice.pick((12, 40, 90)))
        m = n if dice.chance(0.7) else dice.int(1, n + 5)
        few = [leaf(dice, m, n, wrapped if dice.chance(0.6) else names) for _ in range(dice.pick((2, 2, 3)))]
        if any(x.mask.shape[:2] != (1, 1) for x in few):
            continue
        tile = None if dice.chance(0.5) else (dice.pick((1, 3, 8, 16, 33, 64)), 64)
        for order in itertools.permutations(few):
            for op in "|&-" if len(few) == 2 else "|":
                tree = Node(op, list(order))
                try:
                    made = tree.build()
                    made = P.Mask(made) if isinstance(made, np.ndarray) else made
                    plan = spattn.plan(made, m, n, **({"tile": tile} if tile else {}))
                except (ValueError, TypeError):
                    continue
                rows, keys = plan_pairs(plan)
                visits = np.zeros((m, n), int)
                np.add.at(visits, (rows, keys), 1)
                wrong = visits - tree.mask[0, 0]
                if wrong.any():
                    some = [(int(i), int(j), int(wrong[i, j])) for i, j in np.argwhere(wrong)[:4]]
                    yield (
                        f"{int((wrong < 0).sum())} pairs lost, {int((wrong > 0).sum())} visited too often (row, key, "
                        f"by how often: {some}): turn {turn}, q_len={m}, kv_len={n}, tile={tile}: {tree.shown()}\n"
                        f"{made!r}"
                    )
        yield None


def attack_many(args, rounds):
    """Thirty operands, two hundred of them, and operators nested up to the limit."""
    for turn in range(rounds):
        rng = np.random.default_rng([args.seed, 13, turn])
        dice = Dice(rng, 1, 2, 2)
        n = int(rng.integers(20, 140))
        kind = turn % 4
        names = [*LEAVES] if kind != 1 else STRIDES + BANDS
        names = [x for x in names if x != "array"]
        many = {0: 30, 1: 30, 2: 200, 3: 40}[kind]
        if kind == 2:
            names = STRIDES + BANDS + ["vertical_slash"]
        leaves = [leaf(dice, n, n, names) for _ in range(many)]
        if kind < 3:
            if rng.random() < 0.5:  # sparse ones, so that the union is not everything
                leaves = [Node("&", [x, leaf(dice, n, n, ["block_local", "dilated", "mask"])]) for x in leaves]
            tree = Node("|", leaves)
        else:
            tree = leaves[0]
            for at, other in enumerate(leaves[1:]):
                tree = Node("|&-|"[at % 4], [tree, other] if at % 3 else [other, tree])
        case = make_case(args.seed, 20000 + turn, "cpu")
        case = dataclasses.replace(
            case, q_len=n, kv_len=n, batch=1, heads=2, heads_kv=2, mode=("pattern", "plan")[turn % 2], tree=tree,
            layout="bhnd", selection=None, box=None,
            arrays=tuple(
                rng.standard_normal((1, 2, n, d) if d else (1, 2, n))
                for d in (case.head_dim, case.head_dim, case.head_dim_v, case.head_dim_v, 0)
            ),
        )  # fmt: skip
        kind_, lines, _ = outcome(case, tree, "cpu", args.isa)
        if kind_ != "ok":
            tree = shrink(case, kind_, "cpu", args.isa)
            yield f"{many} operands: {kind_} {lines}; {case.shown()}; shrunk: {tree.shown()}\n{pattern_text(tree)}"
        yield None


def refused(function, *kinds):
    """None where it raises one of these, else what it did."""
    try:
        function()
    except kinds:
        return None
    except Exception as error:
        return f"raises {last_line(error)}"
    return "is accepted"


def refusals_of(args, turn):
    """What is not refused of one turn's calls, or refused though it suits."""
    rng = np.random.default_rng([args.seed, 17, turn])
    n = int(rng.integers(8, 80))
    dice = Dice(rng, 3, 4, 4)
    told = [P.PerHead(tuple(P.SlidingWindow(int(x)) for x in range(4))), P.Mask(rng.random((4, n, n)) < 0.5)]
    entries = [P.PerBatch(tuple(P.Sinks(x) for x in (1, 2, 3))), P.KeyPadding(rng.random((3, n)) < 0.5)]
    others = [leaf(dice, n, n, STRIDES + BANDS + GRIDS) for _ in range(2)]
    base = functools.reduce(operator.or_, [x.build() for x in others if x.mask.shape[:2] == (1, 1)], P.Stride(5))

    def call_(batch, heads, m, k_len, pattern):
        x = np.zeros((batch, heads, m, 8), np.float32)
        y = np.zeros((batch, heads, k_len, 8), np.float32)
        out, lse = spattn.attention(x, y, y, pattern, return_lse=True)
        return spattn.attention_backward(x, x, y, y, out, lse, pattern)

    by_head = spattn.plan(base | told[turn % 2] | P.Columns(4, 0, 1), n, batch=1, heads=4)
    by_entry = spattn.plan(base | entries[turn % 2] | P.Columns(4, 0, 1), n, batch=3, heads=1)
    either = spattn.plan(base | P.Columns(4, 0, 1), n)
    checks = {
        "a plan of 4 heads, given 2": lambda: call_(1, 2, n, n, by_head),
        "a plan of 4 heads, given 8": lambda: call_(1, 8, n, n, by_head),
        "a plan of 4 heads, given 1": lambda: call_(1, 1, n, n, by_head),
        "a plan of 3 batch entries, given 2": lambda: call_(2, 2, n, n, by_entry),
        "a plan of 3 batch entries, given 1": lambda: call_(1, 2, n, n, by_entry),
        "a plan, fewer queries": lambda: call_(1, 1, n - 1, n, either),
        "a plan, more keys": lambda: call_(1, 1, n, n + 1, either),
        "a plan, other lengths": lambda: call_(1, 1, n + 1, n + 1, either),
        "patterns of 4 heads, given 3": lambda: call_(1, 3, n, n, base | told[turn % 2] | P.Sinks(1)),
        "patterns of 3 batch entries, given 2": lambda: call_(2, 1, n, n, base | entries[turn % 2] | P.Sinks(1)),
        "a union of 4 heads and of 3": lambda: call_(
            1, 12, n, n, told[1] | P.Mask(np.ones((3, n, n), bool)) | P.Sinks(1)
        ),
        "a mask of other lengths": lambda: call_(1, 1, n, n + 1, base | P.Mask(np.ones((n, n), bool)) | P.Sinks(1)),
        "a grid of other lengths": lambda: call_(1, 1, n, n, base | P.Axial((n + 1,), 0) | P.Sinks(1)),
        "a row interval too few": lambda: call_(
            1, 1, n, n, base | P.RowIntervals(np.zeros(n - 1, int), np.ones(n - 1, int)) | P.Sinks(1)
        ),
    }
    for name, check in checks.items():
        said = refused(check, ValueError)
        if said:
            yield f"{name}: {said} (n={n}, {base!r})"
    said = refused(lambda: bool(base | P.Sinks(1)), TypeError)
    if said:
        yield f"bool() of a union {said}"
    for good in (
        lambda: call_(2, 4, n, n, by_head),
        lambda: call_(3, 5, n, n, by_entry),
        lambda: call_(2, 3, n, n, either),
    ):
        said = refused(good)
        if said and said != "is accepted":
            yield f"a plan that suits is refused: {said}"


def attack_refusals(args, rounds):
    """Plans for other lengths, batch entries or heads must be refused; those of no batch entry or head serve all."""
    for turn in range(rounds):
        yield from refusals_of(args, turn)
        yield None


def attack_nonfinite(args, rounds):
    """NaN and infinity at one key, and in K or V: rows that do not see it keep every bit, those that do have NaN."""
    calls = drawn_calls(args, 30000)
    for turn in range(rounds):
        case, pattern, arrays, allowed = next(calls)
        if not case.q_len or not case.kv_len:
            continue
        rng = np.random.default_rng([args.seed, 19, turn])
        where = f"draw {case.number}: {case.tree.shown()}, {case.shown()}"
        target = pattern
        if turn % 2:
            target = spattn.plan(
                pattern, case.q_len, case.kv_len, batch=case.batch, heads=case.heads,
                tile=(int(rng.choice((1, 3, 8, 32, 64))), 64), workers=case.workers,
            )  # fmt: skip
        before = both(arrays, target)
        bad = rng.permutation(case.kv_len)[: int(rng.integers(1, 4))]
        hidden = np.nonzero(~allowed.any((0, 1, 2)))[0]
        if turn % 3 == 0 and len(hidden):
            bad = hidden
        q, k, v, dout = (x.copy() for x in arrays)
        what = turn % 4
        if what in (0, 2):
            v[:, :, bad] = rng.choice((np.nan, np.inf, -np.inf))
        if what in (1, 2):
            k[:, :, bad] = np.nan
        if what == 3:
            k[:, :, bad, 0] = np.inf
        after = both((q, k, v, dout), target)
        sees = allowed[..., bad].any(-1)  # rows
        group = case.heads // case.heads_kv
        met = (allowed & sees[..., None]).any(2)  # keys that such rows attend to
        met = met.reshape(case.batch, case.heads_kv, group, -1).any(2)
        met[..., bad] = met[..., bad] | False
        clean = ~met
        for name, rows, one, two in zip(
            ("out", "lse", "dq", "dk", "dv"), (~sees, ~sees, ~sees, clean, clean), before, after, strict=True
        ):
            if bits_of([one[rows]]) != bits_of([two[rows]]):
                yield f"{name}: bits moved by what is not finite at keys {bad.tolist()} ({what}): {where}\n{pattern!r}"
        if what in (0, 1, 2):
            poisoned = after[0][sees].astype(np.float64)
            if poisoned.size and np.isfinite(poisoned).all(-1).any():
                yield f"out: a row that attends to what is not finite at {bad.tolist()} is finite ({what}): {where}"
        # NaN in some queries
        q, k, v, dout = (x.copy() for x in arrays)
        rows = rng.permutation(case.q_len)[: int(rng.integers(1, 3))]
        q[:, :, rows] = np.nan
        after = both((q, k, v, dout), target)
        other = np.ones(case.q_len, bool)
        other[rows] = False
        met = allowed[:, :, rows].any(2).reshape(case.batch, case.heads_kv, group, -1).any(2)
        for name, one, two in zip(("out", "lse", "dq"), before[:3], after[:3], strict=True):
            if bits_of([one[:, :, other]]) != bits_of([two[:, :, other]]):
                yield f"{name}: bits of other rows moved by NaN in queries {rows.tolist()}: {where}\n{pattern!r}"
        for name, one, two in zip(("dk", "dv"), before[3:], after[3:], strict=True):
            if bits_of([one[~met]]) != bits_of([two[~met]]):
                yield f"{name}: bits of keys moved that NaN in queries {rows.tolist()} does not meet: {where}"
        yield None


def attack_algebra(args, rounds):
    """Unions in another order, of operands twice, and by De Morgan: the same pairs, and results within the bound."""
    calls = drawn_calls(args, 40000)
    for turn in range(rounds):
        case, pattern, arrays, allowed = next(calls)
        rng = np.random.default_rng([args.seed, 23, turn])
        tree = case.tree
        operands = [x.build() for x in (tree.children if isinstance(tree, Node) and tree.op == "|" else [tree])]
        operands = [P.Mask(x) if isinstance(x, np.ndarray) else x for x in operands]
        shuffled = [operands[int(at)] for at in rng.permutation(len(operands))]
        forms = {
            "in another order": functools.reduce(operator.or_, shuffled),
            "twice": functools.reduce(operator.or_, operands + shuffled),
            "De Morgan": ~functools.reduce(operator.and_, [~x for x in operands]),
            "~~": ~~pattern,
            "& itself": pattern & pattern,
            "- its complement": pattern - ~pattern,
            "| - of it": (pattern - operands[0]) | (pattern & operands[0]),
        }
        name = list(forms)[turn % len(forms)]
        try:
            results = both(arrays, forms[name])
        except (ValueError, TypeError) as error:
            yield f"{name}: refused: {last_line(error)}: draw {case.number}: {case.shown()}\n{forms[name]!r}"
            continue
        lines = judge(dataclasses.replace(case, scale=None), arrays, allowed, results, args.isa)
        if lines:
            yield f"{name}: {lines}: draw {case.number}: {case.shown()}\n{forms[name]!r}"
        yield None


def attack_grouped(args, rounds):
    """Groups of problems have the bits that each has alone."""
    calls = drawn_calls(args, 50000)
    for _ in range(rounds):
        some = [next(calls) for _ in range(5)]
        alone = [spattn.attention(*arrays[:3], pattern, return_lse=True) for _, pattern, arrays, _ in some]
        together = spattn.grouped_attention([(*arrays[:3], pattern) for _, pattern, arrays, _ in some], return_lse=True)
        for (case, pattern, _, _), one, two in zip(some, alone, together, strict=True):
            if bits_of(one) != bits_of(two):
                yield f"in a group: draw {case.number}: {case.shown()}\n{pattern!r}"
        yield None


def attack_thread_counts(args, rounds):
    """Longer sequences: one thread and several give the same bits, which are within the bound."""
    from threadpoolctl import threadpool_limits

    for turn in range(rounds):
        rng = np.random.default_rng([args.seed, 29, turn])
        n = int(rng.integers(300, 1100))
        dice = Dice(rng, 1, 4, 2)
        tree = random_tree(dice, n, n)
        dtype = str(rng.choice(("float64", "float32", "float16", "bfloat16")))
        arrays = [own_dtype(rng.standard_normal((1, 2 if at in (1, 2) else 4, n, 32)), dtype) for at in range(4)]
        try:
            pattern = tree.build()
            pattern = P.Mask(pattern) if isinstance(pattern, np.ndarray) else pattern
            one = both(arrays, pattern)
        except (ValueError, TypeError):
            continue
        if turn % 2:
            pattern = spattn.plan(
                pattern, n, batch=1, heads=4, tile=(int(rng.choice((7, 16, 48, 64))), 64),
                workers=int(rng.choice((1, 4, 40))),
            )  # fmt: skip
            one = both(arrays, pattern)
        for threads in (1, 2, 3):
            with threadpool_limits(threads, user_api="openmp"):
                if bits_of(both(arrays, pattern)) != bits_of(one):
                    where = f"seed {args.seed}, turn {turn}, n={n}, {dtype}"
                    yield f"{threads} threads: other bits: {where}: {tree.shown()}"
        case = dataclasses.replace(make_case(args.seed, 0, "cpu"), head_dim=32, head_dim_v=32, dtype=dtype, scale=None)
        lines = judge(case, arrays, np.broadcast_to(tree.mask, (1, 4, n, n)), one, args.isa)
        if lines:
            yield f"long: {lines}: seed {args.seed}, turn {turn}, n={n}, {dtype}: {tree.shown()}\n{pattern!r}"
        yield None


def attack_torch(args, rounds):
    """PyTorch's autograd on the host finds the bits of attention_backward."""
    import torch

    calls = drawn_calls(args, 60000)
    for _ in range(rounds):
        case, pattern, arrays, _ = next(calls)
        if case.dtype == "bfloat16":
            continue
        want = both(arrays, pattern)
        q, k, v = (torch.from_numpy(x.copy()).requires_grad_() for x in arrays[:3])
        out = spattn.attention(q, k, v, pattern)
        out.backward(torch.from_numpy(arrays[3].copy()))
        got = [x.detach().numpy() for x in (out, q.grad, k.grad, v.grad)]
        if bits_of(got) != bits_of([want[0], *want[2:]]):
            yield f"PyTorch: other bits: draw {case.number}: {case.shown()}\n{pattern!r}"
        yield None


ATTACKS = {
    f.__name__.removeprefix("attack_"): (f, rounds)
    for f, rounds in (
        (attack_threads, 6), (attack_fork, 25), (attack_mutated, 5), (attack_pickled, 150), (attack_decode, 80),
        (attack_lengths, 50), (attack_alike, 6), (attack_pairs, 3000),
        (attack_many, 24), (attack_refusals, 12), (attack_nonfinite, 200), (attack_algebra, 250), (attack_grouped, 40),
        (attack_thread_counts, 16), (attack_torch, 60),
    )
}  # fmt: skip


def work_on_misc(args, report):
    """One attack after another."""
    warnings.simplefilter("ignore")
    until = time.monotonic() + args.seconds
    for number, (name, (attack, rounds)) in enumerate(ATTACKS.items()):
        if args.attack and name not in args.attack or number < args.start:
            continue
        report.at(number)
        counts = collections.Counter()
        begun = time.monotonic()
        steps = attack(args, max(1, round(rounds * args.rounds)))
        while time.monotonic() < until:
            try:
                said = next(steps)
            except StopIteration:
                break
            except Exception as error:
                counts["crashed"] += 1
                report("failure", failure="crashed", attack=name, isa=args.isa, seed=args.seed, says=[
                    f"{last_line(error)}\n{traceback.format_exc()[-1500:]}"])  # fmt: skip
                break
            if said is None:
                counts["drawn"] += 1
                report.at(number)
            else:
                counts["wrong"] += 1
                if counts["wrong"] <= 5:
                    report("failure", failure="wrong", attack=name, isa=args.isa, seed=args.seed, says=[said])
        counts["ok"] = max(0, counts["drawn"] - counts["wrong"])
        report("counts", counts=dict(counts), attacks={name: {**counts, "seconds": round(time.monotonic() - begun, 1)}})


# --- processes --------------------------------------------------------------------------------------------------------


class Report:
    """What a worker tells its parent: lines of JSON, and the number of the draw that it is at."""

    def __init__(self, folder):
        self.lines = open(Path(folder) / "lines", "a")  # noqa: SIM115
        self.place = os.open(Path(folder) / "at", os.O_CREAT | os.O_WRONLY)
        self.turn = 0

    def at(self, number):
        """Work on this draw begins."""
        self.turn += 1
        os.pwrite(self.place, f"{number:12d} {self.turn:12d}".encode(), 0)

    def __call__(self, kind, **fields):
        self.lines.write(json.dumps({"kind": kind, **fields}) + "\n")
        self.lines.flush()

    def close(self):
        """All is written."""
        self.lines.close()


def merge(total, found):
    """Adds counts to counts."""
    for name, value in found.items():
        if isinstance(value, dict):
            merge(total.setdefault(name, {}), value)
        elif isinstance(value, (int, float)):
            total[name] = total.get(name, 0) + value


def show(failure):
    """Prints a failure with what reproduces it."""
    head = f"\n*** {failure['failure']} ({failure.get('isa')}"
    if failure.get("device", "cpu") != "cpu":
        head += f", {failure['device']}, {failure.get('kernel')}"
    print(head + f") seed {failure.get('seed')} " + (
        f"attack {failure['attack']}" if "attack" in failure else f"draw {failure.get('number')}"
    ))  # fmt: skip
    for line in failure.get("says", []):
        print("   ", line)
    if "case" in failure:
        print(f"    case: {failure['case']}\n    drawn: {failure['drawn']}\n    shrunk: {failure['shrunk']}")
        print(f"    says: {failure['shrunk_says']}\n    pattern: {failure['pattern']}")
        options = f"--isa {failure['isa']}" if failure["device"] == "cpu" else (
            f"--device {failure['device']} --kernel {failure['kernel']}"
        )  # fmt: skip
        print(f"    again: tools/attack_unions.py {options} --seed {failure['seed']} --draw {failure['number']}")
    sys.stdout.flush()


def run_isa(args, isa, start):
    """Workers for one instruction set, one after another until all is drawn; what they told."""
    total: dict = {name: {} for name in ("counts", "refusals", "warnings", "used", "dtypes", "attacks")}
    total["failures"] = []
    begun = time.monotonic()
    at, stop, deaths = start, start + args.count, 0
    environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}  # NumPy's products are small
    if args.device == "cuda":
        environment["SPATTN_CUDA_KERNEL"] = args.kernel
    elif isa != "auto":
        environment["SPATTN_ISA"] = isa
    while at < stop:
        left = args.seconds - (time.monotonic() - begun)
        if left <= 0 or deaths > 50:
            break
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, str(HERE), "--worker", folder, "--isa", isa, "--seed", str(args.seed),
                "--start", str(at), "--count", str(stop - at), "--seconds", str(left),
                "--device", args.device, "--kernel", args.kernel,
                "--part", args.part, "--draw", str(args.draw), "--rounds", str(args.rounds),
                *itertools.chain.from_iterable(("--attack", name) for name in args.attack or ()),
            ]  # fmt: skip
            worker = subprocess.Popen(command, env=environment)
            place, moved, hung = None, time.monotonic(), False
            patience = 900 if args.device == "cuda" or args.part == "misc" else 180
            while worker.poll() is None:
                time.sleep(0.2)
                now = (Path(folder) / "at").read_text() if (Path(folder) / "at").exists() else None
                if now != place:
                    place, moved = now, time.monotonic()
                elif time.monotonic() - moved > patience:
                    hung = True
                    worker.kill()
                    worker.wait()
            now = (Path(folder) / "at").read_text() if (Path(folder) / "at").exists() else None
            number = int(now.split()[0]) if now else at
            path = Path(folder) / "lines"
            told = 0
            for line in path.read_text().splitlines() if path.exists() else ():
                message = json.loads(line)
                if message.pop("kind") == "failure":
                    total["failures"].append(message)
                    show(message)
                    continue
                told += message["counts"].get("drawn", 0)
                for name, share in message.pop("used", {}).items():
                    total["used"][name] = max(total["used"].get(name, 0.0), share)
                merge(total, message)
            if worker.returncode == 0:
                break
            deaths += 1
            if worker.returncode != RESTART:
                kind = "hung" if hung else "crashed"
                failure = {
                    "failure": kind, "isa": isa, "device": args.device, "kernel": args.kernel, "seed": args.seed,
                    "number": number,
                    "says": [f"the process {'hangs' if hung else f'ended with {worker.returncode}'}"],
                }  # fmt: skip
                if args.part == "unions":
                    case = make_case(args.seed, number, args.device)
                    failure |= {"case": case.shown(), "drawn": case.tree.shown(), "shrunk": "", "shrunk_says": ""}
                    failure["pattern"] = pattern_text(case.tree)
                total["failures"].append(failure)
                show(failure)
                lost = number - at + 1 - told if args.part == "unions" else 0
                merge(total, {"counts": {"drawn": lost, "ok": max(0, lost - 1), "crashed": 1}})
            at = number + 1
    total["seconds"] = round(time.monotonic() - begun, 1)
    return total


def commit():
    """The commit of the tree that this file lies in."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE.parent, capture_output=True, text=True)
    return found.stdout.strip() or None


def options():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=("unions", "misc"), default="unions")
    parser.add_argument("--count", type=int, default=1000, help="draws for each instruction set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--isa", default="auto", help="one, several with commas, all, or auto")
    parser.add_argument("--seconds", type=float, default=1e9, help="at most so many for each instruction set")
    parser.add_argument("--device", choices=("cpu", "cuda", "torch"), default="cpu", help="torch: on the host")
    parser.add_argument("--kernel", choices=("auto", "portable"), default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="instruction sets at a time")
    parser.add_argument("--draw", type=int, default=-1, help="this draw alone, said in full")
    parser.add_argument("--start", type=int, default=0, help="number of the first draw")
    parser.add_argument("--attack", action="append", choices=tuple(ATTACKS), help="of part misc; all when left out")
    parser.add_argument("--rounds", type=float, default=1.0, help="of part misc: so many times as many rounds")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    """A worker's work, or the parent of the workers."""
    args = options()
    if args.worker:
        if args.isa == "auto" and args.device != "cuda":
            from spattn import cpu

            args.isa = os.environ.get("SPATTN_ISA", cpu.instruction_sets()[0])
        report = Report(args.worker)
        (work_on_misc if args.part == "misc" else work_on_unions)(args, report)
        report.close()
        return 0
    if args.device == "cuda":
        sets = ["auto"]
    elif args.isa == "all":
        from spattn import cpu

        sets = list(cpu.instruction_sets())
    else:
        sets = args.isa.split(",")
    if args.draw >= 0:
        args.start, args.count = args.draw, 1
    elif args.part == "misc":
        args.start, args.count = 0, len(ATTACKS)
    begun = time.monotonic()
    # Other draws for each instruction set: the masks and most of the planning are the same for all.
    apart = 0 if args.draw >= 0 or args.part == "misc" else args.count
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(lambda at: run_isa(args, sets[at], args.start + at * apart), range(len(sets))))
    result = {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), "part": args.part, "device": args.device,
        "kernel": args.kernel, "spattn": spattn.__version__, "commit": commit(),
        "seconds": round(time.monotonic() - begun, 1),
        "instruction_sets": dict(zip(sets, found, strict=True)),
    }  # fmt: skip
    print(f"\nspattn {result['spattn']}, commit {result['commit']}, {result['seconds']} s")
    bad = 0
    for isa, total in result["instruction_sets"].items():
        counts = total["counts"]
        bad += counts.get("wrong", 0) + counts.get("crashed", 0)
        line = ", ".join(f"{name} {counts.get(name, 0)}" for name in ("drawn", "wrong", "crashed", "refused"))
        shares = ", ".join(f"{name} {share:.2f}" for name, share in sorted(total["used"].items()))
        print(f"{isa}: {line}; {total['seconds']} s" + (f"; of the bound at most {shares}" if shares else ""))
        for name, value in total["attacks"].items():
            print(f"    {name}: {value}")
    for title in ("refusals", "warnings"):
        together: collections.Counter = collections.Counter()
        for total in found:
            together.update(total[title])
        for message, count in together.most_common():
            print(f"{title}: {count} × {message}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
