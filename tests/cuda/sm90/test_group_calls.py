"""Grouped calls from the face to their launches, without a GPU: tensors in host memory that pass for others, and a
driver that writes launches down."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging

import numpy as np
import pytest

import spattn
from spattn import cuda, patterns
from spattn.api import grouped as _grouped
from spattn.arrays import namespace_of
from spattn.cuda.driver import buffer
from spattn.cuda.host import group
from spattn.cuda.sm90.forward import group as hopper_group
from spattn.cuda.sm90.forward import launches, params, prepared
from spattn.dispatch import plans

pytestmark = [pytest.mark.family("sm90"), pytest.mark.usefixtures("no_plans")]


class Kernel:
    """A kernel whose launches are kept as (stream, parameters)."""

    handle, threads, shared_bytes, starts_early = 1 << 40, 384, 200_000, True

    def __init__(self, dtype, started, early):
        self.dtype, self.params_bytes, self._started, self._early = dtype, dtype.itemsize, started, early
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._start)
        self.start = ctypes.cast(self._function, ctypes.c_void_p).value

    def _start(self, config, function, parameters, extra):
        pointer = ctypes.c_void_p.from_address(parameters).value
        (filled,) = np.frombuffer(ctypes.string_at(pointer, self.params_bytes), self.dtype)
        self._started.append((ctypes.c_void_p.from_address(config + 32).value or 0, filled))
        self._early.append(ctypes.c_uint.from_address(config + 48).value == 1)  # attributes
        return 0


class Gpu:
    """An H200 that is current."""

    ordinal, sm_count, shared_bytes, capability, name = 0, 132, 227 << 10, (9, 0), "H200"
    total_bytes = 141 << 30
    captures = False

    def __init__(self):
        self.early = []  # of every launch, whether it may start before the one before it has ended

    def made_current(self):
        return contextlib.nullcontext()

    def is_capturing(self, stream):
        return self.captures

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def free_bytes(self):
        return 12345


@pytest.fixture
def started():
    """(stream, parameters) of every launch."""
    return []


@pytest.fixture
def gpu(torch, monkeypatch, started, tensor_maps):
    """CPU tensors pass for tensors on a GPU; calls by themselves run on the CPU."""
    kind, made = type(namespace_of(torch.zeros(1))), Gpu()
    monkeypatch.setattr(kind, "ordinal", lambda self, x: 0)
    monkeypatch.setattr(kind, "raw_stream", staticmethod(lambda ordinal: 7))
    monkeypatch.setattr(cuda.device, "get", lambda ordinal=None: made)
    monkeypatch.setattr(plans, "load", lambda name: cuda if name == "cuda" else pytest.fail(name))

    def upload(device, arrays):
        return None, {name: 1 << 20 | number << 12 for number, name in enumerate(arrays)}

    def load_kernels(device, requests):
        for one in requests:
            assert one.arch == "sm_90a" and one.source == f"sm90/forward/{one.entry.removeprefix('hopper_')}.cu"
        structs = [one.structs["Params" if "attention" in one.entry else "Merge"] for one in requests]
        return [Kernel(one, started, made.early) for one in structs]

    for module in (hopper_group, prepared):
        monkeypatch.setattr(module, "upload", upload)
    monkeypatch.setattr(launches, "load_kernels", load_kernels)

    def alone(q, k, v, pattern, *, return_lse=False, **options):
        return ("alone", None) if return_lse else "alone"

    monkeypatch.setattr(_grouped, "attention", alone)
    return made


def tensors(torch, heads, heads_kv, length, dim=64, batch=1, dtype="bfloat16"):
    shapes = ((batch, n, length, dim) for n in (heads, heads_kv, heads_kv))
    return [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in shapes]


def grouped(problems, **options):
    return spattn.grouped_attention(problems, backend="cuda", **options)


@pytest.fixture
def problems(torch):
    return [
        (*tensors(torch, 4, 2, 500), patterns.Causal()),
        (*tensors(torch, 2, 2, 300, 32, batch=2), "full"),
        (*tensors(torch, 3, 3, 600), patterns.strided(16)),
    ]


def addresses(problem, found):
    return {name: x.data_ptr() for name, x in zip(("q", "k", "v", "out"), (*problem[:3], found), strict=True)}


def test_one_launch_has_all_addresses(gpu, problems, started):
    """Each problem's arrays, lse and scale stand in its place; reductions are a second launch of the same problems."""
    results = grouped(problems, return_lse=True)
    assert len(started) == 2 and [stream for stream, _ in started] == [7, 7]
    for _, filled in started:
        for number, (problem, (out, lse)) in enumerate(zip(problems, results, strict=True)):
            own = filled["problems"][number]
            expected = addresses(problem, out) | {"lse": lse.data_ptr(), "q_len": problem[0].shape[2]}
            assert {name: own[name] for name in expected} == expected
            assert own["scale_log2"] == pytest.approx(problem[0].shape[3] ** -0.5 / np.log(2)) and own["sign"] == 1
            assert out.shape == problem[0].shape and lse.shape == out.shape[:3]
        assert not filled["problems"][3:].view(np.uint8).any()
    counters = [int(filled["counter"]) for _, filled in started]
    assert counters[1] == counters[0] + 4
    first, second = (filled["problems"][2]["partial_out"] for _, filled in started)
    assert first == second != 0


def test_sizes_of_tiles_run_side_by_side(gpu, torch, started):
    """What needs no launch before it starts first, larger tiles in front, and shares no memory with what it runs
    beside; reductions wait."""
    wide = [
        (*tensors(torch, 2, 2, 300), spattn.plan(patterns.Causal(), 300, tiling=spattn.Tiling(tile=(128, 64)), heads=2))
    ]
    wide += [
        (
            *tensors(torch, 2, 2, 9000),
            spattn.plan(patterns.Full(), 9000, tiling=spattn.Tiling(tile=(128, 64), workers=66), heads=2),
        )
    ]
    small = [
        (
            *tensors(torch, heads, heads, 600),
            spattn.plan(patterns.strided(16), 600, tiling=spattn.Tiling(tile=(64, 64)), heads=heads),
        )
        for heads in (3, 4)
    ]
    for repeat in range(2):
        outs = grouped([small[0], *wide, small[1]])
        launches = [filled for _, filled in started[-len(started) // (repeat + 1) :]]
        of_items = [filled for filled in launches if "problems" in filled.dtype.names]
        assert [filled["problems"]["block_q"][0] for filled in of_items] == [128, 64, 64]
        assert len(launches) > 3 and gpu.early == [False, True, *[False] * (len(launches) - 2)]  # merges are last
        gpu.early.clear()
    used = [(out.data_ptr(), out.numel() * 2) for out in outs]
    for filled in launches[:2]:
        for own in filled["problems"][:2]:
            rows = 2 if own["block_q"] == 128 else int(own["heads_q"])
            used.append((int(own["partial_out"]), rows * int(own["partial_rows"]) * 64 * 4))
    used = sorted(one for one in used if one[1])
    assert len(used) == 7 and all(start + size <= after for (start, size), (after, _) in itertools.pairwise(used))
    spattn.clear_plan_cache()
    nothing = spattn.plan(patterns.Full() - patterns.Full(), 100, tiling=spattn.Tiling(tile=(128, 64)))
    gpu.early.clear()
    grouped([(*tensors(torch, 1, 1, 100), nothing), *small])  # nothing runs beside the second launch
    assert len(gpu.early) == 3 and not any(gpu.early)


def test_workspaces_lie_apart(gpu, torch, started):
    """Rows of one problem, and their lse, are nobody else's."""
    given = [
        (*tensors(torch, heads, heads, 600, dim), patterns.strided(16)) for heads, dim in ((3, 64), (2, 32), (4, 64))
    ]
    grouped(given)
    end = 0
    for number, (q, *_) in enumerate(given):
        own = started[0][1]["problems"][number]
        rows = q.shape[1] * int(own["partial_rows"])
        assert rows and own["partial_out"] >= end and own["partial_out"] % 16 == 0
        assert own["partial_lse"] >= own["partial_out"] + 4 * rows * q.shape[3]
        end = own["partial_lse"] + 4 * rows


def test_repeated_calls_are_prepared_once(gpu, problems, started, monkeypatch, torch):
    """Other values, addresses and scales; another shape, pattern or option is another call."""
    made, original = [], group.Group.__init__
    monkeypatch.setattr(group.Group, "__init__", lambda self, *args: (made.append(1), original(self, *args))[1])
    for _ in range(3):
        outs = grouped(problems)
        for number, (problem, out) in enumerate(zip(problems, outs, strict=True)):
            expected = addresses(problem, out) | {"lse": 0}
            own = started[-1][1]["problems"][number]
            assert {name: own[name] for name in expected} == expected
    again = [(*(x.clone() for x in problem[:3]), problem[3]) for problem in problems]
    outs = grouped(again, scale=-0.5)
    own = started[-1][1]["problems"]
    assert own["q"].tolist()[:3] == [problem[0].data_ptr() for problem in again] and (own["sign"][:3] == -1).all()
    assert len(made) == 1 and len(started) == 8
    for others in (problems[1:], problems[::-1], [*problems[:2], (*problems[2][:3], patterns.Causal())]):
        grouped(others)
    grouped(problems, return_lse=True)
    assert len(made) == 5
    spattn.clear_plan_cache()
    grouped(problems)
    assert len(made) == 6


def test_plans_that_are_given_stay_as_they_are(gpu, problems, monkeypatch):
    """Patterns are planned for a share of the machine, which leaves longer pieces."""
    planned, original = {}, cuda.prepare_group

    def noted(calls):
        planned.update({number: plan for number, (_, plan) in calls.items()})
        return original(calls)

    monkeypatch.setattr(cuda, "prepare_group", noted)
    q = problems[0][0]
    big = namespace_of(q).module.zeros(1, 16, 4096, 64, dtype=q.dtype)
    made = spattn.plan(
        patterns.Full(), 4096, tiling=spattn.Tiling(tile=(128, 64), workers=17), heads=16
    )  # as by itself
    grouped([(big, big, big, made), (big, big, big, "full"), (big, big, big, "causal"), problems[2]])
    assert len(made.work) == 64 and np.array_equal(planned[0].work, made.work)
    assert len(planned[1].work) == 22  # whole lists of 192 queries


def test_problems_that_run_by_themselves(gpu, torch, problems, started, caplog):
    """Others run together; what repeats says nothing more."""
    caplog.set_level(logging.DEBUG, "spattn.cuda")
    odd = torch.zeros(1 * 4 * 500 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 4, 500, 64)
    strided = torch.zeros(1, 2, 300, 65, dtype=torch.bfloat16)[..., :64]
    given = [
        problems[0],
        (*tensors(torch, 2, 2, 100, dtype="float32"), "full"),
        problems[1],
        (*tensors(torch, 2, 2, 0), "full"),
        (odd, *problems[0][1:]),
        (strided, strided, strided, "full"),
        (*tensors(torch, 2, 2, 100, 128), "full"),
        problems[2],
    ]
    outs = grouped(given)
    assert [number for number, out in enumerate(outs) if isinstance(out, str)] == [1, 3, 4, 5, 6]
    own = started[-1][1]["problems"]["q"].tolist()
    assert own[:3] == [given[n][0].data_ptr() for n in (0, 2, 7)] and not any(own[3:])
    said = [record.getMessage() for record in caplog.records if "is not grouped" in record.getMessage()]
    for number, why in ((1, "float32"), (3, "nothing"), (4, "starts"), (5, "address")):
        assert any(text.startswith(f"problems[{number}] is not grouped:") and why in text for text in said), said
    negated = [
        (torch._neg_view(problem[0]) if n == 1 else problem[0], *problem[1:]) for n, problem in enumerate(problems)
    ]
    assert [isinstance(out, str) for out in grouped(negated)] == [False, True, False]


def test_what_is_looked_up_runs_by_itself(gpu, torch, problems, started, caplog):
    """In tiles of tokens in a row, as those of a group are, clusters would take several times as long."""
    caplog.set_level(logging.DEBUG, "spattn.cuda")
    clusters = patterns.Clusters(np.random.default_rng(0).integers(0, 32, 4096))
    outs = grouped([problems[0], (*tensors(torch, 4, 4, 4096), clusters), problems[2]])
    assert [isinstance(out, str) for out in outs] == [False, True, False]
    assert "problems[1] is not grouped: its plan is ordered or gathered" in caplog.text


def test_what_may_change_between_calls(gpu, torch, problems, started):
    """A bool array may be written to, and a subclass of a tensor may be anything: they run by themselves."""
    mask = torch.ones(500, 500, dtype=torch.bool)
    parameters = [torch.nn.Parameter(x, requires_grad=False) for x in problems[1][:3]]
    given = [problems[0], (*problems[0][:3], mask), (*parameters, "full"), problems[2]]
    for _ in range(2):
        assert [isinstance(out, str) for out in grouped(given)] == [False, True, True, False]
    outs = grouped([given[1], given[0], given[3], given[2]])
    assert [isinstance(out, str) for out in outs] == [True, False, False, True] and len(started) == 6
    assert started[-1][1]["problems"]["out"].tolist()[:2] == [out.data_ptr() for out in outs[1:3]]
    assert grouped(given[:3]) == ["alone"] * 3


def test_errors_name_the_problem(gpu, torch, problems):
    """Before anything is launched, and in calls that repeat."""
    q, k, v, _ = problems[0]
    wrong = {
        "pattern: expected one of": (q, k, v, "nope"),
        r"v: expected shape \(1, 2, 500, 64\), got": (q, k, v[:, :, :9], "full"),
        "pattern: expected a plan for lengths": (q, k, v, spattn.plan(patterns.Causal(), 400)),
    }
    for message, problem in wrong.items():
        with pytest.raises(ValueError, match=rf"^problems\[3\]: {message}"):
            grouped([*problems, problem])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^(problems\[0\]: )?scale must not exceed"):
            grouped(problems, scale=1e39)
        grouped(problems)


def test_kernels_asked_for_later(gpu, problems, monkeypatch, started):
    grouped(problems)
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    assert grouped(problems) == ["alone"] * 3 and len(started) == 2
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "auto")
    assert len(grouped(problems)) == 3 and len(started) == 4


def test_launches_are_cut(gpu, torch, started):
    """More problems than a launch has room for."""
    most = params.GROUPS[-1][0]
    one = tensors(torch, 2, 2, 100)
    outs = grouped([(*one, "full")] * (most + 5))
    assert len(started) == 2 and len({out.data_ptr() for out in outs}) == most + 5
    assert started[1][1]["problems"]["out"].tolist()[:5] == [out.data_ptr() for out in outs[most:]]


def test_layouts(gpu, torch, problems, started):
    given = [(*(x.transpose(1, 2) for x in problem[:3]), problem[3]) for problem in problems]
    results = grouped(given, layout="bshd", return_lse=True)
    for number, (problem, (out, lse)) in enumerate(zip(given, results, strict=True)):
        own = started[-1][1]["problems"][number]
        assert out.shape == problem[0].shape and lse.shape == problem[0].transpose(1, 2).shape[:3]
        assert (own["out"], own["lse"]) == (out.data_ptr(), lse.data_ptr())


def test_gradients_are_recorded_of_what_was_computed(gpu, torch, problems, started):
    """Nothing is computed twice."""
    problems[1][0].requires_grad_()
    for repeat in range(2):
        outs = grouped(problems)
        assert [out.requires_grad for out in outs] == [False, True, False] and len(started) == 2 * (repeat + 1)
        own = started[-1][1]["problems"]
        assert own["out"].tolist()[:3] == [out.data_ptr() for out in outs]
        assert (own["lse"] != 0).tolist()[:3] == [False, True, False]
    with torch.no_grad():
        assert not any(out.requires_grad for out in grouped(problems))


def test_captured(gpu, problems, monkeypatch):
    """What captured launches read stays for ever."""
    kept = {}
    monkeypatch.setattr(buffer, "_captured", kept)
    grouped(problems)
    assert not kept
    gpu.captures = True
    held = grouped(problems), grouped(problems)
    assert len(held) == 2 and len(kept) == 1
    assert isinstance(next(iter(kept.values())), launches.Launches)


def test_out_of_memory(gpu, problems, torch, monkeypatch):
    """Says what a call needs."""
    grouped(problems)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "empty_like", fail)
    with pytest.raises(MemoryError, match=r"H200 \(cuda:0\): needed \d+ bytes, 12345 are free"):
        grouped(problems)
