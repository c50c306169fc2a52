"""Bitmasks of a plan: each different one has one number, in the order in which they first came."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spattn.planning.contract.budget import Budget
from spattn.planning.tiles import masks as _masks
from spattn.planning.tiles._bitmasks import hashes
from spattn.planning.tiles.masks import Masks

SHAPE = 4, 2


def numbered(masks):
    """The number of each bitmask, by the definition."""
    known = {}
    return [known.setdefault(mask.tobytes(), len(known)) for mask in masks], list(known)


@example(which=[0, 1, 2, 0, 1, 1, 3, 4], split=3)
@given(which=st.lists(st.integers(0, 9), max_size=60), split=st.integers(0, 30))
def test_each_different_bitmask_has_the_next_number(which, split):
    """Also where the same come again in another call, and where nothing comes."""
    masks = np.random.default_rng(0).integers(0, 2**63, (10, *SHAPE), dtype=np.uint64)[which]
    made = Masks(SHAPE[0], 64 * SHAPE[1], Budget(1 << 20))
    found = [made.add(some) for some in (masks[:split], masks[split : 2 * split], masks[2 * split :])]
    numbers, known = numbered(masks)
    assert np.concatenate(found).tolist() == numbers and all(x.dtype == np.int32 for x in found)
    assert [mask.tobytes() for mask in made.array()] == known


def of_one_hash(numbers):
    """A bitmask of 8 rows for each number, all of one hash: the ninth word undoes what the first one does."""
    masks = np.zeros((len(numbers), 16), np.uint64)
    masks[:, 0] = numbers
    with np.errstate(over="ignore"):
        mixed = masks[:, 0] * np.uint64(0xD2E7470EE14C6C93)
    masks[:, 8] = mixed ^ mixed >> np.uint64(32)
    assert len(np.unique(hashes(masks))) == 1
    return masks


@pytest.mark.parametrize("rows", [None, np.arange(8) < 7], ids=["all rows", "some rows"])
def test_bitmasks_of_one_hash_are_told_apart(rows):
    """However many have it, within a call and from call to call."""
    masks = of_one_hash([1, 3, 2, 1, 5, 3, 7, 4, 2, 9, 1, 5])
    made = Masks(8, 128, Budget(1 << 20))
    for some in (masks[:7], masks[7:], masks):
        numbers = made.add(some) if rows is None else made.add_rows(some, rows)
        assert np.array_equal(made.array().reshape(-1, 16)[numbers], some)
    assert len(made.array()) == len(np.unique(masks[:, 0]))


def test_an_array_of_them_stays_as_it_is():
    """Those that are added afterwards lie elsewhere."""
    made = Masks(SHAPE[0], 64 * SHAPE[1], Budget(1 << 20))
    masks = np.arange(8 * 2000, dtype=np.uint64).reshape(-1, 8)
    made.add(masks[:3])
    before = made.array()
    made.add(masks)
    assert np.array_equal(before.reshape(-1, 8), masks[:3])
    assert np.array_equal(made.array().reshape(-1, 8), masks)
    with pytest.raises(ValueError):
        before.flags.writeable = True


@given(
    tiles=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 2)), max_size=40),
    at_once=st.integers(1, 40),
)
def test_padded_tiles_share_bitmasks(tiles, at_once):
    """Those that allow the same to queries that are not padding have one."""
    real = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]], bool)
    words = np.array([0, 5, 2**64 - 1], np.uint64)
    rows = np.array([own for own, _ in tiles], np.int64).reshape(-1, 4)
    content, padding = np.repeat(words[rows][:, :, None], SHAPE[1], axis=2), np.array([kind for _, kind in tiles], int)
    made = Masks(SHAPE[0], 64 * SHAPE[1], Budget(1 << 20))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_masks, "_CELLS_AT_ONCE", at_once * SHAPE[0] * 64 * SHAPE[1])
        numbers = made.number(lambda some: content[some], padding, real)
    known = made.array()
    for tile, number in enumerate(numbers):
        own = content[tile][real[padding[tile]]]
        if number < 0:
            assert (own == (words[2] if number == -1 else words[0])).all()
        else:
            assert (
                np.array_equal(known[number][real[padding[tile]]], own)
                and not (own == own[0, 0]).all()
                or own[0, 0] == 5
            )
    whole = {tuple(own) for (own, kind) in tiles if not kind} - {(0,) * 4, (2,) * 4}
    assert len(whole) <= len(known) and len({mask.tobytes() for mask in known}) == len(known)
    plain = {content[tile].tobytes() for tile in np.nonzero(padding == 0)[0] if numbers[tile] >= 0}
    more = {(padding[t], content[t][real[padding[t]]].tobytes()) for t in np.nonzero(padding)[0] if numbers[t] >= 0}
    assert len(known) <= len(plain) + len(more)


def test_they_start_as_large_as_those_before_became():
    """However few they are at first; nothing of that is left in their array, and large ones are forgotten."""

    def started(count):
        """Bytes that are held once the first of so many bitmasks is there."""
        made = Masks(SHAPE[0], 64 * SHAPE[1], Budget(1 << 30))
        masks = np.arange(8 * count, dtype=np.uint64).reshape(-1, 8)
        tracemalloc.start()
        made.compiled.add(masks[:1])
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        made.add(masks)
        assert len(made.array().base) == 64 * count
        return held

    started(9000)
    assert started(1) >= 9000 * 64
    for _ in range(300):
        few = started(1)
    assert few < 1000 * 64
    started(1 << 19)
    assert 1 << 24 <= started(1) < (1 << 24) + 4096


def test_hashes_differ_where_bits_do():
    """Of single cells, whole rows, whole columns, and pairs of columns: what patterns are made of."""
    cells = np.zeros((128 * 64, 128), np.uint64)
    cell = np.arange(len(cells))
    cells[cell, cell // 64] = np.uint64(1) << (cell % 64).astype(np.uint64)
    bits = np.uint64(1) << np.arange(64, dtype=np.uint64)
    columns = np.unique(bits[:, None] | bits)
    rows = np.eye(128, dtype=np.uint64) * ~np.uint64(0)
    every = np.concatenate([cells, np.repeat(columns[:, None], 128, axis=1), rows])
    assert len(np.unique(hashes(every))) == len(every)


def test_a_budget_bounds_them():
    """The bytes of all different ones."""
    made = Masks(SHAPE[0], 64 * SHAPE[1], Budget(3 * 64))
    masks = np.arange(32, dtype=np.uint64).reshape(4, 8)
    made.add(masks[[0, 1, 2, 1]])
    with pytest.raises(ValueError, match="at most max_bytes = 192 bytes, got one that needs at least 256"):
        made.add(masks)


@given(which=st.lists(st.integers(0, 9), max_size=30), split=st.integers(0, 30), rows=st.integers(1, SHAPE[0]))
def test_bitmasks_that_agree_in_their_first_rows(which, split, rows):
    """The first one that does, known or new, stands for all of them."""
    rng = np.random.default_rng(0)
    masks = (rng.integers(0, 2, (10, SHAPE[0], 1), dtype=np.uint64) + np.zeros(SHAPE, np.uint64))[which]
    made = Masks(SHAPE[0], 64 * SHAPE[1], Budget(1 << 20))
    made.add(masks[:split])
    expected = list(made.array())
    for mask, number in zip(masks[split:], made.add_rows(masks[split:], np.arange(SHAPE[0]) < rows), strict=True):
        alike = [n for n, one in enumerate(expected) if np.array_equal(one[:rows], mask[:rows])]
        expected += [] if alike else [mask]
        assert number == (alike[0] if alike else len(expected) - 1)
    assert np.array_equal(made.array(), np.array(expected).reshape(-1, *SHAPE))
