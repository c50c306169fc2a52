"""Programs of mask functions in native code: the bits of NumPy's functions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.index_set import AffineRows
from spattn.planning.tiles import undecided
from spattn.testing import check_plan
from spattn.trace import program as programs
from spattn.trace._cells import LANES, OPERATIONS
from spattn.trace.native import LookUp
from spattn.trace.program import Program

SPECIAL = [0, 1, -1, 7, 1 << 31, 1 << 51, -(1 << 53), (1 << 63) - 1, -(1 << 63)]
FLOATS = [0.0, 0.5, -0.5, 1.5, 2.5, -3.0, 1e30, np.inf, -np.inf, np.nan]
COMPARISONS = [np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal]
OF_INTEGERS = [np.add, np.subtract, np.multiply, np.minimum, np.maximum]
OF_INTEGERS += [np.bitwise_and, np.bitwise_or, np.bitwise_xor]
OF_FLOATS = [np.add, np.subtract, np.multiply, np.true_divide, np.minimum, np.maximum]
OF_TRUTH = [np.bitwise_and, np.bitwise_or, np.logical_and, np.logical_or, np.logical_xor, np.add, np.multiply]
WITH_NUMBER = [np.remainder, np.floor_divide, np.left_shift, np.right_shift]
SHAPES = [(3, 5, 1), (2, 3, 64), (7, 48, 64), (1, 2, LANES + 77), (700,), (5, 130)]
FLOAT_DTYPES = (np.float32, np.float64)


def counted(function, calls):
    """Append each call's arguments to `calls`."""
    return lambda *args: calls.append(args) or function(*args)


def arrays(rng, dtype, shape):
    """Values of a dtype, with extreme ones among them."""
    if dtype is np.bool_:
        return rng.random(shape) < 0.5
    special = np.array(SPECIAL if dtype is np.int64 else FLOATS).astype(dtype)
    scale = 10.0 ** rng.integers(0, 6)
    values = (rng.standard_normal(shape) * scale).astype(dtype)
    return np.where(rng.random(shape) < 0.1, rng.choice(special, shape), values)


@st.composite
def cases(draw):
    """A program, and the dtypes of its inputs."""
    others = draw(st.lists(st.sampled_from([np.bool_, *FLOAT_DTYPES]), max_size=2))
    program, dtypes = Program(), [np.int64, np.int64, *others]
    values = [program.input(dtype) for dtype in dtypes]

    def pick(*wanted):
        found = [x for x in values if x.dtype in wanted]
        return draw(st.sampled_from(found)) if found else None

    def number():
        return draw(st.sampled_from([1, 2, 3, 7, 64, 1009, 1 << 20, (1 << 40) + 1]))

    table = draw(st.sampled_from([np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_, *FLOAT_DTYPES]))
    for _ in range(draw(st.integers(2, 12))):
        a, kind = draw(st.sampled_from(values)), draw(st.integers(0, 8))
        whole, truth, real = pick(np.int64), pick(np.bool_), pick(*FLOAT_DTYPES)
        if kind == 0:
            made = draw(st.sampled_from(OF_INTEGERS))(whole, draw(st.sampled_from([pick(np.int64), number()])))
        elif kind == 1:
            function = draw(st.sampled_from(WITH_NUMBER))
            shift = draw(st.sampled_from([0, 1, 33, 63, 64, 90]))
            made = function(whole, number() if function in WITH_NUMBER[:2] else shift)
        elif kind == 2:
            made = draw(st.sampled_from([np.negative, np.absolute, np.sign, np.invert]))(whole)
        elif kind == 3 and real is not None:
            made = draw(st.sampled_from(OF_FLOATS))(real, draw(st.sampled_from([a, 1.5, pick(*FLOAT_DTYPES)])))
        elif kind == 4 and real is not None:
            unary = np.negative, np.absolute, np.sqrt, np.floor, np.ceil, np.trunc, np.rint
            made = draw(st.sampled_from(unary))(real)
        elif kind == 5 and truth is not None:
            made = draw(st.sampled_from([*OF_TRUTH, np.invert]))
            made = made(truth) if made is np.invert else made(truth, pick(np.bool_))
        elif kind == 6 and truth is not None:
            made = np.where(truth, a, draw(st.sampled_from([a, whole, 3])))
        elif kind == 7:
            other = {"b": np.float32, "i": np.float64, "f": np.int64}[a.dtype.kind]
            made = a.astype(other)
        elif kind == 8:
            shape = draw(st.sampled_from([(5,), (3, 4)]))
            array = np.resize(np.arange(7) - 2 * (np.dtype(table).kind != "u"), shape).astype(table)
            indices = [np.remainder(whole, 2 * n) - n for n in shape]
            made = whole.record(LookUp(array), *indices, dtype=np.int64 if array.dtype.kind in "iu" else table)
        else:
            made = np.isin(whole, np.array([-3, 0, 1, 7, 1009]))
        values.append(made)
        values.append(draw(st.sampled_from(COMPARISONS))(made, draw(st.sampled_from([a, 1]))))
    result = values[-1]
    for x in values[len(dtypes) :]:
        if x.dtype == bool:
            result = np.logical_xor(result, x)
    program.finish(result)
    return program, dtypes


@given(cases(), st.sampled_from(SHAPES), st.integers(0, 99))
def test_native_programs_have_the_bits_of_numpy(case, shape, seed):
    program, dtypes = case
    rng = np.random.default_rng(seed)
    sides = [tuple(n if (axis + i) % 2 or len(shape) == 1 else 1 for axis, n in enumerate(shape)) for i in range(2)]
    inputs = [arrays(rng, dtype, (*sides, shape)[min(i, 2)]) for i, dtype in enumerate(dtypes)]
    expected = program.run_by_numpy(inputs)
    assert program._native is not None
    found = program._native.run(inputs)
    assert found.dtype == bool and np.array_equal(found, np.broadcast_to(expected, found.shape))


def test_every_operation_is_in_some_program():
    """One program for each operation, whose values decide the result."""
    rng, seen = np.random.default_rng(0), set()
    names = {number: name for name, number in OPERATIONS.items()}

    def check(function, *dtypes):
        program = Program()
        program.finish(function(*(program.input(dtype) for dtype in dtypes)))
        inputs = [arrays(rng, dtype, (3, 40)) for dtype in dtypes]
        assert np.array_equal(program._native.run(inputs), program.run_by_numpy(inputs))
        seen.update(names[step[0]] for step in program._native.steps)

    i = np.int64
    for function in (*OF_INTEGERS, *COMPARISONS):
        check(lambda a, b, c, function=function: np.not_equal(function(a, b), c), i, i, i)
    for function in (np.negative, np.absolute, np.sign, np.invert):
        check(lambda a, b, function=function: function(a) < b, i, i)
    for function in WITH_NUMBER:
        check(lambda a, function=function: function(a, 13) == 3, i)
    check(lambda a: np.power(a, 3) < 0, i)
    check(lambda a: np.isin(a, np.array([7, -1, 0])), i)
    check(lambda a, t: np.where(t, a, 3) < 5, i, np.bool_)
    check(lambda a: a.record(LookUp(np.arange(5) % 2 == 0), a % 5, dtype=bool), i)
    for f in FLOAT_DTYPES:
        for function in (*OF_FLOATS, *COMPARISONS):
            check(lambda a, b, c, function=function: np.not_equal(function(a, b), c), f, f, f)
        for function in (np.negative, np.absolute, np.sqrt, np.floor, np.ceil, np.trunc, np.rint):
            check(lambda a, b, function=function: function(a) < b, f, f)
        check(lambda a, b, t: np.where(t, a, b) < 5, f, f, np.bool_)
        check(lambda a, f=f: a.record(LookUp(np.arange(5, dtype=f)), a % 5, dtype=f) < 2, i)
        check(lambda a, b, f=f: a.astype(f) < b, i, f)
        check(lambda a, b: a.astype(np.int64) < b, f, i)
    check(lambda a, b: a.astype(np.float64) < b, np.float32, np.float64)
    check(lambda a, b: a.astype(np.float32) < b, np.float64, np.float32)
    assert seen == set(OPERATIONS)


@pytest.mark.parametrize("function", [np.arctan, lambda x: x // 2, lambda x: np.power(x, 2.0)])
def test_functions_without_a_native_operation(function):
    program = Program()
    program.finish(function(program.input(np.float64)) < 1)
    x = np.linspace(-2, 2, programs._COMPILED_FROM + 1)
    assert program._native is None
    assert np.array_equal(program.run([x]), function(x) < 1)


def test_large_programs_report_an_index_out_of_range():
    program = Program()
    index = program.input(np.int64)
    program.finish(index.record(LookUp(np.arange(8)), index, dtype=np.int64) > 3)
    at = np.arange(programs._COMPILED_FROM) % 16 - 8
    assert np.array_equal(program.run([at]), np.arange(8)[at] > 3)
    for wrong in (8, -9, -(1 << 63), (1 << 63) - 1):
        at[-1] = wrong
        with pytest.raises(ValueError, match=f"index {wrong} is out of bounds for dimension 0 with size 8"):
            program.run([at])


@pytest.mark.parametrize("listed", [False, True])
def test_masks_without_rules(monkeypatch, listed):
    """Plans of unions of a mask that no rule decides, at odd lengths, against the dense mask."""
    torch = pytest.importorskip("torch")
    spattn.clear_plan_cache()
    monkeypatch.setattr(programs, "_COMPILED_FROM", 1)
    monkeypatch.setattr(undecided, "_FEWEST_CELLS", 1 if listed else 1 << 62)
    monkeypatch.setattr(undecided.EveryPair, "_pairs", counted(undecided.EveryPair._pairs, calls := []))
    table = torch.from_numpy(np.random.default_rng(0).integers(-50, 50, 331))
    weight = table.double() / 7

    def mask_mod(b, h, q, k):
        hashed = ((q * k * 7919 + k * 104729 + q) ^ (q + k)) % 1009
        return (hashed < 40) & (table[(q + hashed) % 331] * k >= weight[k] * q)

    pattern = p.interop.from_mask_mod(mask_mod) | p.QueriesAt(p.SlidingWindow(3, 2) - p.Sinks(5), 0)
    q, k = np.arange(203)[:, None], np.arange(331)
    hashed = ((q * k * 7919 + k * 104729 + q) ^ (q + k)) % 1009
    numbers = table.numpy()
    mask = (hashed < 40) & (numbers[(q + hashed) % 331] * k >= numbers[k] / 7 * q)
    mask |= (k >= q - 3) & (k <= q + 2) & (k >= 5)
    for tile in ((48, 64), (1, 64), (24, 64)):
        plan = spattn.plan(pattern, 203, 331, tiling=spattn.Tiling(tile=tile))
        check_plan(plan, [AffineRows.from_dense(mask)])
        assert bool(calls) == listed
        calls.clear()
