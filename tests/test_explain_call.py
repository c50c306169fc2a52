"""Explanations of calls: facts, bounds, and advice that is measured."""

import dataclasses

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as sp
from spattn.api import explain_call
from spattn.cuda import families
from spattn.planning.contract import cache
from spattn.request.call import Call
from spattn.testing import DTYPES

ROW, KEY = np.ogrid[:1024, :1024]
STRIDED = (abs(ROW - KEY) % 64 == 0) & (abs(ROW - KEY) <= 512)


def arrays(tokens=128, heads=2, dtype=np.float32, head_dim=16):
    return tuple(np.random.default_rng(0).standard_normal((3, 1, heads, tokens, head_dim)).astype(dtype))


@pytest.fixture
def brief(monkeypatch):
    monkeypatch.setattr(explain_call, "_SECONDS", 0.02)


@pytest.fixture
def priced(monkeypatch):
    """Return a function that replaces the clock: a measured call takes `cost` of its arguments, in milliseconds."""

    def use(cost):
        attention, seen = explain_call.attention, []

        def recorded(*args, **options):
            seen.append(cost(*args))
            return attention(*args, **options)

        def once(run, finish, times=1):
            seen.clear()
            run()
            return seen[-1] if seen else 0.0

        monkeypatch.setattr(explain_call, "attention", recorded)
        monkeypatch.setattr(explain_call, "_once", once)
        monkeypatch.setattr(explain_call, "_MOST_RUNS", 2)

    return use


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_facts_of_a_call(library, brief):
    q, k, v = arrays()
    k, v = k[:, :1], v[:, :1]
    if library != "numpy":
        module = pytest.importorskip(library)
        q, k, v = map(module.from_numpy if library == "torch" else module.numpy.asarray, (q, k, v))
    if library == "torch":
        q.requires_grad_()
    spattn.clear_plan_cache()
    pattern = sp.Causal() & (sp.Sinks(4) | sp.SlidingWindow(20, 0))
    first, second = (spattn.explain(q, k, v, pattern, backward=True) for _ in range(2))
    assert (first.plan_source, second.plan_source) == ("made", "cached")
    assert first.plan is second.plan is spattn.plan_for(pattern, q, k, v)
    assert first.backend == "cpu" and first.backend_reason == 'chosen by "auto" because the arrays are in host memory'
    assert first.execution.kernels == f"{cpu.info()['in use']} kernels"
    assert 0 < first.host_ms <= first.measured_ms and first.backward_ms > 0 and first.runs >= 1
    assert first.predicted_ms == cpu.predicted_ms(first.plan, 1, 2, 16, 16, "float32")
    text = str(second)
    for words in (
        f"{pattern!r}, 128 × 128 tokens, batch of 1, 2 query and 1 key heads of 16, float32 {library} arrays on cpu",
        f"tiles: {first.plan.tiles} of 48 queries × 64 keys in {len(first.plan.work)} work items",
        f"{first.plan.nnz} allowed pairs",
        "plan: found in the plan cache in ",
        "backward tiles: ",
        f"bound by: {second.bound_by} (",
    ):
        assert words in text


def test_options_are_those_of_the_call(brief, priced):
    """The measured call is the caller's: layout, scale, score, sinks, dropout and a named backend."""
    q, k, v = (np.swapaxes(x, 1, 2) for x in arrays())
    found = spattn.explain(
        q,
        k,
        v,
        "causal",
        layout="bshd",
        backend="reference",
        score=lambda s, b, h, i, j: 2 * s,
        sinks=np.zeros(2, "f4"),
    )
    assert found.backend_reason == "named by the caller" and found.predicted_ms is None
    assert spattn.explain(q, k, v, "causal", layout="bshd", score=spattn.score.softcap(5.0)).predicted_ms is None
    assert found.execution.arithmetic == "float64" and "not covered by the cost model" in str(found)
    given = spattn.plan_for(sp.Causal(), q, k, v, layout="bshd")
    assert spattn.explain(q, k, v, given, layout="bshd", dropout_p=0.5, seed=1).plan_source == "given"
    padding = np.arange(q.shape[1])[None] < 40
    padded = spattn.explain(q, k, v, "causal", layout="bshd", key_padding=padding, backward=True)
    assert padded.plan.nnz == sum(min(i + 1, 40) for i in range(q.shape[1]))


def test_a_plan_and_a_call_have_different_options():
    q, k, v = arrays()
    with pytest.raises(TypeError, match="heads"):
        spattn.explain(q, k, v, "causal", heads=2)
    with pytest.raises(TypeError, match="layout"):
        spattn.explain(spattn.plan("causal", 64), layout="bshd")
    with pytest.raises(
        TypeError, match="^plan: expected a Plan, as spattn.plan.. returns it, or q, k, v and a pattern"
    ):
        spattn.explain("causal")
    with pytest.raises(ValueError, match="^k: expected shape"):
        spattn.explain(q, k[:, :, :, :8], v)


def test_small_calls_are_bound_by_the_host(brief):
    found = spattn.explain(*arrays(2), "causal")
    assert found.bound_by == "host overhead" and found.execution.workers == 1
    assert "too small" in found.execution.workers_reason
    empty = arrays(0)
    assert spattn.explain(*empty, "causal").plan.tiles == 0


@pytest.mark.parametrize(
    ("times", "bound"),
    [
        ((10, 1, 0, 1, False), "compute"),
        ((10, 1, 0, 6, False), "memory"),
        ((10, 6, 0, 6, False), "host overhead"),
        ((10, 6, 6, 6, False), "planning"),
        ((10, 0, 0, 0, True), "planning"),
    ],
)
def test_bounds(times, bound):
    assert explain_call._bound(*times) == bound


def test_a_plan_that_the_cache_cannot_keep(monkeypatch, brief):
    q, k, v = arrays()
    kept = spattn.explain(q, k, v, sp.SlidingWindow(9))
    spattn.clear_plan_cache()
    monkeypatch.setattr(cache, "MAX_BYTES", 0)
    found = spattn.explain(q, k, v, sp.SlidingWindow(9))
    assert found.replanned and found.bound_by == "planning" and "again at each call" in str(found)
    assert "keep the result of spattn.plan_for" in found.advice[0]
    assert not kept.replanned and "each call" not in "".join(kept.advice)
    advised = spattn.explain(q, k, v, spattn.plan_for(sp.SlidingWindow(9), q, k, v))
    assert not advised.replanned and advised.bound_by != "planning"


def test_planning_that_takes_longer_than_the_call(brief, monkeypatch):
    monkeypatch.setattr(explain_call, "_pattern_ms", lambda *arguments: 0.0)
    q, k, v = arrays(8)
    spattn.clear_plan_cache()
    first, second = (spattn.explain(q, k, v, sp.SlidingWindow(7)) for _ in range(2))
    assert first.advice[0].startswith("planning took ") and "spattn.plan_for" in first.advice[0]
    assert second.advice == ()


def test_a_mask_is_converted_at_each_call(brief):
    q, k, v = arrays(1024, heads=1)
    mask = (ROW == 5) & (KEY == 3)  # attention over one pair takes less time than reading the mask
    found = spattn.explain(q, k, v, mask)
    assert any(line.startswith("the boolean array is copied and hashed at each call") for line in found.advice)
    advised = spattn.explain(q, k, v, sp.Mask(mask))
    assert "boolean array" not in "".join(advised.advice)


class ByIdentity(sp.Pattern):
    def allows(self, q, k):
        return k <= q


@dataclasses.dataclass(frozen=True)
class ByValue(sp.Pattern):
    def allows(self, q, k):
        return k <= q


@pytest.mark.parametrize("made", [ByIdentity, ByValue])
def test_patterns_that_compare_by_identity(made, brief):
    q, k, v = arrays()
    found = spattn.explain(q, k, v, sp.SlidingWindow(5) | ~made())
    advised = [line for line in found.advice if line.startswith("an equal ByIdentity that is built anew")]
    misses = spattn.plan_cache_info().misses
    spattn.attention(q, k, v, sp.SlidingWindow(5) | ~made())
    assert bool(advised) == (spattn.plan_cache_info().misses > misses) == (made is ByIdentity)


def test_regular_patterns_in_listed_pairs(monkeypatch):
    """The planner finds them in a mask by itself, but not in a list of pairs."""
    monkeypatch.setattr(explain_call._Case, "faster_ms", lambda case, other: (2.0, 1.0))
    q, k, v = arrays(1024, heads=1)
    found = spattn.explain(q, k, v, sp.interop.from_pairs(*np.nonzero(STRIDED), 1024, 1024))
    (line,) = [line for line in found.advice if "discover" in line]
    assert "DilatedWindow(left=8, right=8, dilation=64)" in line
    scattered = np.random.default_rng(1).random((256, 256)) < 0.02
    assert "discover" not in str(spattn.explain(*arrays(256), sp.Mask(scattered)))


@pytest.mark.parametrize("faster", [True, False])
def test_two_threads(faster, priced, monkeypatch):
    monkeypatch.setattr(explain_call._limits, "processors", lambda: 2)
    monkeypatch.setattr(cpu, "team_size", lambda useful: min(useful, cpu.num_threads()))
    monkeypatch.setattr(cpu._threads, "team_size", lambda useful: min(useful, cpu.num_threads()))
    priced(lambda *args: 10 / cpu.num_threads() if faster else 10)
    with spattn.threads(1):
        found = spattn.explain(*arrays(2048, heads=1), "causal")
    assert found.execution[2:4] == (1, "thread: set by spattn.threads")
    advised = "two threads take 5 ms instead of 10 ms" in found.advice
    assert advised == faster
    with spattn.threads(2):
        assert "two threads" not in str(spattn.explain(*arrays(2048, heads=1), "causal"))


@pytest.mark.parametrize("faster", [True, False])
def test_strides_that_are_slow(faster, priced):
    q, k, v = arrays()
    q = np.asfortranarray(q)
    priced(lambda q, *others: 1 if faster and q.flags.c_contiguous else 3)
    found = spattn.explain(q, k, v, "causal")
    assert (f"q has strides {q.strides}: contiguous arrays take 1 ms instead of 3 ms" in found.advice) == faster
    assert "strides" not in str(spattn.explain(q.copy(), k, v, "causal"))


class Holes(ByValue):
    """Views of eight tokens, of which none fills a tile."""

    def parts(self, q_len, kv_len):
        lattices = [sp.authoring.Lattice(first, (16,), (8,)) for first in range(16)]
        return tuple(sp.authoring.Part(self, query, key) for query in lattices for key in lattices)


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.filterwarnings("ignore::spattn.EfficiencyWarning")
def test_dense_attention_that_is_faster(faster, priced):
    priced(lambda q, k, v, pattern: 1 if faster and pattern == "full" else 3)
    plan = spattn.plan(Holes(), 128, tiling=spattn.Tiling(tile=(48, 64)))
    found = spattn.explain(*arrays(), plan)
    assert any("all pairs takes 1 ms instead of 3 ms" in line for line in found.advice) == faster
    assert "all pairs" not in str(spattn.explain(*arrays(), "causal"))


@pytest.mark.parametrize(
    ("isa", "dtype", "queries", "words"),
    [
        ("amx", "bfloat16", 128, "AMX tiles"),
        ("amx", "float16", 128, "two bfloat16 terms"),
        ("avx512bf16", "bfloat16", 128, "AVX512-BF16"),
        ("avx512bf16", "bfloat16", 1, "bfloat16 widened to float32"),
        ("avx512bf16", "float16", 128, "float16 widened to float32"),
        ("avx2", "bfloat16", 128, "bfloat16 widened to float32"),
        ("amx", "float32", 128, "float32 multiply-adds"),
    ],
)
def test_arithmetic_of_the_cpu(isa, dtype, queries, words):
    q, k, v = (x.astype(DTYPES[dtype]) for x in arrays(128))
    call = Call.of(q[:, :, :queries], k, v)
    plan = spattn.plan("causal", queries, 128, tiling=spattn.Tiling(tile=(48, 64)))
    assert words in cpu._execution.arithmetic(isa, call, plan)


def test_threads_have_a_reason(monkeypatch):
    monkeypatch.setattr(cpu._threads, "num_threads", lambda: 4)
    monkeypatch.setattr(cpu._threads, "team_size", lambda useful: min(useful, 2))
    assert cpu._execution.threads_of(8) == (2, "of 4 threads, because other processes occupy cores")
    assert cpu._execution.threads_of(2) == (2, "of 4 threads, because the call has no more parallel tasks")
    monkeypatch.setattr(cpu._threads, "team_size", lambda useful: min(useful, 4))
    monkeypatch.setitem(cpu._execution._limits.environment, b"OMP_NUM_THREADS", b"4")
    assert cpu._execution.threads_of(8) == (4, "threads: set by OMP_NUM_THREADS or threadpoolctl")
    monkeypatch.delitem(cpu._execution._limits.environment, b"OMP_NUM_THREADS")
    assert cpu._execution.threads_of(8)[1].startswith("threads: all ")
    with spattn.threads(4):
        assert cpu._execution.threads_of(8) == (4, "threads: set by spattn.threads")


def test_arithmetic_of_a_gpu():
    assert "FFMA" in families.arithmetic("hopper", "float64", None) and "FFMA" in families.advice("float64", None)
    assert families.arithmetic("hopper", "bfloat16", None) == "bfloat16 tensor cores (WGMMA), float32 sums"
    assert "mma.sync" in families.arithmetic(families.PORTABLE.name, "float16", None)
    for family, own, other in ((families.PORTABLE.name, "TF32 t", "two TF32 terms"), ("hopper", "two bf", "three bf")):
        assert own in families.arithmetic(family, "float32", "tf32")
        assert other in families.arithmetic(family, "float32", None)
    assert families.advice("float32", "tf32") is families.advice("bfloat16", None) is None
    assert "precision='tf32'" in families.advice("float32", None)
