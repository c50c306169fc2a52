"""Selections: what indices on the GPU allow is what the pattern of the same numbers allows, whenever they are read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import spattn
from spattn import patterns
from spattn.cuda.sm90 import dynamic_masks
from spattn.patterns import dynamic
from spattn.patterns.dynamic import Form
from spattn.planning.contract.types import positions, tile_lists
from spattn.schedule import compiler

from ...tables import check_table

pytestmark = pytest.mark.family("sm90")

HOSTS = {
    "full": (patterns.Full(), 400, 400),
    "whole tiles": (patterns.Full(), 256, 640),
    "more keys": (patterns.Full(), 200, 333),
    "causal": (patterns.Causal(), 700, 700),
    "causal, more keys": (patterns.Causal(), 260, 391),
    "causal, more queries": (patterns.Causal(), 391, 260),
    "more queries": (patterns.Full(), 591, 460),
    "window": (patterns.SlidingWindow(70), 400, 400),
    "dilated": (patterns.DilatedWindow(20, 20, 3), 401, 401),
    "strided": (patterns.strided(16), 400, 400),
    "longformer": (patterns.longformer(64, global_tokens=(0, 1, 200)), 400, 400),
    "bigbird": (patterns.BigBird(64, 3, 1, 1), 704, 704),
    "neighborhood": (patterns.Neighborhood((18, 22), 7), 396, 396),
    "nothing": (patterns.Full() - patterns.Full(), 150, 150),
    "per head": (patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30))), 260, 260),
    "one query": (patterns.Full(), 1, 5000),
}


def numbers(rng, shape, least, stop):
    return rng.integers(least, stop, shape)


def blocks(rng, kv_len, batch, heads, block_q, block_kv, count=3):
    """Key blocks for each block of queries. Some are none: a bit of theirs would be the next row's."""
    own, shape = -(-kv_len // block_kv), (batch, heads, -(-kv_len // block_q), count)
    found, next_row = numbers(rng, shape, -2, own + 1), -(-own // 32) * 32
    return np.where(rng.random(shape) < 0.1, next_row, found)


def starts(rng, kv_len, documents):
    """Cumulative lengths, documents without tokens among them; some tokens are of none."""
    return np.concatenate([[0], np.sort(numbers(rng, documents, 0, kv_len + 1))])


# -- bounds, without a GPU -------------------------------------------------------------------------------------------

FORMS = {
    "blocks of 128": lambda rng, n: (Form("blocks", 1, 1, (3,), -(-n // 128), 128, 64), blocks(rng, n, 1, 1, 128, 64)),
    "blocks of 64": lambda rng, n: (Form("blocks", 1, 1, (3,), -(-n // 64), 64, 128), blocks(rng, n, 1, 1, 64, 128)),
    "odd blocks": lambda rng, n: (Form("blocks", 1, 1, (3,), -(-n // 37), 37, 21), blocks(rng, n, 1, 1, 37, 21)),
    "lengths": lambda rng, n: (Form("lengths", 1, 1, (1,)), int(rng.integers(0, n + 1))),
    "documents": lambda rng, n: (Form("documents", 1, 1, (9,)), starts(rng, n, 8)),
    "lines": lambda rng, n: (Form("lines", 1, 1, (1, 2)), numbers(rng, 3, 0, n // 2)),
}


def looked_at(form, given, q, k):
    """(any, every) of the pairs of a tile, as the kernel that selects tiles sees them."""
    q, k = q[:, None], k[None]
    if form.name == "blocks":
        listed = given[0, 0][np.maximum(q, 0) // form.block_q]
        allowed = (listed == (k // form.block_kv)[..., None]).any(axis=-1) & (q >= 0)
    elif form.name == "lengths":
        allowed = (k < given) & (q == q)
    elif form.name == "documents":
        same = np.searchsorted(given, q, "right") == np.searchsorted(given, k, "right")
        allowed = same & (k < given[-1]) & (q >= 0)
    else:
        allowed = np.isin(k, given[:1]) | np.isin(q - k, given[1:])
        return allowed.any(), (allowed & (k <= q)).all()  # columns behind the queries are found there, too
    return allowed.any(), allowed.all()


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_room(host, form, rows):
    """No list has more tiles, and no variant more bitmasks, than there is room for."""
    pattern, q_len, kv_len = host
    form, given = form(np.random.default_rng(q_len), kv_len)
    plan = compiler.plan(pattern, q_len, kv_len, heads=2, tile=(rows, 64), workers=3)
    room, lists = dynamic_masks.room(plan, form, q_len), tile_lists(plan)
    masks = np.zeros(len(plan.work), int)
    for number, item in enumerate(plan.work):
        component, tiles = plan.components[item["component"]], 0
        place, real = positions(plan.views[component["query_view"]], np.array([item["query_tile"]]))
        q = place[real] + kv_len - q_len
        for e in range(item["begin"], item["end"]):
            view = plan.views[component["key_view"] + lists.key_view[e]]
            place, real = positions(view, lists.indices[e : e + 1])
            some, every = looked_at(form, given, q, place[real])
            tiles += some
            masks[number] += some and not (every and lists.mask[e] < 0)
        assert tiles <= room.tiles[number]
        assert masks[number] <= room.masks[number]
    for first, last in zip(plan.work_indptr, plan.work_indptr[1:], strict=False):
        assert masks[first:last].sum() <= room.all_masks


def test_views_of_keys():
    """Tiles of keys lie side by side in one view, or in several that have no key twice."""
    found = {
        name: dynamic_masks._key_views(compiler.plan(pattern, q_len, kv_len, tile=(128, 64)))
        for name, (pattern, q_len, kv_len) in HOSTS.items()
    }
    assert found["causal"] == found["window"] == found["full"] == 1 and found["more keys"] == 2
    assert found["strided"] is found["neighborhood"] is None
    twice = compiler.plan(patterns.Full(), 200, 333)
    views = twice.views.copy()
    views["offset"] = 0
    assert dynamic_masks._key_views(replace(twice, views=views)) is None


def test_items_of_variants():
    """Each pair of a variant of the plan and a selection has its own items, and its heads find them."""
    pattern = patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30)))
    plan = compiler.plan(pattern, 260, batch=2, heads=4)
    items = dynamic_masks.items_of(plan, Form("lengths", 2, 1, (1,)), 2, 4, 260)
    assert items.variant.tolist() == [[0, 0, 2, 2], [1, 1, 3, 3]]
    for pair, (variant, selection) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        own = slice(items.work_indptr[pair], items.work_indptr[pair + 1])
        assert (items.selections[own] == selection).all()
        np.testing.assert_array_equal(items.items[own], np.arange(*plan.work_indptr[variant : variant + 2]))


def test_changed_items_are_found():
    pattern = patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30)))
    plan = compiler.plan(pattern, 260, batch=2, heads=4)
    items = dynamic_masks.items_of(plan, Form("lengths", 2, 1, (1,)), 2, 4, 260)
    check_table("selected items", plan=plan, items=items)
    rooms, starts = items.work.copy(), items.starts.copy()
    rooms["end"][3] += 1
    starts[4:] += 1  # the room of one item: one tile more than it has
    twice = items.items.copy()
    twice[1] = twice[0]  # which is as long or longer
    longer = items._replace(work=rooms, starts=starts)
    for changed in (items._replace(items=twice), longer, items._replace(work=rooms), items._replace(starts=starts)):
        with pytest.raises(AssertionError):
            check_table("selected items", plan=plan, items=changed)


def test_too_many_tiles():
    plan = compiler.plan(patterns.Full(), 1 << 17)
    with pytest.raises(ValueError, match=r"pattern: expected a selection of at most 2147483647 tiles, got one of up"):
        dynamic_masks.items_of(plan, Form("lengths", 1025, 1, (1,)), 1025, 1, 1 << 17)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("blocks", lambda x: dynamic.DynamicKeyBlocks(x, 64, 64)),
        ("lengths", dynamic.DynamicKeyPadding),
        ("cu_seqlens", dynamic.DynamicDocuments),
        ("columns", lambda x: dynamic.DynamicVerticalSlash(x, x)),
    ],
)
def test_arrays_in_host_memory(name, make):
    """They are patterns' to take."""
    with pytest.raises(TypeError, match=f"{name}: expected an array on a GPU, got one in host memory"):
        make(np.zeros((2, 3), int))
    with pytest.raises(TypeError, match=f"{name}: expected a PyTorch or CuPy array on a GPU, got list"):
        make([1])


# -- on the GPU ------------------------------------------------------------------------------------------------------

SELECTIONS = {
    "blocks of 64": lambda rng, n, on: dynamic.DynamicKeyBlocks(on(blocks(rng, n, 2, 2, 64, 64)), 64, 64),
    "blocks of 128 for all": lambda rng, n, on: dynamic.DynamicKeyBlocks(
        on(blocks(rng, n, 1, 1, 128, 64)[0, 0]), 128, 64
    ),
    "blocks of 64/128": lambda rng, n, on: dynamic.DynamicKeyBlocks(on(blocks(rng, n, 2, 1, 64, 128)), 64, 128),
    "odd blocks": lambda rng, n, on: dynamic.DynamicKeyBlocks(on(blocks(rng, n, 1, 4, 37, 21, 9)), 37, 21),
    "no blocks": lambda rng, n, on: dynamic.DynamicKeyBlocks(on(blocks(rng, n, 1, 1, 64, 64, 0)), 64, 64),
    "padding": lambda rng, n, on: dynamic.DynamicKeyPadding(on(numbers(rng, 2, -3, n + 3))),
    "left padding": lambda rng, n, on: dynamic.DynamicKeyPadding(on(numbers(rng, 2, -3, n + 3)), left=True),
    "documents": lambda rng, n, on: dynamic.DynamicDocuments(on(starts(rng, n, 8))),
    "documents of entries": lambda rng, n, on: dynamic.DynamicDocuments(
        on(np.stack([starts(rng, n, 3) for _ in "ab"]))
    ),
    "lines": lambda rng, n, on: dynamic.DynamicVerticalSlash(
        on(numbers(rng, (2, 4, 5), -3, n + 3)), on(numbers(rng, (2, 4, 9), -3, n + 3))
    ),
    "lines for all": lambda rng, n, on: dynamic.DynamicVerticalSlash(on(numbers(rng, 3, 0, n)), on(np.arange(20))),
}


def on_gpu(torch, dtype="int64"):
    return lambda x: torch.from_numpy(x).to("cuda", getattr(torch, dtype))


def arrays_of(torch, q_len, kv_len, head_dim=64, heads=4, dtype="bfloat16"):
    make = torch.Generator("cuda").manual_seed(q_len)
    shapes = [(2, heads, q_len, head_dim), *[(2, 2, kv_len, head_dim)] * 2]
    return [torch.randn(shape, generator=make, device="cuda").to(getattr(torch, dtype)) for shape in shapes]


def assert_same(torch, got, expected):
    """To what rounds weights and results to 16 bits, in tiles of other shapes."""
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=1e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_patterns(torch, host, selection):
    """The results of a pattern and a selection are those of the pattern and the pattern of the same numbers."""
    pattern, q_len, kv_len = host
    q, k, v = arrays_of(torch, q_len, kv_len)
    chosen = pattern & selection(np.random.default_rng(kv_len), kv_len, on_gpu(torch))
    got = spattn.attention(q, k, v, chosen, return_lse=True)
    expected = spattn.attention(q, k, v, chosen.to_host(kv_len), return_lse=True)
    assert_same(torch, got, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_types(torch, head_dim, dtype):
    q, k, v = arrays_of(torch, 500, 500, head_dim, dtype="float16")
    selection = dynamic.DynamicKeyBlocks(
        on_gpu(torch, dtype)(blocks(np.random.default_rng(0), 500, 2, 2, 64, 64)), 64, 64
    )
    got = spattn.attention(q, k, v, selection, return_lse=True)
    assert_same(torch, got, spattn.attention(q, k, v, selection.to_host(500), return_lse=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("name", ["blocks of 64", "padding", "documents", "lines"])
def test_long_lists(torch, name):
    """More tiles than threads look at together."""
    n = 17000
    q, k, v = arrays_of(torch, n, n, 32)
    chosen = patterns.Causal() & SELECTIONS[name](np.random.default_rng(3), n, on_gpu(torch))
    got = spattn.attention(q, k, v, chosen, return_lse=True)
    assert_same(torch, got, spattn.attention(q, k, v, chosen.to_host(n), return_lse=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_strides(torch):
    """Indices may lie anywhere: a column of a larger array, or one that repeats."""
    rng, (q, k, v) = np.random.default_rng(1), arrays_of(torch, 500, 500)
    wide = on_gpu(torch)(blocks(rng, 500, 2, 2, 64, 64, 6))
    for chosen in (wide[..., ::2], wide.flip(-1), wide[:1, :1].expand(2, 4, -1, -1), wide.transpose(0, 1)):
        selection = dynamic.DynamicKeyBlocks(chosen, 64, 64)
        got = spattn.attention(q, k, v, selection, return_lse=True)
        assert_same(torch, got, spattn.attention(q, k, v, selection.to_host(500), return_lse=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_cupy(cupy, torch):
    rng = np.random.default_rng(2)
    q, k, v = (cupy.from_dlpack(x.half()) for x in arrays_of(torch, 300, 300))
    selection = dynamic.DynamicKeyPadding(cupy.asarray(numbers(rng, 2, 1, 300)))
    got = spattn.attention(q, k, v, selection, return_lse=True)
    expected = spattn.attention(q, k, v, selection.to_host(300), return_lse=True)
    assert_same(torch, [torch.from_dlpack(x) for x in got], [torch.from_dlpack(x) for x in expected])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_indices_are_read_by_the_stream(torch, selection):
    """Of a call, and of a graph that is replayed, at its time; the host waits for neither."""
    q, k, v = arrays_of(torch, 700, 700)
    first, second = (
        patterns.Causal() & selection(np.random.default_rng(seed), 700, on_gpu(torch)) for seed in range(2)
    )
    expected = [spattn.attention(q, k, v, one.to_host(700)) for one in (first, second)]
    spattn.attention(q, k, v, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = spattn.attention(q, k, v, first)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
        for a, b in zip(first.selection.arrays(), second.selection.arrays(), strict=True):
            a.copy_(b)
        got = spattn.attention(q, k, v, first)
        assert not side.query(), "the call waited for the stream"
    side.synchronize()
    graph.replay()
    for found in (got, replayed):
        assert_same(torch, [found], expected[1:])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_values_that_are_not_allowed(torch):
    """NaN where nobody may look has no influence, in tiles that others of their rows see."""
    q, k, v = arrays_of(torch, 500, 500)
    selection = dynamic.DynamicKeyPadding(on_gpu(torch)(np.array([300, 77])))
    expected = spattn.attention(q, k, v, selection)
    for entry, length in enumerate((300, 77)):
        k[entry, :, length:] = torch.nan
        v[entry, :, length:] = torch.inf
    assert_same(torch, [spattn.attention(q, k, v, selection)], [expected])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_recorded(torch, layout):
    """Gradients are those of what was allowed at the time of the call, whatever has become of the indices."""
    rng, arrays = np.random.default_rng(4), arrays_of(torch, 500, 500)
    dout = torch.randn_like(arrays[0])
    if layout == "bshd":
        *arrays, dout = (x.transpose(1, 2) for x in (*arrays, dout))
    chosen = patterns.Causal() & dynamic.DynamicKeyBlocks(on_gpu(torch)(blocks(rng, 500, 2, 2, 64, 64)), 64, 64)
    found = []
    for pattern in (chosen.to_host(500), chosen):
        leaves = [x.detach().clone().requires_grad_() for x in arrays]
        out, lse = spattn.attention(*leaves, pattern, return_lse=True, layout=layout)
        loss = (out * dout).sum() + lse.where(lse.isfinite(), 0).sum()
        if pattern is chosen:
            chosen.selection.blocks.fill_(0)
        loss.backward()
        found.append([x.grad for x in leaves])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)
    with torch.no_grad():
        spattn.attention(*leaves, chosen, layout=layout)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_errors(torch):
    q, k, v = arrays_of(torch, 200, 200)
    on = on_gpu(torch)
    rows = on(np.zeros((4, 2), np.int64))
    lengths = dynamic.DynamicKeyPadding(on(np.array([3, 4])))
    whole = dynamic.DynamicKeyBlocks(rows[:1], 1 << 40, 1 << 40)
    torch.testing.assert_close(spattn.attention(q, k, v, whole), spattn.attention(q, k, v), atol=1e-2, rtol=2e-2)
    with pytest.raises(ValueError, match=r"blocks: expected 2 query blocks \(200 tokens of 100\), got 4"):
        spattn.attention(q, k, v, dynamic.DynamicKeyBlocks(rows, 100, 64))
    with pytest.raises(ValueError, match=r"for 2 batch entries, got one for 3"):
        spattn.attention(q, k, v, dynamic.DynamicKeyPadding(on(np.arange(3))))
    with pytest.raises(ValueError, match=r"for a divisor of 4 heads, got one for 3"):
        spattn.attention(q, k, v, dynamic.DynamicKeyBlocks(rows.expand(1, 3, 4, 2), 64, 64))
    with pytest.raises(ValueError, match=r"a selection needs float16 or bfloat16.*got float32"):
        spattn.attention(q.float(), k.float(), v.float(), lengths)
    with pytest.raises(ValueError, match=r"requires backend 'cuda', got 'cpu'"):
        spattn.attention(q.cpu(), k.cpu(), v.cpu(), lengths)
    shifted, columns = torch.zeros(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape), q.mT.contiguous().mT
    for odd in (shifted, columns):
        with pytest.raises(ValueError, match=r"q, k, v: a selection needs contiguous, 16-byte aligned rows"):
            spattn.attention(odd, k, v, lengths)
    with pytest.raises(TypeError, match=r"lengths: expected int32 or int64, got float32"):
        dynamic.DynamicKeyPadding(torch.zeros(2, device="cuda"))
    with pytest.raises(ValueError, match=r"lengths: expected 1-D, got shape \(2, 2\)"):
        dynamic.DynamicKeyPadding(on(np.zeros((2, 2), np.int64)))
    with pytest.raises(ValueError, match=r"diagonals: expected the leading axes of columns"):
        dynamic.DynamicVerticalSlash(on(np.zeros((2, 2), np.int64)), on(np.zeros(2, np.int64)))
    with pytest.raises(TypeError, match=r"pattern: expected a Pattern, .*got DynamicKeyPadding"):
        spattn.plan(lengths, 200)
    assert repr(lengths) == "DynamicKeyPadding(lengths=<int64 (2,)>, left=False)"
