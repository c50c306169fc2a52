"""What GPUs are told of compositions, without a GPU: plans are chosen, and their tables read as the kernels read them.

Tables of the forward and of both passes of the backward visit each pair of the mask once and write each row once; room
for selections is enough; groups of problems keep to themselves.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import cuda
from spattn.arrays import namespace_of
from spattn.arrays.operand import Operand, row_major
from spattn.choose import machine_gpu as _choice
from spattn.choose.chooser import Sizes
from spattn.cuda.driver import device
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.sm90 import dynamic_masks
from spattn.cuda.sm90.backward import prepared as backward_prepared
from spattn.cuda.sm90.backward import tables as backward_layout
from spattn.cuda.sm90.forward import group
from spattn.cuda.sm90.forward import prepared as hopper_prepared
from spattn.cuda.sm90.forward.joined import join
from spattn.cuda.sm90.forward.tables import make_layout
from spattn.planning import positions
from spattn.planning.contract.types import tile_lists
from spattn.planning.contract.validated import validated
from spattn.request.call import Call
from spattn.schedule.pack_heads import pack_heads
from spattn.schedule.subtiles import EMPTY, FULL, by_keys, by_queries, subtile_masks
from spattn.testing import DTYPES

from . import draws, oracle
from .draws import Drawn
from .gpu import HOPPER_TILES, SELECTIONS
from .test_compositions import check_planned, drawing, index_sets, planned

pytestmark = [
    pytest.mark.unfollowed,
    pytest.mark.filterwarnings("ignore::spattn.EfficiencyWarning"),
]

SMS = 132


class Card:
    """An H100 that answers what planning asks."""

    name, capability, sm_count, shared_bytes, ordinal = "Card", (9, 0), SMS, 227 << 10, 0


@contextlib.contextmanager
def card(family):
    """Plans are for the kernels of a family on a GPU that is not there; none is kept of another one."""
    environment = {"SPATTN_CUDA_KERNEL": {"hopper": "auto", "portable": "portable"}[family]}
    with mock.patch.object(device, "get", lambda ordinal=None: Card()), mock.patch.dict("os.environ", environment):
        spattn.clear_plan_cache()
        yield
    spattn.clear_plan_cache()


@contextlib.contextmanager
def nothing_uploaded():
    """Tables stay where they are, and no kernel is compiled."""

    def upload(device, arrays):
        return None, dict.fromkeys(arrays, 0)

    with contextlib.ExitStack() as stack:
        for module in (hopper_prepared, backward_prepared, group):
            stack.enter_context(mock.patch.object(module, "upload", upload))
        yield


# -- tables, read as kernels do ----------------------------------------------------------------------------------------


def cells_of(spec, view, corner):
    """Positions that a tensor map reads for the box at `corner` (axis 2 first), -1 outside of it."""
    shift = 0, int(view["shift_y"]), int(view["shift_z"])
    total, inside = np.full(1, spec.offset, np.int64), np.ones(1, bool)
    for axis in (2, 1, 0):
        at = corner[axis] + shift[axis] + np.arange(spec.box[axis])
        total = (total[:, None] + at * spec.strides[axis]).ravel()
        inside = (inside[:, None] & (at < spec.extents[axis])).ravel()
    return np.where(inside, total, -1)


def fragments(masks, rows):
    """Bitmasks in the order of accumulators as booleans (n, rows, 64)."""
    row, column = np.divmod(np.arange(rows * 64), 64)
    thread = row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
    bit = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return (masks[:, row // 64, thread] >> bit.astype(np.uint32) & 1).astype(bool).reshape(-1, rows, 64)


def visit(visits, rows, keys, allowed):
    """Adds the allowed pairs of a tile; rows and keys below 0 are padding."""
    row, key = np.nonzero(allowed & (rows >= 0)[:, None] & (keys >= 0))
    np.add.at(visits, (rows[row], keys[key]), 1)


class Writers:
    """Who writes which rows of a variant, and which rows of the workspace are filled and read."""

    def __init__(self, length, block):
        self.written, self.filled, self.read = np.zeros(length, int), Counter(), Counter()
        self._block = block

    def item(self, slot, rows):
        cell = np.nonzero(rows >= 0)[0]
        if slot >= 0:
            self.filled.update((slot * self._block + cell).tolist())
        else:
            self.written[rows[cell]] += 1

    def reduction(self, prior, rows):
        self.read.update(prior[: len(rows)][rows >= 0].tolist())

    def merges(self, merges, variant):
        own = slice(merges.variants[variant], merges.variants[variant + 1])
        np.add.at(self.written, merges.rows[own], 1)
        bounds = merges.indptr[[own.start, own.stop]]
        self.read.update(merges.sources[slice(*bounds)].tolist())

    def check(self):
        assert (self.written == 1).all(), f"rows {np.flatnonzero(self.written != 1)[:5]} are not written once"
        assert self.filled == self.read, "what is put together is not what was computed"


def forward_tables(plan):
    """How often the Hopper forward visits each pair, (variants, q_len, kv_len); AssertionError unless every row is
    written once."""
    layout = make_layout(plan)
    specs, rows = layout.query_specs + layout.key_specs, plan.block_q
    parts = max(1, rows // 64)
    bits = fragments(layout.masks, 64 * layout.masks.shape[1]) if len(layout.masks) else layout.masks
    visits = np.zeros((plan.variants, plan.q_len, plan.kv_len), np.int16)
    for variant in range(plan.variants):
        writers = Writers(plan.q_len, rows)
        for number in range(*plan.work_indptr[variant : variant + 2]):
            item = layout.work[number]
            assert plan.components["variant"][plan.work["component"][number]] == variant
            if len(layout.query_rows):
                own = layout.query_rows[item["x"]]
            else:
                view = layout.query_views[item["query_view"]]
                corners = [[item[a] + part * view["half"][2 - i] for i, a in enumerate("xyz")] for part in range(parts)]
                own = np.concatenate([cells_of(specs[view["map"] // 2], view, corner) for corner in corners])
            assert len(own) <= rows  # fewer where heads that are packed do not fill it
            own = np.pad(own, (0, rows - len(own)), constant_values=-1)
            for e in range(item["begin"], item["end"]):
                entry, mask = layout.entries[e], layout.entry_masks[e]
                view = layout.key_views[item["key_view"] + entry["view"]]
                if layout.gathers:
                    keys = layout.key_rows[view["map"] + entry["x"]]
                else:
                    keys = cells_of(specs[view["map"] // 2], view, [entry[a] for a in "xyz"])
                allowed = np.ones((rows, len(keys)), bool) if mask < 0 else bits[mask, :rows, : len(keys)]
                visit(visits[variant], own, keys, allowed)
            writers.item(int(item["slot"]), own)
            if item["slot"] <= -2:
                writers.reduction(layout.priors[-2 - item["slot"]], own)
        writers.merges(layout.merges, variant)
        writers.check()
    return visits


def subtile_rows(plan, view, tile, order):
    """The positions of the cells of a tile, in an order, -1 for padding."""
    if tile >= plan.views["tiles"][view]:
        return np.full(len(order), -1)
    place, real = positions(plan.views[view], np.array([tile]))
    return np.where(real[0], place[0], -1)[order]


def backward_tables(plan, sizes, workers):
    """(variants, q_len, kv_len) of the pass by queries, and (kinds of key heads, query heads of one, q_len, kv_len) of
    the pass by keys, with the kind of each key head; AssertionError unless every row is written once."""
    batch, heads_q, heads_kv, q_len, kv_len = sizes
    cut = backward_layout.lay_out_views(plan).cut
    masks = subtile_masks(plan, cut)

    def allowed(numbers):
        """Of subtiles of queries one below the other."""
        kinds = {FULL: np.ones((cut.side, 64), bool), EMPTY: np.zeros((cut.side, 64), bool)}
        return [kinds.get(int(n), masks.bits[max(n, 0)]) for n in numbers]

    def queries_of(view, tile):
        return subtile_rows(plan, view, tile, cut.orders[cut.of_view[view]]).reshape(-1, cut.side)

    keys_in_order = np.arange(plan.block_kv)
    queries = by_queries(plan, cut)
    found = np.zeros((plan.variants, q_len, kv_len), np.int16)
    for variant in range(plan.variants):
        writers = Writers(q_len, plan.block_q)
        for item in queries.work[slice(*queries.work_indptr[variant : variant + 2])]:
            rows = queries_of(item["view"], item["tile"])
            for e in range(item["begin"], item["end"]):
                entry = queries.entries[e]
                keys = subtile_rows(plan, item["columns"] + entry["view"], entry["tile"], keys_in_order)
                visit(found[variant], rows.ravel(), keys, np.concatenate(allowed(queries.masks[e])))
            writers.item(int(item["slot"]), rows.ravel())
        writers.merges(queries.merges, variant)
        writers.check()
    keys = by_keys(plan, batch, heads_q, heads_kv, cut, 2, workers)
    kinds, group = len(keys.work_indptr) - 1, heads_q // heads_kv
    transposed = np.zeros((kinds, group, q_len, kv_len), np.int16)
    for kind in range(kinds):
        writers = Writers(kv_len, 2 * plan.block_kv)
        for item in keys.work[slice(*keys.work_indptr[kind : kind + 2])]:
            rows = [subtile_rows(plan, item["view"], item["tile"] + n, keys_in_order) for n in range(2)]
            for e in range(item["begin"], item["end"]):
                entry = keys.entries[e]
                own = queries_of(entry["view"], entry["tile"])[entry["part"]]
                for keys_of, part in zip(rows, allowed(keys.masks[e]), strict=True):
                    for head in range(item["heads"]):
                        visit(transposed[kind, entry["head"] + head], own, keys_of, part)
            writers.item(int(item["slot"]), np.concatenate(rows))
        writers.merges(keys.merges, kind)
        writers.check()
    return found, transposed, keys.variant


def check_tables(case, plan, visits):
    """Each variant's are those of the mask of all heads that have it."""
    allowed, variant = case.allowed(), np.broadcast_to(plan.variant, case.sizes[:2])
    for b, h in np.ndindex(variant.shape):
        wrong = np.argwhere(visits[variant[b, h]] != allowed[b, h])
        assert not len(wrong), f"batch entry {b}, head {h}: pairs {wrong[:5].tolist()} are not visited once"


# -- properties --------------------------------------------------------------------------------------------------------


def check_choices(source):
    """Whatever is chosen for a GPU is a plan of the mask: for the forward and the gradients of either family, by price
    alone; and plans in smaller tiles have a price."""
    case = draws.draw_case(source, 300)
    source.note(case)
    batch, heads_q, heads_kv, q_len, kv_len = case.sizes
    dim = source.choice([64, 128])
    sets = index_sets(case)
    made = [_choice.cheapest(case.pattern, q_len, kv_len, Sizes(batch, heads_q, heads_kv, dim, dim), SMS)]
    family, dtype = source.choice(["hopper", "hopper", "portable"]), source.choice(["bfloat16", "float32"])
    empty = np.zeros((), DTYPES[dtype])
    shapes = [(heads_q, q_len, dim), (heads_kv, kv_len, dim), (heads_kv, kv_len, dim)]
    call = Call.of(*(np.broadcast_to(empty, (batch, *shape)) for shape in shapes))
    with card(family):
        made += [cuda.plan_for(case.pattern, call, backward=backward) for backward in (False, True)]
    for tile in source.choice([[(1, 64), (16, 64)], [(4, 64), (33, 64)]]):
        plan = planned(case, draws.How(tile, None, source.choice([1, 3])))
        assert cuda.predicted_ms(plan, batch, heads_q, dim, dim, "bfloat16") >= 0
    for plan in dict.fromkeys(made):
        source.note(repr(plan))
        check_planned(case, plan, sets)


def check_forward_tables(source):
    """Of tiles of all sizes, of boxes, of places that are looked up; with heads packed into one tile."""
    case = draws.draw_case(source, 120)
    source.note(case)
    how = draws.draw_how(source, case, HOPPER_TILES, most_cells=64)
    source.note(how)
    plan = planned(case, how)
    check_tables(case, plan, forward_tables(plan))
    group = case.sizes.heads_q // case.sizes.heads_kv
    packed = None if plan.ordered else pack_heads(plan, group)
    if group > 1 and packed is not None:
        batch, heads_q, heads_kv, q_len, kv_len = case.sizes
        together = case._replace(mask=None, sizes=case.sizes._replace(heads_q=heads_kv, q_len=group * q_len))
        allowed, visits = case.allowed().reshape(batch, heads_kv, -1, kv_len), forward_tables(packed)
        variant = np.broadcast_to(packed.variant, (batch, heads_kv))
        for b, h in np.ndindex(batch, heads_kv):
            assert np.array_equal(visits[variant[b, h]], allowed[b, h]), f"packed: {together.sizes}"


def check_backward_tables(source):
    """Of both passes, whichever heads share keys, with lists cut into pieces or not; and all that is made of them."""
    case = draws.draw_case(source, 120)
    source.note(case)
    batch, heads_q, heads_kv, *_ = case.sizes
    plan = planned(case, draws.How((128, 64), None, source.choice(draws.WORKERS)))
    queries, keys, kind = backward_tables(plan, case.sizes, source.choice(draws.WORKERS))
    check_tables(case, plan, queries)
    allowed, kind = case.allowed(), np.broadcast_to(kind, (batch, heads_kv))
    group = heads_q // heads_kv
    for b, h in np.ndindex(batch, heads_q):
        own = keys[kind[b, h // group], h % group]
        wrong = np.argwhere(own != allowed[b, h])
        assert not len(wrong), f"by keys, batch entry {b}, head {h}: pairs {wrong[:5].tolist()} are not visited once"
    with nothing_uploaded():
        backward_prepared.BackwardPlan(plan, Card(), batch, heads_q, heads_kv)
        hopper_prepared.HopperPlan(plan, Card(), batch, heads_q, heads_kv, False)


def check_room(source):
    """For whatever a selection of some form allows of a composition there is room."""
    case = draws.draw_case(source, 120)
    source.note(case)
    batch, heads, _, q_len, kv_len = case.sizes
    made = source.choice(list(SELECTIONS.values()))(source, case.sizes)
    plan = planned(case, draws.How((source.choice([64, 128]), 64), None, source.choice([1, 3])))
    room, lists = dynamic_masks.room(plan, made.form, q_len), tile_lists(plan)
    # Of lines, columns behind a query are found, too, before pairs are looked at.
    some = oracle.whole(made.found, batch, heads, q_len, kv_len)
    every = oracle.whole(made.mask, batch, heads, q_len, kv_len)
    variant = np.broadcast_to(plan.variant, (batch, heads))
    for b, h in np.ndindex(batch, heads):
        masks = []
        for number in range(*plan.work_indptr[variant[b, h] : variant[b, h] + 2]):
            item, tiles, partial = plan.work[number], 0, 0
            component = plan.components[item["component"]]
            place, real = positions(plan.views[component["query_view"]], np.array([item["query_tile"]]))
            rows = place[real]
            for e in range(item["begin"], item["end"]):
                view = plan.views[component["key_view"] + lists.key_view[e]]
                keys, real = positions(view, lists.indices[e : e + 1])
                at = np.ix_(rows, keys[real])
                met = some[b, h][at].any()
                tiles += met
                partial += met and not (every[b, h][at].all() and lists.mask[e] < 0)
            assert tiles <= room.tiles[number] and partial <= room.masks[number]
            masks.append(partial)
        assert sum(masks) <= room.all_masks
    items = dynamic_masks.items_of(plan, made.form, batch, heads, q_len)
    assert items.masks >= 0 and len(items.work) == len(items.items)


def check_selections(source):
    """What a selection allows of a composition is what its mask does, on the host, and its form is that of its
    arrays."""
    torch = pytest.importorskip("torch")
    case = draws.draw_case(source, 100, 3)
    source.note(case)
    batch, heads, _, q_len, kv_len = case.sizes
    made = source.choice(list(SELECTIONS.values()))(source, case.sizes)
    kind = type(namespace_of(torch.empty(0)))
    with mock.patch.object(kind, "ordinal", lambda self, x: None if x.dtype.is_floating_point else 0):
        selection = made.make(torch.from_numpy)
        assert selection.form() == made.form
        selected = case.pattern & selection
        pattern = selected.to_host(kv_len)
    both = oracle.both(case.mask, made.mask)
    index_sets(case._replace(pattern=pattern, mask=both))


def check_groups(source):
    """Problems in one launch: each item reads what it reads by itself."""
    parts, tiles = [], source.choice([[(128, 64)], [(16, 64), (33, 64), (64, 64)]])  # of one launch
    for number in range(source.integer(2, 4)):
        case = draws.draw_case(source, 100, most=4)
        source.note(case)
        batch, heads_q, heads_kv, q_len, kv_len = case.sizes
        plan = planned(case, draws.How(source.choice(tiles), None, source.choice(draws.WORKERS)))
        shapes = [(heads_q, q_len, 64), (heads_kv, kv_len, 64), (heads_kv, kv_len, 64), (heads_q, q_len, 64)]
        operands = [
            Operand((16 * number + name + 1) << 40, (batch, *shape), row_major((batch, *shape)))
            for name, shape in enumerate(shapes)
        ]
        part = group.part_of(ForwardPass(Card(), 0, validated(plan), *operands, 0, "bfloat16", 0.125, None))
        parts += [] if part is None else [part]  # of too many tensor maps
    layouts = [part.layout for part in parts]
    first = np.cumsum([0, *(layout.maps for layout in layouts)]).tolist()
    joined = join(layouts, first[:-1]) if layouts else None
    for number, layout in enumerate(layouts):
        for item in range(len(layout.work)):
            alone, together = _read(layout, item, 0), _read(joined, joined.items[number] + item, first[number])
            assert together[0] == {number}
            for a, b in zip(alone[1:], together[1:], strict=True):
                np.testing.assert_array_equal(a, b)
    assert len(joined.work) == sum(len(layout.work) for layout in layouts) if layouts else True


def _read(tables, item, first_map):
    """The problems that a work item is of, and all that the kernel reads for it, maps counted from the first one."""
    work = tables.work[item]
    query = tables.query_views[work["query_view"]].copy()
    entries = slice(work["begin"], work["end"])
    views = tables.key_views[work["key_view"] + tables.entries["view"][entries]].copy()
    problems = {int(query["problem"]), *views["problem"].tolist()}
    query["map"], query["problem"] = query["map"] - first_map, 0
    views["map"], views["problem"] = views["map"] - first_map, 0
    numbers, slot = tables.entry_masks[entries], int(work["slot"])
    prior = tables.priors[-2 - slot] if slot <= -2 else np.zeros(0)
    masks = numbers.clip(max=0), tables.masks[numbers[numbers >= 0]]
    return problems, [work[name] for name in "xyz"], query, views, tables.entries[entries], *masks, max(slot, -2), prior


@pytest.mark.slow
@drawing(4)
@given(st.data())
def test_plans_that_are_chosen(data):
    check_choices(Drawn(data))


@drawing(2)
@given(st.data())
def test_tables_of_the_forward(data):
    check_forward_tables(Drawn(data))


@drawing(2)
@given(st.data())
def test_tables_of_the_backward(data):
    check_backward_tables(Drawn(data))


@drawing(4)
@given(st.data())
def test_room_for_selections(data):
    check_room(Drawn(data))


@drawing(4)
@given(st.data())
def test_selections_on_the_host(data):
    check_selections(Drawn(data))


@drawing(8)
@given(st.data())
def test_tables_of_groups(data):
    check_groups(Drawn(data))
