"""Random mask functions: plans against the masks, evaluated cell by cell by PyTorch.

Hypothesis composes integers, floats and booleans of query and key of the operations that have rules, of look-ups in
tables, also beyond their ends, and of operations without rules; and joins three of the booleans. Some differ between
batch entries and heads, and some are operands of compositions with registered patterns.
"""

import operator
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.testing import check_plan

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
from .mask_corpus import index_sets  # noqa: E402

MOST = 150  # tokens
RNG = np.random.default_rng(0)
TABLES = {  # integers by position
    "sorted": torch.from_numpy(np.sort(RNG.integers(0, 9, MOST))),
    "mixed": torch.from_numpy(RNG.integers(0, 5, MOST)),
    "negative": torch.from_numpy(RNG.integers(-40, 40, MOST)),
    "int8": torch.from_numpy(RNG.integers(-128, 128, MOST).astype(np.int8)),
    "uint8": torch.from_numpy((RNG.integers(0, 256, MOST) // 16 * 16).astype(np.uint8)),
    "int16": torch.from_numpy(RNG.integers(-(2**15), 2**15, MOST).astype(np.int16)),
    "int32": torch.from_numpy(np.repeat(RNG.integers(-(2**31), 2**31, MOST // 10), 10).astype(np.int32)),
    "large": torch.from_numpy(np.repeat(RNG.integers(-(2**62), 2**62, MOST // 25), 25)),
}
FLOATS = {  # by position or distance; some are not numbers
    name: torch.from_numpy(RNG.choice([-np.inf, np.nan, np.inf, *RNG.normal(0, 9, 2 * MOST)], 2 * MOST).astype(name))
    for name in ("float16", "float32", "float64")
}
FLOATS["blocks"] = torch.from_numpy(np.repeat(RNG.choice([np.nan, -0.0, 0.0, 1.5, 3.0], 2 * MOST // 20), 20))
FLAGS = torch.from_numpy(RNG.random(2 * MOST) < 0.3)
NUMBERS = torch.from_numpy(RNG.integers(-9, 9, 40))
LAYOUT = torch.from_numpy(RNG.random((12, 12)) < 0.3)
COSTS = torch.from_numpy(RNG.integers(0, 100, (12, 12)))
POINTS = torch.from_numpy(RNG.random((MOST, 3)).astype(np.float32))
CHOSEN = torch.from_numpy(RNG.integers(0, 20, (MOST, 4)))

# Values are functions of (q, k).
small = st.integers(1, 9)


def one_side(side):
    """Integers of the query or of the key alone."""
    pick = (lambda q, k: q) if side == "q" else (lambda q, k: k)
    tables = st.sampled_from(list(TABLES)).map(lambda name: lambda q, k: TABLES[name][pick(q, k)])
    blocks = small.map(lambda n: lambda q, k: pick(q, k) // n)
    residues = small.map(lambda n: lambda q, k: pick(q, k) % n)
    return st.one_of(st.just(pick), tables, blocks, residues)


UNARY = [
    lambda x, n: x + n,
    lambda x, n: n - x,
    lambda x, n: x * n,
    lambda x, n: -x,
    lambda x, n: x.abs(),
    lambda x, n: -x.to(torch.uint8),
    lambda x, n: x.to(torch.int16) * n,
    lambda x, n: x.to(torch.int32) << (3 * n),
    lambda x, n: x.to(torch.int8) >> n,
    lambda x, n: (x - n) // -n if n % 2 else x % -n,
    lambda x, n: x // n,
    lambda x, n: x % n,
    lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    lambda x, n: x.clamp(-n, 3 * n),
    lambda x, n: x.clamp_min(n),
    lambda x, n: x & n,
    lambda x, n: x | n,
    lambda x, n: x ^ n,
    lambda x, n: ~x,
    lambda x, n: x << n,
    lambda x, n: x >> n,
    lambda x, n: x**2,
    lambda x, n: x**3,
    lambda x, n: torch.sign(x),
    lambda x, n: x.to(torch.int8),
    lambda x, n: x.to(torch.int32) + n,
    lambda x, n: NUMBERS[x % 40],
    lambda x, n: NUMBERS[x % 60 - 30],
    lambda x, n: torch.gcd(x, torch.tensor(n)),  # no rule
    lambda x, n: (x * 1.0 / n).floor().long().clamp(-99, 99),
]
BINARY = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    torch.minimum,
    torch.maximum,
    lambda x, y: x & y,
    lambda x, y: x | y,
    lambda x, y: x ^ y,
    lambda x, y: torch.where(x < y, x, y + 1),
    lambda x, y: torch.stack([x.long(), y.long()]).sum(),
    lambda x, y: (x < y) + (x > y + 3) + (y > 5).long(),
    lambda x, y: COSTS[x % 12, y % 12],
    lambda x, y: torch.remainder(x, y.long().abs() + 1),  # no rule
]


def with_operators(values):
    """Integers of `values`."""
    of_one = st.builds(lambda f, x, n: lambda q, k: f(x(q, k), n), st.sampled_from(UNARY), values, small)
    of_two = st.builds(lambda f, x, y: lambda q, k: f(x(q, k), y(q, k)), st.sampled_from(BINARY), values, values)
    return of_one | of_two


leaves = st.one_of(one_side("q"), one_side("k"), st.just(lambda q, k: q - k))
INTEGERS = st.recursive(leaves, with_operators, max_leaves=5)
COMPARE = st.sampled_from([operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne])
OF_FLOATS = st.sampled_from(  # monotone functions of an integer, and a threshold that no value equals
    [
        lambda x, n: torch.exp(-x / 8.0) > 0.37 / n,
        lambda x, n: torch.log2(x.abs() + 1.5) < n + 0.013,
        lambda x, n: torch.sqrt(x.float() * x) < n + 0.57,
        lambda x, n: x / 3 > n + 0.1,
        lambda x, n: x * 0.37 - n * 1.1 < 0.123,
        lambda x, n: torch.tanh(x / 9.0) ** 2 < 0.5001,
        lambda x, n: torch.sin(x * 0.7) > 0.333,  # no rule
    ]
)


def of_floats(operation, compare, name, query, key, number):
    """A comparison of a function of two floats, each by position, by distance or of the indices."""
    sides = {
        "position": lambda q, k: (FLOATS[name][q], FLOATS[name][k]),
        "distance": lambda q, k: (FLOATS[name][q - k], FLOATS[name][k - q]),
        "index": lambda q, k: (q * 0.5, k / 3),
    }
    return lambda q, k: compare(operation(sides[query](q, k)[0], sides[key](q, k)[1]), number)


def apart(q, k):
    return POINTS[q] - POINTS[k]


OF_TWO_FLOATS = st.builds(
    of_floats,
    st.sampled_from([operator.add, operator.sub, operator.mul, torch.maximum, torch.minimum, lambda x, y: x / (y + 1)]),
    COMPARE,
    st.sampled_from(list(FLOATS)),
    *[st.sampled_from(["position", "distance", "index"])] * 2,
    st.sampled_from([0, 0.0, 1.5, -3.3, 7]),
)
TRUTHS = st.one_of(
    OF_TWO_FLOATS,
    st.builds(lambda f, x, y: lambda q, k: f(x(q, k), y(q, k)), COMPARE, INTEGERS, INTEGERS),
    st.builds(lambda f, x, n: lambda q, k: f(x(q, k), n), COMPARE, INTEGERS, st.integers(-20, 20)),
    st.builds(lambda f, x, n: lambda q, k: f(x(q, k), n), OF_FLOATS, INTEGERS, small),
    st.builds(lambda n, m: lambda q, k: LAYOUT[q // n % 12, k // m % 12], small, small),
    st.builds(lambda n, m: lambda q, k: LAYOUT[q % 12 - n, k // m % 12 - m], small, small),  # from the table's end
    st.builds(lambda n: lambda q, k: FLAGS[q - k + n], small),
    st.builds(lambda n: lambda q, k: FLAGS[(q - k).clamp(min=-n)], small),
    st.builds(lambda n: lambda q, k: (CHOSEN[q // n] == k // n).any(), small),
    st.builds(lambda n: lambda q, k: (CHOSEN[q] != k).all(), small),
    st.builds(lambda n: lambda q, k: (apart(q, k) ** 2).sum() < n / 30, small),
    st.builds(lambda n: lambda q, k: apart(q, k)[:2].abs().sum() < n / 10, small),
    st.builds(lambda n: lambda q, k: torch.isin(q - k, torch.tensor([1, n, 3 * n])), small),
)
JOINS = [
    lambda a, b: a & b,
    lambda a, b: a | b,
    lambda a, b: a ^ b,
    lambda a, b: a & ~b,
    lambda a, b: a + b,
    lambda a, b: a * b,
    torch.logical_or,
    lambda a, b: torch.where(a, b, ~b),
    lambda a, b: torch.stack([a, b]).any(),
]
JOINED = st.builds(
    lambda f, g, a, b, c: lambda q, k: g(f(a(q, k), b(q, k)), c(q, k)),
    st.sampled_from(JOINS),
    st.sampled_from(JOINS),
    TRUTHS,
    TRUTHS,
    TRUTHS,
)


BY_ENTRY = [  # of a boolean and the indices of batch entry, head, query and key
    lambda truth, b, h, q, k: truth(q, k),
    lambda truth, b, h, q, k: truth((q + 3 * h).clamp_max(MOST - 1), k),
    lambda truth, b, h, q, k: truth(q, k) & (k < 50 * b + 31),
    lambda truth, b, h, q, k: torch.where(h == 1, truth(q, k), q >= k - b),
    lambda truth, b, h, q, k: truth(q, k) ^ LAYOUT[b * 2 + h, k % 12],
]
REGISTERED = [  # with their booleans of position and key
    (p.Causal(), lambda i, j: j <= i),
    (p.SlidingWindow(9, 4), lambda i, j: (i - 9 <= j) & (j <= i + 4)),
    (p.DilatedWindow(5, 2, 4), lambda i, j: ((j - i) % 4 == 0) & (i - 20 <= j) & (j <= i + 8)),
    (p.Stride(4), lambda i, j: (i - j) % 4 == 0),
    (p.BlockLocal(23), lambda i, j: i // 23 == j // 23),
    (p.Sinks(3) | p.SlidingWindow(6, 0), lambda i, j: (j < 3) | (i - 6 <= j) & (j <= i)),
]


def mask_of(truth, by_entry, *sizes):
    """The mask_mod and its mask, evaluated by PyTorch; None if an index is beyond the ends of a table."""

    def mask_mod(b, h, q, k):
        return by_entry(truth, b, h, q, k)

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*batching rule")
            return mask_mod, flex.create_mask(mask_mod, *sizes, device="cpu").numpy()
    except IndexError:
        return None


def check(pattern, mask, block_q):
    """Compare plans with a mask (batch, heads, q_len, kv_len)."""
    batch, heads, q_len, kv_len = mask.shape
    like = [np.broadcast_to(np.float32(0), (batch, heads, length, 8)) for length in (q_len, kv_len, kv_len)]
    tiling = spattn.Tiling(tile=(block_q, 64))
    for plan in (
        spattn.plan(pattern, q_len, kv_len, batch=batch, heads=heads, tiling=tiling),
        spattn.plan_for(pattern, *like, backend="cpu"),
    ):
        check_plan(plan, index_sets(plan, mask))


lengths, heights = st.integers(1, MOST), st.sampled_from([7, 16, 33, 48])


@pytest.mark.unfollowed
@given(JOINED | TRUTHS, st.sampled_from(BY_ENTRY), lengths, lengths, heights)
def test_plans_are_the_cells(truth, by_entry, q_len, kv_len, block_q):
    batch, heads = (1, 1) if by_entry is BY_ENTRY[0] else (2, 2)
    made = mask_of(truth, by_entry, batch, heads, q_len, kv_len)
    if made is not None:
        pattern = p.interop.from_mask_mod(made[0])
        last = pattern.index_set(q_len, kv_len, batch=batch - 1, head=heads - 1)
        assert np.array_equal(last.to_dense(), made[1][-1, -1])
        check(pattern, made[1], block_q)


@pytest.mark.unfollowed
@given(
    JOINED | TRUTHS,
    TRUTHS,
    st.lists(
        st.tuples(st.sampled_from([operator.or_, operator.and_, operator.sub]), st.sampled_from(REGISTERED)), max_size=2
    ),
    lengths,
    lengths,
    heights,
)
def test_compositions_are_the_cells(truth, other, terms, q_len, kv_len, block_q):
    """A union of two functions, joined with registered patterns."""
    made = [mask_of(own, BY_ENTRY[0], 1, 1, q_len, kv_len) for own in (truth, other)]
    if None in made:
        return
    pattern = p.interop.from_mask_mod(made[0][0]) | p.interop.from_mask_mod(made[1][0])
    mask = made[0][1][0, 0] | made[1][1][0, 0]
    for join, (term, allowed) in terms:
        own = allowed(np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len))
        pattern, mask = join(pattern, term), mask & ~own if join is operator.sub else join(mask, own)
    check(pattern, mask[None, None], block_q)


def test_tables_may_change_between_calls():
    """A function that is passed to a call is traced again; a pattern keeps copies."""
    for table in (torch.zeros(40, dtype=torch.int64), np.zeros(40, np.int64)):
        mask_mod = (lambda own: lambda b, h, q, k: own[q] == own[k])(torch.as_tensor(table))
        pattern = p.interop.from_mask_mod(mask_mod)
        for mixed in (False, True):
            table[20:] = int(mixed)
            assert spattn.plan(mask_mod, 40).nnz == (800 if mixed else 1600)
            assert spattn.plan(pattern, 40).nnz == 1600
    mask = np.ones((40, 40), bool)
    for count in (1600, 1200):
        assert spattn.plan(mask, 40).nnz == count
        mask[30:] = False


@given(st.integers(1, 40), st.integers(1, 40))
def test_an_index_out_of_range_is_an_error(q_len, kv_len):
    """Of the pairs that the rest of the mask allows."""
    table = torch.zeros(20, dtype=torch.bool)
    pattern = p.interop.from_mask_mod(lambda b, h, q, k: table[q + k])
    if q_len + kv_len - 2 < 20:
        assert spattn.plan(pattern, q_len, kv_len).nnz == 0
    else:
        with pytest.raises(ValueError, match="^mask_mod: index out of range: index .* with size 20"):
            spattn.plan(pattern, q_len, kv_len)


WIDE = {"int64": torch.tensor([2**32 + 5, 7, 300]), "float64": torch.tensor([0.1, 1 / 3, 2.5], dtype=torch.float64)}
NARROW = {
    "uint8": (torch.arange(MOST) % 7).to(torch.uint8),
    "int32": torch.tensor([5, 7, 9], dtype=torch.int32).repeat(MOST // 3),
    "float32": torch.tensor([0.1, 0.2, 1 / 3]).repeat(MOST // 3),
}
OPERATIONS = {
    "eq": operator.eq,
    "lt": operator.lt,
    "add": lambda a, b: (a + b) % 3 == 1,
    "clamp": lambda a, b: torch.clamp(a, max=b) < 6,
    "minimum": lambda a, b: torch.minimum(a, b) < 5,
    "where": lambda a, b: torch.where(a > 3, a, b) > 4,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("by_query", [False, True])
def test_numbers_of_heads_and_tables_are_promoted_like_scalars(operation, narrow, by_query):
    """A scalar tensor beside an array would be cast to the array's dtype."""
    table, apply = NARROW[narrow], OPERATIONS[operation]
    numbers = {"head": lambda b, h: h * 256 + 5, "batch": lambda b, h: b - 300}
    numbers |= {name: lambda b, h, wide=wide: wide[h] for name, wide in WIDE.items()}
    for name, number in numbers.items():
        for turned in (False, True):

            def mask_mod(b, h, q, k, number=number, turned=turned):
                pair = table[q if by_query else k], number(b, h)
                return apply(*(pair[::-1] if turned else pair)) | (q == k)

            if operation == "clamp" and turned and name in WIDE:
                continue  # the same dtypes
            for b, h in ((0, 0), (1, 2)):
                got = p.interop.from_mask_mod(mask_mod).index_set(9, 9, batch=b, head=h).to_dense()
                cells = [[bool(mask_mod(*map(torch.tensor, (b, h, i, j)))) for j in range(9)] for i in range(9)]
                np.testing.assert_array_equal(got, cells, err_msg=f"{name}, {turned}, {b}, {h}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roots_of_one_position_and_of_two_are_equal(dtype):
    found = p.interop.from_mask_mod(lambda b, h, q, k: torch.sqrt(q.to(dtype)) == torch.sqrt((k - q).to(dtype)))
    q, k = np.ogrid[:130, :130]
    np.testing.assert_array_equal(found.index_set(130, 130).to_dense(), k == 2 * q)
