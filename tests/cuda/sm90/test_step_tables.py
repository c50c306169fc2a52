"""Tables of steps from bits of rows, made natively: those of the layout of the same plan."""

from __future__ import annotations

import numpy as np
import pytest

from spattn.cuda.sm90.forward.launches import MERGE_TABLES
from spattn.cuda.sm90.forward.params import PLAN_POINTERS
from spattn.cuda.sm90.forward.tables import ENTRY, WORK, make_layout
from spattn.planning.contract.types import NO_ORDER
from spattn.planning.contract.types import VIEW as PLAN_VIEW
from spattn.planning.contract.validated import made_validated
from spattn.schedule import few_queries
from spattn.schedule._few_queries import StepTables, tables_of_rows
from spattn.schedule.pack_heads import pack_heads
from spattn.schedule.tasks import TASK, merge_heads, order_tasks
from spattn.schedule.tensor_maps import VIEW

pytestmark = pytest.mark.family("sm90")

EXAMPLES = 60  # take 1 s
NAMES = (*PLAN_POINTERS, *MERGE_TABLES, "counters")
LENGTH_AT = VIEW.itemsize + VIEW.fields["extent"][1] + 8


def draw_bits(rng, variants, q_len, kv_len):
    """Rows of random, all, periodic, adjacent or no keys, as bools (variants, queries, multiple of 64)."""
    bits = np.zeros((variants, q_len, -(-kv_len // 64) * 64), bool)
    for own in bits[:, :, :kv_len]:
        kind = rng.integers(5)
        if kind == 0:
            own[...] = rng.random(own.shape) < rng.random() ** 3
        elif kind == 1:
            own[...] = True
        elif kind == 2:
            own[:, :: rng.integers(1, 130)] = True
        elif kind == 3:
            own[:, rng.integers(kv_len) :] = True
    return bits


def fragments(masks):
    """Bitmasks in accumulator order as bools (n, 64, 64)."""
    row, column = np.divmod(np.arange(64 * 64), 64)
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    bit = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return (masks[:, thread] >> bit.astype(np.uint32) & 1).astype(bool).reshape(-1, 64, 64)


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_tables_are_those_of_the_plan(seed):
    rng = np.random.default_rng(seed)
    group, heads_kv, batch = int(rng.choice([1, 1, 2, 3, 4, 8])), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    heads = 1 << (group - 1).bit_length()
    q_len, kv_len = int(rng.integers(1, 64 // heads + 1 if heads > 8 else 9)), int(rng.integers(1, 3000))
    tile, workers = -(-heads * q_len // 16) * 16, int(rng.choice([1, 2, 7, 30]))
    variants = int(rng.integers(1, batch * heads_kv + 1))
    bits = draw_bits(rng, variants, q_len, kv_len)
    words = np.packbits(bits, axis=-1, bitorder="little").view(np.uint64)
    variant = rng.integers(0, variants, (batch, heads_kv)).astype(np.int32)
    fields = tables_of_rows(words, kv_len, workers, None, tile)
    components, _ = few_queries._components(variants, q_len, tile)
    fields |= {"q_len": q_len, "kv_len": kv_len, "block_kv": 64, "components": components}
    fields |= {"variant": np.repeat(variant, group, axis=1), "q_order": NO_ORDER, "kv_order": NO_ORDER}
    plan = made_validated(None, fields)
    plan = plan if group == 1 else pack_heads(plan, group)
    layout = make_layout(plan)
    views = plan.views.tobytes(), layout.query_views.tobytes(), layout.key_views.tobytes()
    form = StepTables(batch, group * heads_kv, q_len, group, 1, tile, workers, *views, LENGTH_AT, 16)
    made = form.of(words, plan.variant.repeat(group, axis=1), kv_len)
    image = np.full(made.nbytes, 0xAB, np.uint8)
    made.write(image.ctypes.data)

    def table(name, dtype, count):
        first = made.addresses(0)[NAMES.index(name)]
        return image[first : first + count * np.dtype(dtype).itemsize].view(dtype)

    work, tiles = table("work", WORK, len(plan.work)), len(layout.entries)
    assert all((work[name] == layout.work[name]).all() for name in WORK.names if name != "slot")
    assert (work["slot"] == plan.work["slot"]).all()  # without in-kernel reductions
    assert (table("entries", ENTRY, tiles) == layout.entries).all()
    masks, expected = table("entry_masks", np.int32, tiles), fragments(layout.masks[:, 0])
    found = fragments(table("masks", np.uint32, 128 * (masks.max(initial=-1) + 1)).reshape(-1, 128))
    row, apart = np.arange(64), tile // heads
    real = (row // apart < group) & (row % apart < q_len) & (row < tile)
    assert ((masks < 0) == (layout.entry_masks < 0)).all()
    for own, other in zip(masks, layout.entry_masks, strict=True):
        assert own < 0 or (found[own][real] == expected[other][real]).all()
    for name in ("merge_rows", "merge_indptr", "merge_sources"):
        assert (table(name, np.int32, len(getattr(plan, name))) == getattr(plan, name)).all()
    of_heads = merge_heads(plan.merge_variants, plan.variant, batch, heads_kv)
    assert (table("merge_heads", np.int32, of_heads.size).reshape(-1, 4) == of_heads).all()
    views = table("query_views", VIEW, 2), table("key_views", VIEW, 2)
    assert (views[0] == layout.query_views).all() and (views[1] == layout.key_views).all()
    assert not table("counters", np.int32, 16).any()
    own = table("tasks", TASK, made.tasks)
    same = order_tasks(plan, np.ones(len(plan.work), bool), batch, heads_kv, heads_kv, 1 << 30)
    length = plan.work["end"] - plan.work["begin"]
    assert sorted(own.tolist()) == sorted(same.tolist()) and (np.diff(length[own["item"]]) <= 0).all()
    assert (made.longest, made.slots) == (length.max(initial=0), plan.slots)
    assert made.merges == np.diff(plan.merge_variants)[variant].max()


def test_invalid_tables_are_refused():
    words, views = np.ones((1, 2, 2), np.uint64), (view_of((2, 1), (16, 1)), bytes(200), bytes(200), 0, 16)
    one, two, three = np.zeros((1, 1), np.int32), np.ones((1, 1), np.int32), np.zeros((3, 1), np.int32)
    form = StepTables(1, 1, 2, 1, 1, 16, 1, *views)
    for variant, kv_len, what in ((one, 300, "words"), (two, 100, "variant"), (three, 100, "variant")):
        with pytest.raises(ValueError, match=what):
            form.of(words, variant, kv_len)
    with pytest.raises(ValueError, match="tile"):
        StepTables(1, 1, 2, 1, 1, 8, 1, *views)
    with pytest.raises(ValueError, match="tile: expected at least 2"):
        tables_of_rows(words, 100, 1, None, 1)


def view_of(extent, box):
    """The view of queries in one tile, as bytes."""
    view = np.zeros(2, PLAN_VIEW)
    view["stride"], view["extent"], view["box"] = (0, extent[0], 1), (1, *extent[::-1]), (1, *box[::-1])
    view["grid"], view["tiles"] = 1, 1
    return view.tobytes()


@pytest.mark.parametrize("tiles", [0, 1, 90])
def test_rows_that_are_not_written_once_are_refused(tiles):
    """The proof reads the tables: it notices each number that is wrong."""
    rows = np.zeros((1, 3, 90), np.uint64)
    rows[:, :, :tiles] = 2**64 - 1
    form = StepTables(1, 2, 3, 2, 1, 16, 3, view_of((3, 2), (8, 2)), bytes(200), bytes(200), 0, 4)
    made = form.of(rows, np.zeros((1, 1), np.int32), 64 * 90)
    image = np.empty(made.nbytes, np.uint8)
    made.write(image.ctypes.data)
    pieces = {0: 0, 1: 1, 90: 3}[tiles]
    merges = 0 if pieces == 1 else 6
    at = dict(zip(NAMES, made.addresses(0), strict=True))
    numbers = {"merge_rows": range(merges), "merge_indptr": range(merges and merges + 1)}
    numbers["merge_sources"] = range(merges * pieces)
    numbers["work"] = [
        8 * n + field for n in range(pieces) for field in (0, 1, 2, 3, 4, 5, 7)
    ]  # the views of keys differ
    for name, of_table in numbers.items():
        for number in of_table:
            word = image[at[name] + 4 * number :][:4].view(np.int32)
            for change in (-1, 1, 16):
                word += change
                with pytest.raises(RuntimeError, match="a row of variant 0 is not written once"):
                    made.check(image.ctypes.data)
                word -= change
    made.check(image.ctypes.data)


def test_views_that_do_not_hold_each_row_once_are_refused():
    for extent, box in (((2, 2), (8, 2)), ((4, 2), (8, 2)), ((3, 2), (16, 1)), ((3, 1), (8, 2))):
        with pytest.raises(ValueError, match="views: expected 6 rows"):
            StepTables(1, 2, 3, 2, 1, 16, 3, view_of(extent, box), bytes(200), bytes(200), 0, 4)


def test_heads_of_a_group_with_rows_of_their_own():
    rows = np.ones((2, 1, 1), np.uint64)
    form = StepTables(2, 4, 1, 2, 1, 16, 1, view_of((1, 2), (8, 2)), bytes(200), bytes(200), 0, 4)
    assert form.of(rows, np.array([[0, 0, 1, 1]], np.int32), 64).tasks == 4
    assert form.of(rows, np.array([[0, 0, 1, 1], [0, 0, 0, 1]], np.int32), 64) is None
