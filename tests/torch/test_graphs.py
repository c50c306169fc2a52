"""Graphs in which spattn's operators stand: torch.compile, torch.export, checkpoints, files for other processes."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.testing import inputs

torch = pytest.importorskip("torch")

WINDOW = p.SlidingWindow(7, 2)


@pytest.fixture(autouse=True)
def fresh():
    """No graph of another test is found, or counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs():
    """How many graphs torch.compile has made."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def tensors(q_len=20, kv_len=30, batch=1, dtype="float32"):
    q, k, v = inputs(batch, 4, 2, q_len, kv_len, 8)
    return [torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_() for x in (q, k, v)]


def attend(q, k, v, pattern=WINDOW):
    """With something before and behind it, and heads behind tokens."""
    out, lse = spattn.attention(2 * q, k, v, pattern, scale=0.3, return_lse=True)
    return out.transpose(1, 2).flatten(2) + 1, lse.exp()


def step(function, operands, *others):
    """Results and gradients."""
    out, lse = function(*operands, *others)
    return out, lse, *torch.autograd.grad((out * out).sum() + lse.sum(), operands)


def same(got, want):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:.*cells are evaluated")
@pytest.mark.parametrize("name", p.registry.names())
def test_one_graph_of_every_pattern(name):
    """Eager's bits, of gradients too."""
    pattern, q_len, kv_len = p.registry.example(name)
    batch, heads = (max(1, size) for size in pattern.sizes())
    operands = [torch.from_numpy(x).requires_grad_() for x in inputs(batch, heads, heads, q_len, kv_len, 8)]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert same(step(compiled, operands, pattern), step(attend, operands, pattern))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_kernels_around_it(dtype):
    """By the compiler that torch.compile has by default, which lays operands out as it likes."""
    operands = tensors(dtype=dtype)
    compiled = torch.compile(attend, fullgraph=True)
    for got, want in zip(step(compiled, operands), step(attend, operands), strict=True):
        torch.testing.assert_close(got, want)


def test_one_graph_of_all_lengths():
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for q_len, kv_len, batch in ((20, 30, 5), (33, 64, 3), (7, 100, 9)):  # equal lengths would be one for ever
        operands = tensors(q_len, kv_len, batch)
        assert same(step(compiled, operands), step(attend, operands))
    assert graphs() == 1


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_axes_in_any_order_of_all_lengths(axes):
    def run(*operands):
        return attend(*(x.permute(axes).contiguous().permute([axes.index(n) for n in range(4)]) for x in operands))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (20, 33):
        operands = tensors(length, length, 2)
        assert same(step(compiled, operands), step(run, operands))


# -- which pattern a graph holds ---------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, pattern):
        super().__init__()
        self.pattern = pattern

    def forward(self, q, k, v):
        return attend(q, k, v, self.pattern)


def test_a_graph_is_of_the_pattern_that_it_is_asked_for():
    """Whether it is an argument, a name, or an attribute that is set to another one."""
    operands, compiled = tensors(), torch.compile(attend, backend="eager", fullgraph=True)
    for pattern in (p.Causal(), p.SlidingWindow(3), p.SlidingWindow(4), "causal", p.KeyPadding.from_lengths([9], 30)):
        assert same(compiled(*operands, pattern), attend(*operands, pattern))
    layer = Layer(p.SlidingWindow(3))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for pattern in (p.SlidingWindow(3), p.SlidingWindow(4), p.Causal()):
        layer.pattern = pattern
        assert same(compiled(*operands), attend(*operands, pattern))


def test_a_plan_stands_for_its_pattern():
    operands, compiled = tensors(), torch.compile(attend, backend="eager", fullgraph=True)
    for pattern in (p.SlidingWindow(3), p.Causal()):
        torch.testing.assert_close(compiled(*operands, spattn.plan(pattern, 20, 30)), attend(*operands, pattern))


@pytest.mark.slow
def test_a_mask_is_an_operand():
    """One graph for all its values, as it is an argument like others."""
    operands, compiled = tensors(), torch.compile(attend, backend="aot_eager", fullgraph=True)
    rng = np.random.default_rng(0)
    for shape in ((20, 30), (20, 30), (4, 20, 30), (1, 4, 20, 30)):
        mask = torch.from_numpy(rng.random(shape) < 0.4)
        assert same(step(compiled, operands, mask), step(attend, operands, mask))
    assert graphs() == 3
    for wrong, error in ((mask.float(), TypeError), (mask[..., :-1], ValueError), (mask[0, 0, 0], ValueError)):
        with pytest.raises(error) as eager:
            attend(*operands, wrong)
        with pytest.raises(error) as raised:
            torch.compile(attend, backend="eager")(*operands, wrong)
        assert str(raised.value).splitlines()[0] == str(eager.value)


@dataclass(frozen=True)
class Band(p.Pattern):
    """Its class is not registered. A graph that traced how it is made would see the default alone."""

    left: int = 3

    def __post_init__(self):
        pass

    def allows(self, q, k):
        return (k <= q) & (q - k <= self.left)


CHANGED = {
    "not registered": lambda q, k, v: attend(q, k, v, Band(5)),
    "not registered, joined": lambda q, k, v: attend(q, k, v, WINDOW & Band(5)),
    "array": lambda q, k, v: attend(q, k, v, np.tri(20, 30, 10, dtype=bool)),
    "operands of NumPy": lambda q, k, v: map(
        torch.from_numpy, spattn.attention(*(x.detach().numpy() for x in (q, k, v)), WINDOW, return_lse=True)
    ),
}


@pytest.mark.filterwarnings("ignore:.*lru_cache")
@pytest.mark.parametrize("what", CHANGED)
def test_what_no_graph_can_hold(what):
    """Two graphs with the call between them, or no graph where somebody insists on one; never another pattern."""
    run, operands = CHANGED[what], tensors()
    for _ in range(2):
        assert same(torch.compile(run, backend="eager")(*operands), run(*operands))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(run, backend="eager", fullgraph=True)(*operands)


@pytest.mark.parametrize("make", [lambda: p.SlidingWindow(5), lambda: WINDOW & p.Causal(), lambda: WINDOW - p.Sinks(2)])
def test_patterns_that_are_made_within(make):
    operands = tensors()
    found = torch.compile(lambda q, k, v: attend(q, k, v, make()), backend="eager", fullgraph=True)(*operands)
    assert same(found, attend(*operands, make()))


def test_a_pattern_that_is_made_within_is_not_that_of_its_defaults():
    """Even where torch.compile follows how it is made."""
    try:
        p.authoring.register("band_of_a_graph")(Band)
        operands = tensors()
        run = torch.compile(lambda q, k, v: attend(q, k, v, Band(5)), backend="eager")
        assert same(run(*operands), attend(*operands, Band(5))) and not same(run(*operands), attend(*operands, Band()))
        assert same(torch.compile(attend, backend="eager", fullgraph=True)(*operands, Band(5)), run(*operands))
    finally:
        p.base.class_registry._REGISTRY.pop("band_of_a_graph")


@pytest.mark.slow
def test_errors_are_those_of_eager_calls():
    q, k, v = tensors()
    compiled = torch.compile(spattn.attention, backend="eager")
    for given, options in (
        ((q, k[:, :, 1:], v, WINDOW), {}),
        ((q, k, v.double(), WINDOW), {}),
        ((q, k, v, p.Mask(np.ones((3, 3), bool))), {}),
        ((q, k, v, "casual"), {}),
        ((q, k, v, None), {}),
        ((q, k, v), {"scale": float("nan")}),
        ((q, k, v), {"scale": "1"}),
        ((q, k, v), {"backend": "gpu"}),
        ((q, k, v), {"precision": "tf32"}),
        ((q, k, v), {"return_lse": "yes"}),
    ):
        with pytest.raises((TypeError, ValueError)) as eager:
            spattn.attention(*given, **options)
        with pytest.raises(type(eager.value)) as raised:
            compiled(*given, **options)
        assert str(raised.value).splitlines()[0] == str(eager.value)


def test_numbers_of_numpy():
    q, k, v = tensors()
    run = functools.partial(spattn.attention, q, k, v, WINDOW, scale=np.float32(0.3))
    assert torch.equal(torch.compile(run, backend="eager")(), run())


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripts_hold_the_operator():
    """And not the values that it gave while they were traced."""
    q, k, v = (x.detach() for x in tensors())
    traced = torch.jit.trace(lambda q: spattn.attention(q, k, v, WINDOW), q, check_trace=False)
    assert torch.equal(traced(2 * q), spattn.attention(2 * q, k, v, WINDOW))


# -- with whatever else is going on ------------------------------------------------------------------------------------


def test_the_backward_in_a_graph():
    q, k, v = (x.detach() for x in tensors())
    out, lse = spattn.attention(q, k, v, WINDOW, return_lse=True)
    for dlse in (None, torch.ones_like(lse)):
        run = functools.partial(spattn.attention_backward, pattern=WINDOW, dlse=dlse, scale=0.3)
        assert same(
            torch.compile(run, fullgraph=True, backend="aot_eager")(out, q, k, v, out, lse), run(out, q, k, v, out, lse)
        )


def test_modes_of_pytorch():
    """Inference mode, no_grad, and autocast, which casts nothing but what is around."""
    operands = tensors()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert same(compiled(*operands), attend(*operands))

    def projected(q, k, v):
        weight = torch.eye(8)
        return attend(*(x @ weight for x in (q, k, v)))

    with torch.autocast("cpu", torch.bfloat16):
        got = step(torch.compile(projected, backend="aot_eager", fullgraph=True), operands)
        assert same(got, step(projected, operands)) and got[0].dtype == torch.bfloat16


def test_a_batch_of_calls_in_a_graph():
    q, k, v = (x.detach() for x in tensors())
    run = torch.func.vmap(lambda q: spattn.attention(q, k, v, WINDOW))
    many = torch.stack([q, 2 * q])
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(many), run(many))


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoints_that_keep_attention_alone(compiled):
    """The policy is asked for the operator, and what it keeps is not computed again."""
    from torch.utils import checkpoint

    operands, asked = tensors(), []

    def policy(context, operator, *args, **kwargs):
        asked.append(operator)
        kept = operator == torch.ops.spattn.attention.default
        return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def run(*operands):
        contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)
        return checkpoint.checkpoint(attend, *operands, use_reentrant=False, context_fn=contexts)

    function = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    spattn.clear_plan_cache()
    got = step(function, operands)
    assert torch.ops.spattn.attention.default in asked
    assert same(got, step(attend, operands))


# -- export ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """Of all lengths, with heads behind tokens in memory."""
    operands = [x.detach() for x in tensors(20, 30, 2)]
    tokens, keys = torch.export.Dim("tokens", min=2, max=100), torch.export.Dim("keys", min=2, max=100)
    shapes = {"q": {2: tokens}, "k": {2: keys}, "v": {2: keys}}
    program = torch.export.export(Layer(WINDOW), tuple(operands), dynamic_shapes=shapes, strict=strict)
    assert "torch.ops.spattn.attention.default" in program.graph_module.code
    for q_len, kv_len in ((20, 30), (41, 77)):
        given = [x.detach() for x in tensors(q_len, kv_len, 2)]
        assert same(program.module()(*given), attend(*given))


def test_a_program_with_a_pattern_that_has_no_text_is_not_exported():
    with pytest.raises(
        TypeError, match=r"^pattern: a PyTorch graph requires a serializable pattern, .*got Band\(left=3\)"
    ):
        torch.export.export(Layer(Band()), tuple(x.detach() for x in tensors()), strict=False)


READER = """
import sys
import torch
import spattn.torch

program, operands, expected = sys.argv[1:]
found = torch.export.load(program).module()(*torch.load(operands))
print(all(map(torch.equal, found, torch.load(expected))))
"""


@pytest.mark.slow
def test_another_process_runs_an_exported_program(python, tmp_path):
    operands = [x.detach() for x in tensors()]
    files = [tmp_path / name for name in ("program.pt2", "operands.pt", "expected.pt")]
    pattern = WINDOW & ~p.KeyPadding.from_lengths([9], 30)
    torch.export.save(torch.export.export(Layer(pattern), tuple(operands)), files[0])
    torch.save(operands, files[1])
    torch.save(attend(*operands, pattern), files[2])
    assert python(f"import sys; sys.argv[1:] = {list(map(str, files))!r}\n{READER}") == "True\n"


@pytest.mark.slow
def test_ahead_of_time(tmp_path):
    """AOTInductor's package, with the operator called from compiled code."""
    operands = [x.detach() for x in tensors()]
    program = torch.export.export(Layer(WINDOW), tuple(operands))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    for got, want in zip(torch._inductor.aoti_load_package(package)(*operands), attend(*operands), strict=True):
        torch.testing.assert_close(got, want)
