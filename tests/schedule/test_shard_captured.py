"""Gradients of sinks and captured arrays on several ranks: the bits of one process, and a float64 formula."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import cpu
from spattn.cpu import _score
from spattn.dispatch import scores
from spattn.dispatch.calls import backward_with_score
from spattn.distributed._plans import Shape, key_transfers, row_transfers
from spattn.distributed._shardings import NAMES, named
from spattn.request.call import Call
from spattn.request.score import Portion
from spattn.schedule import shard
from spattn.score import take
from spattn.testing import dense_mask, inputs
from spattn.testing.strategies import cases, compositions, problems

TABLES = "slopes", "diagonals", "keys", "queries", "pairs"


class Threads:
    """Ranks that are threads, and exchange the parts of arrays."""

    def __init__(self, world_size):
        self.barrier, self.arrays = threading.Barrier(world_size, timeout=60), [None] * world_size

    def exchange(self, rank):
        def scatter(x):
            self.arrays[rank] = x.copy()
            self.barrier.wait()
            bounds = [len(x) * part // len(self.arrays) for part in (rank, rank + 1)]
            found = np.stack([y[slice(*bounds)] for y in self.arrays])
            self.barrier.wait()
            return slice(*bounds), found

        return scatter

    def run(self, program):
        with ThreadPoolExecutor(len(self.arrays)) as pool:
            return list(pool.map(program, range(len(self.arrays))))


def captured(rng, shape, dtype):
    heads, length = shape.heads_q, shape.length
    sizes = {
        "slopes": (heads,),
        "diagonals": (heads, 2 * length),
        "keys": (length,),
        "queries": (length,),
        "pairs": (shape.batch, heads, length, length),
    }
    return {name: rng.uniform(-0.5, 0.5, size).astype(dtype) for name, size in sizes.items()}


def score_of(tables, names):
    terms = {
        "slopes": lambda b, h, q, k: take(tables["slopes"], h) * (k - q) * 0.125,
        "diagonals": lambda b, h, q, k: take(tables["diagonals"], h, k - q),
        "keys": lambda b, h, q, k: take(tables["keys"], k),
        "queries": lambda b, h, q, k: take(tables["queries"], q),
        "pairs": lambda b, h, q, k: take(tables["pairs"], b, h, q, k),
    }
    return lambda s, b, h, q, k: sum((terms[name](b, h, q, k) for name in names), s)


def formula(q, k, v, dout, mask, tables, names, sinks):
    """Gradients of the tables and of the sinks in float64."""
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    q, k, v, dout = (x.astype(np.float64) for x in (q, np.repeat(k, group, 1), np.repeat(v, group, 1), dout))
    at = np.indices((*q.shape[:2], length, length))
    tables = {name: x.astype(np.float64) for name, x in tables.items()}
    b, h, i, j = at
    terms = {
        "slopes": tables["slopes"][h] * (j - i) * 0.125,
        "diagonals": tables["diagonals"][h, j - i],
        "keys": tables["keys"][j],
        "queries": tables["queries"][i],
        "pairs": tables["pairs"][b, h, i, j],
    }
    s = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]) + sum(terms[name] for name in names)
    s = np.concatenate([np.where(mask, s, -np.inf), np.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], axis=3)
    p = np.exp(s - s.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    p, own = p[..., :-1], p[..., -1]
    of_weight = dout @ v.swapaxes(2, 3)
    delta = (p * of_weight).sum(axis=3)
    ds = p * (of_weight - delta[..., None])
    found, diagonals = {}, np.zeros((q.shape[1], 2 * length))
    np.add.at(diagonals, (at[1], at[3] - at[2]), ds)
    found["slopes"] = (ds * (at[3] - at[2]) * 0.125).sum(axis=(0, 2, 3))
    found |= {"diagonals": diagonals, "keys": ds.sum(axis=(0, 1, 2)), "queries": ds.sum(axis=(0, 1, 3)), "pairs": ds}
    return [found[name] for name in names], -(own * delta).sum(axis=(0, 2))


def square(drawn):
    return drawn.case.sizes.q_len == drawn.case.sizes.kv_len


@settings(max_examples=25)
@given(
    problems(st.one_of(cases(max_len=150), compositions(max_len=150)), layout=("contiguous",) * 3).filter(square),
    st.sampled_from(NAMES),
    st.integers(2, 4),
    st.lists(st.sampled_from(TABLES), min_size=1, max_size=3, unique=True),
    st.sampled_from([_score._MOST_ELEMENTS, 200]),
)
def test_each_sum_is_on_one_rank_with_the_bits_of_one_process(problem, name, world_size, names, at_once):
    """Rows that a rank does not need hold other numbers; they may not matter. Nor may the number of passes."""
    sizes, pattern = problem.case.sizes, problem.case.pattern
    shape = Shape(sizes.batch, sizes.heads_q, sizes.heads_kv, sizes.q_len, problem.head_dim, problem.head_dim_v)
    q, k, v = inputs(*problem.shape, dtype=problem.dtype, seed=problem.seed)
    call, rng = Call.of(q, k, v), np.random.default_rng(problem.seed)
    dout = rng.standard_normal(call.out_shape).astype(q.dtype)
    wide = np.dtype(call.lse_dtype)
    tables, sinks = captured(rng, shape, wide), rng.standard_normal(shape.heads_q).astype(wide)
    options = {"score": score_of(tables, names), "sinks": sinks}
    out, lse = spattn.attention(q, k, v, pattern, backend="cpu", return_lse=True, **options)
    *_, of_tables, of_sinks = spattn.attention_backward(dout, q, k, v, out, lse, pattern, backend="cpu", **options)
    order = scores.read(options["score"], sinks, None, q, k, v, "cpu", "bhsd", backward=True)
    position = {id(x): number for number, x in enumerate(order.tables)}
    want = formula(q, k, v, dout, dense_mask(pattern, *q.shape[:3], k.shape[2]), tables, names, sinks)
    tolerance = {2: 0.1, 4: 1e-3, 8: 1e-9}[q.dtype.itemsize]
    for got, expected in zip(
        [of_sinks, *(of_tables[position[id(tables[name])]] for name in names)], [want[1], *want[0]], strict=True
    ):
        assert np.abs(got - expected).max() <= tolerance * max(1, np.abs(expected).max())

    plan, of_gradients = (cpu.plan_for(pattern, call, backward=backward) for backward in (False, True))
    sharding, ranks = named(name, shape, world_size, plan), Threads(world_size)

    def of_rank(rank):
        rows, other = sharding.rows(rank), np.random.default_rng(rank)

        def seen(x, transfers, fill=None):
            made = np.full_like(x, fill) if fill else other.standard_normal(x.shape).astype(x.dtype)
            flat, of = made.reshape(-1, *x.shape[2:]), x.reshape(-1, *x.shape[2:])
            flat[:, rows] = of[:, rows]
            for block in (block for transfer in transfers for block in transfer.receive):
                flat[np.ix_(block.heads, block.rows)] = of[np.ix_(block.heads, block.rows)]
            return made

        keys = key_transfers(plan, sharding, rank, sizes.batch, sizes.heads_q, sizes.heads_kv, of_gradients)
        of_rows = row_transfers(of_gradients, sharding, rank, sizes.batch, sizes.heads_q, True)
        part = shard.backward_part(of_gradients, sharding, rank)
        lists = shard.lists_of_tables(of_gradients, sharding, rank)
        portion = Portion(sharding.owners() == rank, lists.items(part), ranks.exchange(rank))
        given = order._replace(operands=order.operands._replace(portion=portion))
        arrays = *(seen(x, of_rows) for x in (dout, q)), seen(k, keys), seen(v, keys), seen(out, of_rows)
        fixed = {"scale": call.scale, "backend": "cpu", "precision": None, "layout": "bhsd"}
        return backward_with_score(
            *arrays, seen(lse, of_rows, -np.inf), part, given=given, wanted=order.operands.wanted, **fixed
        )[3:]

    with mock.patch.object(_score, "_MOST_ELEMENTS", at_once):
        found = ranks.run(of_rank)
    for number, expected in enumerate([*of_tables, of_sinks]):
        parts = np.stack([[*dtables, dsinks][number] for dtables, dsinks in found])
        assert ((parts != 0).sum(axis=0) <= 1).all()
        assert (parts.sum(axis=0) + 0.0).tobytes() == (expected + 0.0).tobytes(), number
