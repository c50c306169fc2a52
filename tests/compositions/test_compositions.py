"""Compositions of up to six patterns on the CPU: index sets, plans, results and gradients are those of their masks.

What is expected comes from :mod:`.oracle`, which is NumPy and the patterns' definitions, and knows nothing of spattn.
A union writes a row from several views, and plans say who merges it: operands here differ in their views, rows lie in
several of them and in some without a pair, and tiles are as small as one query, where that shows most.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.request.call import Call
from spattn.schedule import compiler
from spattn.testing import DTYPES, check_plan, execute

from . import draws, oracle
from .draws import Drawn, How, Term
from .oracle import Results
from .problems import RELATIVE, make_problem, of_arrays

pytestmark = [
    pytest.mark.unfollowed,  # of predicates that no rule follows
    pytest.mark.filterwarnings("ignore::spattn.EfficiencyWarning"),
]

ISAS = cpu.instruction_sets()
SMALL = [(1, 64), (1, 64), (1, 64), (2, 64), (3, 64), (4, 64)]
DIMS = [(16, 16), (32, 32), (64, 64), (8, 40), (24, 16), (5, 3)]


def drawing(share: int = 1, nightly: int = 1):
    """The profile's number of examples divided by `share`; `nightly` times the profile's in the profile of that name,
    which is the one that draws as many as that one does, by whatever option it was loaded."""
    own = settings.default.max_examples
    many = own >= settings.get_profile("nightly").max_examples
    return settings(max_examples=nightly * own if many else max(5, own // share))


def index_sets(case):
    """Those of the variants, after each was held against the mask of every head that has it."""
    batch, heads, _, q_len, kv_len = case.sizes
    variants, index = case.pattern.variants(batch, heads)
    made, allowed = [own.index_set(q_len, kv_len) for own in variants], case.allowed()
    index = np.broadcast_to(index, (batch, heads))
    for b, h in np.ndindex(batch, heads):
        dense = made[index[b, h]].to_dense()
        wrong = np.argwhere(dense != allowed[b, h])
        assert not len(wrong), f"batch entry {b}, head {h}: the index set differs at {wrong[:5].tolist()} (row, key)"
    for number, own in enumerate(made):
        b, h = np.argwhere(index == number)[0]
        assert own.nnz == allowed[b, h].sum()
    return made


def check_planned(case, plan, sets):
    """A plan visits each pair of the mask once and writes each row once, for every head."""
    batch, heads, *_ = case.sizes
    check_plan(plan, sets)
    allowed, variant = case.allowed(), np.broadcast_to(plan.variant, (batch, heads))
    each = [allowed[*np.argwhere(variant == number)[0]] for number in range(plan.variants)]
    assert plan.nnz == sum(int(own.sum()) for own in each)
    for b, h in np.ndindex(batch, heads):
        assert np.array_equal(allowed[b, h], each[variant[b, h]])


def planned(case, how, **options):
    batch, heads, _, q_len, kv_len = case.sizes
    return compiler.plan(case.pattern, q_len, kv_len, batch=batch, heads=heads, **{**how._asdict(), **options})


@contextlib.contextmanager
def on(isa):
    """Choices and calls are for an instruction set, as if it were the machine's best one."""
    spattn.clear_plan_cache()
    with mock.patch.object(cpu, "_default_isa", lambda: isa):
        yield
    spattn.clear_plan_cache()


def draw_problem(source, case, dtype=None):
    """Arrays and a scale, and what attention makes of them."""
    dtypes = ["float64", "float32", "float64", "float32", "float16", "bfloat16"]
    dtype, dims = source.choice(dtypes) if dtype is None else dtype, source.choice(DIMS)
    source.note(f"{dtype}, head dimensions {dims}")
    return make_problem(source, case, dtype, *dims, scale=source.choice([None, 0.3, -0.7]))


def run_plan(problem, plan, isa):
    """Forward and backward of a plan on an instruction set, as close as the dtype allows."""
    q, k, v, dout, dlse = problem.arrays
    out, lse = cpu.forward(q, k, v, plan, problem.scale, isa=isa)
    options = {"dlse": dlse if problem.with_dlse else None, "isa": isa}
    found = problem.wrong((out, lse, *cpu.backward(dout, q, k, v, out, lse, plan, problem.scale, **options)))
    assert not found, f"{isa}, {plan!r:.500}:\n" + "\n".join(found)


def check_plans(source):
    """Index sets, a plan in tiles of few queries, one in any tiles, and those that the CPU chooses for a forward and
    for its gradients."""
    case = draws.draw_case(source)
    source.note(case)
    sets = index_sets(case)
    small = How(source.choice(SMALL), None, source.choice(draws.WORKERS))
    for how in (small, draws.draw_how(source, case)):
        source.note(how)
        check_planned(case, planned(case, how), sets)
    q, k, v, *_ = draws.draw_arrays(source, case.sizes, *source.choice(DIMS), DTYPES[source.choice(list(DTYPES))])
    with on(source.choice(ISAS)):
        call = Call.of(q, k, v)
        for backward in (False, True):
            chosen = cpu.plan_for(case.pattern, call, backward=backward)
            source.note(chosen)
            check_planned(case, chosen, sets)


def check_results(source):
    """Of a plan in few queries and of one in any tiles, on any instruction set, in any dtype."""
    case = draws.draw_case(source)
    source.note(case)
    problem, isa = draw_problem(source, case), source.choice(ISAS)
    small = How(source.choice(SMALL), None, source.choice(draws.WORKERS))
    for how in (small, draws.draw_how(source, case, gathered=False)):
        source.note(how)
        run_plan(problem, planned(case, how), isa)


def check_calls(source):
    """Of :func:`spattn.attention` and its backward, with the plans that the CPU chooses on any instruction set, and
    with a plan that is handed over."""
    case = draws.draw_case(source)
    source.note(case)
    problem, isa = draw_problem(source, case), source.choice(ISAS)
    how = draws.draw_how(source, case, draws.FEW, gathered=False)
    source.note(how)
    q, k, v, dout, dlse = problem.arrays
    with on(isa):
        for pattern in (case.pattern, planned(case, how)):
            out, lse = spattn.attention(q, k, v, pattern, scale=problem.scale, return_lse=True)
            options = {"dlse": dlse if problem.with_dlse else None, "scale": problem.scale}
            found = problem.wrong((out, lse, *spattn.attention_backward(dout, q, k, v, out, lse, pattern, **options)))
            assert not found, f"{isa}, {pattern!r:.500}:\n" + "\n".join(found)


def _terms():
    """By name: a composition that was wrong once, its tokens, and its tile."""
    half = np.where(np.arange(30) < 15, 30, 0)
    rows = Term(p.RowIntervals(0 * half, half), oracle.row_intervals(0 * half, half))
    steps = {n: Term(p.Stride(n), oracle.stride(n, 0)) for n in (2, 3, 5)}
    near = Term(p.SlidingWindow(1, 0), oracle.sliding_window(1, 0))
    behind = Term(p.Prefix(p.Stride(2), 1), oracle.prefix(oracle.stride(2, 0), 1))
    return {
        # Rows of two views, and of a third one that has no list there, were not put together: one of two was lost.
        "three views": (steps[2] | steps[3] | (steps[5] & rows), 30, (1, 64)),
        # Pieces that repeat with other moves of queries than of keys were one piece beside a pattern of distances.
        "a prefix and a window": (near & behind, 5, (48, 64)),
        "a prefix or a window": (near | behind, 5, (48, 64)),
    }


@pytest.mark.parametrize(("term", "tokens", "tile"), _terms().values(), ids=_terms())
def test_what_was_found(term, tokens, tile):
    case = draws.Case(*term, draws.Sizes(1, 1, 1, tokens, tokens))
    made = planned(case, How(tile, None, 1))
    check_planned(case, made, index_sets(case))
    for isa in ISAS:
        run_plan(make_problem(draws.Seeded(0), case, "float64", 16, 16), made, isa)


def draw_listed(source):
    """Patterns that list their pairs or have an order of the tokens, alone, with others, and by head."""
    sizes = draws.draw_sizes(source)
    looked_up = [draws.pairs, draws.together, draws.clusters]

    def one():
        found = source.choice(looked_up)(source, sizes)
        for _ in range(source.integer(0, 2)):
            found = found & draws.draw_term(source, sizes, 2, draws.SINGLE)
        return found

    if source.integer(0, 2):
        return draws.Case(*one(), sizes)
    number = source.choice([n for n in range(1, sizes.heads_q + 1) if sizes.heads_q % n == 0])
    each = [one(), *(draws.draw_term(source, sizes, 3, draws.SINGLE) for _ in range(number - 1))]
    patterns, masks = zip(*each, strict=True)
    pattern, mask = p.PerHead(patterns), oracle.per_head(masks, sizes.heads_q)
    return draws.Case(pattern, mask, sizes)


def check_looked_up(source):
    """Tokens in an order, which the CPU takes, and gathered keys, whose plans are executed as their contract says."""
    case = draw_listed(source)
    source.note(case)
    sets, problem, isa = index_sets(case), draw_problem(source, case), source.choice(ISAS)
    how = How(source.choice(draws.TILES), None, source.choice(draws.WORKERS))
    for own in (how._replace(ordered=True), how._replace(gathered=True)):
        source.note(own)
        made = planned(case, own)
        check_planned(case, made, sets)
        if not made.gathered:
            run_plan(problem, made, isa)
            continue
        q, k, v = (x.astype(np.float64) for x in problem.arrays[:3])
        exact = problem.attention.exact_to(RELATIVE)
        found = oracle.wrong(execute(made, q, k, v, problem.scale), problem.results, exact, ("out", "lse"))
        assert not found, "\n".join(found)


def draw_steps(source):
    """Compositions of any length, most of them of operands whose plans move with a sequence or grow, now and then by
    head or batch entry."""
    longest = source.choice([100, 300])
    sizes = draws.draw_sizes(source, longest)
    sizes = sizes._replace(q_len=source.choice([1, 1, source.integer(2, 5), source.integer(1, 70)]))
    kinds = draws.GROWING if source.integer(0, 2) else draws.ANYWHERE

    def one():
        return draws.draw_term(source, sizes, 4, kinds)

    way = source.integer(0, 3)
    if way == 0:
        pairs = [one() for _ in range(sizes.heads_q)]
        patterns, masks = zip(*pairs, strict=True)
        return draws.Case(p.PerHead(patterns), oracle.per_head(masks, sizes.heads_q), sizes)
    if way == 1:
        patterns, masks = zip(*(one() for _ in range(sizes.batch)), strict=True)
        return draws.Case(p.PerBatch(patterns), oracle.per_batch(masks), sizes)
    return draws.Case(*one(), sizes)


def check_steps(source):
    """Plans that are kept move and grow with the number of keys: of one key more, of 64, of more, and back again."""
    case = draw_steps(source)
    source.note(case)
    sizes = case.sizes
    lengths = [sizes.kv_len + more for more in (0, 1, 64, source.integer(1, 200), 0)]
    dtype, dims = source.choice(["float64", "float32", "bfloat16"]), source.choice(DIMS)
    whole = draws.draw_arrays(source, sizes._replace(kv_len=max(lengths)), *dims, DTYPES[dtype])
    how, isa = How(source.choice(draws.TILES), None, source.choice(draws.WORKERS)), source.choice(ISAS)
    source.note(f"{lengths} keys, {dtype}, head dimensions {dims}, {isa}, {how}")
    with on(isa):
        for step, n in enumerate(lengths):
            here = case._replace(sizes=sizes._replace(kv_len=n))
            problem = of_arrays(here, dtype, whole._replace(k=whole.k[:, :, :n], v=whole.v[:, :, :n]), False)
            q, k, v, dout, _ = problem.arrays
            got = spattn.attention(q, k, v, case.pattern, return_lse=True)
            if step in (2, 4):
                got = (*got, *spattn.attention_backward(dout, q, k, v, *got, case.pattern))
                check_planned(here, planned(here, how), index_sets(here))
            found = problem.wrong(got, Results._fields[: len(got)])
            assert not found, f"step {step}, {n} keys:\n" + "\n".join(found)


@pytest.mark.slow
@drawing(nightly=10)
@given(st.data())
def test_plans_are_those_of_the_masks(data):
    check_plans(Drawn(data))


@pytest.mark.slow
@drawing(nightly=10)
@given(st.data())
def test_results_and_gradients(data):
    check_results(Drawn(data))


@pytest.mark.slow
@drawing(2, nightly=10)
@given(st.data())
def test_calls(data):
    check_calls(Drawn(data))


@drawing(2)
@given(st.data())
def test_tokens_in_an_order_and_keys_that_are_gathered(data):
    check_looked_up(Drawn(data))


@drawing()
@given(st.data())
def test_steps_of_generation(data):
    check_steps(Drawn(data))
