"""Tensors that require a gradient, plans that do not fit, and calls that repeat and find what was prepared for them."""

import dataclasses
import math
import sys
import types

import numpy as np
import pytest

import spattn
from spattn import cpu, dispatch
from spattn import patterns as p
from spattn.arrays import cache_key
from spattn.patterns.base import class_registry as _registry
from spattn.planning.contract import cache as _cache
from spattn.request.call import Call

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("no_plans")
NAMES = ("q", "k", "v")


@pytest.fixture
def prepared(monkeypatch):
    """The calls that the CPU backend is asked to prepare."""
    calls = []
    for name in ("prepare", "prepare_backward"):
        own = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda call, plan, own=own: calls.append(call) or own(call, plan))
    return calls


def tensors(**changes):
    made = {name: torch.ones(1, 2, 10, 8) for name in NAMES}
    return list((made | changes).values())


@pytest.mark.parametrize("name", NAMES)
def test_a_required_second_gradient_is_refused(name):
    """Unless nobody would record it."""
    q, k, v = tensors(**{name: torch.ones(1, 2, 10, 8, requires_grad=True)})
    out, lse = spattn.attention(*tensors(), "causal", return_lse=True)
    with pytest.raises(RuntimeError, match=rf"{name}.*gradient"):
        spattn.attention_backward(out, q, k, v, out, lse, "causal")
    with torch.no_grad():
        assert torch.equal(spattn.attention(q, k, v, "causal"), out)
        spattn.attention_backward(out, q, k, v, out, lse, "causal")


def test_v_of_another_batch_is_named_before_any_backend_is_asked():
    q, k, v = tensors(v=torch.ones(2, 2, 10, 8))
    with pytest.raises(ValueError, match=r"^v: expected shape \(1, 2, 10, 8\), got \(2, 2, 10, 8\)$"):
        Call.of(q, k, v)


def test_what_a_call_says():
    call = Call.of(torch.ones(2, 6, 5, 8), torch.ones(2, 3, 12, 8), torch.ones(2, 3, 12, 16), scale=2)
    assert (call.kind.name, call.dtype, call.device, call.scale) == ("torch", "float32", "cpu", 2.0)
    assert (call.q_offset, call.group, call.rows, call.out_shape) == (7, 2, (2, 6, 5), (2, 6, 5, 16))
    assert Call.of(*tensors()).scale == 1 / math.sqrt(8)


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_a_call_is_prepared_once(kind, prepared):
    convert = {"numpy": lambda x: x, "torch": torch.from_numpy}.get(kind) or pytest.importorskip("jax").numpy.asarray
    rng = np.random.default_rng(0)
    for scale in (None, 0.5, None):
        q, k, v, dout = (convert(rng.standard_normal((1, 2, 30, 8), np.float32)) for _ in range(4))
        out, lse = spattn.attention(q, k, v, "causal", scale=scale, return_lse=True)
        gradients = spattn.attention_backward(dout, q, k, v, out, lse, "causal", scale=scale)
        exact = spattn.attention(q, k, v, "causal", scale=scale, backend="reference")
        np.testing.assert_allclose(np.asarray(out), np.asarray(exact), rtol=1e-4, atol=1e-5)
        assert [type(x) for x in (out, *gradients)] == [type(q)] * 4
    assert len(prepared) == 2


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_require_a_gradient_have_a_signature_of_their_own(name):
    """What to do with them depends on whether gradients are recorded just now."""
    wanting = tensors(**{name: torch.ones(1, 2, 10, 8, requires_grad=True)})
    assert len({cache_key(*tensors()), cache_key(*wanting)}) == 2
    with torch.no_grad():
        assert cache_key(*wanting) == cache_key(*tensors())


@pytest.mark.parametrize("pattern", ["causal", p.Causal()], ids=["name", "pattern"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_recorded_call_is_prepared_once(layout, pattern, prepared):
    """With its own scale each time; without a record where nobody wants a gradient."""
    for scale in (None, 0.5, None):
        leaves = [torch.randn(1, 12, 12, 8, requires_grad=True) for _ in NAMES]
        options = {"scale": scale, "layout": layout}
        out = spattn.attention(*leaves, pattern, **options)
        got = torch.autograd.grad(out.square().sum(), leaves)
        with torch.no_grad():
            plain, lse = spattn.attention(*leaves, pattern, return_lse=True, **options)
            want = spattn.attention_backward(2 * plain, *leaves, plain, lse, pattern, **options)
        assert out.requires_grad and not plain.requires_grad and torch.equal(out, plain)
        assert all(map(torch.equal, got, want))
    assert len(prepared) == 3  # on record, not on record, the gradients


def test_no_signature_for_arrays_of_several_kinds_or_classes():
    q, k, v = tensors()
    assert cache_key(q.numpy(), k, v) is None and cache_key(q, k, np.ma.masked_array(v)) is None
    assert cache_key(torch.nn.Parameter(q, requires_grad=False), k, v) is None
    assert cache_key([1], [2], [3]) is None


def test_what_was_prepared_is_not_used_where_a_derivative_is_taken():
    q, k, v = tensors()
    spattn.attention(q, k, v, "causal")
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="^q: .*gradient"):
        spattn.attention(forward_ad.make_dual(q, k), k, v, "causal")
    with pytest.raises(TypeError, match="^q: .* transformation of torch.func"):
        torch.func.grad(lambda x: spattn.attention(x, k, v, "causal").sum())(q)


def test_whatever_differs_is_prepared_for_itself(prepared):
    """Shape, strides and dtype of each tensor, the pattern, the backend and the precision; a name is its pattern."""
    for pattern in ("causal", "full", p.Causal(), p.Full()):
        spattn.attention(*tensors(), pattern)
    assert len(prepared) == 2
    spattn.attention(*tensors(), "causal", backend="cpu")
    moved = torch.ones(1, 10, 2, 8).transpose(1, 2)
    for name in NAMES:
        spattn.attention(*tensors(**{name: moved}), "causal")
    spattn.attention(*tensors(v=torch.ones(1, 2, 10, 16)), "causal")
    spattn.attention(*(x.double() for x in tensors()), "causal")
    assert len(prepared) == 8
    with pytest.raises(ValueError, match="^precision: 'tf32' is not supported by backend"):
        spattn.attention(*tensors(), "causal", precision="tf32")
    spattn.attention(*tensors(), "causal")
    assert len(prepared) == 8


def test_what_was_prepared_for_a_plan_ends_with_it(prepared):
    """Never is it found through another plan, nor through the pattern."""
    plans = [spattn.plan(pattern, 10) for pattern in (p.Causal(), p.Full())]
    out = [spattn.attention(*tensors(), plan) for plan in plans]
    assert len(prepared) == 2 and not _cache._calls
    spattn.attention(*tensors(), plans[0])
    assert len(prepared) == 2
    spattn.attention(*tensors(), dataclasses.replace(plans[0]))
    assert len(prepared) == 3 and torch.equal(out[0], out[1])


def test_results_lie_in_memory_as_q_does():
    for x in (np.ones((1, 2, 10, 8), np.float32), np.ones((1, 10, 2, 8), np.float32).transpose(0, 2, 1, 3)):
        out, lse = spattn.attention(x, x, x, "causal", return_lse=True)
        dq, dk, dv = spattn.attention_backward(x, x, x, x, out, lse, "causal")
        assert out.strides == dq.strides == dk.strides == dv.strides == x.strides


def test_masks_are_read_anew_by_every_call():
    mask = torch.ones(10, 10, dtype=torch.bool)
    first = spattn.attention(*tensors(v=torch.arange(160.0).view(1, 2, 10, 8)), mask)
    mask[:, 3:] = False
    assert not torch.equal(first, spattn.attention(*tensors(v=torch.arange(160.0).view(1, 2, 10, 8)), mask))


def test_prepared_calls_are_bounded_and_go_with_their_plan(monkeypatch):
    for dim in range(1, 101):
        spattn.attention(*[torch.ones(1, 1, 10, dim)] * 3, "causal")
        assert 0 < len(_cache._calls) <= 64
    monkeypatch.setattr(_cache, "_MAX_PLANS", 1)
    spattn.attention(*tensors(), "full")
    assert len(_cache._calls) == 1
    plan = spattn.plan(p.Causal(), 10)
    for dim in range(1, 101):
        spattn.attention(*[torch.ones(1, 1, 10, dim)] * 3, plan)
        assert 0 < len(plan._validated.calls) <= 64
    spattn.clear_plan_cache()
    assert not _cache._calls


def test_a_pattern_is_held_once_by_all_that_is_prepared_for_it():
    for dim in (4, 8):
        spattn.attention(*[torch.ones(1, 1, 10, dim)] * 3, p.Mask(np.tri(10, dtype=bool)))
    held = {id(pattern) for pattern, _ in _cache._calls} | {id(key[0]) for key in _cache._plans}
    assert len(_cache._calls) == 2 and len(held) == 1


def test_a_call_in_use_keeps_its_plan(monkeypatch):
    monkeypatch.setattr(_cache, "_MAX_PLANS", 2)
    for length in range(11, 15):
        spattn.attention(*tensors(), "causal")  # used again before each of the others is made
        spattn.plan(p.Causal(), length)
    misses = spattn.plan_cache_info().misses
    spattn.plan(p.Causal(), 10, tiling=spattn.Tiling(tile=(48, 64), workers=8), heads=2)
    assert spattn.plan_cache_info().misses == misses


def test_tensors_where_torch_was_never_imported(monkeypatch):
    q, k, v = (x.numpy() for x in tensors())
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    assert spattn.attention(q, k, v, "causal").shape == q.shape


def test_the_plan_that_a_backend_runs():
    """Its tiles are those of the kernels, so its efficiency is the one that is paid."""
    q, k, v = (torch.ones(2, 4, n, 16) for n in (100, 300, 300))
    made = spattn.plan_for(p.SlidingWindow(20), q, k, v, backend="cpu")
    assert made.tile == (48, 64) and (made.q_len, made.kv_len) == (100, 300)
    assert made is spattn.plan_for(p.SlidingWindow(20), q, k, v)
    misses = spattn.plan_cache_info().misses
    spattn.attention(q, k, v, p.SlidingWindow(20))
    assert spattn.plan_cache_info().misses == misses
    with pytest.raises(TypeError, match="^tiling: expected a spattn.Tiling, got "):
        spattn.plan(p.Causal(), 10, tiling=(128, 64))
    with pytest.raises(ValueError, match="^pattern: .*max_bytes = 10 bytes"):
        spattn.plan_for(p.Causal(), q, k, v, max_bytes=10)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_backend_refuses_a_broken_plan(backend):
    """Also one that would only look at the plan's pattern."""
    made = spattn.plan(p.Causal(), 10)
    plain = [x.numpy() for x in tensors()]
    for arrays in (plain, [x.view(type("Own", (np.ndarray,), {})) for x in plain]):  # without a cache_key
        broken = dataclasses.replace(made, indices=made.indices + 1)
        with pytest.raises(ValueError, match="^plan: "):
            spattn.attention(*arrays, broken, backend=backend)
    with pytest.raises(ValueError, match="^plan: "):
        spattn.plan_for(dataclasses.replace(made, indices=made.indices + 1), *plain, backend=backend)


def test_plan_for_other_heads_where_the_backend_would_plan_again():
    """A backend without kernels for a plan's tiles plans its pattern, but not for what the plan was not made for."""
    made = spattn.plan(p.PerHead((p.Full(), p.Causal(), p.SlidingWindow(3))), 10, heads=3)
    planned, call = [], Call.of(*tensors())
    module = types.SimpleNamespace(
        accepts=lambda plan, call, backward: False,
        memory=lambda call: 1 << 30,
        plan_for=lambda pattern, call, max_bytes, backward: planned.append(pattern),
    )
    with pytest.raises(ValueError, match=r"^pattern: expected a plan for batch=1 and heads=2, got .*=3$"):
        dispatch.find_plan(module, made, call)
    assert not planned
    dispatch.find_plan(module, spattn.plan(p.Causal(), 10, heads=2), call)
    assert planned == [p.Causal()]


def run_prepared(backward, **changes):
    """A prepared call of tensors (1, 4 over 2, 10, 8), values 6 wide, with some of its arrays changed."""
    call = Call.of(*(np.ones(shape, np.float32) for shape in ((1, 4, 10, 8), (1, 2, 12, 8), (1, 2, 12, 6))))
    made = cpu.plan_for(p.Causal(), call)
    out, lse = cpu.prepare(call, made)(call.q, call.k, call.v, 1.0)
    arrays = {"dout": out, "q": call.q, "k": call.k, "v": call.v, "out": out, "lse": lse, "dlse": lse}
    if not backward:
        arrays = {name: arrays[name] for name in NAMES}
    prepare = cpu.prepare_backward if backward else cpu.prepare
    return prepare(call, made)(*(changes.get(name, lambda x: x)(x) for name, x in arrays.items()), 1.0)


OTHERS = {
    "longer": lambda x: np.concatenate([x, x], axis=2),
    "shorter": lambda x: x[:, :, :-1],
    "fewer heads": lambda x: x[:, :1],
    "wider": lambda x: np.concatenate([x, x], axis=3),
    "batch": lambda x: np.concatenate([x, x]),
    "dtype": lambda x: x.astype(np.float64),
    "byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "axes": lambda x: x[0],
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_prepared_calls_refuse_what_they_are_not_for(backward):
    """Kernels would read outside of the arrays."""
    run_prepared(backward)
    refused = 0
    for name in ("dout", *NAMES, "out", "lse", "dlse") if backward else NAMES:
        for other in OTHERS if not name.endswith("lse") else OTHERS.keys() - {"wider"}:
            with pytest.raises(ValueError, match=f"^{name}: expected shape .* and the dtype .*, got "):
                run_prepared(backward, **{name: OTHERS[other]})
            refused += 1
    assert refused == (54 if backward else 24)


def test_a_name_means_the_class_that_has_it_now():
    """A notebook's cell that is run again registers its class again."""

    def registered(window):
        @p.authoring.register("of_a_cell")
        class OfACell(p.Pattern):
            def allows(self, q, k):
                return (q - k < window) & (q >= k)

        return OfACell

    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 40, 8))
    try:
        for window in (3, 9):
            cls = registered(window)
            for _ in range(2):
                np.testing.assert_array_equal(spattn.attention(q, k, v, "of_a_cell"), spattn.attention(q, k, v, cls()))
    finally:
        _registry._REGISTRY.pop("of_a_cell", None)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_bytes_of_results(dtype):
    q, k, v = (np.ones(shape, dtype) for shape in ((2, 4, 10, 8), (2, 2, 12, 8), (2, 2, 12, 6)))
    out, lse = spattn.attention(q, k, v, p.Full(), return_lse=True)
    assert Call.of(q, k, v).result_bytes() == out.nbytes + lse.nbytes
    assert Call.of(q, k, v, return_lse=False).result_bytes() == out.nbytes
    assert Call.of(q, k, v).result_bytes(backward=True) == q.nbytes + k.nbytes + v.nbytes


def test_a_repeated_call_is_a_hit():
    arrays, pattern = [np.ones((1, 2, 10, 8), np.float32)] * 3, p.Causal()
    spattn.attention(*arrays, pattern)
    before = spattn.plan_cache_info()
    spattn.attention(*arrays, pattern)
    after = spattn.plan_cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)
