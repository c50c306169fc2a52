"""Tensors that require a gradient or do not fit, plans that do not fit, and the short ways of calls that repeat."""

import dataclasses
import sys
import types

import pytest

import spattn
from spattn import _api, _arguments, _routes
from spattn import patterns as p

torch = pytest.importorskip("torch")
NAMES = ("q", "k", "v")


def tensors(**changes):
    made = {name: torch.ones(1, 2, 10, 8) for name in NAMES}
    return list((made | changes).values())


@pytest.mark.parametrize("name", NAMES)
def test_a_required_gradient_is_refused(name):
    """Unless nobody would record it."""
    q, k, v = tensors(**{name: torch.ones(1, 2, 10, 8, requires_grad=True)})
    out, lse = spattn.attention(*tensors(), "causal", return_lse=True)
    with pytest.raises(RuntimeError, match=rf"{name}.*gradient"):
        spattn.attention(q, k, v, "causal")
    with pytest.raises(RuntimeError, match=rf"{name}.*gradient"):
        spattn.attention_backward(out, q, k, v, out, lse, "causal")
    with torch.no_grad():
        assert torch.equal(spattn.attention(q, k, v, "causal"), out)
        spattn.attention_backward(out, q, k, v, out, lse, "causal")


def test_v_of_another_batch_is_named_before_any_backend_is_asked():
    q, k, v = tensors(v=torch.ones(2, 2, 10, 8))
    with pytest.raises(ValueError, match=r"^v: expected shape \(1, 2, 10, 8\), got \(2, 2, 10, 8\)$"):
        _arguments.check_shapes(q, k, v)


@pytest.mark.parametrize("name", NAMES)
def test_no_route_for_tensors_that_require_a_gradient(name):
    assert _routes.of_call(*tensors(), "causal", "auto")[1] is not None
    asking = tensors(**{name: torch.ones(1, 2, 10, 8, requires_grad=True)})
    assert _routes.of_call(*asking, "causal", "auto")[1] is None


def test_no_route_for_arrays_that_may_change_their_meaning():
    for pattern in (torch.ones(10, 10, dtype=torch.bool), [1, 2]):
        assert _routes.of_call(*tensors(), pattern, "auto")[1] is None
    q, k, v = tensors()
    assert _routes.of_call(q.numpy(), k, v, "causal", "auto")[1] is None


def test_whatever_differs_has_a_route_of_its_own():
    """Shape, strides and dtype of each tensor, the pattern and the backend."""
    keys = [_routes.of_call(*tensors(), pattern, backend)[1]
            for pattern, backend in (("causal", "auto"), ("causal", "cpu"), ("full", "auto"), (p.Causal(), "auto"))]
    for name in NAMES:
        wider, moved = torch.ones(1, 2, 10, 16), torch.ones(1, 10, 2, 8).transpose(1, 2)
        for other in (wider, moved, moved.double()):
            keys.append(_routes.of_call(*tensors(**{name: other}), "causal", "auto")[1])
    assert len(set(keys)) == len(keys)
    assert _routes.of_call(*tensors(), "causal", "auto")[1] == keys[0]


def test_routes_of_plans_are_kept_apart():
    """With the plan, so that they end with it; never where another plan would find them."""
    plans = [spattn.plan(pattern, 10) for pattern in (p.Causal(), p.Full())]
    (first, key), (second, _) = (_routes.of_call(*tensors(), plan, "auto") for plan in plans)
    assert first is not second and first is not _routes.recent and second is not _routes.recent
    _routes.remember(first, key, "a route")
    assert key not in second and _routes.of_call(*tensors(), plans[0], "auto")[0][key] == "a route"


def test_old_routes_are_forgotten():
    kept = dict(_routes.recent)
    try:
        for number in range(3 * _routes._KEPT):
            _routes.remember(_routes.recent, ("test", number), None)
            assert len(_routes.recent) <= _routes._KEPT
            assert ("test", number) in _routes.recent
    finally:
        _routes.recent.clear()
        _routes.recent.update(kept)


def test_no_route_where_torch_was_never_imported(monkeypatch):
    q, k, v = tensors()
    monkeypatch.delitem(sys.modules, "torch")
    assert _routes.of_call(q, k, v, "causal", "auto")[1] is None


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_backend_refuses_a_broken_plan(backend):
    """Also one that would only look at the plan's pattern."""
    made = spattn.plan(p.Causal(), 10)
    broken = dataclasses.replace(made, indices=made.indices + 1)
    with pytest.raises(ValueError, match="^plan: "):
        spattn.attention(*(x.numpy() for x in tensors()), broken, backend=backend)


def test_plan_for_other_heads_where_the_backend_would_plan_again():
    """A backend without kernels for a plan's tiles plans its pattern, but not for what the plan was not made for."""
    made = spattn.plan(p.PerHead((p.Full(), p.Causal(), p.SlidingWindow(3))), 10, heads=3)
    planned = []
    module = types.SimpleNamespace(
        accepts=lambda plan, q, k, v: False, plan_for=lambda pattern, q, k, v: planned.append(pattern)
    )
    with pytest.raises(ValueError, match=r"^pattern: expected a plan for 1 batch entries and 2 heads, got .* 3$"):
        _api.find_plan(module, made, *tensors())
    assert not planned
    _api.find_plan(module, spattn.plan(p.Causal(), 10, heads=2), *tensors())
    assert planned == [p.Causal()]
