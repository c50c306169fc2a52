"""mask_mods and BlockMasks of FlexAttention: the same pairs as evaluating them everywhere."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.testing import inputs

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
from .flex_gallery import CELL_BY_CELL, GALLERY, causal, documents, padding, window_by_head  # noqa: E402


def everywhere(mask_mod, batch, heads, q_len, kv_len):
    return flex.create_mask(mask_mod, batch, heads, q_len, kv_len, device="cpu").numpy()


def pairs(pattern, batch, heads, q_len, kv_len):
    """By the index set of each batch entry and head."""
    own_batch, own_heads = pattern.sizes()
    found = np.empty((batch, heads, q_len, kv_len), bool)
    for b, h in np.ndindex(batch, heads):
        which = {"batch": b if own_batch != 1 else 0, "head": h if own_heads != 1 else 0}
        found[b, h] = pattern.index_set(q_len, kv_len, **which).to_dense()
    return found


def planned(pattern, batch, heads, q_len, kv_len):
    """By the plan that kernels execute: one-hot values show which keys a row has."""
    q, k, v = np.zeros((batch, heads, q_len, 8)), np.zeros((batch, heads, kv_len, 8)), np.eye(kv_len)
    v = np.broadcast_to(v, (batch, heads, kv_len, kv_len))
    return spattn.attention(q, k, v, pattern) > 0


@pytest.mark.parametrize("name", GALLERY)
def test_gallery(name):
    """No tile is evaluated cell by cell but those that differ."""
    mask_mod, *sizes = GALLERY[name]
    pattern, expected = p.interop.from_mask_mod(mask_mod), everywhere(mask_mod, *sizes)
    assert np.array_equal(pairs(pattern, *sizes), expected)
    assert np.array_equal(planned(pattern, *sizes), expected)


@pytest.mark.unfollowed
@pytest.mark.usefixtures("slow_plans", "no_plans")
@pytest.mark.parametrize("name", CELL_BY_CELL)
def test_what_tiles_cannot_be_asked(name):
    """The reason names the function, the operation and its line."""
    mask_mod, *sizes = CELL_BY_CELL[name]
    pattern, expected = p.interop.from_mask_mod(mask_mod), everywhere(mask_mod, *sizes)
    assert np.array_equal(pairs(pattern, *sizes), expected)
    place = r"<mask_mod .*<lambda> \(.*flex_gallery.py, line \d+\)>: planning took"
    with pytest.warns(spattn.PlanningWarning, match=place + r".* \(.*flex_gallery.py, line \d+\)\); intersect"):
        assert np.array_equal(planned(pattern, *sizes), expected)


def test_long_sequences_are_planned_by_tiles():
    """9 · 10⁹ pairs, of which only those of a few tiles are looked at."""
    lengths = [15_000, 40_000, 40_000]
    plan = spattn.plan(p.interop.from_mask_mod(documents(lengths, causal)), sum(lengths))
    assert plan.nnz == sum(n * (n + 1) // 2 for n in lengths)


NARROW = st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
OPERATIONS = [
    lambda a, b: a - b >= 0,
    lambda a, b: b + a < 7,
    lambda a, b: 3 - a < b,
    lambda a, b: torch.sub(a, b, alpha=2) < 0,
    lambda a, b: (a - b).abs() % 5 == 2,
    lambda a, b: torch.remainder(a - b, -3) == -1,
    lambda a, b: torch.div(a - b, 3, rounding_mode="floor") == torch.div(b, 3, rounding_mode="trunc"),
    lambda a, b: (a - b) // 4 == -1,
    lambda a, b: torch.minimum(a, b) == -torch.maximum(-a, -b),
    lambda a, b: (a - b).clamp(-2, 3) == (a - b).clamp_min(-2),
    lambda a, b: (a - b).clamp_max(1) != 1,
    lambda a, b: ((a > b) ^ (a < 4)) & ~(b == a) | torch.logical_xor(a >= b, b <= 2),
    lambda a, b: torch.where(a > b, b > 3, a < 2),
    lambda a, b: torch.where(a > b, a, b) > 3,
    lambda a, b: (a == b).to(torch.int32) + (a > b) == 1,
    lambda a, b: (a - b).bool() & torch.logical_not(torch.logical_and(a < b, b < 9)),
    lambda a, b: (a - b).to(torch.int16) > 1.5,
    lambda a, b: torch.stack([a, b]).sum() > 5,
    lambda a, b: (a == b) == (a < 3),
    lambda a, b: (a & 3) == (b & 3),
    lambda a, b: ((a - b) & 2) > 0,
]


@pytest.mark.unfollowed
@settings(max_examples=max(20, settings.default.max_examples // 2), deadline=None)
@given(st.lists(st.integers(-128, 255), min_size=75, max_size=75), NARROW, NARROW, st.sampled_from(OPERATIONS))
@example([100] * 40 + [-100] * 35, torch.int8, torch.int8, OPERATIONS[0])  # differences that wrap
def test_operations(numbers, left, right, operation):
    """Of numbers of any width, which may wrap, on tiles and off them."""
    table = torch.tensor(numbers)
    one, other = table.to(left), table.flip(0).to(right)

    def mask_mod(b, h, q, k):
        return operation(one[q], other[k])

    expected = everywhere(mask_mod, 1, 1, 70, 75)
    pattern = p.interop.from_mask_mod(mask_mod)
    assert np.array_equal(pairs(pattern, 1, 1, 70, 75), expected)
    assert spattn.plan(pattern, 70, 75, tiling=spattn.Tiling(tile=(16, 64))).nnz == expected.sum()
    assert np.array_equal(planned(pattern, 1, 1, 70, 75), expected)


def test_numbers_that_do_not_fit():
    """PyTorch makes 254 of −2 for a uint8, and so the least of a clamp."""
    table = torch.arange(100, dtype=torch.uint8)

    def mask_mod(b, h, q, k):
        return (table[q] - table[k]).clamp(-2, 3) == 3

    assert np.array_equal(pairs(p.interop.from_mask_mod(mask_mod), 1, 1, 90, 99), everywhere(mask_mod, 1, 1, 90, 99))


# -- a pattern is a value ----------------------------------------------------------------------------------------------


def test_tensors_are_copied_and_compared():
    """A tensor that changes later changes no pattern; one made then is another one, and the first is found again."""
    owner = torch.tensor([0, 0, 1, 1])

    def make():
        return p.interop.from_mask_mod(lambda b, h, q, k: owner[q] == owner[k])

    first = make()
    assert make() == first and hash(make()) == hash(first) and spattn.plan(make(), 4) is spattn.plan(first, 4)
    owner[1] = 1
    second = make()
    assert first != second
    assert first.index_set(4, 4).row(1).tolist() == [0, 1] and second.index_set(4, 4).row(1).tolist() == [1, 2, 3]
    owner[1] = 0
    assert make() == first


def test_calls_see_what_changed_between_patterns():
    q, k, v = (torch.from_numpy(x) for x in inputs(1, 1, q_len=6, head_dim=8))
    owner = torch.zeros(6, dtype=torch.int64)
    for number in range(3):
        owner[number:] = number
        expected = spattn.attention(q, k, v, owner[:, None] == owner)
        assert torch.equal(
            spattn.attention(q, k, v, p.interop.from_mask_mod(lambda b, h, q, k: owner[q] == owner[k])), expected
        )


def test_numbers_of_other_types_are_others():
    one, other = (p.interop.from_mask_mod(lambda b, h, q, k, n=n: q / n > k) for n in (1, True))
    assert one != other and one == p.interop.from_mask_mod(lambda b, h, q, k: q / 1 > k)


def test_heads_alike_share_a_variant():
    pattern = p.interop.from_mask_mod(window_by_head([3, 9, 9, 200]))
    assert spattn.plan(pattern, 150, heads=4).variant.tolist() == [[0, 1, 1, 2]]
    assert (
        spattn.plan(p.interop.from_mask_mod(causal, batch=3, heads=4), 150, batch=3).variant.tolist() == [[0] * 4] * 3
    )
    assert spattn.plan(p.interop.from_mask_mod(causal), 150, batch=3, heads=4).variant.tolist() == [[0]]


def test_sizes():
    assert p.interop.from_mask_mod(causal).sizes() == (1, 1)
    assert p.interop.from_mask_mod(padding([3, 4])).sizes() == (0, 1)
    made = p.interop.from_mask_mod(padding([3, 4]), batch=2, heads=4)
    assert made.sizes() == (2, 4)
    with pytest.raises(ValueError, match="^pattern: expected one for 3 batch entries, got one for 2"):
        spattn.plan(made, 8, batch=3, heads=4)
    with pytest.raises(ValueError, match="^batch: expected an integer in"):
        made.at(2, 0)
    assert p.interop.from_mask_mod(padding([3, 4]), batch=1).index_set(8, 8).row(7).tolist() == [0, 1, 2]


def test_copies_and_pickles():
    pattern = p.interop.from_mask_mod(documents([3, 5]))
    for again in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert again == pattern and again.index_set(8, 8) == pattern.index_set(8, 8)
    assert repr(pattern).startswith("<mask_mod documents.<locals>.mask_mod (")
    with pytest.raises(ValueError, match="^pattern: expected a registered class with JSON-serializable parameters"):
        pattern.to_json()


def test_in_compositions():
    made = p.interop.from_mask_mod(padding([90, 30])) & p.SlidingWindow(10) | p.Sinks(2)
    expected = p.Causal() & p.KeyPadding.from_lengths([90, 30], 100) & p.SlidingWindow(10) | p.Sinks(2)
    for batch in range(2):
        assert made.index_set(100, 100, batch=batch) == expected.index_set(100, 100, batch=batch)


def test_beside_nothing():
    """Positions of none are asked for: no key is left by the other operand."""
    nowhere = p.interop.from_mask_mod(lambda b, h, q, k: k + 1 <= q + 1) & p.KeyPadding(np.zeros(300, bool))
    assert nowhere.index_set(300, 300).nnz == spattn.plan(nowhere, 300).nnz == 0


def test_gradients_of_parameters_are_not_asked_for():
    scale = torch.nn.Parameter(torch.tensor([3.0]))
    assert p.interop.from_mask_mod(lambda b, h, q, k: (q - k).abs() < scale[0]).index_set(9, 9) == p.SlidingWindow(
        2
    ).index_set(9, 9)


@pytest.mark.parametrize("name", ["causal documents", "tree", "a mask"])
def test_positions_of_any_form(name):
    """Numbers alone and arrays of fewer bits, of which a pair is more than their type holds."""
    mask_mod, *sizes = (GALLERY | CELL_BY_CELL)[name]
    pattern, dense = p.interop.from_mask_mod(mask_mod).bind(7, 7), everywhere(mask_mod, 1, 1, 7, 7)[0, 0]
    assert all(bool(pattern.allows(i, j)) == dense[i, j] for i, j in np.ndindex(7, 7))
    q, k = np.ogrid[:7, :7]
    assert np.array_equal(pattern.allows(q.astype(np.int32), k.astype(np.int32)), dense)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta"), lambda: torch.autocast("cpu")])
def test_modes_of_torch(mode):
    mask_mod, *sizes = GALLERY["documents by entry"]
    expected = pairs(p.interop.from_mask_mod(mask_mod), *sizes)
    with mode():
        pattern = p.interop.from_mask_mod(mask_mod)
        assert np.array_equal(pairs(pattern, *sizes), expected)
    assert np.array_equal(pairs(pattern, *sizes), expected)


def test_in_a_compiled_function():
    """A graph ends before a mask_mod is traced, as before a call."""
    owner = torch.tensor([0, 0, 1, 1, 1])

    def model(x):
        return spattn.attention(x, x, x + 1, p.interop.from_mask_mod(lambda b, h, q, k: owner[q] == owner[k])) * 2

    x = torch.from_numpy(inputs(1, 1, q_len=5, head_dim=8)[0])
    assert torch.allclose(torch.compile(model, backend="eager")(x), model(x))


@pytest.mark.slow
def test_torch_is_imported_when_a_mask_mod_comes():
    program = """
import sys
import spattn
assert "torch" not in sys.modules
found = spattn.patterns.interop.from_mask_mod(lambda b, h, q, k: (q - k).abs() <= 1).index_set(3, 3)
assert found == spattn.patterns.SlidingWindow(1).index_set(3, 3) and "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "spattn.trace.recorder", None)
    with pytest.raises(spattn.BackendUnavailableError, match="^mask_mod: requires PyTorch; pip install torch"):
        p.interop.from_mask_mod(causal)


# -- what is refused ---------------------------------------------------------------------------------------------------


def changes_a_tensor(b, h, q, k):
    return q.sub_(k) > 0


def writes_an_element(b, h, q, k):
    seen = torch.zeros(9)
    seen[q] = 1
    return seen[k] > 0


def picks_by_truth(b, h, q, k):
    return torch.arange(3)[torch.stack([q > 5] * 3)].sum() > 0


@pytest.mark.parametrize(
    "mask_mod, words",
    [
        (7, "expected a function of b, h, q_idx and kv_idx, got 7"),
        (
            lambda b, h, q, k: k <= q if q > 3 else k > q,
            r"'if', .* need a truth value.*use torch.where, .*, line \d+\)",
        ),
        (lambda b, h, q, k: k <= q and k > 3, "need a truth value.* &, "),
        (lambda b, h, q, k: k in torch.arange(3), "need a truth value.* torch.isin, "),
        (lambda b, h, q, k: int(q) > k, r"int\(\), .* need a number.*leave them out"),
        (lambda b, h, q, k: torch.arange(9)[q].item() > k, r"item\(\).* need a number"),
        (lambda b, h, q, k: torch.arange(9).select(0, q) > k, r"select\(\) needs a number.*look up"),
        (lambda b, h, q, k: torch.arange(9).narrow(0, q, 1).sum() > k, r"narrow\(\) needs a number.*look up, table"),
        (lambda b, h, q, k: torch.arange(q).sum() > k, r"arange\(\) needs a number.*torch.where"),
        (lambda b, h, q, k: torch.zeros(q).sum() > k, r"zeros\(\) needs a number.*torch.where"),
        (lambda b, h, q, k: torch.arange(9)[q > k].sum() > 3, r"table\[...\] takes integers.*torch.where"),
        (lambda b, h, q, k: LAYOUT[:, q, [0, 3]].any(), r"table\[...\] takes integers.*\]\[:, rows\]"),
        (lambda b, h, q, k: LAYOUT[0, [q, k], k].any(), r"table\[...\] takes integers.*torch.stack"),
        (lambda b, h, q, k: q < {0: 1, 1: 2}[h], r"a dict.*look up in a tensor, .*line \d+\)"),
        (lambda b, h, q, k: (q >= k) if h in {0, 2} else (q > k), "a dict, a set .*torch.isin"),
        (lambda b, h, q, k: round(q / 2) > k, "round.* use torch.round"),
        (lambda b, h, q, k: divmod(q, 2)[0] > k, "divmod.* use x // n"),
        (lambda b, h, q, k: divmod(9, q + 1)[0] > k, "divmod.* use x // n"),
        (lambda b, h, q, k: len(q) > 3, r"len\(\), loops .* need a vector"),
        (lambda b, h, q, k: any(q == x for x in k), r"len\(\), loops .* need a vector"),
        (lambda b, h, q: q > 3, "got a function of 3 arguments; a mask_mod takes b, h"),
        (lambda q, k: q > k, "got a function of two arguments; write lambda b, h"),
        (lambda b, h, q, k: [5, 7][b] > k, r"a list, .* need an integer.*torch.tensor\(table\)\[q_idx\]"),
        (lambda b, h, q, k: torch.arange(9)[:q].sum() > k, "a slice needs integers.*compare positions instead"),
        (lambda b, h, q, k: np.arange(9)[q] == k, "NumPy needs values"),
        (lambda b, h, q, k: np.where(q > k, 1, 0) == 1, "NumPy needs values.*use PyTorch"),
        (writes_an_element, r"t\[q_idx\] = x is not supported.*use torch.where"),
        (lambda b, h, q, k: torch.ones(9)[torch.arange(9) < q].sum() > 3, r"for x\[mask\].sum\(\); got"),
        (lambda b, h, q, k: torch.rand_like(q.float()) < 0.5, "expected no random numbers, got aten.rand_like"),
        (
            lambda b, h, q, k: (q >= k) & (torch.rand(()) < 0.5),
            "expected no random numbers, got aten.rand.default",
        ),
        (
            lambda b, h, q, k: (q >= k) & torch.empty(8).bernoulli_().bool()[k],
            "expected no random numbers, got aten.bern",
        ),
        (changes_a_tensor, "in-place operations are not supported, got aten.sub_"),
        (picks_by_truth, "expected operations that torch.vmap supports"),
        (
            lambda b, h, q, k: q - k,
            r"expected a function that returns a 0-d bool tensor, got torch.int64 of shape \(\); compare it",
        ),
        (lambda b, h, q, k: (q > k)[None], r"got torch.bool of shape \(1,\); reduce it"),
        (lambda b, h, q, k: True, "expected a function that returns a 0-d bool tensor, got True"),
        (
            lambda b, h, q, k: torch.zeros(9, device="meta")[q] > k,
            "expected references to plain tensors, got a meta tensor",
        ),
    ],
)
def test_refused(mask_mod, words):
    with pytest.raises(TypeError, match=f"^mask_mod: .*{words}"):
        p.interop.from_mask_mod(mask_mod)


LAYOUT = torch.from_numpy(np.random.default_rng(0).random((4, 9, 9)) < 0.5)
LOOKUPS = {  # as FlexAttention evaluates them, but index_select by a 0-d index, of which torch.vmap returns the table
    "rows": (lambda b, h, q, k: LAYOUT[h, q, :][k], lambda b, h, q, k: LAYOUT[h, q, k]),
    "columns": (lambda b, h, q, k: LAYOUT[:, :, k][h, q], lambda b, h, q, k: LAYOUT[h, q, k]),
    "ellipsis": (lambda b, h, q, k: LAYOUT[..., k][h][q], lambda b, h, q, k: LAYOUT[h, q, k]),
    "one by one": (lambda b, h, q, k: LAYOUT[:, :, k][:, q][h], lambda b, h, q, k: LAYOUT[h, q, k]),
    "slices": (lambda b, h, q, k: LAYOUT[1:, q, 2:][0, k % 7], lambda b, h, q, k: LAYOUT[1, q, k % 7 + 2]),
    "sum": (lambda b, h, q, k: LAYOUT[h, :, k].sum() > q, lambda b, h, q, k: LAYOUT.sum(1)[h, k] > q),
    "index_select": (
        lambda b, h, q, k: LAYOUT[0].index_select(0, q).squeeze(0).index_select(0, k).squeeze(),
        lambda b, h, q, k: LAYOUT[0][q, k],
    ),
    "index_select and [0]": (
        lambda b, h, q, k: torch.index_select(LAYOUT[1, 2], 0, k)[0] & (k <= q),
        lambda b, h, q, k: LAYOUT[1, 2][k] & (k <= q),
    ),
}


@pytest.mark.unfollowed
@pytest.mark.parametrize("name", LOOKUPS)
def test_look_ups_by_slices(name):
    mask_mod, same = LOOKUPS[name]
    expected = everywhere(same, 1, 4, 9, 9)
    assert np.array_equal(pairs(p.interop.from_mask_mod(mask_mod), 1, 4, 9, 9), expected)
    if name in ("rows", "columns", "ellipsis", "one by one"):  # as if written so
        joined, written = (p.interop.from_mask_mod(function).trace.steps for function in (mask_mod, same))
        assert [step.args for step in joined] == [step.args for step in written]
    if "select" not in name:
        assert np.array_equal(everywhere(mask_mod, 1, 4, 9, 9), expected)


TABLE = LAYOUT[1]
INDEXED = {  # each also a function of 0-d tensors in plain PyTorch
    "None": lambda b, h, q, k: TABLE[None, q, k][0] | TABLE[q, None, k][0] & TABLE[k, q, None][0],
    "None and ...": lambda b, h, q, k: LAYOUT[h, ..., None][q, k, 0] & LAYOUT[None, ..., k][0, h, q],
    "None and slices": lambda b, h, q, k: (LAYOUT[None, h, 1:, k, None] == LAYOUT[h, None, 1:, q].T).all(),
    "list": lambda b, h, q, k: TABLE[q, [0, 3, 5]].any() & LAYOUT[h, [1, 2], k].all(),
    "array": lambda b, h, q, k: TABLE[q, np.array([[0, 3], [5, 7]])].sum() > k,
    "vector beside a slice": lambda b, h, q, k: TABLE[:, torch.stack([q, k])].sum() > 8,
    "index_select": lambda b, h, q, k: torch.index_select(TABLE, 1, k.reshape(1))[q, 0],
    "index_select and causal": lambda b, h, q, k: torch.index_select(TABLE, 1, k.reshape(1))[q].squeeze() & (q >= k),
    "gather": lambda b, h, q, k: torch.gather(TABLE, 1, k.expand(9, 1))[q, 0],
    "take_along_dim": lambda b, h, q, k: torch.take_along_dim(TABLE, k.reshape(1, 1), 1)[q, 0],
    "scatter": lambda b, h, q, k: torch.zeros(9).scatter(0, k.reshape(1), 1.0)[q] > 0,
    "index_fill": lambda b, h, q, k: torch.zeros(9).index_fill(0, k.reshape(1), 1.0)[q] > 0,
    "own tensors": lambda b, h, q, k: changed_own_tensors()[q] >= k,
}


def changed_own_tensors():
    """Tensors that the function makes may change; one_hot writes to one, too."""
    found = torch.nn.functional.one_hot(torch.arange(9), 9).sum(0) + torch.tensor([1] * 9).mul_(2)
    found[3:].add_(2)
    found += 1
    return found


@pytest.mark.unfollowed
@pytest.mark.parametrize("name", INDEXED)
def test_look_ups_as_in_loops(name):
    """Also by operations that return an array whose first axis is the key."""
    mask_mod, expected = INDEXED[name], np.empty((1, 4, 9, 9), bool)
    for at in np.ndindex(expected.shape):
        expected[at] = bool(mask_mod(*map(torch.tensor, at)))
    pattern = p.interop.from_mask_mod(mask_mod, heads=4)
    assert np.array_equal(pairs(pattern, 1, 4, 9, 9), expected)
    assert np.array_equal(planned(pattern, 1, 4, 9, 9), expected)


CAPTURED = torch.zeros(9, dtype=torch.int64)


def adds_to_a_global(b, h, q, k):
    global CAPTURED
    CAPTURED += 1
    return CAPTURED[q] >= k


def writes_to_a_view(b, h, q, k):
    CAPTURED.view(3, 3)[0, 0] = 5
    return CAPTURED[q] >= k


@pytest.mark.parametrize(
    "mask_mod",
    [
        adds_to_a_global,
        writes_to_a_view,
        lambda b, h, q, k: CAPTURED.add_(1)[q] >= k,
        lambda b, h, q, k: CAPTURED.fill_(7)[q] >= k,
        lambda b, h, q, k: CAPTURED.data.add_(1)[q] >= k,
        lambda b, h, q, k: CAPTURED.__iadd__(1)[q] >= k,
        lambda b, h, q, k: torch.add(CAPTURED, 1, out=CAPTURED)[q] >= k,
        lambda b, h, q, k: torch.ops.aten.add_(CAPTURED, 1)[q] >= k,
        lambda b, h, q, k: torch.nn.functional.threshold(CAPTURED, 1, 5, inplace=True)[q] >= k,
        lambda b, h, q, k: (torch._foreach_add_([CAPTURED], 1), q >= k)[1],
        lambda b, h, q, k: (torch.from_numpy(CAPTURED.numpy()).add_(1), q >= k)[1],
    ],
)
def test_captured_tensors_do_not_change(mask_mod):
    captured = CAPTURED
    with pytest.raises(
        TypeError, match=r"^mask_mod: a captured tensor must not change, got aten.*; write .*line \d+\)"
    ):
        p.interop.from_mask_mod(mask_mod)
    assert CAPTURED is captured and not captured.any()


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, at: table[at],
        lambda table, at: table.index_select(0, at.reshape(1))[0],
        lambda table, at: torch.gather(table, 0, at.reshape(1))[0],
        lambda table, at: torch.take(table, at),
    ],
)
def test_tables_that_are_too_short_for_any_index(look_up):
    for argument in range(4):
        for length in (0, 2):
            table = torch.arange(length)
            with pytest.raises(ValueError, match="^mask_mod: index out of range: "):
                pattern = p.interop.from_mask_mod(
                    lambda *at, n=argument, t=table: look_up(t, at[n]) > 0, batch=3, heads=3
                )
                pattern.index_set(3, 3, batch=2, head=2)


def test_tables_that_are_too_short():
    pattern = p.interop.from_mask_mod(documents([3, 5]))
    assert pattern.index_set(8, 8).nnz == 9 + 25
    with pytest.raises(ValueError, match="^mask_mod: index out of range: index 8"):
        pattern.index_set(8, 9)


@pytest.mark.parametrize(
    "batch, heads, error", [(0, None, ValueError), (None, 1.0, TypeError), (True, None, TypeError)]
)
def test_sizes_are_checked(batch, heads, error):
    with pytest.raises(error, match="^(batch|heads): expected"):
        p.interop.from_mask_mod(causal, batch=batch, heads=heads)


def test_unresolved():
    pattern = p.interop.from_mask_mod(padding([3, 4]))
    with pytest.raises(ValueError, match=r"^mask_mod: .*use \.at\(batch, head\)"):
        pattern.bind(8, 8).allows(np.arange(8), np.arange(8))


# -- BlockMask ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "causal, fewer queries", "causal documents", "natten", "by entry and head"])
@pytest.mark.parametrize("block", [16, (32, 16)])
def test_block_mask(name, block):
    mask_mod, *sizes = GALLERY[name]
    block_mask = flex.create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=block)
    assert np.array_equal(pairs(p.interop.from_block_mask(block_mask), *sizes), everywhere(mask_mod, *sizes))


def test_block_mask_of_lists():
    """Blocks that are listed without a mask_mod, and full ones that it is not asked about."""
    counts, listed = torch.tensor([[[1, 2]]]), torch.tensor([[[[2, 0, 0], [1, 0, 0]]]])
    plain = flex.BlockMask.from_kv_blocks(counts, listed, BLOCK_SIZE=16, seq_lengths=(30, 44))
    layout = np.zeros((2, 3), bool)
    layout[0, 2] = layout[1, :2] = True
    tokens = np.kron(layout, np.ones((16, 16), bool))[:30, :44]
    assert np.array_equal(pairs(p.interop.from_block_mask(plain), 1, 1, 30, 44)[0, 0], tokens)
    full = torch.zeros_like(counts), torch.zeros_like(listed)
    full[0][0, 0, 1], full[1][0, 0, 1, 0] = 1, 2
    mixed = flex.BlockMask.from_kv_blocks(counts, listed, *full, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(30, 44))
    expected = tokens & np.tri(30, 44, dtype=bool)
    expected[16:, 32:] = True
    assert np.array_equal(pairs(p.interop.from_block_mask(mixed), 1, 1, 30, 44)[0, 0], expected)


def test_what_is_no_block_mask():
    with pytest.raises(TypeError, match="^block_mask: expected a BlockMask, got function"):
        p.interop.from_block_mask(causal)
