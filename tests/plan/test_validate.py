"""The check of plans that the planner did not make: it accepts every sound one and refuses what no kernel may meet.

The single numbers of ``tests/faults/test_plans.py`` point outside of something; here a plan is wrong although every
number is in range.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.planning import validate
from spattn.planning.tiles.parts import repeats
from spattn.testing.strategies import cases, compositions

N = 300


def good_plan():
    """Two families, one of several components; several variants; slots, merges, full, partial and ragged tiles."""
    window = p.longformer(20, global_tokens=(0, 150))
    return spattn.plan(p.PerHead((window, p.strided(7), window)), N, tiling=spattn.Tiling(tile=(64, 64), workers=64))


def spoiled(plan, **changes):
    """`plan` with fields changed: ``field=function of a copy of it``, which returns the new one or changes the copy."""
    made = {}
    for name, change in changes.items():
        old = getattr(plan, name)
        new = old.copy() if isinstance(old, np.ndarray) else old
        result = change(new)
        made[name] = new if result is None else result
    return dataclasses.replace(plan, **made)


def put(field, at, value):
    """A change of ``array[field][at]``."""
    return lambda array: array[field].__setitem__(at, value)


def drop(at):
    return lambda array: np.delete(array, at, axis=0)


def test_good_plan_has_it_all():
    plan = good_plan()
    assert plan.variants == 2 and len(plan.components) > 7 and len(plan.merge_rows)
    assert (plan.mask < 0).any() and (plan.mask >= 0).any() and {-1, 0} <= set(plan.work["slot"])
    assert len(np.unique(plan.components["first_row"])) < len(plan.components)
    assert validate(dataclasses.replace(plan)) is not plan


@pytest.mark.parametrize("tile", [(16, 64), (48, 64), (64, 128)], ids=str)
@given(case=st.one_of(cases(), compositions()), workers=st.sampled_from([1, 64]))
def test_every_plan_of_the_planner_is_sound(case, tile, workers):
    sizes = case.sizes
    made = spattn.plan(
        case.pattern,
        sizes.q_len,
        sizes.kv_len,
        tiling=spattn.Tiling(tile=tile, workers=workers),
        batch=sizes.batch,
        heads=sizes.heads_q,
    )
    validate(dataclasses.replace(made))


def _double(array):
    """Every element twice."""
    return np.repeat(array, 2, axis=0)


def _swap(array):
    array[[0, -1]] = array[[-1, 0]]


def _turned(views):
    """The lattice of view 0 runs backwards, outside of the sequence."""
    views["stride"][0] *= -1


def _stuck(views):
    """All points of view 0 are its first position."""
    views["stride"][0] = 0


def _wraps(views):
    """The last of the 300 points of view 0 is just beyond 2⁶⁴: int64 takes it for a position of the sequence."""
    views["stride"][0, 2] = 2**64 // 299 + 1


def _half_boxes(views):
    """The key tiles of component 0 have half the keys."""
    number = good_plan().components["key_view"][0]
    grid = -(-int(views["extent"][number, 2]) // 32)
    views["box"][number, 2], views["grid"][number, 2], views["tiles"][number] = 32, grid, grid


def _neighbours():
    """A run that another one of its list and its view follows."""
    plan = good_plan()
    row = np.repeat(np.arange(len(plan.indptr) - 1), np.diff(plan.indptr))
    return np.nonzero((np.diff(row) == 0) & (np.diff(plan.key_view) == 0))[0][0]


def _falling(indices):
    """Two neighbours of a list change places."""
    at = _neighbours()
    indices[at : at + 2] = indices[at : at + 2][::-1]


def _overlapping(tile_indptr):
    """The first of two neighbours has the first tile of the second one, too."""
    at, indices = _neighbours(), good_plan().indices
    tile_indptr[at + 1 :] += indices[at + 1] - indices[at] + 1 - (tile_indptr[at + 1] - tile_indptr[at])


def _empty_first(work):
    """An item of no tile, before the first one."""
    empty = work[:1].copy()
    empty["end"] = empty["begin"]
    return np.concatenate([empty, work])


def _another_shape(views):
    """One view of a family is a query shorter than the others."""
    components = good_plan().components
    _, first, family = np.unique(components["first_row"], return_index=True, return_inverse=True)
    second = next(number for number, own in enumerate(family) if number != first[own])
    views["extent"][components["query_view"][second], 2] -= 1


WRONG = {  # what: (what is expected instead, changes)
    "no work": ("18 lists", {"work": lambda w: w[:0], "work_indptr": np.zeros_like}),
    "an item less": ("18 lists", {"work": drop(0), "work_indptr": lambda e: np.maximum(e - 1, 0)}),
    "an item twice": ("items that partition", {"work": _double, "work_indptr": lambda e: 2 * e}),
    "a piece shorter": ("items that partition", {"work": lambda w: put("end", 0, w["end"][0] - 1)(w)}),
    "an empty piece": ("items that partition", {"work": lambda w: put("end", 0, w["begin"][0])(w)}),
    "an item of no tile": ("items that partition", {"work": _empty_first, "work_indptr": lambda e: e + (e > 0)}),
    "an item of another variant": ("components of the item's variant", {"work_indptr": put(..., 1, 1)}),
    "a component of another variant": ("components of the item's variant", {"components": put("variant", 0, 1)}),
    "items that share a slot": ("distinct consecutive slots", {"work": lambda w: put("slot", w["slot"] >= 0, 0)(w)}),
    "a slot for a row that an item writes": ("each row to be written once", {"work": put("slot", slice(None), -1)}),
    "slots that do not count from 0": (
        "distinct consecutive slots",
        {"work": lambda w: put("slot", w["slot"] == 0, 10**6)(w)},
    ),
    "more slots": ("12, the maximum", {"slots": lambda n: n + 1}),
    "fewer slots": ("12, the maximum", {"slots": lambda n: n - 1}),
    "slots beyond int64": ("12, the maximum", {"slots": lambda n: 2**63}),
    "a merge less": (
        "a non-decreasing array",
        {"merge_rows": drop(0), "merge_indptr": drop(0), "merge_variants": lambda e: np.maximum(e - 1, 0)},
    ),
    "a row merged twice": ("each row to be written once", {"merge_rows": lambda r: put(..., 0, r[1])(r)}),
    "merges of other rows": ("each row to be written once", {"merge_rows": _swap}),
    "sources of other rows": ("for its own row", {"merge_sources": _swap}),
    "a source twice": ("for its own row", {"merge_sources": lambda s: put(..., 0, s[1])(s)}),
    "merges of another variant": ("each row to be written once", {"merge_variants": put(..., 1, 0)}),
    "nnz": ("15682 pairs", {"nnz": lambda n: n + 1}),
    "a bit more": ("15678 pairs", {"masks": lambda m: put(..., (0, 0, 0), m[0, 0, 0] ^ np.uint64(1))(m)}),
    "a lattice outside": ("positions in", {"views": _turned}),
    "a position twice": ("without duplicate positions", {"views": _stuck}),
    "an offset before the sequence": ("positions in", {"views": put("offset", 0, -1)}),
    "an offset at the end of int64": ("positions in", {"views": put("offset", 0, 2**63 - 1)}),
    "a lattice beyond int64": ("positions in", {"views": _wraps}),
    "boxes of half a tile": ("boxes of 64 cells", {"views": _half_boxes}),
    "lengths": ("positions in", {"q_len": lambda n: n - 1}),
    "a length beyond int32": ("lengths up to", {"kv_len": lambda n: 2**31}),
    "a fraction": ("an integer", {"q_len": float}),
    "a negative number": ("an integer", {"nnz": lambda n: -n}),
    "tile": ("the tile's shape", {"block_q": lambda n: n // 2}),
    "tile of no keys": ("a multiple of 64 keys", {"block_kv": lambda n: 0}),
    "a tile beyond all masks": ("up to 32768 queries", {"block_q": lambda n: 2**31 - 64}),
    "no variant of any head": ("at least one", {"variant": lambda v: v[:, :0]}),
    "one variant more": ("one range per variant", {"work_indptr": lambda e: np.append(e, e[-1])}),
    "rows that no component has": ("families with consecutive rows", {"indptr": lambda e: np.append(e, e[-1])}),
    "families that overlap": (
        "families with consecutive rows",
        {"components": lambda c: put("first_row", -1, c["first_row"][-1] - 1)(c)},
    ),
    "a family of different views": ("one shape", {"views": _another_shape}),
    "a run of no tile": ("runs of at least one tile", {"tile_indptr": lambda e: put(..., 2, e[1])(e)}),
    "runs that go back": ("runs of at least one tile", {"tile_indptr": lambda e: put(..., 2, e[1] - 1)(e)}),
    "a run that reaches into the next": ("sorted lists", {"tile_indptr": _overlapping}),
    "runs that do not start at 0": ("a range of tiles", {"tile_indptr": lambda e: e + 1}),
    "ranges without runs": ("a range of tiles", {"tile_indptr": lambda e: np.append(e, e[-1] + 1)}),
    "no ranges": ("a range of tiles", {"tile_indptr": lambda e: e[:0]}),
    "a run beyond its view": ("key tiles of the view", {"tile_indptr": lambda e: put(..., -1, e[-1] + 10**6)(e)}),
    "a run one tile beyond its view": ("key tiles of the view", {"tile_indptr": lambda e: put(..., -1, e[-1] + 1)(e)}),
    "a run beyond int32": ("runs of at least one tile", {"tile_indptr": lambda e: put(..., -1, 2**62)(e)}),
    "a list that is not sorted": ("sorted lists", {"indices": _falling}),
    "key views in another order": ("indices of key views", {"key_view": lambda k: 1 - np.minimum(k, 1)}),
    "a key view before the first": ("indices of key views in key_view", {"key_view": put(..., 0, -1)}),
    "full tiles at the end": ("a bitmask for a tile with padding keys", {"mask": lambda m: np.full_like(m, -1)}),
    "all bits": ("zero bits for padding keys", {"masks": lambda m: np.full_like(m, 2**64 - 1)}),
    "key views beyond int32": ("indices of key views", {"key_view": lambda k: np.full_like(k, 2**31 - 1)}),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused(what):
    expected, changes = WRONG[what]
    with pytest.raises(ValueError, match=f"^plan: expected .*{expected}"):
        validate(spoiled(good_plan(), **changes))


def test_a_query_tile_behind_the_last_one():
    plan = good_plan()
    tiles = plan.components["query_tiles"][plan.work["component"][0]]
    with pytest.raises(ValueError, match="^plan: expected query tiles of the component"):
        validate(spoiled(plan, work=put("query_tile", 0, tiles)))


@pytest.mark.parametrize(
    "name, value",
    [("q_len", "300"), ("slots", None), ("nnz", 1.0), ("nnz", True), ("views", None), ("work", []), ("mask", "mask")],
)
def test_refused_types(name, value):
    with pytest.raises(ValueError, match=rf"^plan: expected .* in {name}$"):
        validate(dataclasses.replace(good_plan(), **{name: value}))


def test_message_has_the_first_number():
    with pytest.raises(ValueError, match=r"^plan: expected -1 or indices of bitmasks in mask\[3\]$"):
        validate(spoiled(good_plan(), mask=put(..., slice(3, 5), 10**6)))


def test_not_a_plan():
    with pytest.raises(TypeError, match="^plan: expected a Plan, got Causal"):
        validate(p.Causal())


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 5)), min_size=1, max_size=3),
)
def test_lattices_that_repeat_a_position(axes):
    """Against the positions themselves."""
    strides, extents = zip(*axes, strict=True)
    found = sum(stride * at for stride, at in zip(strides, np.indices(extents), strict=True))
    assert repeats(strides, extents) == (len(np.unique(found)) < np.prod(extents))


@pytest.mark.parametrize("pattern", [p.SlidingWindow(256), p.strided(128), p.Neighborhood((128, 128), 13)], ids=repr)
def test_takes_less_than_a_second(pattern):
    made = dataclasses.replace(spattn.plan(pattern, 16384, tiling=spattn.Tiling(tile=(48, 64), workers=16)))
    start = time.process_time()
    validate(made)
    assert time.process_time() - start < 1
