"""Tables of steps from bits of rows, made natively: those of the layout of the same plan."""

from __future__ import annotations

import numpy as np
import pytest

from spattn.cuda.sm90.forward.tables import ENTRY, WORK, make_layout
from spattn.planning.contract.types import NO_ORDER
from spattn.planning.contract.validated import made_validated
from spattn.schedule import few_queries
from spattn.schedule._few_queries import device_tables, tables_of_rows
from spattn.schedule.pack_heads import pack_heads
from spattn.schedule.proof import Writers, prove
from spattn.schedule.tasks import TASK, merge_heads, order_tasks

pytestmark = pytest.mark.family("sm90")

EXAMPLES = 60  # take 1 s


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
    components, query_view = few_queries._components(variants, q_len, tile)
    fields |= {"q_len": q_len, "kv_len": kv_len, "block_kv": 64, "components": components}
    fields |= {"variant": np.repeat(variant, group, axis=1), "q_order": NO_ORDER, "kv_order": NO_ORDER}
    plan = made_validated(None, fields)
    plan = plan if group == 1 else pack_heads(plan, group)
    layout = make_layout(plan)
    views = layout.query_views.view(np.uint8), layout.key_views.view(np.uint8)
    image, offsets, items, sizes = device_tables(words, variant, kv_len, group, 1, tile, workers, *views, 16)
    prove(Writers(plan.views, query_view, *items, q_len * group, tile))

    def table(name, dtype, count):
        first = offsets[name]
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
    tasks, longest, slots, most = sizes
    own = table("tasks", TASK, tasks)
    same = order_tasks(plan, np.ones(len(plan.work), bool), batch, heads_kv, heads_kv, 1 << 30)
    length = plan.work["end"] - plan.work["begin"]
    assert sorted(own.tolist()) == sorted(same.tolist()) and (np.diff(length[own["item"]]) <= 0).all()
    assert (longest, slots) == (length.max(initial=0), plan.slots)
    assert most == np.diff(plan.merge_variants)[variant].max()


def test_invalid_tables_are_refused():
    words, views = np.ones((1, 2, 2), np.uint64), np.zeros(8, np.uint8)
    one, two = np.zeros((1, 1), np.int32), np.ones((1, 1), np.int32)
    for variant, kv_len, tile, what in ((one, 300, 16, "words"), (two, 100, 16, "variant"), (one, 100, 8, "tile")):
        with pytest.raises(ValueError, match=what):
            device_tables(words, variant, kv_len, 1, 1, tile, 1, views, views, 16)
    with pytest.raises(ValueError, match="tile: expected at least 2"):
        tables_of_rows(words, 100, 1, None, 1)
