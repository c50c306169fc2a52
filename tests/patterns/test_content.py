"""Patterns with arrays among their fields."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.testing import check_pattern, inputs


def from_data(data):
    return p.from_json(json.dumps(data))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Clusters(p.authoring.ByContent, p.Pattern):
    """Keys of the query's cluster, where they are near."""

    cluster: np.ndarray
    weight: np.ndarray | None = None
    name = "clusters_of_a_test"

    def allows(self, q, k):
        return p.authoring.apply(self.of, q) == p.authoring.apply(self.of, k)

    def of(self, positions):
        return self.cluster[positions]


@dataclasses.dataclass(frozen=True)
class Forgotten(p.Pattern):
    """Does not say how it is compared."""

    cluster: object

    def allows(self, q, k):
        return k <= q


@dataclasses.dataclass(frozen=True)
class EqualityForgotten(p.authoring.ByContent, p.Pattern):
    """Lets the dataclass compare it."""

    cluster: object

    def allows(self, q, k):
        return k <= q


NUMBERS = np.random.default_rng(0).integers(0, 5, 40)


def test_content_decides():
    one, same, other = Clusters(NUMBERS), Clusters(NUMBERS.copy()), Clusters(NUMBERS + 1)
    assert one == same and hash(one) == hash(same) and one != other and one != p.Causal()
    assert spattn.plan(one, 40) is spattn.plan(same, 40) is not spattn.plan(other, 40)
    assert repr(one) == "Clusters(cluster=<int64 (40,)>, weight=None)"


def test_array_is_copied_and_read_only():
    numbers = NUMBERS.copy()
    pattern = Clusters(numbers)
    numbers[:] = 0
    assert np.array_equal(pattern.cluster, NUMBERS)
    with pytest.raises(ValueError, match="read-only"):
        pattern.cluster[0] = 1


def test_array_of_torch_is_taken():
    torch = pytest.importorskip("torch")
    assert Clusters(torch.from_numpy(NUMBERS)) == Clusters(NUMBERS)


def test_masked_array_is_refused():
    with pytest.raises(TypeError, match="^cluster: expected a plain array, got a masked array"):
        Clusters(np.ma.masked_array(NUMBERS))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float32", "float64", "bool"])
def test_keeps_every_promise(dtype):
    p.authoring.register("clusters_of_a_test")(Clusters)
    try:
        check_pattern(Clusters(NUMBERS.astype(dtype), np.linspace(0, 1, 7)), 40)
        with pytest.raises(ValueError, match="^pattern: expected a registered class with JSON-serializable parameters"):
            Clusters(np.array(["a"])).to_json()
    finally:
        del p.base.class_registry._REGISTRY["clusters_of_a_test"]
    q, k, v = inputs(1, 2, q_len=40, head_dim=8)
    expected = spattn.attention(q, k, v, NUMBERS.astype(dtype)[:, None] == NUMBERS.astype(dtype))
    assert np.array_equal(spattn.attention(q, k, v, Clusters(NUMBERS.astype(dtype))), expected)


@pytest.mark.parametrize("cls", [Forgotten, EqualityForgotten])
def test_what_cannot_be_hashed_is_refused_in_words(cls):
    message = "^cluster: expected a hashable value, such as a tuple, got ndarray; .* ByContent"
    with pytest.raises(TypeError, match=message):
        cls(NUMBERS)
    with pytest.raises(TypeError, match="got list"):
        cls([1, 2])
    assert spattn.plan(cls((1, 2)), 5).nnz == 15


def test_arrays_of_one_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr("spattn.patterns.base.content._hash_of", lambda value: 7)
    one, same, other = Clusters(NUMBERS), Clusters(NUMBERS.copy()), Clusters(NUMBERS + 1)
    assert hash(one) == hash(other) and one == same and one != other
    assert spattn.plan(one, 40) is spattn.plan(same, 40) is not spattn.plan(other, 40)
    spattn.clear_plan_cache()


def test_a_hash_stays_in_its_process():
    """Python hashes bytes otherwise in each."""
    one = Clusters(NUMBERS)
    hash(one)
    for other in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert "_hash" in vars(one) and "_hash" not in vars(other) and other == one and hash(other) == hash(one)


@pytest.mark.parametrize("shape", [(3, 1, 40), (3, 2, 40), (2, 1, 0)])
def test_one_of_a_batch_lies_on_the_bytes_of_all(shape):
    """Nobody can change it, nor the shape of the whole through it."""
    rng = np.random.default_rng(0)
    padded = p.RowIntervals(*(np.sort(rng.integers(0, 40, shape), axis=-1) for _ in range(2)))
    one = padded.at(shape[0] - 1, shape[1] - 1)
    assert np.array_equal(one.start, padded.start[-1, -1]) and isinstance(one.start.base, bytes)
    assert shape[-1] == 0 or one.start.base is padded.start.base
    with pytest.raises(ValueError):
        one.start.flags.writeable = True
    assert one == p.RowIntervals(padded.start[-1, -1], padded.stop[-1, -1])
