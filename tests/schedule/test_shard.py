"""The parts of a plan on several ranks give the bits of the whole plan, from the rows that the ranks need alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import cpu
from spattn.distributed._plans import Shape, key_routes, row_routes
from spattn.distributed._shardings import NAMES, named
from spattn.request.call import Call
from spattn.schedule import shard
from spattn.testing import inputs
from spattn.testing.strategies import cases, compositions, problems


def allowed(pattern, batch, heads, length):
    """The pairs of each batch entry and head, from the predicate: (batch, heads, length, length) bool."""
    at = np.arange(length)
    pairs = np.empty((batch, heads, length, length), bool)
    for entry, head in np.ndindex(batch, heads):
        own = pattern.slice(entry, head) if hasattr(pattern, "slice") else pattern
        pairs[entry, head] = own.bind(length, length).allows(at[:, None], at)
    return pairs


def square(drawn):
    return drawn.case.sizes.q_len == drawn.case.sizes.kv_len


@settings(max_examples=40)
@given(
    problems(st.one_of(cases(max_len=300), compositions(max_len=300)), layout=("contiguous",) * 3).filter(square),
    st.sampled_from(NAMES),
    st.integers(2, 5),
)
def test_parts_have_the_bits_of_the_whole(problem, name, world_size):
    """Rows that a rank does not need hold other numbers; they may not matter."""
    sizes, pattern = problem.case.sizes, problem.case.pattern
    shape = Shape(sizes.batch, sizes.heads_q, sizes.heads_kv, sizes.q_len, problem.head_dim, problem.head_dim_v)
    q, k, v = inputs(*problem.shape, dtype=problem.dtype, seed=problem.seed)
    dout = inputs(*problem.shape, dtype=problem.dtype, seed=problem.seed + 1)[2]
    call = Call.of(q, k, v)
    plan, of_gradients = (cpu.plan_for(pattern, call, backward=backward) for backward in (False, True))
    sharding = named(name, shape, world_size, plan)
    out, lse = spattn.attention(q, k, v, pattern, backend="cpu", return_lse=True)
    dout = np.resize(dout, out.shape)
    gradients = spattn.attention_backward(dout, q, k, v, out, lse, pattern, backend="cpu")
    rng = np.random.default_rng(problem.seed)
    for rank in range(world_size):
        rows = sharding.rows(rank)

        def seen(x, routes, other, rows=rows):
            made = np.full_like(x, other) if other == -np.inf else rng.standard_normal(x.shape).astype(x.dtype)
            flat, of = made.reshape(-1, *x.shape[2:]), x.reshape(-1, *x.shape[2:])
            flat[:, rows] = of[:, rows]
            for route in routes:
                for block in route.receive:
                    flat[np.ix_(block.heads, block.rows)] = of[np.ix_(block.heads, block.rows)]
            return made

        of_keys = key_routes(plan, sharding, rank, sizes.batch, sizes.heads_q, sizes.heads_kv)
        keys, values = seen(k, of_keys, 0), seen(v, of_keys, 0)
        own = shard.forward_part(plan, sharding, rank)
        mine, of_mine = spattn.attention(seen(q, (), 0), keys, values, own, backend="cpu", return_lse=True)
        assert mine[:, :, rows].tobytes() == out[:, :, rows].tobytes()
        assert of_mine[:, :, rows].tobytes() == lse[:, :, rows].tobytes()
        of_rows = row_routes(of_gradients, sharding, rank, sizes.batch, sizes.heads_q)
        given = [seen(x, of_rows, 0) for x in (dout, q)], [seen(out, of_rows, 0), seen(lse, of_rows, -np.inf)]
        own = shard.backward_part(of_gradients, sharding, rank)
        for got, want in zip(
            spattn.attention_backward(*given[0], keys, values, *given[1], own, backend="cpu"), gradients, strict=True
        ):
            assert got[:, :, rows].tobytes() == want[:, :, rows].tobytes()
