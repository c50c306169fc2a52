"""The chains of benchmarks/scores: score functions and array operators compute the same."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import spattn
from spattn.testing import assert_within_bound

HEADS, TOKENS, HEAD_DIM = 3, 96, 8
PATH = Path(__file__).parents[2] / "benchmarks" / "scores" / "score_chains.py"


def load_chains():
    spec = importlib.util.spec_from_file_location("score_chains", PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


chains = load_chains()


def double(x):
    return x.astype(np.float64) if x.dtype.kind == "f" else x


@pytest.fixture(params=chains.CHAINS)
def chain(request):
    return chains.CHAINS[request.param]


@pytest.fixture(params=["all pairs", "causal", "window 32"])
def problem(request, chain):
    """Pattern, parameters, float32 q, k, v, and the result of float64 NumPy."""
    parameters = chains.parameters(HEADS, TOKENS)
    qkv = np.random.default_rng(1).standard_normal((3, HEADS, TOKENS, HEAD_DIM), np.float32)
    function = chain.function(SimpleNamespace(**{name: double(x) for name, x in vars(parameters).items()}))
    return request.param, parameters, qkv, chains.exact(function, request.param, *qkv.astype(float), np.arange(TOKENS))


def test_operators_of_numpy(chain, problem):
    pattern, parameters, qkv, expected = problem
    separate = chains.Separate(np, chain, pattern, parameters, double)
    for call in (separate, separate.head_by_head()):
        np.testing.assert_allclose(call(*double(qkv)), expected, rtol=0, atol=1e-12)


def test_operators_of_torch(chain, problem):
    torch = pytest.importorskip("torch")
    pattern, parameters, qkv, expected = problem
    separate = chains.Separate(torch, chain, pattern, parameters, lambda x: torch.tensor(double(x)))
    for call in (separate, separate.head_by_head()):
        np.testing.assert_allclose(call(*torch.tensor(double(qkv))).numpy(), expected, rtol=0, atol=1e-12)


def test_fused_call(chain, problem):
    pattern, parameters, qkv, expected = problem
    single = chains.Separate(np, chain, pattern, parameters, np.asarray)(*qkv)
    batch = [x[None] for x in qkv]
    fused = spattn.attention(*batch, chains.pattern_of(pattern), score=chain.function(parameters))
    assert_within_bound(fused[0], expected, single)


def test_each_chain_changes_the_result(chain, problem):
    pattern, _, qkv, expected = problem
    plain = chains.exact(None, pattern, *qkv.astype(float), np.arange(TOKENS))
    assert np.linalg.norm(expected - plain) > 1e-3 * np.linalg.norm(plain)
