"""The tables and parameters of a grouped launch, without a GPU: every task reads what it would read by itself."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn._util.ragged import offsets
from spattn.arrays.operand import Operand, row_major
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.sm90.forward import group, launches, params
from spattn.cuda.sm90.forward.joined import join
from spattn.cuda.sm90.forward.tables import make_layout
from spattn.planning.contract.validated import validated
from spattn.schedule.tasks import order_tasks

from ...tables import check_table

pytestmark = pytest.mark.family("sm90")

# (pattern, batch, heads_q, heads_kv, q_len, kv_len, workers)
PROBLEMS = [
    (patterns.Causal(), 1, 4, 4, 700, 700, 1),
    (patterns.SlidingWindow(70), 2, 8, 2, 400, 400, 1),
    (patterns.strided(16), 1, 4, 2, 600, 600, 9),  # reductions
    (patterns.longformer(64, global_tokens=(0, 5)), 2, 4, 1, 500, 500, 40),  # reductions and merges
    (patterns.DilatedWindow(20, 20, 4), 1, 2, 2, 515, 515, 1),
    (patterns.Neighborhood((24, 32), 5, 2), 1, 2, 1, 768, 768, 4),
    (patterns.Causal(), 2, 8, 2, 1, 3000, 33),  # heads that are packed, lists that are split
    (patterns.Full() - patterns.Full(), 1, 2, 2, 150, 150, 1),
    (patterns.PerHead((patterns.Causal(), patterns.strided(12))), 1, 2, 2, 300, 300, 4),
]
GPU = type("Gpu", (), {"ordinal": 0, "sm_count": 132})()


@pytest.fixture(autouse=True)
def uploaded(monkeypatch, tensor_maps):
    """What a group copies to the device: by its addresses, the arrays."""
    memory = {}

    def upload(device, arrays):
        at = {name: 1 << 20 | number << 12 for number, name in enumerate(arrays)}
        memory.update({at[name]: array for name, array in arrays.items()})
        return None, at

    monkeypatch.setattr(group, "upload", upload)
    monkeypatch.setattr(launches, "load_kernels", lambda device, requests: requests)
    return memory


def call_of(number, pattern, batch, heads_q, heads_kv, q_len, kv_len, workers, dim=64, block_q=128):
    made = plan(pattern, q_len, kv_len, tiling=Tiling(tile=(block_q, 64), workers=workers), batch=batch, heads=heads_q)
    operands = [
        Operand((16 * number + name) << 40, shape := (batch, heads, length, dim), row_major(shape))
        for name, heads, length in (
            (1, heads_q, q_len),
            (2, heads_kv, kv_len),
            (3, heads_kv, kv_len),
            (4, heads_q, q_len),
        )
    ]
    return ForwardPass(GPU, 0, validated(made), *operands, 0, "bfloat16", 0.125, None)


@pytest.fixture(scope="module")
def calls():
    return [call_of(number, *problem) for number, problem in enumerate(PROBLEMS)]


def read(tables, item, first_map):
    """All that the kernel reads for a work item, with maps counted from the problem's first one."""
    work = tables.work[item]
    query = tables.query_views[work["query_view"]].copy()
    query["map"] -= first_map
    entries = slice(work["begin"], work["end"])
    views = tables.key_views[work["key_view"] + tables.entries["view"][entries]].copy()
    views["map"] -= first_map
    numbers = tables.entry_masks[entries]
    priors = tables.priors[-2 - work["slot"]] if work["slot"] <= -2 else None
    problems = {int(query["problem"]), *views["problem"].tolist()}
    query["problem"], views["problem"] = 0, 0
    found = [work[name] for name in ("x", "y", "z")], query, views, tables.entries[entries]
    masks = [numbers.clip(max=0), tables.masks[numbers[numbers >= 0]]]
    return problems, [*found, *masks, work["slot"] if work["slot"] > -2 else -2, priors]


@pytest.mark.parametrize("block_q", [(128,), (64, 50, 33)], ids=str)
def test_every_item_reads_what_it_reads_by_itself(block_q):
    """Views, tiles, bitmasks and what reductions join, of every work item of every problem."""
    calls = [call_of(n, *problem, block_q=block_q[n % len(block_q)]) for n, problem in enumerate(PROBLEMS)]
    layouts = [group.part_of(call).layout for call in calls]
    assert any(layout.reduces.any() for layout in layouts) and any(len(layout.merges.rows) for layout in layouts)
    first_maps = offsets([layout.maps for layout in layouts])
    joined = join(layouts, first_maps[:-1].tolist())
    for number, layout in enumerate(layouts):
        for item in range(len(layout.work)):
            _, alone = read(layout, item, 0)
            problems, found = read(joined, joined.items[number] + item, first_maps[number])
            assert problems == {number}
            for a, b in zip(alone, found, strict=True):
                np.testing.assert_array_equal(a, b)
    assert len(joined.work) == sum(len(layout.work) for layout in layouts)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("entries", "x"),
        ("entry_masks", None),
        ("masks", None),
        ("query_views", "problem"),
        ("key_views", "problem"),
        ("query_views", "offset"),
        ("key_views", "offset"),
        ("priors", None),
        ("work", "slot"),
    ],
)
def test_a_changed_table_is_found(calls, name, field):
    layouts = [group.part_of(call).layout for call in calls]
    joined = join(layouts, offsets([layout.maps for layout in layouts])[:-1].tolist())
    check_table("joined", layouts=layouts, joined=joined)
    table = getattr(joined, name).copy()
    changed = table if field is None else table[field]
    changed[...] += 1
    with pytest.raises(AssertionError):
        check_table("joined", layouts=layouts, joined=joined._replace(**{name: table}))


def test_tasks_are_those_of_all_problems(calls, uploaded):
    """Each once, those that finish others in a second launch, the longest first."""
    parts = [group.part_of(call) for call in calls]
    made = group.prepare(parts)
    to = [params.Addresses(1, 2, 3, 4, 5, 6, 7, 1.0)] * len(parts)
    joined = join([part.layout for part in parts], [0] * len(parts))
    dtype = params.params_dtype(made.attention.defines["SPATTN_MAPS"], made.attention.defines["SPATTN_PROBLEMS"])
    assert made.attention.structs == params.structs(
        made.attention.defines["SPATTN_MAPS"], made.attention.defines["SPATTN_PROBLEMS"]
    )
    length = joined.work["end"] - joined.work["begin"]
    for launch, finishing in enumerate((False, True)):
        (filled,) = np.frombuffer(made.template.fill(launch, to), dtype)
        at = max(place for place in uploaded if place <= filled["tasks"])
        skipped = (int(filled["tasks"]) - at) // uploaded[at].itemsize
        tasks = uploaded[at][skipped : skipped + int(filled["task_count"])]
        assert (np.diff(np.frexp(length[tasks["item"]])[1]) <= 0).all()
        expected = set()
        for (layout, call), first in zip(parts, joined.items, strict=True):
            chosen = layout.reduces == finishing
            own = order_tasks(call.plan, chosen, *call.q.shape[:2], call.k.shape[1], 1 << 20)
            own["item"] += first
            expected |= {tuple(task) for task in own.tolist()}
        assert {tuple(task) for task in tasks.tolist()} == expected and len(tasks) == len(expected)
        assert made._blocks[launch] == min(132, len(tasks)) and made.template.counter_at == dtype.fields["counter"][1]


def test_parameters_of_every_problem(calls):
    """Sizes, addresses and scales stand at the problem's number, and its tensor maps follow its arrays alone."""
    parts = [group.part_of(call) for call in calls]
    made = group.prepare(parts)
    dtype = params.params_dtype(*(made.attention.defines[name] for name in ("SPATTN_MAPS", "SPATTN_PROBLEMS")))
    to = [
        params.Addresses(*(x.pointer for x in (call.q, call.k, call.v, call.out)), n, n + 1, n + 2, -0.5 * (n + 1))
        for n, (_, call) in enumerate(parts)
    ]
    (before,) = np.frombuffer(made.template.fill(0, to), dtype)
    for n, (_, call) in enumerate(parts):
        problem = before["problems"][n]
        assert [problem[name] for name in ("q", "k", "v", "out", "lse", "partial_out", "partial_lse")] == list(
            to[n][:7]
        )
        assert problem["scale_log2"] == pytest.approx(0.5 * (n + 1) / np.log(2)) and problem["sign"] == -1
        assert problem["partial_rows"] == call.plan.slots * 128 and problem["q_len"] == call.q.shape[2]
        assert problem["heads_q"] == problem["q_batch"] == call.q.shape[1]
        assert problem["kv_batch"] == call.k.shape[1] and problem["batch_maps"] == 0
        for name in ("q", "k", "v", "out"):
            assert problem[f"{name}_stride"].tolist() == getattr(call, name).strides[:3]
    third = [one._replace(k=one.k + 4096) if n == 2 else one for n, one in enumerate(to)]
    (after,) = np.frombuffer(made.template.fill(0, third), dtype)
    addresses, moved = (x["maps"].view("u8")[:, 0].astype(np.int64) for x in (before, after))
    used = offsets([part.maps for part in parts])
    of_k = np.flatnonzero(moved != addresses)
    assert len(of_k) and (moved[of_k] - addresses[of_k] == 4096).all()
    assert (of_k >= used[2]).all() and (of_k < used[3]).all() and (addresses[of_k] >> 40 == 16 * 2 + 2).all()
    assert (addresses[: used[-1]] > 0).all() and not addresses[used[-1] :].any()


def test_launches_have_room(calls):
    """A launch takes as many problems, in their order, as its parameters hold."""
    small, large = (group.part_of(calls[number]) for number in (0, 5))
    most, room = params.GROUPS[-1]
    assert group.cut([small] * (most + 3)) == [list(range(most)), [most, most + 1, most + 2]]
    fit = room // large.maps
    assert group.cut([large] * (fit + 1)) == [list(range(fit)), [fit]]
    low, lower = (group.part_of(call_of(1, *PROBLEMS[1], block_q=block_q)) for block_q in (64, 50))
    assert group.cut([lower, small, small, low]) == [[1, 2], [0, 3]]
    for problems, maps_held in params.GROUPS:
        assert params.params_dtype(maps_held, problems).itemsize <= 32764  # bytes of a kernel's parameters


def test_arrays_that_tma_cannot_read(calls):
    assert group.part_of(calls[0]) is not None
    strides = (*calls[0].k.strides[:2], 65, 1)
    odd = call_of(0, *PROBLEMS[0])
    odd.k = odd.k._replace(strides=strides)
    assert group.part_of(odd) is None


def test_merges_have_their_own_tables(calls, uploaded):
    parts = [group.part_of(call) for call in calls]
    made = group.prepare(parts)
    for (layout, call), merging in zip(parts, made._merges, strict=True):
        assert (merging is None) == (len(layout.merges.rows) == 0)
        if merging is not None:
            rows, indptr, sources, heads = (uploaded[at] for at in merging.head)
            assert rows is layout.merges.rows and indptr is layout.merges.indptr and sources is layout.merges.sources
            assert len(heads) == call.q.shape[0] * call.q.shape[1] and merging.tail[0] == call.plan.slots * 128


def test_layouts_know_no_group():
    """An ordinary call is problem 0."""
    made = make_layout(plan(patterns.strided(16), 512, tiling=Tiling(tile=(128, 64))))
    assert not made.query_views["problem"].any() and not made.key_views["problem"].any()
