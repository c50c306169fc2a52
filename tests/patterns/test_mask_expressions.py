"""Random mask functions: plans against the masks, evaluated cell by cell by PyTorch.

Hypothesis composes integers, floats and booleans of query and key of the operations that have rules, of look-ups in
tables, also beyond their ends, and of operations without rules; and joins three of the booleans.
"""

import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.index_set import AffineRows
from spattn.testing import check_plan

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

MOST = 150  # tokens
RNG = np.random.default_rng(0)
TABLES = {  # integers by position
    "sorted": torch.from_numpy(np.sort(RNG.integers(0, 9, MOST))),
    "mixed": torch.from_numpy(RNG.integers(0, 5, MOST)),
    "negative": torch.from_numpy(RNG.integers(-40, 40, MOST)),
    "int8": torch.from_numpy(RNG.integers(-128, 128, MOST).astype(np.int8)),
    "uint8": torch.from_numpy((RNG.integers(0, 256, MOST) // 16 * 16).astype(np.uint8)),
    "int32": torch.from_numpy(np.repeat(RNG.integers(-(2**31), 2**31, MOST // 10), 10).astype(np.int32)),
    "large": torch.from_numpy(np.repeat(RNG.integers(-(2**62), 2**62, MOST // 25), 25)),
}
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
    lambda x, y: torch.remainder(x, y.abs() + 1),  # no rule
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


def apart(q, k):
    return POINTS[q] - POINTS[k]


TRUTHS = st.one_of(
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


@pytest.mark.unfollowed
@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(JOINED | TRUTHS, st.integers(1, MOST), st.integers(1, MOST), st.sampled_from([7, 16, 33, 48]))
def test_plans_are_the_cells(truth, q_len, kv_len, block_q):
    def mask_mod(b, h, q, k):
        return truth(q, k)

    try:
        mask = flex.create_mask(mask_mod, 1, 1, q_len, kv_len, device="cpu")[0, 0].numpy()
    except IndexError:  # beyond the ends of a table
        return
    pattern = p.interop.from_mask_mod(mask_mod)
    assert np.array_equal(pattern.index_set(q_len, kv_len).to_dense(), mask)
    plan = spattn.plan(pattern, q_len, kv_len, tiling=spattn.Tiling(tile=(block_q, 64)))
    check_plan(plan, [AffineRows.from_dense(mask)])


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
