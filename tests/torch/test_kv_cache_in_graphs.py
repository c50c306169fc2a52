"""Steps over a KVCache in graphs of torch.compile: one graph for all steps, with the eager results and errors."""

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("torch._dynamo.testing")

import spattn  # noqa: E402
from spattn import patterns as p  # noqa: E402

STREAMING = p.Causal() & (p.Sinks(4) | p.SlidingWindow(15, 0))


def caches(pattern, count=2, **options):
    sizes = {"batch": 2, "heads_kv": 2, "head_dim": 8, "like": torch.zeros(1)}
    return [spattn.KVCache(pattern, 200, **sizes, **options) for _ in range(count)]


def draw(tokens):
    return [torch.randn(2, heads, tokens, 8) for heads in (4, 2, 2)]


def step(cache, q, k, v, lengths=None, sinks=None):
    cache.append(2 * k, v, lengths=lengths)
    out, lse = cache.attention(q + 1, lengths=lengths, scale=0.5, return_lse=True, sinks=sinks)
    return 2 * out, lse


def compiled(function):
    torch._dynamo.reset()
    counter = testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize(("pattern", "ragged"), [(STREAMING, False), (STREAMING, True), ("causal", True)])
@torch.no_grad()
def test_one_graph_of_all_steps(pattern, ragged):
    """Keys are dropped, entries reordered and cropped between steps; tensors say how many tokens an entry gets."""
    torch.manual_seed(0)
    run, counter = compiled(step)
    one, other = caches(pattern)
    sinks = torch.randn(4)
    for cache in (one, other):
        torch.manual_seed(1)
        cache.append(*draw(60)[1:])
    for number in range(50):
        given = draw(1)
        lengths = torch.tensor([1, number % 3 % 2]) if ragged else None
        for got, want in zip(run(one, *given, lengths, sinks), step(other, *given, lengths, sinks), strict=True):
            assert torch.equal(got, want)
        if number % 20 == 19:
            for cache in (one, other):
                cache.reorder([1, 0])
                cache.crop(cache.lengths - 1)
    assert one.lengths.tolist() == other.lengths.tolist()
    assert counter.frame_count == 1


@torch.no_grad()
def test_steps_of_two_sizes_and_caches():
    run, counter = compiled(step)
    for tokens in (1, 3):
        one, other = caches(STREAMING)
        for _ in range(10):
            given = draw(tokens)
            for got, want in zip(run(one, *given), step(other, *given), strict=True):
                assert torch.equal(got, want)
    assert counter.frame_count == 2


@torch.no_grad()
def test_errors_of_values_are_raised_when_the_graph_runs():
    run, _ = compiled(step)
    (cache,) = caches("causal", 1)
    cache.append(*draw(199)[1:])
    run(cache, *draw(1))
    with pytest.raises(ValueError, match=r"batch entry 0 has 200 of 200 tokens \(max_len\)"):
        run(cache, *draw(1))
    assert cache.lengths.tolist() == [200, 200]
    with pytest.raises(ValueError, match=r"lengths: expected integers in \[0, 1\], got 1 to 2"):
        run(cache, *draw(1), torch.tensor([1, 2]))


def test_what_a_graph_does_not_support():
    (cache,) = caches("causal", 1)
    cache.append(*draw(2)[1:])
    (unserializable,) = caches(p.Causal() & p.interop.from_mask_mod(lambda b, h, q, k: q - k < 5), 1)
    for function, message in (
        (
            lambda q: cache.attention(q, score=lambda s, b, h, q, k: 2 * s),
            "score: not supported in graphs of a KVCache",
        ),
        (lambda q: cache.attention(q.requires_grad_()), "has no gradients; call it under torch.no_grad"),
        (lambda q: unserializable.attention(q), "pattern: a KVCache in a graph needs a serializable pattern"),
    ):
        run, _ = compiled(function)
        with pytest.raises(Exception, match=message):
            run(draw(1)[0])
