"""docs/faults.rst 18, index sets: one number of a CSR that is changed, and a pattern whose closed form is corrupt."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import spattn
from spattn import cpu, reference
from spattn import patterns as p
from spattn.index_set import AffineRows, Runs
from spattn.testing import inputs

KEYS = 7


def is_sound(indptr, indices) -> bool:
    """By the definition, row by row."""
    if indptr[0] != 0 or indptr[-1] != len(indices) or any(a > b for a, b in zip(indptr, indptr[1:], strict=False)):
        return False
    rows = [indices[a:b] for a, b in zip(indptr, indptr[1:], strict=False)]
    return all(row == sorted(set(row)) and all(0 <= key < KEYS for key in row) for row in rows)


@st.composite
def changed_csr(draw):
    """The CSR of a random mask with one number changed."""
    rows = draw(st.lists(st.sets(st.integers(0, KEYS - 1), max_size=4), min_size=1, max_size=4))
    indices = [key for row in rows for key in sorted(row)]
    indptr = [sum(map(len, rows[:n])) for n in range(len(rows) + 1)]
    array = draw(st.sampled_from([indptr, indices] if indices else [indptr]))
    at = draw(st.integers(0, len(array) - 1))
    array[at] = draw(st.integers(-2, KEYS + 2) | st.sampled_from([-(2**63), 2**31, 2**32, 2**63 - 1]))
    return indptr, indices


@example(([0, 2**63 - 1, 2], [1, 2]))
@example(([0, -(2**63), 2], [1, 2]))
@example(([0, 2, 2], [-(2**63), 3]))
@given(changed_csr())
def test_fault_18_csr_with_a_number_changed(csr):
    """Refused by the array's name, or it is another sound set, and read as such."""
    indptr, indices = csr
    if not is_sound(indptr, indices):
        with pytest.raises(ValueError, match="^(indptr|indices): expected "):
            AffineRows.from_csr(indptr, indices, KEYS)
        return
    made = AffineRows.from_csr(indptr, indices, KEYS)
    for n in range(len(indptr) - 1):
        assert made.row(n).tolist() == indices[indptr[n] : indptr[n + 1]]
    assert made.nnz == len(indices) and made.to_dense().sum() == len(indices)


def runs_of(start, step, count):
    """Twenty rows of the same runs."""
    return Runs(*(np.tile(np.array(x, dtype=np.int64), (20, 1)) for x in (start, step, count)))


CORRUPT = {
    "key beyond the end": (runs_of([15], [1], [6]), "^count: "),
    "key before the start": (runs_of([-1], [1], [6]), "^start: "),
    "start beyond the end": (runs_of([20], [1], [1]), "^start: "),
    "stride beyond the end": (runs_of([0], [2**40], [2]), "^count: "),
    "stride that wraps": (runs_of([3], [2**62], [5]), "^count: "),
    "count that wraps": (runs_of([3], [1], [2**63 - 1]), "^count: "),
    "count below zero": (runs_of([3], [1], [-1]), "^count: "),
    "no stride": (runs_of([3], [0], [4]), "^step: "),
    "stride backwards": (runs_of([9], [-1], [4]), "^step: "),
    "key in two runs": (runs_of([0, 3], [1, 1], [4, 2]), "^runs: "),
    "key in two strided runs": (runs_of([0, 6], [3, 2], [4, 2]), "^runs: "),
    "too few columns": (Runs(*(np.zeros((20, n), np.int64) for n in (1, 2, 1))), r"^step: expected shape \(20, 1\)"),
}


@dataclass(frozen=True)
class Hinted(p.Pattern):
    """Keys up to the query, and a closed form that is said to be the same set."""

    name: str

    def allows(self, q, k):
        return k <= q

    def runs(self, q, kv_len):
        made = CORRUPT[self.name][0]
        return Runs(*(x[: len(q)] for x in (made.start, made.step, made.count)))


@pytest.mark.parametrize("name", CORRUPT)
def test_fault_18_closed_form_that_is_corrupt(name):
    """The index set refuses it before anything is built from it."""
    with pytest.raises(ValueError, match=CORRUPT[name][1]):
        Hinted(name).index_set(20, 20)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", CORRUPT)
def test_fault_18_no_kernel_runs_on_a_corrupt_closed_form(monkeypatch, name, backend):
    """It is refused, or not looked at: then the predicate decides."""
    q, k, v = inputs(q_len=20, head_dim=8)
    expected = spattn.attention(q, k, v, p.Causal(), backend=backend)
    module = {"cpu": cpu, "reference": reference}[backend]
    run, ran = module.forward, []
    monkeypatch.setattr(module, "forward", lambda *args: ran.append(1) or run(*args))
    try:
        out = spattn.attention(q, k, v, Hinted(name), backend=backend)
    except ValueError as error:
        assert not ran or backend == "reference", error
    else:
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
