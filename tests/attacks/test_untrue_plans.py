"""Attacks on plans: lattices that lie, plans that are changed, and the cost of planning.

Times do not decide here; benchmarks/planning/attacks.py prints them.
"""

import dataclasses
import functools
import operator
import pickle

import numpy as np
import pytest

import spattn
from spattn import patterns as p

from .counts import asked_cells, peak_bytes
from .oracle import arrays, dense

N = 20
QUERY, KEY = np.ogrid[:N, :N]
Q, K, V = arrays(N)


def predicate(allows, **more):
    """A pattern of the caller's own."""
    body = {"allows": lambda self, q, k: allows(q, k), **more}
    return dataclasses.dataclass(frozen=True)(type("Mine", (p.Pattern,), body))()


# -- parts() -----------------------------------------------------------------------------------------------------------

LATTICES = {
    "far-outside": ((10**9, -(10**9)), (3, 3)),
    "just-outside": ((3, -3), (3, 3)),
    "wrap": ((0x5555555555555556,), (4,)),  # modulo 2**64 the last point is position 2
}


def attention_of_a_part(**sides):
    """attention() with a pattern whose parts() has one part, with the given lattices."""
    part = p.authoring.Part(predicate(lambda q, k: k == k), **sides)
    pattern = predicate(lambda q, k: k == k, parts=lambda self, q_len, kv_len: (part,))
    return spattn.attention(Q, K, V, pattern)


def test_parts_of_the_sequence():
    assert abs(attention_of_a_part(key=p.authoring.Lattice(0, (1,), (N,))) - dense(Q, K, V, True)).max() < 1e-5


@pytest.mark.parametrize("side", ["key", "query"])
@pytest.mark.parametrize("name", LATTICES)
def test_parts_that_leave_the_sequence(name, side):
    """A caller's parts() with a lattice of positions outside of the sequence is refused."""
    strides, extents = LATTICES[name]
    with pytest.raises(ValueError, match="."):
        attention_of_a_part(**{side: p.authoring.Lattice(0, strides, extents)})


# -- plans that are changed --------------------------------------------------------------------------------------------


def small_plan(how):
    """A plan whose arrays the caller made or unpickled, and the result of its first call."""
    plan = spattn.plan(p.SlidingWindow(3), N, tiling=spattn.Tiling(tile=(16, 64)))
    copies = {name: getattr(plan, name).copy() for name in ("mask", "views", "variant", "work")}
    plan = dataclasses.replace(plan, **copies) if how == "replaced" else pickle.loads(pickle.dumps(plan))
    first = spattn.attention(Q, K, V, plan)
    assert abs(first - dense(Q, K, V, abs(QUERY - KEY) <= 3)).max() < 1e-5
    return plan, first


@pytest.mark.parametrize("field, value", [("mask", 10**8), ("offset", 10**14), ("variant", 10**8)])
@pytest.mark.parametrize("how", ["replaced", "unpickled"])
def test_plan_changed_after_its_first_call(how, field, value):
    """Its arrays are read-only, or the plan is refused, or the change has no effect."""
    plan, first = small_plan(how)
    array = plan.views["offset"][1:] if field == "offset" else getattr(plan, field).reshape(-1)
    try:
        array[0] = value
        out = spattn.attention(Q, K, V, plan)
    except ValueError as error:
        assert str(error)
    else:
        np.testing.assert_array_equal(out, first)


def test_plan_without_work():
    """A plan that writes no row is refused."""
    plan, _ = small_plan("replaced")
    empty = dataclasses.replace(plan, work=plan.work[:0], work_indptr=np.zeros_like(plan.work_indptr))
    with pytest.raises(ValueError, match="plan"):
        spattn.attention(Q, K, V, empty)


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.unfollowed
@pytest.mark.parametrize("order", [operator.and_, lambda a, b: b & a], ids=["predicate first", "window first"])
def test_plan_predicate_and_window(order):
    """A predicate without a closed form, cut by a window, is evaluated on the window's cells, with twice the room.

    It takes less memory than a dense array of numbers.
    """
    tokens, left = 4096, 255
    i = np.arange(tokens)
    pairs = sum(
        int((np.gcd(i[max(0, -d) : tokens - max(0, d)], i[max(0, d) : tokens - max(0, -d)]) == 1).sum())
        for d in range(-left, left + 1)
    )
    coprime = predicate(lambda q, k: np.gcd(q, k) == 1)
    pattern, plans = order(coprime, p.SlidingWindow(left)), []
    spattn.plan(pattern, 100)  # imports the planner
    with asked_cells(pattern) as asked:
        taken = peak_bytes(lambda: plans.append(spattn.plan(pattern, tokens)))
    assert plans[0].nnz == pairs
    assert asked.cells < 2 * (2 * left + 1) * tokens
    assert taken < 8 * tokens**2


@pytest.mark.parametrize("terms", [200, 1000])
def test_union_of_many_terms(terms):
    """A union of many small terms: no RecursionError, and the number of calls of predicates is linear in the terms."""
    union = functools.reduce(operator.or_, [p.Stride(7 + term, 3) & p.Causal() for term in range(terms)])
    i, j = np.ogrid[:64, :64]
    allowed = functools.reduce(np.logical_or, [((i - j) % (7 + term) == 3) & (j <= i) for term in range(terms)])
    with asked_cells(union) as asked:
        assert spattn.plan(union, 64).nnz == allowed.sum()
    assert asked.calls < 8 * terms
    assert hash(union) == hash(union) and repr(union)
    np.testing.assert_array_equal(np.asarray(union.index_set(64, 64).to_dense()), allowed)


def test_union_doubled_16_times():
    """``a | a``, 16 times over, is asked a few times and not 65536 times."""
    doubled = functools.reduce(lambda a, _: a | a, range(16), p.Stride(3) & p.Causal())
    with asked_cells(doubled) as asked:
        assert spattn.plan(doubled, N).nnz == ((QUERY - KEY) % 3 == 0)[KEY <= QUERY].sum()
    assert asked.calls < 64
    assert spattn.plan(functools.reduce(lambda a, _: a | a, range(16), p.Causal()), N).nnz == 210


MILLION, BLOCKS = 2**20, 2**14  # BigBird: row 0 sees all, rows 1 and the last 6 blocks, the others 3 + 1 global + 3
LARGE = {  # the pattern, tokens, pairs, MiB, whether it may be refused
    "million-causal": ("P.Causal()", MILLION, 2**19 * (MILLION + 1), 300, False),
    "million-bigbird": ("P.BigBird(64)", MILLION, (BLOCKS + 12 + 7 * (BLOCKS - 3)) * 64**2, 1024, False),
    "2**40": ("P.SlidingWindow(3)", 2**40, 7 * 2**40 - 12, 2048, True),
    "10-million-causal": ("P.Causal()", 10**7, 10**7 * (10**7 + 1) // 2, 2048, True),
}
LARGE_PLAN = """
import resource
import spattn
from spattn import patterns as P

spattn.plan({pattern}, 1000)
with open("/proc/self/status") as status:
    size = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize:"))
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 30), hard))
before = peak()
try:
    plan = spattn.plan({pattern}, {tokens})
    print("planned", plan.nnz, len(plan.indices), (peak() - before) >> 10)
except (ValueError, MemoryError) as error:
    print("refused", type(error).__name__, len(str(error)), (peak() - before) >> 10)
"""


@pytest.mark.footprint
@pytest.mark.parametrize("name", LARGE)
def test_plan_of_many_tokens(program, peak, name):
    """A plan of a run of key tiles for every 8 tokens at most, in so much memory; or a refusal that takes none."""
    pattern, tokens, pairs, most_mib, refusable = LARGE[name]
    said, *facts, mib = program(peak + LARGE_PLAN.format(pattern=pattern, tokens=tokens)).split()
    if said == "planned":
        assert int(facts[0]) == pairs and int(facts[1]) <= tokens // 8
        assert int(mib) < most_mib
    else:
        assert refusable and facts[0] in ("ValueError", "MemoryError") and facts[1] != "0"
        assert int(mib) < 256
