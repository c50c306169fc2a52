"""The parameters that kernels are given, read back by the names of their fields; without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.arrays.operand import Operand, row_major
from spattn.cuda.host import score as host_score
from spattn.cuda.host.backward_pass import BackwardPass
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.host.score import IDENTITY, Binder, BoundScore
from spattn.cuda.sm80 import backward as portable_backward
from spattn.cuda.sm80 import forward as portable
from spattn.cuda.sm80 import kernels, params
from spattn.cuda.sm90.forward import launches, prepared
from spattn.cuda.sm90.forward import params as hopper_params
from spattn.planning.contract.validated import validated
from spattn.request.call import Call

from .score_trees import operands, type_of

pytestmark = pytest.mark.family("sm80")

PARAMS = hopper_params.params_dtype(16)
SCORED = BoundScore("text of a function", 77)
GPU = type("Gpu", (contextlib.nullcontext,), {"ordinal": 0, "sm_count": 132, "shared_bytes": 227 << 10})()


def upload(device, arrays):
    """Addresses that tell the arrays apart."""
    return None, {name: 4096 * (1 + sum(map(ord, name))) for name in arrays}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tensor_maps):
    for module in (params, prepared):
        monkeypatch.setattr(module, "upload", upload)
    monkeypatch.setattr(launches, "load_kernels", lambda device, requests: requests)


@pytest.fixture
def call():
    """Heads inside tokens, shared rows, and a negative scale."""
    made = validated(
        plan(patterns.longformer(64, global_tokens=(0, 5)), 400, tiling=Tiling(tile=(128, 64), workers=9), heads=4)
    )
    assert made.slots and len(made.merge_rows)
    operands = [
        Operand(base << 30, (2, heads, 400, dim), (heads * dim * 400, dim, heads * dim, 1))
        for base, heads, dim in ((1, 4, 64), (2, 2, 64), (3, 2, 128), (4, 4, 128))
    ]
    return ForwardPass(GPU, 7, made, *operands, 5 << 30, "bfloat16", -0.5, None)


def test_portable(call):
    on_device = params.plan_on_device(call.plan, GPU, 2, 4)
    (found,) = np.frombuffer(params.pack(call, on_device, 111, 222, 333), params.PARAMS)
    for name in ("q", "k", "v", "out"):
        operand = getattr(call, name)
        assert found[name].tolist() == (operand.pointer, *operand.strides)
    expected = {
        "lse": 5 << 30,
        "partial": 111,
        "partial_lse": 222,
        "first_block": 333,
        "scale_log2": 0.5 / np.log(2),
        "sign": -1,
        "heads_q": 4,
        "group": 2,
        "head_dim": 64,
        "head_dim_v": 128,
        "q_len": 400,
        "slots": call.plan.slots,
        "block_q": 128,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    at = upload(GPU, [*params._ARRAYS, "items", "merges", "items_first", "merges_first", "heads", "head_indptr"])[1]
    assert all(found[name] == at[name] for name in params._ARRAYS)
    for name, tasks in (("items", len(call.plan.work)), ("merges", len(call.plan.merge_rows))):
        own = at[name], at["head_indptr"], at["heads"], at[f"{name}_first"], 8 * tasks, 1
        assert found[name].tolist() == own


def backward_of(call):
    """A backward pass of the forward's arrays."""
    statistics = Operand(8 << 30, (2, 4, 400), (1600, 400, 1))
    gradients = [x._replace(pointer=x.pointer + (8 << 30)) for x in (call.q, call.k, call.v)]
    arrays = call.out, call.q, call.k, call.v, call.out, statistics, None, *gradients
    return BackwardPass(call.device, 7, call.plan, *arrays, call.dtype, call.scale, None, call.precision, call.score)


@pytest.mark.parametrize(("q_len", "score"), [(400, IDENTITY), (400, SCORED), (399, SCORED)])
def test_portable_score(call, q_len, score):
    """Scores are scaled before the function, and the exponent by log2(e) alone; the last query is at the last key."""
    call = dataclasses.replace(call, score=score, q=call.q._replace(shape=(2, 4, q_len, 64)))
    on_device = params.plan_on_device(call.plan, GPU, 2, 4)
    (found,) = np.frombuffer(params.pack(call, on_device, 111, 222, 333), params.PARAMS)
    expected = (77, -0.5, 400 - q_len) if score.text else (0, 0.0, 0)
    assert found["score"].tolist() == expected
    assert found["scale_log2"] == pytest.approx(np.log2(np.e) if score.text else 0.5 * np.log2(np.e))
    assert found["sign"] == (1 if score.text else -1)
    backward = backward_of(call)
    own, _ = params.passes_on_device(call.plan, GPU, 2, 4, 2)
    (found,) = np.frombuffer(params.pack_backward(backward, own, 111, (call.q, 0), None), params.BACKWARD_PARAMS)
    assert found["score"].tolist() == expected and found["scale"] == -0.5


SLOPES, TABLE, SLOPE = np.arange(4, dtype=np.float32), np.arange(12.0).reshape(3, 4)[:, ::2], 0.25


def function(score, b, h, q, k):
    return score + SLOPES[h] * (k - q) + TABLE[b, h] * SLOPE


@pytest.fixture
def bound(monkeypatch):
    """A dispatch's score function; blocks that were uploaded, by address."""
    uploaded = {}

    def upload(device, arrays):
        uploaded[1 << 20 | len(uploaded)] = arrays["args"].tobytes()
        return None, {"args": next(reversed(uploaded))}

    monkeypatch.setattr(host_score, "upload", upload)
    monkeypatch.setattr(host_score, "_blocks", {})
    monkeypatch.setattr(host_score, "keep_if_captured", lambda *_: None)
    q = np.zeros((2, 4, 400, 64), np.float32)
    call = dataclasses.replace(Call.of(q, q, q), score=operands(function))
    return Binder(call, GPU), uploaded


def on_device(score, first=4096):
    """The captured arrays in C order, as host arrays are copied."""
    shapes = [x.shape for x in score.tables]
    return [Operand(first * (1 + n), shape, row_major(shape)) for n, shape in enumerate(shapes)]


def test_values_are_bound(bound):
    """Equal values share a block; others have a block of their own, and the text is the same for all."""
    binder, uploaded = bound
    score = operands(function)
    other = score._replace(parameters=(0.75,))
    found = [binder.bind(0, one, on_device(one), (8, 8), None) for one in (score, other, score)]
    found.append(binder.bind(0, score, on_device(score, 8192), (8, 8), None))
    assert len(uploaded) == 3 and found[0] == found[2] and len({one.text for one in found}) == 1
    _, record = host_score.generated(score.program, tuple(type_of(np.ascontiguousarray(x)) for x in score.tables))
    for one, parameter, first in zip(found, (0.25, 0.75, 0.25, 0.25), (4096,) * 3 + (8192,), strict=True):
        (args,) = np.frombuffer(uploaded[one.address], record)
        assert args["parameter0"] == parameter
        assert (args["table0"], args["table1"]) == (first, 2 * first)
        assert args["stride0"].tolist() == [1] and args["shape0"].tolist() == [4]
        assert args["stride1"].tolist() == [2, 1] and args["shape1"].tolist() == [3, 2]


def test_blocks_are_bounded(bound, monkeypatch):
    monkeypatch.setattr(host_score, "_BLOCKS_KEPT", 2)
    binder, uploaded = bound
    score = operands(function)
    for value in (0.0, 1.0, 2.0, 0.0):
        binder.bind(0, score._replace(parameters=(value,)), on_device(score), (8, 8), None)
    assert len(uploaded) == 4 and len(host_score._blocks[GPU]) == 2


def test_operands_are_checked(bound):
    """What a call captures must be what the kernels were prepared for."""
    binder, _ = bound
    score = operands(function)
    assert binder.check(score) == score.tables
    for wrong in (None, operands(lambda s, b, h, q, k: s), score._replace(wanted=(True, False))):
        with pytest.raises(ValueError, match="expected the function that the call was prepared for"):
            binder.check(wrong)
    with pytest.raises(ValueError, match="expected 2 captured arrays, got 1"):
        binder.check(score._replace(tables=score.tables[:1]))
    with pytest.raises(ValueError, match=r"expected an array of float32 and shape \(4,\), got .*\(3,\)"):
        binder.check(score._replace(tables=(SLOPES[:3], TABLE)))
    with pytest.raises(ValueError, match="expected an array of float32.* got .*float64"):
        binder.check(score._replace(tables=(SLOPES.astype(float), TABLE)))
    with pytest.raises(ValueError, match="expected arrays of strides"):
        binder.bind(0, score, [x._replace(strides=(2,) * len(x.shape)) for x in on_device(score)], (8, 8), None)
    assert binder.check(score._replace(parameters=(5.0,))) == score.tables


def test_portable_kernels_depend_on_the_score(call, monkeypatch):
    """Each text has kernels of its own."""
    monkeypatch.setattr(kernels, "load_kernels", lambda device, requests: [one.text for one in requests])
    call.device = type("Gpu", (), {"arch": "sm_90", "shared_bytes": 227 << 10})()  # kernels are cached by device
    on_device = params.plan_on_device(call.plan, GPU, 2, 4)
    for text in ("", "one", "another", "one", ""):
        call.score = BoundScore(text, 77)
        assert portable.attention_kernel(call, on_device) == (text, 128)
        for by_keys in (False, True):
            found = portable_backward.backward_kernels(backward_of(call), by_keys)
            assert [ready for ready, _ in found] == [text]


def test_hopper(call):
    ready = prepared.prepare(call)
    at = ready._tables.at
    to = hopper_params.Addresses(*(x.pointer for x in (call.q, call.k, call.v, call.out)), 555, 666, 777, -0.5)
    tasks = 0
    for launch in range(ready.computes):
        (found,) = np.frombuffer(ready.template.fill(launch, [to]), hopper_params.params_dtype(16))
        expected = {
            "q": to.q,
            "k": to.k,
            "v": to.v,
            "out": to.out,
            "lse": 555,
            "partial_out": 666,
            "partial_lse": 777,
            "scale_log2": 0.5 / np.log(2),
            "sign": -1,
            "q_len": 400,
            "heads_q": 4,
            "head_dim": 64,
            "head_dim_v": 128,
            "partial_rows": call.plan.slots * 128,
        }
        (problem,) = found["problems"]
        assert {name: problem[name] for name in expected} == pytest.approx(expected)
        for name in ("q", "k", "v", "out"):
            assert problem[f"{name}_stride"].tolist() == getattr(call, name).strides[:3]
        tables = {
            "counter": 0,
            "work": at["work"],
            "tasks": at["tasks"] + 16 * tasks,
        }
        assert {name: found[name] for name in tables} == tables
        tasks += int(found["task_count"])
    assert tasks == 8 * len(call.plan.work)
    (merging,) = ready._merges
    (merge,) = np.frombuffer(merging.params(to), hopper_params.MERGE)
    expected = {
        "rows": at["merge_rows"],
        "heads": at["merge_heads"],
        "partial_out": 666,
        "partial_lse": 777,
        "out": to.out,
        "lse": 555,
        "partial_rows": call.plan.slots * 128,
        "q_len": 400,
        "heads_q": 4,
        "head_dim_v": 128,
        "head_blocks": merging.blocks // 8,
    }
    assert {name: merge[name] for name in expected} == expected
    assert merge["out_stride"].tolist() == call.out.strides[:3]


def test_maps_follow_the_arrays(call):
    """Every tensor map is moved with its array and by as much; those of addresses seen before come from the cache."""
    ready = prepared.prepare(call)
    pointers = [x.pointer for x in (call.q, call.k, call.v, call.out)]
    elsewhere = [pointer + 4096 * (1 + number) for number, pointer in enumerate(pointers)]
    filled = [
        ready.template.fill(0, [hopper_params.Addresses(*at, 0, 0, 0, 1.0)]) for at in (pointers, elsewhere, pointers)
    ]
    first, moved, again = (np.frombuffer(params, hopper_params.params_dtype(16)) for params in filled)
    assert first.tobytes() == again.tobytes()
    addresses, after = (x["maps"][0].view("u8")[:, 0].astype(np.int64) for x in (first, moved))
    used = addresses > 0
    assert used.any() and ((after - addresses)[used] == 4096 * (addresses[used] >> 30)).all()
    assert len(ready.template._maps._heads) == 2


def test_maps_and_records_of_a_plan_that_moves():
    """The maps of the last keys move with them, and no others; those of both ends, which are of one shape here, are two
    although views at equal distances are one elsewhere."""
    pattern = patterns.Sinks(64) | patterns.SlidingWindow(63, 0)
    made = validated(plan(pattern, 1, 1000, tiling=Tiling(tile=(128, 64))))
    operands = [
        Operand(base << 30, (1, 2, length, 64), (length * 128, 64, 128, 1))
        for base, length in ((1, 1), (2, 1000), (3, 1000), (4, 1))
    ]
    ready = prepared.prepare(ForwardPass(GPU, 7, made, *operands, 0, "float16", 1.0, None))
    at = [x.pointer for x in operands]
    filled = [
        np.frombuffer(ready.template.fill(0, [hopper_params.Addresses(*at, 0, 0, 0, 1.0, moved)]), PARAMS)[0]
        for moved in (0, 7, -500, 7)
    ]
    assert [found["problems"][0]["moved"] for found in filled] == [0, 7, -500, 7]
    addresses = np.array([found["maps"].view("u8")[:, 0].astype(np.int64) for found in filled])
    keys = addresses[0] >> 30
    last = (936 * 256 + (keys << 30) == addresses[0]) & (keys > 1)
    assert np.isin(keys, (2, 3)).sum() == 4 and last.sum() == 2
    for found, moved in zip(addresses, (0, 7, -500, 7), strict=True):
        np.testing.assert_array_equal(found - addresses[0], np.where(last, 256 * moved, 0))


def test_a_plan_that_moves_is_prepared_once_for_all_lengths(call):
    made = validated(plan(patterns.SlidingWindow(63, 0), 1, 1000, tiling=Tiling(tile=(128, 64)), heads=4))
    q, out = (Operand(x.pointer, (2, 4, 1, x.shape[3]), x.strides) for x in (call.q, call.out))

    def of(kv_len, head_stride=64):
        k, v = (
            x._replace(shape=(2, 2, kv_len, x.shape[3]), strides=(1 << 20, head_stride, 256, 1))
            for x in (call.k, call.v)
        )
        return prepared.prepare(ForwardPass(GPU, 7, made, q, k, v, out, 0, "bfloat16", 1.0, None))

    assert of(1000) is of(2000) and of(1000) is not of(1000, 128)
    assert of(1000)._tables is of(1000, 128)._tables
