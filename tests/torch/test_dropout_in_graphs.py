"""Attention dropout in graphs of PyTorch: torch.compile, torch.export, vmap, layers, and the operators themselves."""

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.testing import dense_mask, dropout_mask

torch = pytest.importorskip("torch")

from spattn.dispatch.torch_operators import draw_seed  # noqa: E402
from spattn.dispatch.torch_text import text_of  # noqa: E402
from spattn.score.serialized import serialize  # noqa: E402
from spattn.score.tracing import trace  # noqa: E402
from spattn.torch import SparseAttention  # noqa: E402

from ..test_dropout import formula  # noqa: E402
from .test_graphs import fresh, graphs  # noqa: E402, F401
from .test_scores_in_graphs import HEADS, compiled, random, same, tensors  # noqa: E402

PATTERN = p.SlidingWindow(5, 2) | p.Stride(7)
SHARE, SEED = 0.3, (5 << 40) + 11
modified = pytest.mark.parametrize("modified", [False, True], ids=["plain", "score and sinks"])


def attend(q, k, v, seed, share=SHARE, table=None, sinks=None):
    score = None if table is None else lambda s, b, h, i, j: 6 * torch.tanh(s / 6) + table[h, i % 7, j % 5]
    options = {"score": score, "sinks": sinks, "dropout_p": share, "seed": seed}
    return spattn.attention(q, k, v, PATTERN, return_lse=True, **options)


def captured(modified):
    return {"table": random(HEADS, 7, 5), "sinks": random(HEADS, seed=1)} if modified else {}


def step(function, operands, *arguments, **given):
    """out, lse, and the gradients of all operands and captured tensors."""
    out, lse = function(*operands, *arguments, **given)
    leaves = [*operands, *given.values()]
    return out, lse, *torch.autograd.grad(out.square().sum() + lse.square().sum(), leaves)


def dense(operands, seed, share=SHARE, **given):
    """The same by the formulas in NumPy, with the pairs of dropout_mask()."""
    q, k, v = (x.detach().numpy() for x in operands)
    sizes = q.shape[0], HEADS, q.shape[2], k.shape[2]
    masks = dense_mask(PATTERN, *sizes), dropout_mask(seed, share, *sizes)
    named = {name: x.detach().numpy() for name, x in given.items()}
    out, lse = formula(q, k, v, np.zeros_like(q), np.zeros(()), *masks, share, **named)[:2]
    found = formula(q, k, v, 2 * out, 2 * lse, *masks, share, **named)
    return found if given else found[:5]


def assert_close(got, want):
    for x, exact in zip(got, want, strict=True):
        assert np.abs(x.detach().numpy() - exact).max() <= 1e-12 * np.abs(exact).max()


# -- torch.compile -----------------------------------------------------------------------------------------------------


@modified
def test_one_graph_of_all_seeds(modified):
    """Forward and backward drop the pairs of each step's seed, to the bit as eager calls."""
    operands, given = tensors(), captured(modified)
    run = compiled(attend)
    for seed in [*range(48), SEED, 2**63 - 1]:
        got = step(run, operands, torch.tensor(seed), **given)
        assert same(got, step(attend, operands, seed, **given)), seed
        if seed in (1, SEED):
            assert_close(got, dense(operands, seed, **given))
    assert graphs() == 1


def test_seeds_that_are_python_integers():
    """Constants of a first graph; numbers of a second one. PyTorch has no variable integers above 2**63."""
    operands, run = tensors(), compiled(attend)
    for seed in (7, 8, 9, SEED, 2**63 - 1):
        assert same(step(run, operands, seed), step(attend, operands, seed))
    assert graphs() == 2
    for seed in (2**63, 2**64 - 1):
        got = step(run, operands, seed)
        assert same(got, step(attend, operands, seed))
        assert_close(got, dense(operands, seed))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint64"])
def test_dtypes_of_seeds(dtype):
    seed, operands = torch.tensor(np.iinfo(dtype).max, dtype=getattr(torch, dtype)), tensors()
    got = step(compiled(attend, backend="eager"), operands, seed)
    assert same(got, step(attend, operands, seed)) and same(got, step(attend, operands, int(np.iinfo(dtype).max)))


def test_other_shares_are_never_stale():
    operands, run = tensors(), compiled(attend, backend="eager")
    for share in (0.1, 0.5, 0.1, 2.0**-34, 0.0, 0.9):
        got = step(run, operands, torch.tensor(3), share)
        assert same(got, step(attend, operands, 3, share))
        assert_close(got, dense(operands, 3, share))


def test_one_graph_of_all_lengths():
    run = compiled(attend, dynamic=True)
    for n, (q_len, kv_len, batch) in enumerate(((20, 30, 5), (33, 64, 3), (7, 100, 9))):
        operands = tensors(q_len, kv_len, batch)
        got = step(run, operands, torch.tensor(n))
        assert same(got, step(attend, operands, n))
        assert_close(got, dense(operands, n))
    assert graphs() == 1


@pytest.mark.slow
def test_seeds_drawn_through_the_default_compiler():
    """It has a generator of its own, which manual_seed() sets; the backward drops the pairs of the forward."""

    def drawing(q, k, v):
        seed = draw_seed()
        return *attend(q, k, v, seed), seed

    operands, run, found = tensors(), torch.compile(drawing, fullgraph=True), []
    for n in (5, 6, 5):
        torch.manual_seed(n)
        out, lse, seed = run(*operands)
        gradients = torch.autograd.grad(out.square().sum() + lse.square().sum(), operands)
        assert_close((out, lse, *gradients), dense(operands, int(seed)))
        found.append(int(seed))
    assert found[0] == found[2] != found[1] and graphs() == 1


def test_the_backward_function():
    """The public one is an operator, too."""
    q, k, v = (x.detach() for x in tensors())
    table, sinks = (x.detach() for x in captured(True).values())

    def both(q, k, v, seed):
        options = {"score": lambda s, b, h, i, j: s * table[h, 0, 0], "sinks": sinks, "dropout_p": SHARE, "seed": seed}
        out, lse = spattn.attention(q, k, v, PATTERN, return_lse=True, **options)
        dq, dk, dv, (dtable,), dsinks = spattn.attention_backward(out, q, k, v, out, lse, PATTERN, **options)
        plain = spattn.attention_backward(out, q, k, v, out, lse, PATTERN, dropout_p=SHARE, seed=seed)
        return out, lse, dq, dk, dv, dtable, dsinks, *plain

    run = compiled(both)
    for seed in (3, 4):
        assert same(run(q, k, v, torch.tensor(seed)), both(q, k, v, seed))


def test_seeds_that_change_before_the_backward():
    """Refused, because the backward would drop other pairs."""
    operands, seed = tensors(), torch.tensor(3)
    for backend in ("eager", "aot_eager"):
        out, _ = compiled(attend, backend=backend)(*operands, seed)
        seed += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize(
    ("seed", "share", "words"),
    [
        (None, SHARE, "seed: required if dropout_p > 0; pass another integer at each training step"),
        (1.5, SHARE, "seed: expected an integer, got float"),
        (True, SHARE, "seed: expected an integer, got bool"),
        (torch.tensor(1.5), SHARE, r"seed: expected an integer, got torch.float32 of shape \(\)"),
        (torch.tensor(True), SHARE, r"seed: expected an integer, got torch.bool of shape \(\)"),
        (torch.arange(3), SHARE, r"seed: expected an integer, got torch.int64 of shape \(3,\)"),
        (-3, SHARE, r"seed: must be in \[0, 2\*\*64\), got -3"),
        (2**64, SHARE, r"seed: must be in \[0, 2\*\*64\), got 18446744073709551616"),
        (3, 1.0, "dropout_p: must be at least 0 and less than 1, got 1.0"),
        (3, True, "dropout_p: expected a float, got bool"),
    ],
)
def test_refused_as_by_eager_calls(seed, share, words):
    operands = tensors()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        compiled(attend)(*operands, seed, share)
    with pytest.raises((TypeError, ValueError), match="^" + words.partition(", got")[0]):
        attend(*operands, seed, share)


def test_negative_seeds_are_refused_in_the_run():
    operands, run = tensors(), compiled(attend)
    run(*operands, torch.tensor(3))
    with pytest.raises(ValueError, match=r"^seed: must be in \[0, 2\*\*64\), got -3"):
        run(*operands, torch.tensor(-3))


@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace", "ignore:.*lru_cache")
def test_functions_that_break_the_graph():
    """The operator, or the eager call, still gets the step's seed."""
    table, operands = np.linspace(1, 2, HEADS), tensors()

    def attend(q, k, v, seed):
        score = lambda s, b, h, i, j: np.tanh(s) * table[h]  # noqa: E731
        options = {"score": score, "dropout_p": SHARE, "seed": seed, "return_lse": True}
        return spattn.attention(2 * q, k, v, PATTERN, **options)

    run = compiled(attend, fullgraph=False)
    for seed in (3, 4):
        assert same(step(run, operands, torch.tensor(seed)), step(attend, operands, seed))


# -- layers ------------------------------------------------------------------------------------------------------------


def layer(**options):
    torch.manual_seed(0)
    made = SparseAttention(32, HEADS, PATTERN, dropout=0.4, sinks=True, **options)
    x = torch.randn(2, 20, 32)
    return made, x, torch.zeros(2, 20, dtype=torch.bool).index_fill_(1, torch.tensor([3]), True)


def drawn(run, made, *operands):
    """Results of three steps from one state of PyTorch's generator, and their gradients."""
    torch.manual_seed(5)
    found = []
    for _ in range(3):
        out = run(*operands)
        found += [out, *torch.autograd.grad(out.square().sum(), list(made.parameters()))]
    return found


def test_layers_draw_seeds_in_the_graph():
    """From the generator that eager calls read, at each run; padding stays an operand; evaluation drops nothing."""
    made, x, padding = layer()
    call = lambda x, padding: made(x, x, x, key_padding_mask=padding)[0]  # noqa: E731
    run = compiled(call)
    got, want = drawn(run, made, x, padding), drawn(call, made, x, padding)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    outs = got[:: len(got) // 3]
    assert torch.equal(outs[0], want[0]) and not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    assert graphs() == 1
    made.eval()
    assert torch.equal(run(x, padding), call(x, padding)) and torch.equal(run(x, padding), run(x, padding))


def test_checkpoints_in_a_graph_drop_the_same_pairs():
    from torch.utils.checkpoint import checkpoint

    made, x, _ = layer()

    def call(x):
        return checkpoint(lambda x: made(x, x, x)[0], x, use_reentrant=False)

    for one, other in zip(drawn(compiled(call), made, x), drawn(call, made, x), strict=True):
        torch.testing.assert_close(one, other)


# -- torch.export ------------------------------------------------------------------------------------------------------


class Attend(torch.nn.Module):
    def forward(self, q, k, v, seed):
        return attend(q, k, v, seed)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export(strict, tmp_path):
    """The seed is an operand, also in a file."""
    operands = [x.detach() for x in tensors()]
    program = torch.export.export(Attend(), (*operands, torch.tensor(1)), strict=strict)
    assert program.graph_module.code.count("torch.ops.spattn.") == 1
    torch.export.save(program, tmp_path / "program.pt2")
    for module in (program.module(), torch.export.load(tmp_path / "program.pt2").module()):
        for seed in (1, 2, SEED):
            assert same(module(*operands, torch.tensor(seed)), attend(*operands, seed))


def test_export_of_a_layer_in_training():
    """The program draws a seed in each run."""
    made, x, _ = layer()
    module = torch.export.export(made, (x, x, x)).module()
    found = []
    for run in (module, made):
        torch.manual_seed(5)
        found.append([run(x, x, x)[0].detach() for _ in range(2)])
    assert same(*found) and not torch.equal(*found[0])


# -- torch.func.vmap ---------------------------------------------------------------------------------------------------


@modified
@pytest.mark.parametrize("mapped", ["q", "seed", "q and seed"])
def test_vmap_is_a_call_for_each_entry(mapped, modified):
    """Entries with a shared seed drop the same pairs, those of the call alone."""
    q, k, v = tensors()
    given = captured(modified)
    many, seeds = torch.stack([q, 2 * q, q - 1]).detach().requires_grad_(), torch.tensor([3, 4, SEED])
    dims = 0 if "q" in mapped else None, 0 if "seed" in mapped else None
    first, seed = (x if dim == 0 else x[0] for x, dim in zip((many, seeds), dims, strict=True))
    got = torch.func.vmap(lambda q, seed: attend(q, k, v, seed, **given), dims)(first, seed)
    entries = []
    for n in range(3):
        own, drawn = many[n if dims[0] == 0 else 0], int(seeds[n if dims[1] == 0 else 0])
        entries.append(attend(own, k, v, drawn, **given))
        assert_close(entries[-1], dense((own, k, v), drawn, **given)[:2])
    want = tuple(map(torch.stack, zip(*entries, strict=True)))
    assert same(got, want)
    leaves = [many, k, v, *given.values()]
    gradients = [torch.autograd.grad(out.square().sum() + lse.sum(), leaves) for out, lse in (got, want)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_vmap_of_a_layer():
    """PyTorch's argument says whether entries share the seed that the layer draws."""
    made, x, _ = layer()
    many = torch.stack([x, x, x])
    call = lambda x: made(x, x, x)[0]  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(many)
    shared, own = (torch.func.vmap(call, randomness=how)(many) for how in ("same", "different"))
    assert torch.equal(shared[0], shared[1]) and not torch.equal(own[0], own[1])


# -- the operators -----------------------------------------------------------------------------------------------------


def arguments(modified):
    """Arguments of the forward operator."""
    text, floats, integers, tables, sinks = None, [], [], [], None
    if modified:
        table, sinks = captured(True).values()
        text, floats, integers, tables = serialize(trace(lambda s, b, h, i, j: s * table[h, i % 7, j % 5]))
    seed = torch.tensor(SEED), SHARE
    return *tensors(), sinks, tables, floats, integers, text, *seed, text_of(PATTERN), None, None, "auto", None


@modified
def test_opcheck(modified):
    """Schema, autograd, tensors without values, traced graphs of both operators."""
    given = arguments(modified)
    torch.library.opcheck(torch.ops.spattn.scored_attention.default, given)
    given = torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, given)
    out, lse = torch.ops.spattn.scored_attention(*given)
    backward = random(*out.shape).detach(), None, *given[:3], out, lse, *given[3:10], [True] * modified, *given[10:]
    torch.library.opcheck(torch.ops.spattn.scored_attention_backward.default, backward)


def test_finite_differences():
    q, k, v, sinks, tables, *rest = arguments(True)
    operator = torch.ops.spattn.scored_attention
    leaves = q, k, v, sinks, *tables
    assert torch.autograd.gradcheck(lambda *x: operator(*x[:4], list(x[4:]), *rest), leaves, fast_mode=True)


def test_groups():
    """A list of problems in a graph: each is a call with this seed."""
    q, k, v = tensors()
    problems = [(q, k, v, PATTERN), (q[:, :, 5:], k, v, p.Causal())]
    run = compiled(lambda seed: spattn.grouped_attention(problems, dropout_p=SHARE, seed=seed))
    for seed in (3, 4):
        assert same(run(torch.tensor(seed)), spattn.grouped_attention(problems, dropout_p=SHARE, seed=seed))
