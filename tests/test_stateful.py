"""Calls in any order: plans, copies, threads and caches may change when a result is found, never what it is."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import spattn
from spattn import cpu, reference
from spattn import patterns as p
from spattn.arrays import namespace_of, to_host
from spattn.patterns import from_json
from spattn.planning import Plan
from spattn.testing import DTYPES, Expectation, assert_within_bound, dense_mask, inputs, random

from .cpu.test_backward import naive_orders

torch = pytest.importorskip("torch")
TORCH = namespace_of(torch.empty(0))

SHAPES = [(1, 2, 2, 60, 60, 16), (2, 4, 2, 33, 97, 8), (1, 4, 1, 3, 300, 32), (1, 4, 4, 130, 130, 24)]
MASK = np.random.default_rng(0).random((130, 300)) < 0.3
PATTERNS = {
    "full": lambda q_len, kv_len: p.Full(),
    "causal": lambda q_len, kv_len: p.Causal(),
    "window": lambda q_len, kv_len: p.SlidingWindow(9, 3),
    "dilated": lambda q_len, kv_len: p.DilatedWindow(4, 4, 3),
    "longformer": lambda q_len, kv_len: p.longformer(16, global_tokens=(0, 40)),
    "strided": lambda q_len, kv_len: p.strided(8),
    "bigbird": lambda q_len, kv_len: p.BigBird(16, seed=3),
    "per head": lambda q_len, kv_len: p.PerHead((p.Causal(), p.BlockLocal(20))),
    "mask": lambda q_len, kv_len: p.Mask(MASK[:q_len, :kv_len]),
    "composition": lambda q_len, kv_len: (p.Causal() & p.SlidingWindow(30)) | p.GlobalTokens(2),
    "empty rows": lambda q_len, kv_len: p.BlockLocal(16) - p.SlidingWindow(12, 20),
}


class Request(NamedTuple):
    """What is asked for; equal requests have equal answers, to the bit."""

    pattern: str
    shape: tuple[int, ...]
    dtype: str
    kind: str  # of array

    @property
    def lengths(self):
        return self.shape[3:5]

    def make_pattern(self):
        return PATTERNS[self.pattern](*self.lengths)


requests = st.builds(
    Request,
    st.sampled_from(list(PATTERNS)),
    st.sampled_from(SHAPES),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(["numpy", "torch"]),
)


@functools.cache
def arrays_of(shape, dtype, kind):
    """dout, q, k, v; the same objects for every call."""
    made = inputs(*shape, dtype=dtype)
    made = random((*made[0].shape[:3], shape[5]), dtype, seed=7), *made
    return tuple(TORCH.from_numpy(x) if kind == "torch" else x for x in made)


@functools.cache
def expectation(request: Request) -> Expectation:
    return Expectation(request.make_pattern(), *map(to_host, arrays_of(*request[1:])[1:]))


@functools.cache
def expected_gradients(request: Request):
    """The reference's, and what the naive formula loses."""
    arrays, pattern = [to_host(x) for x in arrays_of(*request[1:])], request.make_pattern()
    wide = np.longdouble if request.dtype == "float64" else np.float64
    mask = dense_mask(pattern, *arrays[1].shape[:3], request.lengths[1])
    return reference.gradients(*arrays, pattern, None, wide), naive_orders(*arrays, mask, None)


def bits(x) -> bytes:
    return to_host(x).tobytes()


class Calls(RuleBasedStateMachine):
    """Draws the order of calls; remembers the first answer to each request and every array that was given out."""

    patterns = Bundle("patterns")  # (request, a pattern for it, its equal or copy)
    plans = Bundle("plans")  # (request, options of the plan, the plan or a copy)

    def __init__(self):
        super().__init__()
        self.first: dict = {}
        self.given: list = []

    # -- answers ---------------------------------------------------------------------------------------------------

    def keep(self, key, results) -> None:
        """Equal requests have equal answers; none of them changes later."""
        answer = tuple(map(bits, results))
        assert self.first.setdefault(key, answer) == answer, f"{key}: other bits than the first time"
        self.given = [*self.given[-20:], *zip(results, answer, strict=True)]

    def forward(self, request, pattern, key):
        arrays = arrays_of(*request[1:])
        out, lse = spattn.attention(*arrays[1:], pattern, return_lse=True)
        expectation(request).check(to_host(out), to_host(lse), str(request))
        self.keep((request, key), (out, lse))
        return out, lse

    def backward(self, request, pattern, key) -> None:
        arrays = arrays_of(*request[1:])
        got = spattn.attention_backward(*arrays, *self.forward(request, pattern, key), pattern)
        for name, x, exact, low in zip(("dq", "dk", "dv"), got, *expected_gradients(request), strict=True):
            assert_within_bound(to_host(x), exact, low, DTYPES[request.dtype], f"{name} of {request}")
        self.keep((request, key, "gradients"), got)

    # -- rules: patterns ---------------------------------------------------------------------------------------------

    @rule(target=patterns, request=requests)
    def make_pattern(self, request):
        return request, request.make_pattern()

    @rule(target=patterns, known=patterns, how=st.sampled_from(["pickle", "copy", "deepcopy", "dict", "replace"]))
    def copy_pattern(self, known, how):
        request, pattern = known
        copies = {
            "pickle": lambda x: pickle.loads(pickle.dumps(x)),
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "dict": lambda x: from_json(x.to_json()),
            "replace": dataclasses.replace,
        }
        made = copies[how](pattern)
        assert made == pattern and hash(made) == hash(pattern)
        return request, made

    @rule(known=patterns)
    def call(self, known):
        self.forward(*known, "pattern")

    @rule(known=patterns)
    def call_backward(self, known):
        self.backward(*known, "pattern")

    @rule(request=requests)
    def call_by_mask_that_is_changed_afterwards(self, request):
        """The caller's array is read during the call, and never again."""
        mask = MASK[: request.lengths[0], : request.lengths[1]].copy()
        for name in ("mask", "turned mask"):
            arrays = arrays_of(*request[1:])
            given = TORCH.from_numpy(mask) if request.kind == "torch" else mask
            out, lse = spattn.attention(*arrays[1:], given, return_lse=True)
            check = Expectation(p.Mask(mask), *map(to_host, arrays[1:]))
            check.check(to_host(out), to_host(lse), f"{name} of {request}")
            self.keep((request._replace(pattern=name), "array"), (out, lse))
            mask[...] = ~mask

    # -- rules: plans ------------------------------------------------------------------------------------------------

    @rule(
        target=plans,
        known=patterns,
        tile=st.sampled_from([(48, 64), (64, 64), (7, 128)]),
        workers=st.sampled_from([1, 16]),
    )
    def make_plan(self, known, tile, workers):
        request, pattern = known
        made = spattn.plan(
            pattern,
            *request.lengths,
            tiling=spattn.Tiling(tile=tile, workers=workers),
            batch=request.shape[0],
            heads=request.shape[1],
        )
        return request, (tile, workers), made

    @rule(target=plans, known=plans, how=st.sampled_from(["pickle", "copy", "deepcopy", "replace", "by hand"]))
    def copy_plan(self, known, how):
        request, options, plan = known
        copies = {
            "pickle": lambda x: pickle.loads(pickle.dumps(x)),
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "replace": dataclasses.replace,
            "by hand": lambda x: dataclasses.replace(x, pattern=None),
        }
        return request, options, copies[how](plan)

    @rule(known=plans)
    def call_plan(self, known):
        request, options, plan = known
        self.forward(request, plan, options)

    @rule(known=plans)
    def call_plan_backward(self, known):
        request, options, plan = known
        self.backward(request, plan, options)

    @rule(known=plans, name=st.sampled_from([f.name for f in dataclasses.fields(Plan) if f.type == "np.ndarray"]))
    def write_to_plan(self, known, name):
        array = getattr(known[2], name)
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0

    @rule(known=plans, name=st.sampled_from(["indices", "masks", "work", "merge_rows"]))
    def make_broken_plan(self, known, name):
        """Refused, and no trace of it in the plan that it came from."""
        request, _, plan = known
        array = getattr(plan, name)
        broken = dataclasses.replace(plan, **{name: np.concatenate([array, array[:1], array[:1]])[::-1]})
        if len(array):
            with pytest.raises(ValueError, match="^plan"):
                spattn.attention(*arrays_of(*request[1:])[1:], broken)

    @rule(known=consumes(plans))
    def forget_plan(self, known):
        """It may live on in a cache, or end here."""

    # -- rules: at the same time, and what is kept -------------------------------------------------------------------

    @rule(one=patterns, other=patterns, known=plans)
    def at_the_same_time(self, one, other, known):
        """Three callers, one of whom asks for gradients; a fourth one forgets everything meanwhile."""
        request, options, plan = known
        with ThreadPoolExecutor(4) as pool:
            calls = [
                pool.submit(self.forward, *one, "pattern"),
                pool.submit(self.backward, *other, "pattern"),
                pool.submit(self.forward, request, plan, options),
                pool.submit(self.forget),
            ]
        for each in calls:
            each.result()

    @rule()
    def forget(self):
        spattn.clear_plan_cache()
        cpu.free_workspaces()

    @rule(plans=st.booleans())
    def forget_one(self, plans):
        if plans:
            spattn.clear_plan_cache()
            assert spattn.plan_cache_info().plans == 0
        else:
            cpu.free_workspaces()

    @invariant()
    def nothing_that_was_given_out_changes(self):
        for array, before in self.given:
            assert bits(array) == before, "a result of an earlier call has changed"

    @invariant()
    def no_input_changes(self):
        for shape in {request.shape for request, *_ in self.first}:
            for dtype in DTYPES:
                fresh = inputs(*shape, dtype=dtype)
                for kind in ("numpy", "torch"):
                    given = arrays_of(shape, dtype, kind)[1:]
                    assert all(bits(x) == bits(y) for x, y in zip(given, fresh, strict=True))

    @invariant()
    def caches_are_bounded(self):
        info = spattn.plan_cache_info()
        assert 0 <= info.bytes <= info.max_bytes


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=max(5, settings.default.max_examples // 8), stateful_step_count=25)
