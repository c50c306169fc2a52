"""Calls that repeat, without a GPU: tensors in host memory, and a driver that writes launches down."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import struct
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

import spattn
from spattn.arrays import namespace_of
from spattn.cuda.driver import _launch, buffer
from spattn.cuda.driver._launch import Launch, start
from spattn.cuda.driver.launch import Moving
from spattn.cuda.host import execute, repeat
from spattn.cuda.host import score as host_score
from spattn.patterns import SlidingWindow
from spattn.planning.contract.validated import validated
from spattn.request.call import Call
from spattn.request.score import ScoreOperands

from ..score_trees import operands as operands_of

pytestmark = pytest.mark.family("sm90")

ADDRESSES, WORD = struct.Struct("@7Qd"), struct.Struct("@Q")  # the stand-in for a kernel's parameters
STREAM = 7
SLOPE = 0.5


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Kernel:
    """A kernel whose launches are kept as (stream, parameters)."""

    handle, threads, shared_bytes, params_bytes = 1 << 40, 384, 200_000, ADDRESSES.size + WORD.size
    starts_early = True

    def __init__(self):
        self.started: list[tuple[int, bytes]] = []
        self.early: list[bool] = []
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._start)
        self.start = ctypes.cast(self._function, ctypes.c_void_p).value

    def _start(self, config, function, params, extra):
        config = Config.from_address(config)
        *found, attributes, count = [getattr(config, name) for name, _ in Config._fields_]
        if found != [5, 1, 1, 384, 1, 1, 200_000, config.stream] or (function, extra) != (self.handle, None):
            return 1
        number, _, value = (ctypes.c_int * 3).from_address(attributes) if count else (None, None, 0)
        if number not in (None, 6) or count > 1:  # programmatic stream serialization
            return 1
        self.early.append(value == 1)
        pointer = ctypes.c_void_p.from_address(params).value
        self.started.append((config.stream, ctypes.string_at(pointer, self.params_bytes)))
        return 0


class Launches:
    """The stand-in for the launches of a forward."""

    computes, workspace_bytes, moves = 2, 0, False

    def __init__(self, kernel, gpu):
        self.kernel, self.gpu, self.counter = kernel, gpu, itertools.count(1000).__next__
        self.written, self.scores, self.sinks = [], [], []  # `scores`: addresses of captured values

    def write(self, problems, workspace, stream, early=0, moved=0):
        assert self.gpu.depth == (not self.gpu.current)  # as tensor maps need it; a thread may not have the context
        ((*addresses, scale, score, sinks),) = problems
        self.sinks.append(sinks)
        self.written.append(moved)
        self.scores.append(score)
        params = ADDRESSES.pack(*addresses, workspace, moved % 2**64, scale) + WORD.pack(0)
        moving = Moving(0, moved, 48, []) if self.moves else None  # replaces no address
        return [Launch(self.kernel, 5, params, stream, ADDRESSES.size, moving, n < early) for n in range(self.computes)]


class Gpu:
    """A device that is current, or is made so for the length of a ``with`` block."""

    ordinal = STREAM  # which the stand-in for PyTorch's function gives back as the stream

    def __init__(self):
        self.current, self.captures, self.entered, self.depth = True, False, 0, 0

    def made_current(self):
        return contextlib.nullcontext() if self.current else self

    def is_capturing(self, stream):
        assert self.current or self.depth
        return self.captures

    def __enter__(self):
        self.entered, self.depth = self.entered + 1, self.depth + 1

    def __exit__(self, *error):
        self.depth -= 1


@pytest.fixture
def kernel():
    return Kernel()


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def tensors(torch):
    """q, k and v with (batch, tokens, heads, features) in memory."""
    return [torch.zeros(2, 6, 3, 16, dtype=torch.float16).transpose(1, 2) for _ in range(3)]


@pytest.fixture
def launcher(kernel, gpu):
    """The stand-in for a family's launcher."""
    launches = Launches(kernel, gpu)
    return SimpleNamespace(prepare=lambda run: launches, launches=launches, alignment=16)


@pytest.fixture
def make(torch, tensors, launcher, gpu, monkeypatch):
    """What computes calls like one of the tensors."""
    kind = namespace_of(tensors[0])
    monkeypatch.setattr(type(kind), "raw_stream", staticmethod(abs))
    monkeypatch.setattr(type(kind), "ordinal", lambda self, x: STREAM)
    plan, family = SimpleNamespace(slots=0, block_q=128), SimpleNamespace(forward=None, launcher=launcher)
    monkeypatch.setattr(execute.Forward, "in_place", lambda self, *args: ("the long way", None))
    return lambda call: repeat.forward(call, plan, family, gpu, lambda *args, **kwargs: "other kernels")


@pytest.fixture
def repeated(make, tensors):
    return make(Call.of(*tensors))


def test_launch(kernel, monkeypatch):
    """The driver reads what was written; each launch that wants a counter gets the next one."""
    params, counters = bytes(range(kernel.params_bytes)), iter((0x1122334455667788, 5))
    with_counter = Launch(kernel, 5, params, STREAM, 8)
    start([with_counter, Launch(kernel, 5, params, STREAM), with_counter], counters.__next__)
    expected = params[:8] + WORD.pack(0x1122334455667788) + params[16:], params, params[:8] + WORD.pack(5) + params[16:]
    assert kernel.started == [(STREAM, each) for each in expected] and not list(counters)
    with pytest.raises(ValueError, match=r"params: expected 72 bytes, got 71"):
        Launch(kernel, 5, params[1:], STREAM)
    for at in (65, -1):
        with pytest.raises(ValueError, match=rf"counter_at: expected 0 … 64, got {at}"):
            Launch(kernel, 5, params, STREAM, at)
    monkeypatch.setattr(_launch, "error", lambda status, call: RuntimeError(f"{call}: {status}"))
    with pytest.raises(RuntimeError, match="^cuLaunchKernelEx: 1$"):  # the stand-in expects five blocks
        start([Launch(kernel, 6, params, STREAM), Launch(kernel, 5, params, STREAM)])
    assert len(kernel.started) == 3


def test_launches_that_start_early(kernel):
    """The driver may start them while the launch before is running, if it is a recent one; every other one waits."""
    first = Launch(kernel, 5, bytes(kernel.params_bytes), STREAM)
    start([first, Launch(kernel, 5, bytes(kernel.params_bytes), STREAM, early=True), first])
    kernel.starts_early = False
    start([Launch(kernel, 5, bytes(kernel.params_bytes), STREAM, early=True)])
    assert kernel.early == [False, True, False, False]


def test_launches_that_follow_the_number_of_keys(kernel, monkeypatch):
    """A word and the addresses of some tensor maps change where the number does, whichever way."""
    replaced = []

    def replace(tensor_map, address):
        replaced.append((tensor_map % 64, address))
        ctypes.c_uint64.from_address(tensor_map).value = address or 0
        return 1 if address == 13 else 0

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(replace)
    at = ctypes.cast(function, ctypes.c_void_p).value
    moving = Moving(at, 3, 56, [(0, 1000, 10), (16, 5000, 0)])
    follows, plain = (Launch(kernel, 5, bytes(kernel.params_bytes), STREAM, 64, one) for one in (moving, None))
    for moved in (3, 4, 4, -99, 3):
        start([plain, follows], itertools.count(1).__next__, moved)
    assert replaced == [(0, 1040), (16, 5000), (0, 10), (16, 5000), (0, 1030), (16, 5000)]
    words = [struct.unpack("@9q", params) for _, params in kernel.started]
    assert [(x[0], x[2], x[7], x[8]) for x in words[::2]] == [(0, 0, 0, 1)] * 5
    assert [(x[0], x[2], x[7], x[8]) for x in words[1::2]] == [
        (0, 0, 0, 2),
        (1040, 5000, 4, 2),
        (1040, 5000, 4, 2),
        (10, 5000, -99, 2),
        (1030, 5000, 3, 2),
    ]
    for where in ({"moved_at": 65}, {"maps": [(65, 0, 1)]}, {"maps": [(-1, 0, 1)]}):
        with pytest.raises(ValueError, match=r"(moved_at|map): expected 0 … 64, got (65|-1)"):
            Launch(kernel, 5, bytes(kernel.params_bytes), STREAM, 64, moving._replace(**where))
    monkeypatch.setattr(_launch, "error", lambda status, call: RuntimeError(f"{call}: {status}"))
    with pytest.raises(RuntimeError, match="^cuTensorMapReplaceAddress: 1$"):
        start([Launch(kernel, 5, bytes(72), STREAM, 64, moving._replace(maps=[(0, 3, 10)]))], lambda: 1, 1)


def test_captured_values(make, tensors, launcher, torch, monkeypatch):
    """A call launches with the block of its own captured values, which no launch of other values reads."""
    blocks = []

    def upload(device, arrays):
        blocks.append(arrays["args"].tobytes())
        return None, {"args": len(blocks)}

    monkeypatch.setattr(host_score, "upload", upload)
    monkeypatch.setattr(host_score, "_blocks", {})
    slopes = torch.zeros(3)
    score = operands_of(lambda s, b, h, q, k: s + SLOPE * slopes[h] * (k - q))
    repeated = make(dataclasses.replace(Call.of(*tensors), score=score))
    other = torch.ones(3)
    given = [score._replace(parameters=(parameter,)) for parameter in (0.5, 0.5, 0.75, 0.5)]
    given.append(given[0]._replace(tables=(other,)))
    kept = [repeated(*tensors, 0.25, own) for own in given]  # results of their own
    assert launcher.launches.scores == [1, 1, 2, 1, 3] and len(kept) == 5
    found = [struct.unpack_from("@dQ", block) for block in blocks]
    assert found == [(0.5, slopes.data_ptr()), (0.75, slopes.data_ptr()), (0.5, other.data_ptr())]
    with pytest.raises(ValueError, match="expected the function that the call was prepared for"):
        repeated(*tensors, 0.25)


def test_addresses(repeated, kernel, tensors):
    """Every call launches with its own addresses, scale and counters; results lie in memory as q does."""
    kept = [repeated(*tensors, scale) for scale in (0.25, 0.25, 0.5, 0.25)]
    kept.append(repeated(*reversed(tensors), 0.25))
    assert [len(repeated(*tensors, 0.25)) for _ in range(100)] == [2] * 100
    assert all(out.stride() == tensors[0].stride() and lse.is_contiguous() for out, lse in kept)
    for number, (out, lse) in enumerate(kept):
        q, k, v = tensors if number < 4 else reversed(tensors)
        expected = [x.data_ptr() for x in (q, k, v, out, lse)] + [0, 0, 0.5 if number == 2 else 0.25]
        for stream, params in kernel.started[2 * number : 2 * number + 2]:
            assert stream == STREAM and list(ADDRESSES.unpack(params[:-8])) == expected
    counters = [WORD.unpack(params[-8:])[0] for _, params in kernel.started]
    assert counters == list(range(1000, 1000 + len(counters)))
    assert all(kernel.early)


def test_sinks(torch, make, tensors, launcher):
    """Launches are written for the address of each call's sinks; those that are not contiguous are copied."""
    score = ScoreOperands(None, sinks=torch.zeros(3))
    repeated = make(replace(Call.of(*tensors), score=score))
    repeated._empty_like, repeated.return_lse = lambda x: x, False  # the same addresses each time
    others = torch.ones(3), score.sinks, torch.zeros(6)[::2]
    for sinks in (score.sinks, *others):
        repeated(*tensors, 0.25, score._replace(sinks=sinks))
    written = launcher.launches.sinks
    assert written[:2] == [score.sinks.data_ptr(), others[0].data_ptr()]
    assert len(written) == 3 and written[2] not in (0, others[2].data_ptr())
    negated = score._replace(sinks=torch._neg_view(others[0]))
    (found,) = repeated.general.binder.check(negated)
    assert not found.is_neg() and found.tolist() == [-1.0] * 3
    for wrong, message in (
        (None, "score: expected the function that the call was prepared for"),
        (torch.zeros(2), r"sinks: expected an array of float32 and shape \(3,\), got float32, \(2,\)"),
        (
            torch.zeros(3, dtype=torch.float16),
            r"sinks: expected an array of float32 and shape \(3,\), got float16, \(3,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            repeated(*tensors, 0.25, score._replace(sinks=wrong))


def test_gradients_of_sinks(torch, operands, gradients_of, kernel):
    """As the gradients of q, k and v: the first call prepares the others."""
    score = ScoreOperands(None, sinks=torch.zeros(3))
    gradients = gradients_of(score)
    for dlse in (None, operands[5] + 1, None):
        dq, dk, dv, dtables, dsinks = gradients(*operands, dlse, 0.25, score)
        assert dtables == () and dsinks.shape == (3,) and dsinks.dtype == torch.float32
        assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in operands[1:4]]
    assert len(kernel.started) == 4
    for call, dlse in zip(gradients.written, (True, False), strict=True):
        assert call.sinks == score.sinks.data_ptr() and call.dsinks and (call.dlse is not None) == dlse
        assert call.lse.pointer == operands[5].data_ptr()


def test_an_lse_that_nobody_wants(make, kernel, tensors):
    """Is not allocated, and kernels are told so."""
    out, lse = make(Call.of(*tensors, return_lse=False))(*tensors, 0.25)
    assert lse is None
    for _, params in kernel.started:
        assert ADDRESSES.unpack(params[:-8])[3:5] == (out.data_ptr(), 0)


def test_the_long_way(torch, repeated, kernel, tensors, monkeypatch):
    """Other kernels asked for at run time, odd addresses and values that are lazily negated need the long way."""
    odd = torch.zeros(2 * 3 * 6 * 16 + 1, dtype=torch.float16)[1:].view(2, 6, 3, 16).transpose(1, 2)
    negated = torch._neg_view(tensors[1])
    for others in ((odd, *tensors[1:]), (tensors[0], negated, tensors[2])):
        assert repeated(*others, 0.25) == ("the long way", None)
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    assert repeated(*tensors, 0.25) == "other kernels" and not kernel.started
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "auto")
    assert len(repeated(*tensors, 0.25)) == 2
    monkeypatch.delenv("SPATTN_CUDA_KERNEL")
    assert len(repeated(*tensors, 0.25)) == 2 and len(kernel.started) == 4


def test_kernels_asked_for_later(tensors, monkeypatch):
    """Whatever was prepared, and for whichever library."""
    called = []
    plan = SimpleNamespace(slots=0, block_q=128)
    again = lambda *args, **kwargs: called.append((args, kwargs))  # noqa: E731
    prepared = execute.Forward(Call.of(*tensors), plan, None, Gpu(), again)
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    prepared(*tensors, 0.5)
    assert called == [((*tensors, prepared.plan, 0.5), {"precision": None, "score": None})]


@pytest.fixture
def gradients(gradients_of):
    """What computes the gradients of calls like one of the tensors, after its first call."""
    return gradients_of(None)


@pytest.fixture
def gradients_of(torch, tensors, kernel, gpu, monkeypatch):
    """Makes what `gradients` is, for calls with these ScoreOperands."""
    kind = namespace_of(tensors[0])
    monkeypatch.setattr(type(kind), "raw_stream", staticmethod(abs))
    monkeypatch.setattr(type(kind), "stream", lambda self, x: STREAM)
    monkeypatch.setattr(type(kind), "ordinal", lambda self, x: STREAM)
    written = []

    def write(call, workspace):
        assert gpu.depth == (not gpu.current)
        pointers = [getattr(call, name).pointer for name in ("dout", "q", "k", "v", "dq")]
        written.append(call)
        params = ADDRESSES.pack(*pointers, 0 if call.dlse is None else call.dlse.pointer, workspace, call.scale)
        return [Launch(kernel, 5, params + WORD.pack(0), call.stream, counter_at) for counter_at in (None, 64)]

    ready = SimpleNamespace(write=write, workspace_bytes=48, counter=itertools.count(1000).__next__)
    launcher = SimpleNamespace(prepare_backward=lambda call: ready, alignment=16)
    family = SimpleNamespace(backward=lambda call: None, backward_requests=lambda call: [], launcher=launcher)
    monkeypatch.setattr(execute, "gradient_requests", lambda call: [])

    def make(score):
        made = repeat.backward(replace(Call.of(*tensors), score=score), None, gpu, lambda: family)
        made.written = written
        return made

    return make


@pytest.fixture
def operands(torch, tensors):
    """dout, q, k, v, out and lse."""
    return [torch.zeros_like(tensors[0]), *tensors, torch.zeros_like(tensors[0]), torch.zeros(2, 3, 6)]


def test_gradients(torch, gradients, operands, kernel):
    """Launches are written once for the same addresses; results lie in memory as their operands do."""
    gradients(*operands, None, 0.25)
    assert not kernel.started  # the first call is what the others are prepared by
    kept = [gradients(*operands, dlse, scale) for dlse, scale in ((None, 0.25), (operands[5] + 1, 0.5), (None, 0.25))]
    for number, results in enumerate(kept):
        pair = kernel.started[2 * number : 2 * number + 2]
        for stream, params in pair:
            found = list(ADDRESSES.unpack(params[:-8]))
            assert stream == STREAM and found[:5] == [x.data_ptr() for x in (*operands[:4], results[0])]
            assert (found[5] != 0, found[7]) == ((True, 0.5) if number == 1 else (False, 0.25))
        assert [WORD.unpack(params[-8:])[0] for _, params in pair] == [0, 1000 + number]
        for x, result in zip(operands[1:4], results, strict=True):
            assert (result.shape, result.stride(), result.dtype) == (x.shape, x.stride(), x.dtype)
    del kept, results
    gradients._empty_like = lambda x: x  # addresses that an allocator would hand out again
    gradients._ready.workspace_bytes = 0  # whose address is always the same one
    before = len(gradients.written)
    assert all(len(gradients(*operands, None, 0.25)) == 3 for _ in range(50)) and len(gradients.written) == before + 1
    for scale, dlse in ((0.25, None), (0.5, None), (0.25, None), (0.25, operands[5] + 1)):  # at the same addresses
        gradients(*operands, dlse, scale)
        found = ADDRESSES.unpack(kernel.started[-1][1][:-8])
        assert (found[5] != 0, found[7]) == (dlse is not None, scale)
    before, gradients.device.current = gradients.device.entered, False
    gradients(*operands, None, 0.25)
    assert gradients.device.entered > before


def test_gradients_of_parts(torch, gradients, operands):
    """Of tensors with room between their rows, results have none, as those of the first call."""
    wide = [torch.zeros(2, 3, 6, 32, dtype=torch.float16)[..., :16] for _ in range(3)]
    expected = gradients(operands[0], *wide, *operands[4:], None, 0.25)
    found = gradients(operands[0], *wide, *operands[4:], None, 0.25)
    assert len(gradients.written) == 1
    assert [(x.shape, x.stride()) for x in found] == [(x.shape, x.stride()) for x in expected]
    assert all(x.is_contiguous() for x in found)


def test_gradients_by_the_long_way(torch, gradients, operands, kernel, monkeypatch):
    """As :func:`test_the_long_way`."""
    gradients(*operands, None, 0.25)
    monkeypatch.setattr(execute.Backward, "__call__", lambda self, *args: "the long way")
    odd = torch.zeros(2 * 3 * 6 * 16 + 1, dtype=torch.float16)[1:].view(2, 6, 3, 16).transpose(1, 2)
    for number in range(5):
        for other in (odd, torch._neg_view(operands[number])):
            others = [other if n == number else x for n, x in enumerate(operands)]
            assert gradients(*others, None, 0.25) == "the long way"
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    assert gradients(*operands, None, 0.25) == "the long way" and not kernel.started
    monkeypatch.delenv("SPATTN_CUDA_KERNEL")
    assert len(gradients(*operands, None, 0.25)) == 3 and len(kernel.started) == 2


def test_other_device(repeated, tensors, gpu):
    """The device is made current where it is not, once to write and start launches."""
    before = gpu.entered
    assert len(repeated(*tensors, 0.25)) == 2 and gpu.entered == before
    gpu.current = False
    assert len(repeated(*tensors, 0.5)) == 2 and gpu.entered == before + 1


def test_captured(repeated, launcher, gradients, tensors, operands, gpu, monkeypatch):
    """The tables of captured launches stay for ever."""
    kept = {}
    monkeypatch.setattr(buffer, "_captured", kept)
    repeated(*tensors, 0.25)
    gradients(*operands, None, 0.25)
    gradients(*operands, None, 0.25)
    assert not kept
    gpu.captures = True
    repeated(*tensors, 0.5)
    assert list(kept.values()) == [launcher.launches]
    gradients(*operands, None, 0.5)
    assert list(kept.values()) == [launcher.launches, gradients.plan]


def test_gradients_have_the_precision_of_their_call(torch, gpu, monkeypatch):
    """Whichever kernels compute them."""
    x = torch.zeros(1, 2, 6, 16)
    calls = []
    kernels = SimpleNamespace(backward=lambda call: calls.append(call.precision), backward_requests=lambda call: [])
    monkeypatch.setattr(type(namespace_of(x)), "ordinal", lambda self, x: STREAM)
    monkeypatch.setattr(type(namespace_of(x)), "stream", lambda self, x: STREAM)
    for precision in (None, "tf32"):
        prepared = execute.Backward(Call.of(x, x, x, precision=precision), None, gpu, lambda: kernels)
        prepared(x, x, x, x, x, x[..., 0], None, 0.25)
    assert calls == [None, "tf32"]


def test_threads(repeated, kernel, tensors):
    """Threads share what was prepared, and no launch of one is seen in another."""
    from_threads = []

    def work(scale):
        for _ in range(200):
            out, lse = repeated(*tensors, scale)
            from_threads.append((scale, out.data_ptr(), lse.data_ptr()))

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (0.5, 1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launched = [ADDRESSES.unpack(params[:-8]) for _, params in kernel.started]
    expected = [(scale, out, lse) for scale, out, lse in from_threads for _ in range(2)]
    assert sorted((x[7], x[3], x[4]) for x in launched) == sorted(expected) and len(expected) == 1200
    assert len({params[-8:] for _, params in kernel.started}) == 1200


def test_steps(torch, make, kernel, tensors, launcher):
    """Launches follow the number of keys; keys that lie elsewhere get launches of their own."""
    asked, launches = [], launcher.launches
    launches.moves = True
    repeated = make(Call.of(*tensors))
    launcher.prepare = lambda run: asked.append((run.k, run.v)) or launches
    q, longer = tensors[0], torch.zeros(2, 20, 3, 16, dtype=torch.float16).transpose(1, 2)
    repeated._empty_like, repeated.return_lse = lambda x: x, False  # the same addresses each time
    caches = longer[:, :, :6], longer[:, :, :7], longer[:, :, :4], longer[:, :, :7].contiguous()
    results = [repeated(q, k, k, 0.25) for k in caches]
    assert launches.written == [0, 1]  # once for each way in which keys lie
    found = [ADDRESSES.unpack(params[:-8])[6] for _, params in kernel.started]
    assert found == [0, 0, 1, 1, 2**64 - 2, 2**64 - 2, 1, 1]
    for (k, v), cache in zip(asked, (caches[0], caches[3]), strict=True):
        assert k == v == (cache.data_ptr(), tuple(cache.shape), cache.stride())
    assert all(out.shape == q.shape for out, _ in results)
    launcher.prepare = lambda run: None
    repeated._own.general = lambda *args: "the long way"
    assert repeated(q, *[longer[:, :, :9].contiguous()] * 2, 0.25) == "the long way"


def test_the_plan_of_other_kernels_moves(tensors, monkeypatch):
    """The portable kernels get a plan of as many keys as there are."""
    plan = validated(spattn.plan(SlidingWindow(2, 0), 6, 30))
    keys, plans = [x.new_zeros(2, 3, 30, 16) for x in tensors[1:]], []
    again = lambda q, k, v, plan, *args, **kwargs: plans.append(plan)  # noqa: E731
    prepared = execute.Forward(Call.of(tensors[0], *keys), plan, None, Gpu(), again)
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    for kv_len in (30, 33):
        prepared(tensors[0], *[keys[0].new_zeros(2, 3, kv_len, 16)] * 2, 0.25)
    assert plans[0] is plan
    assert (plans[1].kv_len, plans[1].views["offset"].tolist()) == (33, [0, 25])
