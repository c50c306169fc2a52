"""Plans that cannot fit are refused before the memory is asked for."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn._util import limits as _limits
from spattn.planning.contract.budget import Budget
from spattn.request.call import Call
from spattn.schedule import compiler
from spattn.testing import inputs

TOO_LARGE = r"^pattern: expected a plan of at most max_bytes = (\d+) bytes, got one that needs at least (\d+)$"


def refusal(pattern, q_len, max_bytes, **options):
    with pytest.raises(ValueError, match=TOO_LARGE) as error:
        compiler.plan(pattern, q_len, max_bytes=max_bytes, **options)
    bound, need = map(int, re.match(TOO_LARGE, str(error.value)).groups())
    assert bound == max_bytes < need
    return need


class Chequered(p.Pattern):
    """Every other tile, of which no run is made."""

    def allows(self, q, k):
        return (q // 128 + k // 64) % 2 == 0


def test_refused_before_it_is_made():
    """Over 2¹⁷ tokens there are a million tiles, that many pairs of boxes to look at and more."""
    spattn.plan(p.Causal(), 100)
    tracemalloc.start()
    need = refusal(Chequered(), 1 << 17, 40 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tiles = 1024 * 1024
    assert 40 * tiles < need < 100 * tiles
    assert peak < 40 << 20, "boxes, not tiles"


def test_the_need_is_no_more_than_planning_takes():
    """At least: a plan is never refused by a bound that it would stay below."""
    for pattern, n in ((p.Causal(), 3000), (p.SlidingWindow(50), 20000), (p.strided(40), 5000)):
        spattn.clear_plan_cache()
        tracemalloc.start()
        made = spattn.plan(pattern, n)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert spattn.plan(pattern, n, max_bytes=peak) is made
        spattn.clear_plan_cache()
        assert spattn.plan(pattern, n, max_bytes=peak).nnz == made.nnz
        assert refusal(pattern, n, made.nbytes - 1) >= made.nbytes


@pytest.mark.parametrize("kept", [False, True])
def test_kept_or_not_a_plan_is_refused_by_the_same_bounds(kept):
    def need(max_bytes):
        spattn.clear_plan_cache()
        if kept:
            spattn.plan(p.SlidingWindow(50), 9000)
        return refusal(p.SlidingWindow(50), 9000, max_bytes)

    most = need(100)
    while True:  # up to the largest need that planning meets
        following = need(most - 1)
        if following == most:
            break
        most = following
    spattn.clear_plan_cache()
    made = spattn.plan(p.SlidingWindow(50), 9000)
    assert spattn.plan(p.SlidingWindow(50), 9000, max_bytes=10**12) is made, "the bound is not part of the key"
    with pytest.raises(ValueError, match=str(most)):
        spattn.plan(p.SlidingWindow(50), 9000, max_bytes=most - 1)


def test_masks_of_random_tiles_count():
    mask = np.random.default_rng(0).random((1024, 1024)) < 0.5
    need = refusal(p.Mask(mask), 1024, 60_000, tile=(128, 64))
    assert 60_000 < need <= 64_000, "refused at the first bitmask that is too many"


def test_heads_that_are_too_many():
    assert refusal(p.BigBird(16), 64, 10**6, heads=10**9) == 4 * 10**9


def test_more_runs_than_a_plan_can_hold():
    budget = Budget(10**12)
    budget.add_runs(2**31 - 2)
    budget.need_runs(1)
    with pytest.raises(
        ValueError, match="^pattern: expected at most 2147483647 runs of tiles, got at least 2147483648"
    ):
        budget.need_runs(2)


def test_lists_that_are_written_out_count():
    """For a backend whose kernels read tiles; a plan that is kept is refused as one that is made."""
    call = Call.of(*inputs(1, 1, 1, 5000, 5000, 8))
    made = compiler.plan_for(p.Causal(), call, tile_by_tile=True, max_bytes=1 << 20)
    assert made.nbytes < 16 * made.tiles
    with pytest.raises(ValueError, match=f"{TOO_LARGE[:-1]}"):
        compiler.plan_for(p.Causal(), call, tile_by_tile=True, max_bytes=16 * made.tiles)
    assert compiler.plan_for(p.Causal(), call, max_bytes=16 * made.tiles) is made
    with pytest.raises(ValueError, match="^pattern: expected at most 2147483647 tiles on a GPU, got 2147483648;"):
        Budget(10**12).need_tiles(2**31)


@pytest.mark.footprint
def test_six_billion_tiles(python, peak):
    """10 million tokens, causal, have 6 · 10⁹ tiles, and 160,000 runs of them."""
    source = """
import spattn
before = peak()
made = spattn.plan(spattn.patterns.Causal(), 10**7)
assert made.nnz == 10**7 * (10**7 + 1) // 2 and made.tiles > 6 * 10**9 and len(made.indices) < 3 * 10**5
print((peak() - before) >> 10)
"""
    assert int(python(peak + source, OMP_NUM_THREADS="1")) < 640


def test_the_limit_of_the_address_space_is_the_default(python):
    source = """
import resource, spattn
from spattn._util import limits as _limits
from spattn.schedule import compiler
assert _limits.memory() > 1 << 30
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
assert 32 << 20 < _limits.memory() <= 64 << 20
try:
    spattn.plan(spattn.patterns.SlidingWindow(3), 4 * 10**7)
except ValueError as error:
    print(error)
"""
    assert re.match(TOO_LARGE, python(source).strip())


def test_cgroups(monkeypatch, tmp_path):
    monkeypatch.setattr(_limits, "_CGROUPS", str(tmp_path))
    installed = _limits._installed.__wrapped__()
    assert installed > 1 << 26
    for name, text, expected in (
        ("memory.max", "max\n", installed),
        ("memory.max", "123456\n", 123456),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", 123456),
        ("memory/memory.limit_in_bytes", "99999\n", 99999),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        assert _limits._installed.__wrapped__() == expected


@pytest.mark.parametrize(
    "name, value",
    [
        ("workers", 0),
        ("workers", -1),
        ("batch", -1),
        ("heads", -1),
        ("max_bytes", -1),
        ("tile", (16, 64, 3)),
        ("tile", (1 << 16, 64)),
        ("tile", (16, 1 << 16)),
        ("tile", ()),
    ],
)
def test_numbers_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        compiler.plan(p.Causal(), 20, **{name: value})


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    "name, value",
    [
        ("workers", 1.5),
        ("workers", 1.0),
        ("workers", True),
        ("batch", "1"),
        ("heads", 1.0),
        ("max_bytes", 1e9),
        ("tile", (128.0, 64)),
        ("tile", 128),
        ("tile", (True, 64)),
    ],
)
def test_numbers_of_other_types(name, value, kept):
    """Also where a plan of equal numbers is kept: 1.0 == 1 == True."""
    spattn.clear_plan_cache()
    if kept:
        spattn.plan(p.Causal(), 20)
    with pytest.raises(TypeError, match=rf"^{name}: expected .*, got "):
        compiler.plan(p.Causal(), 20, **{name: value})


def test_integers_of_numpy_are_integers():
    made = spattn.plan(p.Causal(), 20, tiling=spattn.Tiling(workers=1, tile=(128, 64)), batch=1, heads=1)
    one = np.int64(1)
    assert (
        spattn.plan(
            p.Causal(), np.int32(20), tiling=spattn.Tiling(workers=one, tile=[np.int16(128), 64]), batch=one, heads=one
        )
        is made
    )
