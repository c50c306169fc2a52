"""Steps of generation and training with new patterns: counts of plans and bytes.

The counts stand for the times that benchmarks/planning/attacks.py prints.
"""

import numpy as np
import pytest

import spattn
from spattn import patterns as p

from .counts import plans_made
from .oracle import dense, draw, strided

pytestmark = pytest.mark.usefixtures("no_plans")


def test_entries_that_are_each_at_a_place_of_their_own():
    """vLLM's and SGLang's decoding: one query for each batch entry, each at its own position, which moves every step.

    Eight steps search no tiles: they are planned by their rows.
    """
    window, room, entries = 256, 2048, 16
    first = np.random.default_rng(0).integers(300, room - 40, entries)
    q, k, v = draw(4, (entries, 4, 1, 64), *[(entries, 1, room, 64)] * 2)
    keys = np.arange(room)

    def steps():
        for step in range(1, 9):
            place = (first + step)[:, None, None]
            out = spattn.attention(q, k, v, p.RowIntervals(place + 1 - window, place + 1))
        allowed = (keys > place[..., None] - window) & (keys <= place[..., None])
        assert np.abs(out - dense(q, k, v, allowed)).max() < 1e-5

    assert plans_made(steps) <= 2


def test_packed_sequences_of_flash_attention(program):
    """from_flash_attention(cu_seqlens_q=...) of equal queries and keys costs what Documents & SlidingWindow costs.

    It takes less than 8 bytes for a token; Documents & SlidingWindow takes 3. It made the interval of each
    row once, 64 bytes for a token.
    """
    source = """
import numpy as np
import spattn
from counts import peak_bytes
from spattn import patterns as p

tokens, window, made = 1 << 18, 255, []
makes = (
    lambda starts: p.Documents.from_cu_seqlens(starts) & p.SlidingWindow(window, 0),
    lambda starts: p.interop.from_flash_attention((window, 0), cu_seqlens_q=starts),
)
for seed in (1, 0):  # the first packing imports the planner
    starts = np.r_[0, np.sort(np.random.default_rng(seed).choice(tokens, 120, False)), tokens]
    taken = [peak_bytes(lambda: made.append(spattn.plan(make(starts), tokens))) / tokens for make in makes]
from_start = np.arange(tokens) - np.repeat(starts[:-1], np.diff(starts))
right = all(one.nnz == (np.minimum(from_start, window) + 1).sum() for one in made[-2:])
print(right, *taken)
"""
    right, together, packed = program(source).split()
    assert right == "True"
    assert float(together) < 8
    assert float(packed) < 8


STEPS, FIRST = 20, 6000


def assert_steps_share_plans(step, allowed, most):
    """20 steps of generation with one query make at most so many plans, and the last one is right.

    Parameters
    ----------
    step : callable
        Position of the query, of FIRST and those after it, to (pattern, number of keys).
    allowed : callable
        Position of the query and positions of keys to bool array.
    """
    cache = draw(12, *[(1, 2, FIRST + STEPS + 8, 64)] * 2)
    (q,) = draw(13, (1, 4, 1, 64))

    def steps():
        for number in range(STEPS):
            pattern, keys = step(FIRST + number)
            out = spattn.attention(q, *(x[:, :, :keys] for x in cache), pattern)
        k, v = (x[:, :, :keys].repeat(2, 1) for x in cache)
        here = allowed(FIRST + number, np.arange(keys))
        assert np.abs(out - dense(q, k, v, here)).max() < 1e-5

    assert plans_made(steps) <= most


def big_bird(query, keys):
    """(heads, 1, keys): the causal keys of one query of BigBird, of which each head draws random blocks of its own."""
    return np.stack([big_bird_of_head(head, query, keys) for head in range(4)])[:, None]


def big_bird_of_head(head, query, keys, block=64, draws=3, seed=1):
    """Three blocks in the window, a global block and random blocks drawn as docs/patterns-definitions.rst says."""
    own, blocks = query // block, -(-len(keys) // block)
    chosen = {0, own - 1, own, own + 1}
    candidates = [one for one in range(blocks) if one not in chosen]
    taken = []
    words = np.random.Philox(key=seed, counter=[0, 0, head, own]).random_raw(draws).tolist()
    for last, word in enumerate(words, len(candidates) - draws):
        number = word % (last + 1)
        taken.append(last if number in taken else number)
    chosen |= {candidates[number] for number in taken}
    return np.isin(keys // block, list(chosen)) & (keys <= query)


ANY_PATTERN = {  # the pattern, its definition for one query
    "Strided": (p.strided(64), lambda query, keys: strided(query, keys, 64)),
    "Fixed": (p.fixed(64, 4), lambda query, keys: (keys // 64 == query // 64) | (keys % 64 >= 60)),
    "DilatedWindow": (p.DilatedWindow(64, 0, 4), lambda query, keys: ((query - keys) % 4 == 0) & (query - keys <= 256)),
    "BigBird": (p.Causal() & p.BigBird(64, seed=1), big_bird),
}


@pytest.mark.parametrize("name", ANY_PATTERN)
def test_steps_of_any_pattern(name):
    """A pattern whose keys are not all at the ends of the sequence keeps its plan from step to step.

    Four plans for 20 steps are enough for a pattern of stride 4, and for blocks, of which the steps begin one.
    """
    pattern, allowed = ANY_PATTERN[name]
    assert_steps_share_plans(lambda position: (pattern, position + 1), allowed, most=4)


def test_steps_of_a_window():
    """The same steps of a window with sinks have one plan."""
    pattern = p.Sinks(4) | p.SlidingWindow(255, 0)
    assert_steps_share_plans(lambda position: (pattern, position + 1), sinks_and_window, most=1)


def sinks_and_window(query, keys):
    """Four sinks and a window of 256 keys, without keys behind the query."""
    return (keys < 4) | ((query - keys >= 0) & (query - keys <= 255))


def test_steps_in_a_cache_of_fixed_size():
    """QueriesAt in a cache with room left: the steps search no tiles."""
    window, room = p.Sinks(4) | p.SlidingWindow(255, 0), FIRST + STEPS + 8
    assert_steps_share_plans(lambda position: (p.QueriesAt(window, position), room), sinks_and_window, most=2)


def test_decoding_steps_near_100000_keys():
    """400 growing lengths near 100,000 keys: one plan, of 1028 pairs each. Attack decode-steps."""
    pattern, pairs = (p.Sinks(4) | p.SlidingWindow(1023, 0)) & p.Causal(), set()

    def steps():
        for first in (100_000, 101_000, 102_000, 103_000):
            pairs.update(spattn.plan(pattern, 1, first + step).nnz for step in range(100))

    assert plans_made(steps) == 1
    assert pairs == {1028}
