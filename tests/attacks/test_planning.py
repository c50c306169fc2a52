"""Plans that cost an evaluation of all cells, or miss the structure of a pattern.

Counts stand for times here: cells that a predicate is evaluated on, and the efficiency of plans. The times are in
benchmarks/planning/attacks.py.
"""

import functools
import operator

import numpy as np
import pytest

import spattn
from spattn import patterns as p

from .counts import asked_cells
from .oracle import draw


def planned(pattern, allowed):
    """The share of all cells that the predicate is evaluated on while it is planned; the plan has the right pairs."""
    tokens = len(allowed)
    with asked_cells(pattern) as asked:
        plan = spattn.plan(pattern, tokens)
    assert plan.nnz == allowed.sum()
    return asked.cells / tokens**2


# -- mask_mods of FlexAttention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["blocks", "types"])
def test_table_looked_up_by_both_sides(kind):
    """attention-gym's VSA and most masks of token types: ``layout[q // 64, k // 64]``, ``allowed[kind[q], kind[k]]``.

    Both indices are constant within a tile, so that less than one cell in 16 has to be evaluated.
    """
    torch = pytest.importorskip("torch")
    tokens = 4096
    positions = np.arange(tokens)
    if kind == "blocks":
        layout = np.random.default_rng(0).random((64, 64)) < 0.2
        group, table = positions // 64, torch.from_numpy(layout)
        pattern = p.interop.from_mask_mod(lambda b, h, q, k: table[q // 64, k // 64])
    else:
        layout = np.array([[True, False, True], [False, True, True], [True, True, False]])
        group, table = positions // 512 % 3, torch.from_numpy(layout)
        types = torch.from_numpy(group)
        pattern = p.interop.from_mask_mod(lambda b, h, q, k: table[types[q], types[k]])
    assert planned(pattern, layout[group[:, None], group]) < 1 / 16


def test_distances_that_are_no_sums():
    """attention-gym#15, pytorch#134756: discs and radii, and Radial Attention's log2 of a frame distance.

    Predicates with products, powers, log2, bits or tables of a difference that depends on both sides: bounds of
    intervals decide most tiles. The disc has a radius of 5 on an image of 64 rows of 32: 11 rows in 64 are near a
    query, and a third of the cells with those in tiles at the rim.
    """
    pytest.importorskip("torch")

    def disc(b, h, q, k):
        dx, dy = q // 32 - k // 32, q % 32 - k % 32
        return dx * dx + dy * dy <= 25

    q, k = np.arange(2048)[:, None], np.arange(2048)
    assert planned(p.interop.from_mask_mod(disc), disc(0, 0, q, k)) < 1 / 3


def test_classes_in_any_order_by_table():
    """Masks "same class", "same user": ``ids[q] == ids[k]`` with ids in any order.

    Clusters(ids), the same set, puts the tokens of a class side by side. The plan of the mask_mod has at least half the
    efficiency of that one.
    """
    torch = pytest.importorskip("torch")
    tokens = 4096
    ids = np.random.default_rng(1).permutation(np.arange(tokens) // 256)
    table, like = torch.from_numpy(ids), draw(9, *[(1, 1, tokens, 8)] * 3)
    found = spattn.plan_for(p.interop.from_mask_mod(lambda b, h, q, k: table[q] == table[k]), *like)
    clusters = spattn.plan_for(p.Clusters(ids), *like)
    assert found.nnz == clusters.nnz == 16 * 256**2
    assert found.efficiency > 0.5 * clusters.efficiency


def terms_of_kinds(torch, kinds):
    """The terms of a mask of five kinds of tokens, and the mask."""
    table = torch.from_numpy(kinds)

    def terms(q, k):
        return [(table[q] == a) & (table[k] == c) for a in range(5) for c in range(5) if (a + c) % 2]

    return terms, (kinds[:, None] + kinds) % 2 == 1


def test_truth_values_added():
    """Truth values joined by ``+`` or ``sum`` are followed as those joined by ``|``."""
    torch = pytest.importorskip("torch")
    terms, allowed = terms_of_kinds(torch, np.arange(1024) // 64 % 5)
    pattern = p.interop.from_mask_mod(lambda b, h, q, k: sum(terms(q, k), torch.tensor(False)))
    assert planned(pattern, allowed) < 1 / 4


def test_truth_values_joined():
    """The same terms joined by ``|``: less than one cell in four is evaluated."""
    torch = pytest.importorskip("torch")
    terms, allowed = terms_of_kinds(torch, np.arange(1024) // 64 % 5)
    pattern = p.interop.from_mask_mod(lambda b, h, q, k: functools.reduce(operator.or_, terms(q, k)))
    assert planned(pattern, allowed) < 1 / 4


def test_a_random_function_of_a_mask_mod_is_refused():
    """A mask_mod that draws is refused, as the documentation says, instead of all pairs or none, by chance."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in draw(11, *[(1, 1, 64, 8)] * 3))
    with pytest.raises((ValueError, TypeError)):
        spattn.attention(q, k, v, p.interop.from_mask_mod(lambda b, h, q, k: (q >= k) & (torch.rand(()) < 0.5)))


# -- bool arrays -------------------------------------------------------------------------------------------------------


def test_structure_in_a_bool_array_is_found():
    """A regular pattern passed as a bool array has a plan of at least two thirds of the pattern's efficiency."""
    tokens = 2048
    like = draw(10, *[(1, 2, tokens, 64)] * 3)
    distance = np.arange(tokens) - np.arange(tokens)[:, None]
    allowed = (distance % 4 == 0) & (abs(distance) <= 256)
    regular = spattn.plan_for(p.DilatedWindow(64, 64, 4), *like)
    found = spattn.plan_for(p.Mask(allowed), *like)
    assert found.nnz == regular.nnz == allowed.sum()
    assert found.efficiency > regular.efficiency / 1.5
