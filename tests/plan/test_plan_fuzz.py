"""Plans that somebody changed: whatever a plan says, a call refuses it or does what it says, inside of its arrays.

``SPATTN_FUZZ_PLANS`` is the number of changed plans, ``SPATTN_FUZZ_SEED`` where to begin. ``make sanitize`` runs many
on a core that checks its own memory accesses; elsewhere the inputs end at protected pages.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import pickle
import re
from typing import NamedTuple

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.planning import Plan
from spattn.testing import at_protected_page, execute, inputs, random

COUNT = int(os.environ.get("SPATTN_FUZZ_PLANS", "400"))
SEED = int(os.environ.get("SPATTN_FUZZ_SEED", "0"))
PARTS = 8  # tests that the plans are divided among

MASK = np.random.default_rng(0).random((40, 90)) < 0.4
CASES = [  # (pattern, batch, heads, q_len, kv_len, tile, workers)
    (p.Causal(), 1, 1, 50, 50, (16, 64), 1),
    (p.longformer(20, global_tokens=(0, 70)), 1, 2, 90, 90, (16, 64), 64),
    (p.DilatedWindow(4, 2, 3), 1, 1, 70, 97, (16, 64), 1),
    (p.Neighborhood((7, 9), (3, 5)), 1, 1, 63, 63, (16, 64), 1),
    (p.strided(12), 2, 2, 80, 80, (32, 128), 1),
    (p.PerHead((p.Causal(), p.SlidingWindow(5, 5), p.Mask(MASK), p.Full())), 1, 4, 40, 90, (16, 64), 4),
    (p.Full(), 1, 2, 3, 2100, (16, 64), 64),
    (p.Documents((20, 0, 15)), 1, 1, 60, 60, (7, 64), 1),
]
WHOLE = tuple(field.name for field in dataclasses.fields(Plan) if field.type == "int")
ARRAYS = tuple(field.name for field in dataclasses.fields(Plan) if field.type == "np.ndarray")


class Case(NamedTuple):
    """A sound plan, inputs for it, and its results."""

    plan: Plan
    arrays: tuple  # dout, q, k, v
    results: tuple


@pytest.fixture(scope="module")
def cases():
    return [make_case(*case) for case in CASES]


def make_case(pattern, batch, heads, q_len, kv_len, tile, workers) -> Case:
    plan = spattn.plan(
        pattern, q_len, kv_len, tiling=spattn.Tiling(tile=tile, workers=workers), batch=batch, heads=heads
    )
    q, k, v = map(at_protected_page, inputs(batch, heads, heads, q_len, kv_len, 8))
    arrays = at_protected_page(random(q.shape, seed=9)), q, k, v
    return Case(plan, arrays, call(plan, arrays))


def call(plan, arrays, isa=None):
    """out, lse, dq, dk, dv: through the public face, or by the kernels of one instruction set."""
    dout, q, k, v = arrays
    if isa is None:
        out, lse = spattn.attention(q, k, v, plan, scale=0.3, return_lse=True)
        return out, lse, *spattn.attention_backward(dout, q, k, v, out, lse, plan, scale=0.3)
    out, lse = cpu.forward(q, k, v, plan, 0.3, isa=isa)
    return out, lse, *cpu.backward(dout, q, k, v, out, lse, plan, 0.3, isa=isa)


# -- changes -----------------------------------------------------------------------------------------------------------


def other_number(rng, number: int, dtype):
    """A neighbour, an extreme, or anything; as the dtype has it."""
    limits = np.iinfo(dtype)
    near = number + int(rng.integers(-2, 3))
    far = [0, 1, -1, 63, 64, 65, 2**31 - 1, 2**31, -(2**31), 2**62, limits.min, limits.max, 2 * number, -number]
    chosen = near if rng.random() < 0.7 else int(rng.choice(np.array(far, dtype=object)))
    return min(max(chosen, limits.min), limits.max)


def change_element(rng, array: np.ndarray) -> np.ndarray:
    """One number of an array, or of one field of a record."""
    array = array.copy()
    part = array[rng.choice(array.dtype.names)] if array.dtype.names else array
    if part.size:
        at = np.unravel_index(rng.integers(part.size), part.shape)
        if part.dtype == np.uint64 and rng.random() < 0.7:
            part[at] ^= np.uint64(1) << np.uint64(rng.integers(64))
        elif rng.random() < 0.2:
            part[at] = part.flat[rng.integers(part.size)]
        else:
            part[at] = other_number(rng, int(part[at]), part.dtype)
    return array


def change_length(rng, array: np.ndarray) -> np.ndarray:
    return [array[:-1], array[1:], array[:0], np.concatenate([array, array[-1:]]), np.repeat(array, 2, axis=0)][
        rng.integers(5)
    ]


def change_order(rng, array: np.ndarray) -> np.ndarray:
    if rng.random() < 0.5 or len(array) < 2:
        return array[::-1]
    array, (a, b) = array.copy(), rng.integers(len(array), size=2)
    array[[a, b]] = array[[b, a]]
    return array


def change_kind(rng, array: np.ndarray):
    """Another dtype, number of axes or type; among them what holds the same numbers."""
    array = np.ascontiguousarray(array)
    if array.dtype.names:
        kinds = [array.tolist(), array.view(np.int32), array[None]]
    else:
        others = (np.int8, np.int16, np.int64, np.uint32, np.float64, bool, object, ">i4", "<i8")
        kinds = [array.astype(dtype) for dtype in others]
        kinds += [array.tolist(), array[None], array[..., None], np.repeat(array, 2, axis=0)[::2]]
        kinds += [np.asfortranarray(array), array.view(np.matrix) if array.ndim == 2 else np.ma.masked_array(array)]
    kinds += [None, 0, (), "", np.zeros(0), array.astype(array.dtype)]
    return kinds[rng.integers(len(kinds))]


def change_whole_number(rng, number: int):
    odd = [float(number), bool(number), str(number), None, np.int64(number), np.float32(number), 1e300, 2**64, -(2**70)]
    return odd[rng.integers(len(odd))] if rng.random() < 0.2 else other_number(rng, number, np.int64)


def changed_fields(rng, plan: Plan) -> dict:
    """Mostly one change, up to three."""
    fields: dict = {}
    for _ in range(rng.choice([1, 2, 3], p=[0.7, 0.2, 0.1])):
        if rng.random() < 0.15:
            name = rng.choice(WHOLE)
            fields[name] = change_whole_number(rng, getattr(plan, name))
            continue
        name, other = rng.choice(ARRAYS, size=2)
        if rng.random() < 0.05:  # swapped
            fields[name], fields[other] = getattr(plan, other), getattr(plan, name)
            continue
        array = fields.get(name, getattr(plan, name))
        change = rng.choice([change_element, change_length, change_order, change_kind], p=[0.7, 0.1, 0.1, 0.1])
        if isinstance(array, np.ndarray) and array.dtype.kind in "iuV":  # not what has become something else
            fields[name] = change(rng, array)
    return fields


def remade(rng, plan: Plan, fields: dict) -> Plan:
    """By ``replace``, half of them copied or pickled afterwards."""
    bad = dataclasses.replace(plan, **fields)
    way = rng.integers(6)
    if way == 0:
        return pickle.loads(pickle.dumps(bad, protocol=int(rng.integers(2, 6))))
    return [bad, copy.copy(bad), copy.deepcopy(bad), bad, bad, bad][way]


# -- what has to hold --------------------------------------------------------------------------------------------------


def attempt(make, arrays, isa=None):
    """(plan, results), or None where it is refused as it should be."""
    try:
        plan = make()
        return plan, call(plan, arrays, isa)
    except (ValueError, TypeError) as error:
        assert re.match("plan: expected|pattern: expected", str(error)), f"refused for another reason: {error}"
        return None


@pytest.mark.parametrize("part", range(PARTS))
def test_changed_plans_are_refused_or_done(cases, part, capsys):
    """An accepted plan gives what the contract, executed in plain NumPy, says."""
    with capsys.disabled():
        print(f"\nplan fuzz: seed {SEED}, plans {part}, {part + PARTS}, ... of {COUNT}", end=" ", flush=True)
    accepted = 0
    for number in range(part, COUNT, PARTS):
        rng = np.random.default_rng((SEED, number))
        case = cases[rng.integers(len(cases))]
        isa = rng.choice(np.array([None, *cpu.instruction_sets()], dtype=object))
        fields = changed_fields(rng, case.plan)
        done = attempt(functools.partial(remade, rng, case.plan, fields), case.arrays, isa)
        if done is not None:
            accepted += 1
            plan, results = done
            assert all(np.isfinite(x[np.isfinite(x) | (x != -np.inf)]).all() for x in results), number
            for got, want in zip(results, execute(plan, *case.arrays[1:], 0.3), strict=False):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f"seed {SEED}, plan {number}")
    assert 0 < accepted < COUNT / PARTS / 2, "nothing was done, or little refused"


@pytest.mark.parametrize("number", range(len(CASES)))
def test_copies_are_the_same_plan(cases, number):
    plan, arrays, expected = cases[number]
    for other in (dataclasses.replace(plan), copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert all(np.array_equal(x, y) for x, y in zip(call(other, arrays), expected, strict=True))


def scribble(rng, plan: Plan, given: dict) -> None:
    """Writes wherever Python lets one: the arrays that the plan was made from, its own, what they are views of."""
    own = [getattr(plan, name) for name in ARRAYS]
    for array in [*given.values(), *own, *(x.base for x in own if isinstance(x.base, np.ndarray))]:
        try:
            array.flags.writeable = True
        except ValueError:
            continue  # not ours to write
        array[...] = change_element(rng, change_element(rng, array))
    if rng.random() < 0.3:
        name = rng.choice(ARRAYS)
        object.__setattr__(plan, name, change_element(rng, getattr(plan, name)))


@pytest.mark.parametrize("part", range(PARTS))
def test_plans_that_change_between_calls(cases, part):
    """After the first call nothing that anybody writes counts: the same results, or a refusal."""
    for number in range(part, max(PARTS, COUNT // 10), PARTS):
        rng = np.random.default_rng((SEED, number, 1))
        case = cases[rng.integers(len(cases))]
        given = {name: getattr(case.plan, name).copy() for name in ARRAYS}
        plan = dataclasses.replace(case.plan, **given)
        isa = str(rng.choice(cpu.instruction_sets()))
        before = call(plan, case.arrays, isa)
        scribble(rng, plan, given)
        after = attempt(lambda plan=plan: plan, case.arrays, isa)
        if after is not None:
            for x, y in zip(before, after[1], strict=True):
                np.testing.assert_array_equal(x, y, err_msg=f"seed {SEED}, plan {number}")
