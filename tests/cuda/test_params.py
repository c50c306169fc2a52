"""The parameters that kernels are given, read back by the names of their fields; without a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.arrays.operand import Operand
from spattn.cuda.host import score as scores
from spattn.cuda.host.backward_pass import BackwardPass
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.sm80 import backward as portable_backward
from spattn.cuda.sm80 import forward as portable
from spattn.cuda.sm80 import kernels, params
from spattn.cuda.sm90.forward import launches, prepared
from spattn.cuda.sm90.forward import params as hopper_params
from spattn.planning.contract.validated import validated
from spattn.request.score import Score

pytestmark = pytest.mark.family("sm80")

PARAMS = hopper_params.params_dtype(16)
ALIBI, SOFTCAP = Score("alibi", (0.5, 0.25, 0.125, 0.0625)), Score("softcap", (2.0, 3.0, 4.0, 5.0))
GPU = type("Gpu", (), {"ordinal": 0, "sm_count": 132, "shared_bytes": 227 << 10})()


def upload(device, arrays):
    """Addresses that tell the arrays apart."""
    return None, {name: 4096 * (1 + sum(map(ord, name))) for name in arrays}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tensor_maps):
    for module in (params, prepared):
        monkeypatch.setattr(module, "upload", upload)
    monkeypatch.setattr(launches, "kernel", lambda *arguments: arguments)


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


@pytest.mark.parametrize(("q_len", "score"), [(400, None), (400, ALIBI), (399, ALIBI)])
def test_portable_score(call, monkeypatch, q_len, score):
    """Scores are scaled before the function, and the exponent by log2(e) alone; the last query is at the last key."""
    monkeypatch.setattr(scores, "_on_device", lambda device, values: (None, {"values": 77}))
    call = dataclasses.replace(call, score=score, q=call.q._replace(shape=(2, 4, q_len, 64)))
    on_device = params.plan_on_device(call.plan, GPU, 2, 4)
    (found,) = np.frombuffer(params.pack(call, on_device, 111, 222, 333), params.PARAMS)
    expected = (77, -0.5, 400 - q_len) if score else (0, 0.0, 0)
    assert found["score"].tolist() == expected
    assert found["scale_log2"] == pytest.approx(np.log2(np.e) if score else 0.5 * np.log2(np.e))
    assert found["sign"] == (1 if score else -1)
    backward = backward_of(call)
    own, _ = params.passes_on_device(call.plan, GPU, 2, 4, 2)
    (found,) = np.frombuffer(params.pack_backward(backward, own, 111, (call.q, 0), None), params.BACKWARD_PARAMS)
    assert found["score"].tolist() == expected and found["scale"] == -0.5


def test_portable_score_is_checked(call, monkeypatch):
    """Kernels read a parameter for each query head; a named identity folds the scale as no function does."""
    monkeypatch.setattr(scores, "_on_device", lambda device, values: (None, {"values": 77}))
    on_device = params.plan_on_device(call.plan, GPU, 2, 4)
    for wrong in (Score("alibi", (1.0, 2.0)), Score("cube", (1.0,) * 4)):
        call.score = wrong
        with pytest.raises(
            ValueError, match=f"expected one of identity, softcap, alibi with 4 values, got .*{wrong.name}"
        ):
            params.pack(call, on_device, 111, 222)
        with pytest.raises(ValueError, match=f"with 4 values, got .*{wrong.name}"):
            scores.score_values(GPU, wrong, 4)  # which the Hopper kernels call
    call.score = Score("identity", (0.0,) * 4)
    (found,) = np.frombuffer(params.pack(call, on_device, 111, 222), params.PARAMS)
    assert found["scale_log2"] == pytest.approx(0.5 * np.log2(np.e)) and found["sign"] == -1


def test_portable_kernels_depend_on_the_score(call, monkeypatch):
    """Each function has kernels of its own, for any parameters; the identity has no macro."""
    monkeypatch.setattr(kernels, "kernel", lambda device, source, arch, macros, *_: macros.get("SPATTN_SCORE_KIND"))
    call.device = type("Gpu", (), {"arch": "sm_90", "shared_bytes": 227 << 10})()  # kernels are cached by device
    others = ALIBI._replace(values=(1.0,) * 4), Score("identity", (0.0,) * 4)
    on_device = params.plan_on_device(call.plan, GPU, 2, 4)
    for score, kind in ((None, None), (ALIBI, 2), (SOFTCAP, 1), (others[0], 2), (others[1], None), (None, None)):
        call.score = score
        assert portable.attention_kernel(call, on_device) == (kind, 128)
        for by_keys in (False, True):
            found = portable_backward.backward_kernels(backward_of(call), by_keys)
            assert [ready for ready, _ in found] == [kind]


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
