"""Two requests share a plan only if nothing that matters differs: the cache may not be seen but in time."""

import numpy as np
import pytest

import spattn
from spattn import Tiling, plan
from spattn import patterns as p
from spattn.schedule import compiler
from spattn.testing import Expectation, check_plan, inputs

REQUEST = {"q_len": 130, "kv_len": 130, "batch": 2, "heads": 4, "tile": (64, 64), "workers": 8}
OTHER = {"q_len": 66, "kv_len": 194, "batch": 4, "heads": 8, "tile": (64, 128), "workers": 1}


class EachHead(p.Pattern):
    """A window per head and batch entry: as many patterns as there are of them."""

    def sizes(self):
        return 0, 0

    def at(self, batch, head):
        return p.SlidingWindow(8 * batch + head, 3)


@pytest.mark.parametrize("name", REQUEST)
def test_every_argument_matters(name):
    """Each asked for after the other in one process, and each right."""
    pattern = EachHead()
    for request in (REQUEST, REQUEST | {name: OTHER[name]}, REQUEST):
        made = compiler.plan(pattern, **request)
        assert (made.q_len, made.kv_len, made.tile) == (request["q_len"], request["kv_len"], request["tile"])
        assert made.variant.shape == (request["batch"], request["heads"])
        variants, _ = pattern.variants(request["batch"], request["heads"])
        check_plan(made, [own.index_set(request["q_len"], request["kv_len"]) for own in variants])


def test_workers_have_plans_of_their_own():
    made = [plan(p.Full(), 64, 20_000, tiling=Tiling(tile=(64, 64), workers=workers)) for workers in (1, 64, 1)]
    assert len(made[1].work) > len(made[0].work) == len(made[2].work)


@pytest.mark.parametrize("heads", [[2, 4, 2], [4, 2, 4]], ids=str)
def test_calls_with_other_numbers_of_heads(heads):
    """A pattern of two heads serves any multiple of two; each call gets the plan for its own number."""
    pattern = p.PerHead((p.Causal(), p.SlidingWindow(3, 3)))
    for number in heads:
        q, k, v = inputs(1, number, number, 50, head_dim=8)
        out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
        Expectation(pattern, q, k, v).check(out, lse)


def test_equal_numbers_of_other_types_are_one_request():
    assert plan(p.Causal(), np.int64(77), tiling=Tiling(tile=(64, 64))) is plan(
        p.Causal(), 77, tiling=Tiling(tile=(64, 64))
    )
