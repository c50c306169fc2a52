"""Parameters of steps: those of a call with the same k and v, whatever arrays the first step had; without a GPU."""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np
import pytest

from spattn import patterns as p
from spattn.arrays.operand import Operand, row_major
from spattn.cuda.driver.launch import start
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.sm90.forward import launches, params, prepared, steps
from spattn.cuda.sm90.forward.heads import with_packed_heads
from spattn.planning.contract.validated import validated
from spattn.schedule import few_queries
from spattn.schedule.tasks import TASK

pytestmark = pytest.mark.family("sm90")

STRIDED = p.strided(9)
BATCH, HEADS, HEADS_KV, QUERIES, HEAD_DIM = 3, 6, 2, 2, 64
GPU = type("Gpu", (contextlib.nullcontext,), {"ordinal": 0, "sm_count": 132, "shared_bytes": 227 << 10})()
OF_KEYS = "k_stride", "v_stride", "q_offset", "q_batch", "kv_batch", "batch_maps", "heads_q", "group", "q_stride"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tensor_maps):
    monkeypatch.setattr(prepared, "upload", lambda device, arrays: (None, dict.fromkeys(arrays, 4096)))
    for module in (launches, steps):
        monkeypatch.setattr(module, "load_kernels", lambda device, requests: list(map(Kernel, requests)))


class Kernel:
    """A kernel whose launches keep the parameters."""

    handle, threads, shared_bytes, starts_early = 1 << 40, 128, 0, True

    def __init__(self, request):
        name = "Merge" if "merge" in request.source else "Params"
        self.params_bytes, self.params = request.structs[name].itemsize, []
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._start)
        self.start = ctypes.cast(self._function, ctypes.c_void_p).value

    def _start(self, config, function, params, extra):
        self.params.append(ctypes.string_at(ctypes.c_void_p.from_address(params).value, self.params_bytes))
        return 0


def contiguous(kv_len):
    return row_major((BATCH, HEADS_KV, kv_len, HEAD_DIM))


def part_of_a_cache(kv_len):
    return row_major((BATCH, HEADS_KV, 4000, HEAD_DIM))


def heads_inside(kv_len):
    return kv_len * HEADS_KV * HEAD_DIM, HEAD_DIM, HEADS_KV * HEAD_DIM, 1


def shared_heads(kv_len):
    """Batch and heads do not form one axis."""
    return 8 * kv_len * HEAD_DIM, kv_len * HEAD_DIM, HEAD_DIM, 1


def unaligned(kv_len):
    return (*(kv_len * size + 4 for size in (HEADS_KV * HEAD_DIM, HEAD_DIM)), HEAD_DIM, 1)


JOINED, TAKEN = (contiguous, part_of_a_cache), (contiguous, part_of_a_cache, heads_inside, shared_heads)


def launches_of(kv_len, of_k, of_v, pattern=STRIDED):
    plan = validated(few_queries.plan_rows(pattern, QUERIES, kv_len, BATCH, HEADS, 4, 16))
    q = Operand(1 << 30, (BATCH, HEADS, QUERIES, HEAD_DIM), row_major((BATCH, HEADS, QUERIES, HEAD_DIM)))
    k, v = (
        Operand(base << 30, (BATCH, HEADS_KV, kv_len, HEAD_DIM), own(kv_len)) for base, own in ((2, of_k), (3, of_v))
    )
    call = ForwardPass(GPU, 7, plan, q, k, v, q._replace(pointer=4 << 30), 0, "bfloat16", 0.125, None)
    return prepared.prepare(call), k, v


def params_of(image):
    (found,) = np.frombuffer(image, params.params_dtype(16))
    (problem,) = found["problems"]
    return found["maps"].tolist(), {name: problem[name].tolist() for name in OF_KEYS}, found["kv_len"]


def params_of_keys(known, k, v):
    """The parameters of a step, as its launch passes them."""
    made = known._params.of(k, v, (4096,) * 8, 5, 6, QUERIES * known.packed, 7)
    start([made.launch((1 << 30, k.pointer, v.pointer, 4 << 30, 0, 0, 0, 0), 0.125, 1, 0, 9, False)], lambda: 8192)
    return known.kernel.params.pop()


def addresses_of(k, v):
    return params.Addresses(1 << 30, k.pointer, v.pointer, 4 << 30, 0, 0, 0, 0.125)


@pytest.mark.parametrize("of_v", TAKEN)
@pytest.mark.parametrize("of_k", TAKEN)
@pytest.mark.parametrize("first", [(contiguous, contiguous), (shared_heads, contiguous), (heads_inside, contiguous)])
def test_steps_take_other_keys(first, of_k, of_v):
    known = steps.Known(launches_of(1000, *first)[0])
    for kv_len in (1001, 700, 1000):
        expected, k, v = launches_of(kv_len, of_k, of_v)
        joined = [of_k in JOINED and of_v in JOINED, first[0] in JOINED]
        assert known.addresses(k, v) == (joined[0] == joined[1])
        if known.addresses(k, v):
            expected = params_of(expected.template.fill(0, [addresses_of(k, v)]))
            assert params_of(params_of_keys(known, k, v)) == expected


def test_arrays_that_maps_cannot_address():
    known, k, v = launches_of(1000, contiguous, contiguous)
    known = steps.Known(known)
    assert known.addresses(k, v)
    odd = k._replace(strides=unaligned(1000))
    assert not known.addresses(odd, v) and not known.addresses(k, odd)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,), (1,)])
def test_steps_of_one_pattern_and_of_patterns_by_head_in_turns(order, monkeypatch):
    """Heads of a group share a tile if their rows are the same, whatever was called before."""
    images = []

    def copy(device, nbytes, write, staging):
        images.append(np.empty(nbytes, np.uint8))
        write(images[-1].ctypes.data)
        return None, 4096

    monkeypatch.setattr(steps, "copy_in_order", copy)
    by_head = p.PerHead((p.strided(9), p.strided(8), p.Causal()) * HEADS_KV)
    patterns = p.strided(9), by_head
    made = [launches_of(1000, contiguous, contiguous, pattern) for pattern in patterns]
    known, (_, k, v) = steps.Steps(4, None), made[0]
    assert not known.add(launches_of(1000, contiguous, contiguous, p.Full() - p.Full())[0])  # it launches no kernel
    for number in order:
        assert known.add(made[number][0])
    assert [one.part.call.packed for one, *_ in made] == [3, 1]
    assert all(with_packed_heads(one.part.call) is one.part.call for one, *_ in made)
    for number, pattern in enumerate(patterns):
        rows = few_queries.rows_of(pattern, QUERIES, 1000, BATCH, HEADS)
        found = known.of_rows(*rows, k, v)
        if number not in order:
            assert found is None
            continue
        of, own = found
        assert order[of] == number and known._known[of].packed == made[number][0].part.call.packed
        start(own.write([(1 << 30, 2 << 30, 3 << 30, 4 << 30, 5, 0.125, 6, 0)], 640, 7), own.counter)
        (image,) = np.frombuffer(known._known[of].kernel.params.pop(), params.params_dtype(16))
        (problem,) = image["problems"]
        tasks = images[-1][: image["task_count"] * TASK.itemsize].view(TASK)
        assert [image[name] for name in params.PLAN_POINTERS] == list(own.addresses[:8])
        assert image["tasks"] == 4096 and image["kv_len"] == 1000 and image["counter"] == own.addresses[-1]
        assert [problem[name] for name in ("q", "k", "v", "out", "lse", "partial_out", "score", "sinks")] == [
            *(number << 30 for number in (1, 2, 3, 4)),
            *(5, 640, 6, 0),
        ]
        magnitude, sign = params.fold_scale(0.125)
        assert (problem["scale_log2"], problem["sign"]) == (np.float32(magnitude), sign)
        assert set(tasks["head_q"]) == set(range((HEADS_KV, HEADS)[number]))
        assert set(tasks["head_kv"]) == set(range(HEADS_KV))
