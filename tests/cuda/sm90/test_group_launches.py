"""Grouped launches on a GPU: every problem's results are those that it has by itself, to the last bit."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

import spattn
from spattn import patterns
from spattn.arrays import namespace_of, to_host
from spattn.cuda.host import group
from spattn.planning.contract.validated import validated
from spattn.schedule import compiler
from spattn.testing import Expectation, inputs

pytestmark = [pytest.mark.family("sm90"), pytest.mark.gpu, pytest.mark.usefixtures("hopper_kernels")]

# name: (pattern, batch, heads_q, heads_kv, q_len, kv_len)
CASES = {
    "causal": (patterns.Causal(), 1, 4, 4, 700, 700),
    "more keys": (patterns.Causal(), 2, 2, 1, 260, 391),
    "window": (patterns.SlidingWindow(70), 2, 8, 2, 400, 400),
    "strided": (patterns.strided(16), 1, 4, 2, 600, 600),
    "longformer": (patterns.longformer(64, global_tokens=(0, 1, 200)), 2, 4, 1, 500, 500),
    "bigbird": (patterns.BigBird(32, 1, 1, 1, seed=3), 1, 3, 3, 448, 448),
    "documents": (patterns.Documents(((100, 150), (30, 40, 180))), 2, 2, 2, 250, 250),
    "dilated": (patterns.DilatedWindow(20, 20, 3), 1, 16, 4, 401, 401),
    "neighbourhood": (patterns.Neighborhood((18, 22), 7), 1, 5, 5, 396, 396),
    "full": (patterns.Full(), 3, 2, 2, 100, 333),
    "decoding": (patterns.Causal(), 2, 8, 2, 1, 3000),
    "few queries": (patterns.Causal(), 1, 12, 4, 16, 2000),
    "long list": (patterns.Full(), 1, 1, 1, 130, 20000),
    "per head": (
        patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30), patterns.strided(12))),
        1,
        3,
        3,
        260,
        260,
    ),
    "some empty rows": (patterns.BlockLocal(50) & ~patterns.SlidingWindow(20, 90), 1, 2, 2, 300, 300),
    "nothing": (patterns.Full() - patterns.Full(), 1, 2, 2, 150, 150),
}


@pytest.fixture
def started(monkeypatch):
    """How many launches each grouped launch took, merges included."""
    made, original = [], group.OneLaunch.write

    def noted(self, *args):
        written = original(self, *args)
        _, _, first, following = written
        made.append(len(first) + len(following))
        return written

    monkeypatch.setattr(group.OneLaunch, "write", noted)
    return made


def make(torch, name, head_dim=64, dtype="bfloat16", seed=0):
    """(q, k, v, pattern) on the GPU."""
    pattern, batch, heads_q, heads_kv, q_len, kv_len = CASES[name]
    arrays = inputs(batch, heads_q, heads_kv, q_len, kv_len, head_dim, dtype=dtype, seed=seed)
    return *(namespace_of(torch.empty(0)).from_numpy(x).cuda() for x in arrays), pattern


def planned(problem, workers=8, block_q=128):
    """The problem with a plan in place of its pattern, so that a call by itself and a group execute the same, and all
    of a group with tiles of one size run in one launch."""
    q, k, v, pattern = problem
    sizes = {"batch": q.shape[0], "heads": q.shape[1], "tile": (block_q, 64), "workers": workers}
    return q, k, v, compiler.plan(pattern, q.shape[2], k.shape[2], **sizes)


def same(found, problems, **options):
    """Whether results have the bits that problems have by themselves."""
    alone = [spattn.attention(*problem, return_lse=True, **options) for problem in problems]
    for pair, other in zip(found, alone, strict=True):
        for a, b in zip(pair, other, strict=True):
            assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
            np.testing.assert_array_equal(to_host(a).astype(np.float64), to_host(b).astype(np.float64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_patterns(torch, started, head_dim, dtype):
    """All problems at once, with their plans: the same bits; with their patterns: within the budget of float64."""
    given = [planned(make(torch, name, head_dim, dtype)) for name in CASES]
    same(spattn.grouped_attention(given, return_lse=True), given)
    problems = [make(torch, name, head_dim, dtype) for name in CASES]
    results = spattn.grouped_attention(problems, return_lse=True)
    assert len(started) == 2
    for (q, k, v, pattern), (out, lse) in zip(problems, results, strict=True):
        Expectation(pattern, *map(to_host, (q, k, v))).check(to_host(out), to_host(lse), "grouped")


@pytest.mark.parametrize("workers", [1, 16, 132])
def test_split_lists(torch, started, workers):
    """Merges and reductions of several problems."""
    names = ("long list", "strided", "longformer", "decoding", "causal")
    given = [planned(make(torch, name), workers) for name in names]
    same(spattn.grouped_attention(given, return_lse=True), given)
    assert len(started) == 1 and started[0] > 1


def test_every_problem_ends_in_one_launch(torch, started):
    """Without rows that are shared there is one launch, whatever the problems."""
    given = [make(torch, name) for name in ("causal", "window", "documents", "full", "neighbourhood")]
    outs = spattn.grouped_attention(given)
    assert started == [1] and [out.shape for out in outs] == [q.shape for q, *_ in given]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sizes_of_tiles_run_side_by_side(torch, started, head_dim):
    """Tiles of 128 and of up to 64 queries are a launch each; merges and reductions come after all of them. Memory is
    used again from call to call."""
    wide, small = ("causal", "long list", "decoding"), ("strided", "longformer", "window", "bigbird", "neighbourhood")
    given = [planned(make(torch, name, head_dim), 16, 64) for name in small[:2]]
    given += [planned(make(torch, name, head_dim), 16) for name in wide]
    given += [planned(make(torch, name, head_dim), 16, 48) for name in (small[0], *small[2:])]
    for _ in range(10):
        found = spattn.grouped_attention(given, return_lse=True)
        same(found, given)
        del found
    assert len(started) == 20 and started[:2] == started[2:4] and sum(started[:2]) > 4
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = spattn.grouped_attention(given, return_lse=True)
    for _ in range(3):
        for q, *_ in given:
            q.copy_(torch.randn_like(q))
        graph.replay()
        same(found, given)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_computed_again(torch, started, bad):
    """Exact rows read the arrays, plans and strides of their own problem, and no other problem's rows change."""
    names = ("causal", "window", "strided", "longformer", "decoding", "dilated")
    given = [planned(make(torch, name, 128)) for name in names]
    clean = spattn.grouped_attention(given, return_lse=True)
    for number in (1, 2, 4):
        q, k, v, _ = given[number]
        k[:, :, 40] = bad
        v[:, 0, k.shape[2] - 1] = bad
    found = spattn.grouped_attention(given, return_lse=True)
    same(found, given)
    for number in (0, 3, 5):
        assert all(map(torch.equal, found[number], clean[number]))
    assert not torch.equal(found[1][0], clean[1][0]) and len(started) == 2


def test_logits_that_are_too_large(torch, started):
    given = [planned(make(torch, name, 64, "float16")) for name in ("window", "causal", "few queries")]
    given[1][0].mul_(6e4)
    same(spattn.grouped_attention(given, return_lse=True), given)


@pytest.mark.parametrize("scale", [None, 0.3, -0.1, 0.0])
def test_scales(torch, started, scale):
    """One that is given is everybody's; else each problem has that of its own head dimension."""
    given = [planned(make(torch, name, dim)) for name, dim in (("causal", 32), ("window", 64), ("strided", 40))]
    for _ in range(2):
        same(spattn.grouped_attention(given, scale=scale, return_lse=True), given, scale=scale)
    assert len(started) == 2


def test_more_problems_than_a_launch_holds(torch, started):
    given = [planned(make(torch, name, seed=n)) for n in range(5) for name in list(CASES)[:9]]
    same(spattn.grouped_attention(given, return_lse=True), given)
    assert len(started) >= 2


def test_kinds_of_launches(torch, started):
    """Problems of one dtype and class of head dimensions run together; one that is alone runs by itself."""
    kinds = [(64, "bfloat16"), (40, "bfloat16"), (64, "float16"), (128, "bfloat16"), (96, "bfloat16")]
    given = [planned(make(torch, "window", *kind)) for kind in kinds]
    same(spattn.grouped_attention(given, return_lse=True), given)
    assert len(started) == 2


def test_few_problems(torch, started):
    """None, one, and one that has nothing to compute."""
    assert spattn.grouped_attention([]) == []
    causal = planned(make(torch, "causal"))
    same(spattn.grouped_attention([causal], return_lse=True), [causal])
    assert not started
    q, k, v, _ = make(torch, "window")
    empty = [q[:, :, :0], k, v, patterns.Full()], [q, k[:, :, :0], v[:, :, :0], patterns.Full()]
    given = [causal, *map(tuple, empty), planned(make(torch, "strided"))]
    found = spattn.grouped_attention(given, return_lse=True)
    same(found, given)
    assert len(started) == 1 and found[2][0].abs().max() == 0 and found[1][0].shape[2] == 0


def test_other_problems_run_by_themselves(torch, portable_allowed, started, caplog):
    """Of other types, libraries and addresses, beside those that run together; the log says so."""
    caplog.set_level(logging.DEBUG, "spattn.cuda")
    causal, window, strided = (planned(make(torch, name)) for name in ("causal", "window", "strided"))
    wide = tuple(x.float() for x in window[:3])
    host = tuple(x.cpu() for x in causal[:3])
    odd = torch.empty(causal[0].numel() + 1, device="cuda", dtype=torch.bfloat16)[1:].view(causal[0].shape)
    odd.copy_(causal[0])
    given = [causal, (*wide, patterns.Causal()), (odd, *causal[1:]), window, (*host, patterns.Causal()), strided]
    for _ in range(2):
        found = spattn.grouped_attention(given, return_lse=True)
        same(found, given)
    assert len(started) == 2 and [out.device.type for out, _ in found] == ["cuda"] * 4 + ["cpu", "cuda"]
    said = [record.getMessage() for record in caplog.records]
    for number, why in ((1, "float32"), (2, "an array starts at")):
        assert any(text.startswith(f"problems[{number}] is not grouped") and why in text for text in said)


def test_arrays_that_tma_cannot_address(torch, portable_allowed, started):
    """Strides that are never readable, beside others."""
    causal, window, strided = (planned(make(torch, name)) for name in ("causal", "window", "strided"))
    q, k, v, made = causal
    wide = torch.zeros(*k.shape[:3], 65, device="cuda", dtype=k.dtype)
    wide[..., :64] = k
    given = [(q, wide[..., :64], v, made), window, strided]
    same(spattn.grouped_attention(given, return_lse=True), given)
    assert len(started) == 1 and portable_allowed


def test_values_that_are_to_be_negated(torch, started):
    """PyTorch keeps a negation as a flag on a tensor."""
    causal, window, strided = (planned(make(torch, name)) for name in ("causal", "window", "strided"))
    given = [causal, window, strided]
    same(spattn.grouped_attention(given, return_lse=True), given)
    negated = [(torch._neg_view(causal[0]), *causal[1:]), window, strided]
    same(spattn.grouped_attention(negated, return_lse=True), negated)


def test_heads_inside_tokens(torch, started):
    """Batch and head are two axes of memory, with maps of their own; and as axes of another layout."""
    given = []
    for name in ("window", "longformer", "full"):
        q, k, v, pattern = make(torch, name)
        given.append(planned((*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), pattern)))
    same(spattn.grouped_attention(given, return_lse=True), given)
    swapped = [(*(x.transpose(1, 2) for x in problem[:3]), problem[3]) for problem in given]
    same(spattn.grouped_attention(swapped, return_lse=True, layout="bshd"), swapped, layout="bshd")
    assert len(started) == 2


def test_repeated_calls(torch, started):
    """Other values, addresses and streams; patterns and plans; nothing is prepared twice."""
    names, results = ("causal", "strided", "decoding", "longformer"), []
    spattn.clear_plan_cache()
    plans = [problem[3] for problem in map(planned, (make(torch, name) for name in names))]
    for seed in range(6):
        problems = [make(torch, name, seed=seed) for name in names]
        given = [(*problem[:3], made) for problem, made in zip(problems, plans, strict=True)]
        with torch.cuda.stream(torch.cuda.Stream() if seed % 2 else torch.cuda.current_stream()):
            torch.cuda.synchronize()
            found = spattn.grouped_attention(given, return_lse=True)
            by_pattern = spattn.grouped_attention(problems, return_lse=True)
            torch.cuda.synchronize()
        results.append((found, given))
        for (out, lse), (other, other_lse) in zip(found, by_pattern, strict=True):
            torch.testing.assert_close(out, other, rtol=2e-2, atol=1e-2)
            torch.testing.assert_close(lse, other_lse, rtol=1e-4, atol=1e-4)
    for found, given in results:  # which all were kept
        same(found, given)
    assert len(started) == 12
    assert sum(key[0] == "group" for key in validated(plans[0]).calls) == 1


def test_two_streams(torch, started):
    """Groups that run at the same time do not touch each other's work counters or workspaces."""
    names = ("long list", "strided", "longformer", "causal")
    given = [[planned(make(torch, name, seed=seed), 16) for name in names] for seed in (0, 1)]
    for problems in given:
        spattn.grouped_attention(problems)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], [[], []]
    for _ in range(20):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[number].append(spattn.grouped_attention(given[number], return_lse=True))
    torch.cuda.synchronize()
    for problems, results in zip(given, found, strict=True):
        for result in results:
            same(result, problems)


def test_threads(torch, started):
    """Threads share what was prepared."""
    given = [planned(make(torch, name)) for name in ("causal", "window", "strided")]
    expected = spattn.grouped_attention(given)
    torch.cuda.synchronize()
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                found = spattn.grouped_attention(given)
                torch.cuda.current_stream().synchronize()
                if not all(map(torch.equal, found, expected)):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gradients(torch, started):
    """Each result is on record by itself; the gradients are those of the problem's own backward."""
    given = [planned(make(torch, name)) for name in ("causal", "window", "strided", "full")]
    for number in (0, 2):
        for x in given[number][:3]:
            x.requires_grad_()
    for repeat in range(2):
        outs = spattn.grouped_attention(given)
        assert [out.requires_grad for out in outs] == [True, False, True, False]
        loss = sum(out.float().square().sum() for out in outs)
        leaves = [x for number in (0, 2) for x in given[number][:3]]
        found = torch.autograd.grad(loss, leaves)
        alone = sum(spattn.attention(*given[number]).float().square().sum() for number in (0, 2))
        assert all(map(torch.equal, found, torch.autograd.grad(alone, leaves)))
        assert len(started) == repeat + 1
    (out, lse), *_ = spattn.grouped_attention(given, return_lse=True)
    found = torch.autograd.grad(lse.sum(), given[0][:2])
    alone = spattn.attention(*given[0], return_lse=True)[1]
    assert torch.equal(lse, alone) and all(map(torch.equal, found, torch.autograd.grad(alone.sum(), given[0][:2])))
    with torch.no_grad():
        assert not any(out.requires_grad for out in spattn.grouped_attention(given))


def test_graph_capture(torch, started):
    """A group whose plans and kernels are warm can be captured; its graph keeps what it reads."""
    given = [make(torch, name) for name in ("causal", "strided", "long list", "decoding")]
    spattn.grouped_attention(given, return_lse=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = spattn.grouped_attention(given, return_lse=True)
    spattn.clear_plan_cache()
    for q, *_ in given:
        q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    for pair, other in zip(found, spattn.grouped_attention(given, return_lse=True), strict=True):
        assert all(map(torch.equal, pair, other))


def test_other_kernels_asked_for(torch, portable_allowed, started, monkeypatch):
    """``SPATTN_CUDA_KERNEL`` is asked each time."""
    given = [make(torch, name) for name in ("causal", "window")]
    spattn.grouped_attention(given)
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    outs = spattn.grouped_attention(given)
    assert len(started) == 1 and len(portable_allowed) == 2
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "auto")
    for out, other in zip(outs, spattn.grouped_attention(given), strict=True):
        torch.testing.assert_close(out, other, rtol=2e-2, atol=1e-2)


def test_out_of_memory(torch, started):
    """Says how many bytes it needed, and leaves the GPU usable."""
    given = [planned(make(torch, name)) for name in ("causal", "window")]
    expected = spattn.grouped_attention(given)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(MemoryError, match="needed .* bytes"):
            [spattn.grouped_attention(given) for _ in range(1000)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(map(torch.equal, spattn.grouped_attention(given), expected))
