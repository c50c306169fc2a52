"""The parameters that kernels are given, read back by the names of their fields; without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.arrays.operand import Operand
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.sm80.forward import params
from spattn.cuda.sm90.forward import launches, prepared
from spattn.cuda.sm90.forward import params as hopper_params
from spattn.planning.contract.validated import validated
from spattn.schedule import compiler

pytestmark = pytest.mark.family("sm80")

PARAMS = hopper_params.params_dtype(16)
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


@pytest.mark.parametrize(("shape", "columns"), [((8, 8), 64), ((7, 7), 56)])
def test_kernels_are_told_of_short_tiles(shape, columns):
    """Which clear what no copy of such a tile fills, and multiply fewer columns."""
    tile, box = (shape[0] * shape[1], 64), shape
    made = validated(compiler.plan(patterns.windowed((56, 56), shape), 3136, batch=2, heads=4, tile=tile, box=box))
    operands = [Operand(base << 30, (2, 4, 3136, 64), (4 * 3136 * 64, 3136 * 64, 64, 1)) for base in range(1, 5)]
    call = ForwardPass(GPU, 7, made, *operands, 5 << 30, "bfloat16", 0.5, None)
    ready = prepared.prepare(call)
    to = hopper_params.Addresses(*(x.pointer for x in (call.q, call.k, call.v, call.out)), 555, 666, 777, 0.5)
    room = ready._attention[3]["SPATTN_MAPS"]
    (found,) = np.frombuffer(ready.template.fill(0, [to]), hopper_params.params_dtype(room))
    assert found["short_tiles"] == (columns < 64)
    assert ready._attention[3]["SPATTN_COLUMNS"] == columns


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
