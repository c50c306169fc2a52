"""Listed pairs: planned from the list, alone and joined with others, wherever they come from."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from spattn import Tiling, plan
from spattn import patterns as p
from spattn.patterns.listed import pairs
from spattn.planning import validate
from spattn.planning.tiles._pairs import Pairs, bitmasks
from spattn.testing import check_plan

scipy_sparse = pytest.importorskip("scipy.sparse")

SHARES = st.sampled_from([0, 0.001, 0.02, 0.3, 0.95, 1])
TILES = st.sampled_from([(16, 64), (128, 64), (48, 128), (1, 64)])


@st.composite
def masks(draw):
    """Boolean arrays from empty to full, some with whole key tiles."""
    shape = draw(st.integers(1, 200)), draw(st.integers(1, 200))
    mask = np.random.default_rng(draw(st.integers(0, 999))).random(shape) < draw(SHARES)
    mask[:, 64 : draw(st.sampled_from([64, 128, 192]))] = True
    return mask


def listed(mask):
    row, key = np.nonzero(mask)
    return p.CSR(np.searchsorted(row, np.arange(len(mask) + 1)), key, mask.shape[1])


@example(mask=np.arange(4 * 30).reshape(4, 30) % 7 > 2, tile=(1, 64))  # a tile for each row, of the same keys
@given(mask=masks(), tile=TILES)
def test_plans_and_index_sets_are_the_pairs(mask, tile):
    """The same tiles as of the mask, of which the bits are those of the pairs."""
    pattern = listed(mask)
    made = plan(pattern, *mask.shape, tiling=Tiling(tile=tile))
    assert np.array_equal(pattern.index_set(*mask.shape).to_dense(), mask)
    check_plan(made, [pattern.index_set(*mask.shape)])
    same = plan(p.Mask(mask), *mask.shape, tiling=Tiling(tile=tile))
    assert made.tiles == same.tiles and (made.mask < 0).sum() == (same.mask < 0).sum()
    assert np.array_equal(made.indices, same.indices) and np.array_equal(made.indptr, same.indptr)


JOINED = {
    "window": lambda x: x & p.SlidingWindow(40),
    "union": lambda x: x | p.SlidingWindow(20),
    "union with views": lambda x: p.DilatedWindow(5, 5, 4) | x | p.Sinks(3),
    "views": lambda x: p.DilatedWindow(9, 9, 3) & x,
    "complement": lambda x: ~x,
    "less": lambda x: x - p.Causal(),
    "without": lambda x: p.Causal() - x,
    "others": lambda x: (x | p.Stride(5)) & (p.Causal() | ~x),
}


@pytest.mark.parametrize("name", JOINED)
@given(mask=masks(), tile=TILES)
def test_compositions(name, mask, tile):
    pattern, q_len, kv_len = JOINED[name](listed(mask)), *mask.shape
    truth = JOINED[name](p.Mask(mask)).index_set(q_len, kv_len)
    assert pattern.index_set(q_len, kv_len) == truth
    check_plan(plan(pattern, q_len, kv_len, tiling=Tiling(tile=tile)), [truth])


@dataclass(frozen=True)
class Cut(p.Pattern):
    """The listed pairs of some rows and keys, as a part."""

    given: p.Pattern
    first: int

    def bind(self, q_len, kv_len):
        return Cut(self.given.bind(q_len, kv_len), self.first)

    def allows(self, q, k):
        return self.given.allows(q, k) & (q >= self.first) & (k >= 7) & (k < 7 + self.first)

    def parts(self, q_len, kv_len):
        rows = p.authoring.Lattice(self.first, (1,), (kv_len - self.first,))
        return (p.authoring.Part(self.given, rows, p.authoring.Lattice(7, (1,), (self.first,))),)


@given(seed=st.integers(0, 99), first=st.integers(1, 150), tile=TILES)
def test_pairs_on_views_of_some_positions(seed, first, tile):
    pattern = Cut(listed(np.random.default_rng(seed).random((160, 160)) < 0.1), first)
    check_plan(plan(pattern, 160, tiling=Tiling(tile=tile)), [pattern.index_set(160, 160)])


def test_of_a_union_the_listed_pairs_come_last():
    """Whoever is named first, the others' tiles are as they are alone."""
    pattern, window = scattered(2048, 1), p.SlidingWindow(100)
    one, other = plan(pattern | window, 2048), plan(window | pattern, 2048)
    assert np.array_equal(one.indices, other.indices) and len(one.masks) == len(other.masks)
    alone = plan(window, 2048)
    assert np.array_equal(one.indices[one.key_view == 0], alone.indices)


@example(mask=np.ones((10, 100), bool), most=1, seed=0)
@given(mask=masks(), most=st.sampled_from([1, 30, 1 << 22]), seed=st.integers(0, 99))
def test_rectangles_of_a_list_are_never_decided_wrongly(mask, most, seed):
    """Also of coarse squares; where a square is a pair, exactly."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pairs, "_COARSE_CELLS", most)
        table = listed(mask).bind(*mask.shape)._table
        corners = np.random.default_rng(seed).integers(-3, 210, (2, 2, 50))
        (a_lo, a_hi), (b_lo, b_hi) = np.sort(corners, axis=1)
        any_in, all_in = table.any_in(a_lo, a_hi, b_lo, b_hi), table.all_in(a_lo, a_hi, b_lo, b_hi)
    padded = np.pad(mask, ((3, 250 - len(mask)), (3, 250 - mask.shape[1])))
    inside = [padded[a + 3 : b + 4, c + 3 : d + 4] for a, b, c, d in zip(a_lo, a_hi, b_lo, b_hi, strict=True)]
    some, every = (np.array([f(x) for x in inside]) for f in (np.any, np.all))
    assert (any_in >= some).all() and (all_in <= every).all()
    if most >= mask.size:
        assert np.array_equal(any_in, some) and np.array_equal(all_in, every)


@given(mask=masks())
def test_two_lists(mask):
    """A pair of both is in one of them."""
    other = np.roll(mask, 3, axis=0) ^ (np.arange(mask.shape[1]) % 5 == 0)
    for pattern, truth in ((listed(mask) | listed(other), mask | other), (listed(mask) & listed(other), mask & other)):
        check_plan(plan(pattern, *mask.shape), [p.Mask(truth).index_set(*mask.shape)])


@dataclass(frozen=True)
class Counted(p.Pattern):
    """Coprime positions; counts the pairs that it is asked for."""

    asked: list

    def __hash__(self):
        return 1

    def allows(self, q, k):
        self.asked.append(np.broadcast(q, k).size)
        return np.gcd(q, k) == 1


def scattered(tokens, each):
    """Pairs at random, `each` a row, few of them twice."""
    row = np.repeat(np.arange(tokens), each)
    return p.interop.from_pairs(row, np.random.default_rng(0).integers(0, tokens, len(row)), tokens, tokens)


def test_a_predicate_beside_listed_pairs_is_asked_for_them_alone():
    pattern, asked = scattered(4096, 2), []
    made = plan(Counted(asked) & pattern, 4096, tiling=Tiling(tile=(128, 64)))
    assert sum(asked) == pattern.indptr[-1] and 0 < made.nnz < sum(asked)


def test_scattered_pairs_are_planned_in_memory_of_their_number():
    """2³² cells and 4 million tiles, of which 260,000 hold a pair."""
    pattern = scattered(1 << 16, 4)
    made = plan(pattern, 1 << 16, tiling=Tiling(tile=(16, 64)), max_bytes=8 << 20)
    assert made.nnz == pattern.indptr[-1] and made.tiles > 250_000 and len(made.masks) < 10_000
    with pytest.raises(
        ValueError, match="^pattern: expected a plan of at most max_bytes = 1048576 bytes, got one that"
    ):
        plan(pattern, 1 << 16, tiling=Tiling(tile=(16, 64)), max_bytes=1 << 20)


@pytest.mark.parametrize("tile", [(16, 64), (128, 64)])
def test_plans_of_scattered_pairs_are_sound(tile):
    """Most tiles hold a single pair."""
    for pattern in (scattered(1000, 1), scattered(1000, 5) | p.SlidingWindow(3)):
        made = plan(pattern, 1000, tiling=Tiling(tile=tile, workers=4))
        check_plan(made, [pattern.index_set(1000, 1000)])
        validate(pickle.loads(pickle.dumps(made)))


FORMATS = ["bsr", "coo", "csc", "csr", "dia", "dok", "lil"]


@pytest.mark.filterwarnings("ignore:Constructing a DIA matrix")
@pytest.mark.parametrize("form", FORMATS)
@given(mask=masks(), dtype=st.sampled_from([bool, np.int8, np.float64]))
def test_matrices_of_scipy(form, mask, dtype):
    for made in (scipy_sparse.coo_array(mask.astype(dtype)), scipy_sparse.coo_matrix(mask.astype(dtype))):
        assert p.interop.from_scipy(made.asformat(form)) == listed(mask)


def test_entries_that_are_zero_are_no_pairs():
    made = scipy_sparse.coo_array(([1.0, -1, 2, 0], ([0, 0, 1, 2], [1, 1, 1, 2])), shape=(3, 4))
    assert p.interop.from_scipy(made) == p.CSR([0, 0, 1, 1], [1], 4)
    assert made.nnz == 4  # it is as it was
    unsorted = scipy_sparse.csr_array((np.ones(3), np.array([3, 0, 0]), np.array([0, 3])), shape=(1, 4))
    assert p.interop.from_scipy(unsorted) == p.CSR([0, 2], [0, 3], 4)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("form", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float32", "bfloat16"])
def test_tensors_of_torch(form, dtype):
    torch = pytest.importorskip("torch")
    mask = np.random.default_rng(0).random((48, 64)) < 0.1
    blocks = {"blocksize": (8, 8)} if form.startswith("bs") else {}
    made = torch.tensor(mask).to(getattr(torch, dtype)).to_sparse(layout=getattr(torch, f"sparse_{form}"), **blocks)
    assert p.interop.from_torch_sparse(made) == listed(mask)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tensors_with_gradients_and_entries_that_cancel():
    torch = pytest.importorskip("torch")
    made = torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [1.0, -1.0, 3.0], (2, 3)).requires_grad_()
    assert p.interop.from_torch_sparse(made) == p.CSR([0, 0, 1], [2], 3)


@given(mask=arrays(bool, st.tuples(st.integers(0, 9), st.integers(0, 9))), seed=st.integers(0, 99))
def test_pairs_in_any_order(mask, seed):
    row, key = np.nonzero(mask)
    order = np.random.default_rng(seed).integers(0, max(len(row), 1), 3 * len(row))
    order = np.append(order, np.arange(len(row)))
    assert p.interop.from_pairs(row[order], key[order], *mask.shape) == listed(mask)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: p.CSR([0, 1], [0.5], 5), TypeError, "^indices: expected an array of integers"),
        (lambda: p.CSR(np.ma.array([0, 1]), [0], 5), TypeError, "^indptr: expected a plain array"),
        (lambda: p.CSR([[0, 1]], [0], 5), ValueError, "^indptr: expected 1-D"),
        (lambda: p.CSR([0, 2], [0], 5), ValueError, "^indptr: expected a non-decreasing array from 0 to 1"),
        (lambda: p.CSR([0, 2], [1, 1], 5), ValueError, "^indices: expected sorted rows"),
        (lambda: p.CSR([0, 1], [5], 5), ValueError, r"^indices: expected keys in \[0, 5\), got 5"),
        (lambda: p.CSR([0, 1], [2**40], 5), ValueError, "^indices: expected integers in"),
        (lambda: p.CSR([0, 1], [0], True), TypeError, "^kv_len: expected an integer"),
        (lambda: p.CSR([0, 1], [0], 2**31), ValueError, "^kv_len: expected an integer in"),
        (lambda: plan(p.CSR([0, 1], [0], 5), 2, 5), ValueError, "^q_len: expected 1, .* got 2"),
        (lambda: plan(p.CSR([0, 1], [0], 5), 1, 6), ValueError, "^kv_len: expected 5, .* got 6"),
        (lambda: p.CSR([0, 1], [0], 5).allows(0, 0), ValueError, r"use \.bind\(q_len, kv_len\)"),
        (lambda: p.interop.from_pairs([0], [5], 1, 5), ValueError, r"^key: expected numbers in \[0, 5\), got 5 to 5"),
        (
            lambda: p.interop.from_pairs([-1], [0], 1, 5),
            ValueError,
            r"^row: expected numbers in \[0, 1\), got -1 to -1",
        ),
        (lambda: p.interop.from_pairs([0, 1], [0], 2, 5), ValueError, "^row, key: expected one axis and one length"),
        (lambda: p.interop.from_pairs([0.0], [0], 1, 5), TypeError, "^row: expected an array of integers"),
        (lambda: p.interop.from_pairs([0], [0], 1.0, 5), ValueError, "^q_len: expected an integer in"),
        (lambda: p.interop.from_scipy(np.eye(3)), TypeError, "^matrix: expected a sparse array of SciPy, got ndarray"),
        (lambda: p.interop.from_scipy(scipy_sparse.coo_array(np.ones(3))), ValueError, "^matrix: expected two axes"),
        (
            lambda: p.interop.from_torch_sparse(np.eye(3)),
            TypeError,
            "^tensor: expected a sparse tensor of PyTorch, got .*ndarray",
        ),
    ],
)
def test_what_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_tensors_that_are_refused():
    torch = pytest.importorskip("torch")
    for tensor, error, words in (
        (torch.eye(3), TypeError, "^tensor: expected a sparse tensor of PyTorch, got torch.strided"),
        (torch.ones(3).to_sparse(), ValueError, r"^tensor: expected two axes, got shape \(3,\)"),
        (torch.ones(3, 4).to_sparse(1), ValueError, "^tensor: expected two sparse axes, got 1"),
    ):
        with pytest.raises(error, match=words):
            p.interop.from_torch_sparse(tensor)


@pytest.mark.parametrize(
    "row, key",
    [([0, 0], [3, 3]), ([0, 0], [3, 2]), ([1, 0], [0, 1]), ([-1, 0], [0, 1])],
    ids=["repeats", "keys that fall", "rows that fall", "rows before the first"],
)
def test_pairs_are_grouped_in_their_order_alone(row, key):
    """What lists pairs is spattn's own; whoever changes it hears of it."""
    with pytest.raises(ValueError, match="^row: expected sorted pairs of rows from 0 on, got "):
        Pairs((4, 64), 0, 10).group(np.array(row), np.array(key), 0)


def test_bitmasks_are_of_tiles_that_are_there():
    query_tile, key_tile, first, cell = Pairs((2, 64), 0, 100).group(np.array([0, 1, 2]), np.array([3, 70, 99]), 5)
    assert query_tile.tolist() == [5, 5, 6] and key_tile.tolist() == [0, 1, 1]
    assert bitmasks(first, cell, np.array([2, 0]), 2).tolist() == [[1 << 35, 0], [1 << 3, 0]]
    for tiles in ([3], [-1]):
        with pytest.raises(ValueError, match="^tiles: expected numbers below 3, got"):
            bitmasks(first, cell, np.array(tiles), 2)
