#!/usr/bin/env python3
"""Time problems that reviewers found slow, against limits.

    python benchmarks/planning/attacks.py            # 10 minutes
    python benchmarks/planning/attacks.py --quick    # small problems, writes nothing
    python benchmarks/planning/attacks.py union steps # names with these prefixes, writes nothing

Each row is a plan, a decode step or a call: its median wall time, a reference time, and the limit, either absolute or
a multiple of the reference. Plans do not come from the cache unless the row is about the cache. FlexAttention masks
need torch and are skipped without it. tests/attacks/ checks the same problems by counts;
benchmarks/workloads/busy_machine.py times a decode step on busy cores. Writes ``attacks`` and prints the rows above
their limit.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import operator
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record

import spattn
from spattn import patterns as sp
from spattn.schedule import compiler  # noqa: E402

REPEATS = 5


class Times(NamedTuple):
    """Milliseconds of a problem and of the reference `beside`; limited by `limit` ms, or by `times` the reference."""

    ms: float
    limit: float | None = None
    beside: str = ""
    beside_ms: float | None = None
    times: float | None = None

    @property
    def most(self) -> float:
        """The limit in milliseconds."""
        return self.limit if self.limit is not None else self.times * self.beside_ms


class Case(NamedTuple):
    """A measurement, its number of tokens, and the number with ``--quick``."""

    measure: Callable[[int], Times]
    tokens: int
    quick: int
    needs_torch: bool = False


def draw(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Standard normal float32 arrays."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def clock(call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def planning(make: Callable[[], sp.Pattern], tokens: int, repeats: int = REPEATS, **options: Any) -> float:
    """Median milliseconds of constructing and planning a pattern, without the cache."""
    times = []
    for _ in range(repeats):
        spattn.clear_plan_cache()
        times.append(clock(lambda: compiler.plan(make(), tokens, **options)))
    return statistics.median(times)


# -- FlexAttention masks -----------------------------------------------------------------------------------------------


def table(tokens: int) -> Times:
    """``layout[q // 64, k // 64]``."""
    import torch

    layout = np.random.default_rng(0).random((tokens // 64, tokens // 64)) < 0.2
    own = torch.from_numpy(layout)
    mine = planning(lambda: sp.interop.from_mask_mod(lambda b, h, q, k: own[q // 64, k // 64]), tokens)
    return Times(mine, 300, "BlockLayout", planning(lambda: sp.BlockLayout(layout, (64, 64)), tokens))


def types(tokens: int) -> Times:
    """``allowed[kind[q], kind[k]]``."""
    import torch

    kinds = torch.from_numpy(np.arange(tokens) // 512 % 3)
    allowed = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])
    return Times(
        planning(lambda: sp.interop.from_mask_mod(lambda b, h, q, k: allowed[kinds[q], kinds[k]]), tokens), 300
    )


def disc(tokens: int) -> Times:
    """Pairs within a radius of 5 on an image of 128 columns."""
    columns = 128

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        dx, dy = q // columns - k // columns, q % columns - k % columns
        return dx * dx + dy * dy <= 25

    return Times(planning(lambda: sp.interop.from_mask_mod(mask), tokens, 1), 1000)


def classes(tokens: int) -> Times:
    """``ids[q] == ids[k]``, 16 classes in random order."""
    import torch

    ids = np.random.default_rng(1).permutation(np.arange(tokens) // (tokens // 16))
    own, like = torch.from_numpy(ids), draw(9, *[(1, 1, tokens, 8)] * 3)
    mine = planning(lambda: sp.interop.from_mask_mod(lambda b, h, q, k: own[q] == own[k]), None, 1, like=like)
    return Times(mine, None, "Clusters", planning(lambda: sp.Clusters(ids), None, 1, like=like), 5)


def truth_values(tokens: int) -> Times:
    """The sum of twelve boolean terms."""
    import torch

    kinds = torch.from_numpy(np.arange(tokens) // 64 % 5)

    def terms(q: Any, k: Any) -> list[Any]:
        return [(kinds[q] == a) & (kinds[k] == c) for a in range(5) for c in range(5) if (a + c) % 2]

    added = planning(
        lambda: sp.interop.from_mask_mod(lambda b, h, q, k: sum(terms(q, k), torch.tensor(False))), tokens, 1
    )
    joined = planning(
        lambda: sp.interop.from_mask_mod(lambda b, h, q, k: functools.reduce(operator.or_, terms(q, k))), tokens
    )
    return Times(added, 500, "joined by |", joined)


# -- patterns ----------------------------------------------------------------------------------------------------------


def bool_array(tokens: int) -> Times:
    """Attention with a regular pattern passed as a boolean array."""
    arrays = draw(10, *[(1, 2, tokens, 64)] * 3)
    regular = sp.DilatedWindow(64, 64, 4)
    patterns = sp.Mask(regular.index_set(tokens, tokens).to_dense()), regular
    found = []
    for pattern in patterns:
        spattn.attention(*arrays, pattern)
        found.append(min(clock(lambda p=pattern: spattn.attention(*arrays, p)) for _ in range(REPEATS)))
    return Times(found[0], None, "the pattern", found[1], 1.5)


def packed(tokens: int) -> Times:
    """from_flash_attention() with a window and a new packing in each call."""
    mine, theirs = [], []
    for seed in range(REPEATS):
        starts = np.r_[0, np.sort(np.random.default_rng(seed).choice(tokens, 120, False)), tokens]
        documents = functools.partial(sp.Documents.from_cu_seqlens, starts)
        mine.append(planning(lambda s=starts: sp.interop.from_flash_attention((255, 0), cu_seqlens_q=s), tokens, 1))
        theirs.append(planning(lambda d=documents: d() & sp.SlidingWindow(255, 0), tokens, 1))
    return Times(statistics.median(mine), None, "Documents & SlidingWindow", statistics.median(theirs), 5)


@dataclass(frozen=True)
class Coprime(sp.Pattern):
    """A predicate without a closed form."""

    def allows(self, q: Any, k: Any) -> Any:
        return np.gcd(q, k) == 1


def predicate_and_window(tokens: int) -> Times:
    """A predicate without a closed form, intersected with a window."""
    mine = planning(lambda: Coprime() & sp.SlidingWindow(255), tokens, 3)
    return Times(mine, 2000, "the other way round", planning(lambda: sp.SlidingWindow(255) & Coprime(), tokens, 3))


def union(terms: int) -> Times:
    """A union of `terms` terms at 64 tokens."""
    own = functools.reduce(operator.or_, [sp.Stride(7 + term, 3) & sp.Causal() for term in range(terms)])
    return Times(planning(lambda: own, 64), 1000 if terms <= 200 else 20000)


def doubled(tokens: int) -> Times:
    """``a | a``, nested 16 times."""
    own = functools.reduce(lambda a, _: a | a, range(16), sp.Causal())
    return Times(planning(lambda: own, tokens), 5000)


def plan_of(make: Callable[[], sp.Pattern], limit: float) -> Callable[[int], Times]:
    """Planning a pattern."""
    return lambda tokens: Times(planning(make, tokens, 3), limit)


# -- decode steps ------------------------------------------------------------------------------------------------------


def entries(tokens: int) -> Times:
    """A batch of 16, each entry with one query at its own position, which moves in each step."""
    place = np.random.default_rng(0).integers(300, tokens - 40, 16)[:, None, None]
    arrays = draw(4, (16, 4, 1, 64), *[(16, 1, tokens, 64)] * 2)
    new = []
    for step in range(1, 9):
        pattern = sp.RowIntervals(place + step + 1 - 256, place + step + 1)
        new.append(clock(lambda p=pattern: spattn.attention(*arrays, p)))
    again = [clock(lambda: spattn.attention(*arrays, pattern)) for _ in range(8)]
    return Times(statistics.median(new), None, "the same pattern again", statistics.median(again), 5)


def step_ms(step: Callable[[int], tuple[sp.Pattern, int]], first: int, steps: int = 20) -> float:
    """Median milliseconds of a decode step; `step` maps a position to (pattern, kv_len)."""
    cache = draw(12, *[(1, 2, first + steps + 8, 64)] * 2)
    (q,) = draw(13, (1, 4, 1, 64))
    times = []
    for position in range(first, first + steps):
        pattern, keys = step(position)
        k, v = (x[:, :, :keys] for x in cache)
        times.append(clock(lambda k=k, v=v, p=pattern: spattn.attention(q, k, v, p)))
    return statistics.median(times)


def steps_of(pattern: sp.Pattern) -> Callable[[int], Times]:
    """Decode steps with a growing cache; the reference is a window with sinks."""
    window = sp.Sinks(4) | sp.SlidingWindow(255, 0)

    def measure(tokens: int) -> Times:
        mine, theirs = (step_ms(lambda position, p=p: (p, position + 1), tokens) for p in (pattern, window))
        return Times(mine, 1, "window and sinks", theirs)

    return measure


def fixed_cache(tokens: int) -> Times:
    """QueriesAt in a preallocated cache."""
    window = sp.Sinks(4) | sp.SlidingWindow(255, 0)
    return Times(step_ms(lambda position: (sp.QueriesAt(window, position), tokens + 28), tokens), 1)


def growing(tokens: int) -> Times:
    """Milliseconds per plan over 100 growing cache lengths."""
    pattern = (sp.Sinks(4) | sp.SlidingWindow(1023, 0)) & sp.Causal()
    times = []
    for first in range(tokens, tokens + 4000, 1000):
        times.append(clock(lambda f=first: [spattn.plan(pattern, 1, f + step) for step in range(100)]) / 100)
    return Times(min(times), 0.3)


def beyond_memory(tokens: int) -> Times:
    """MemoryError for a result of `tokens` rows of 256 numbers, or of twice the memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 512
    q = np.broadcast_to(np.float32(0), (1, 1, max(tokens, 1 << (pages.bit_length() - 1)), 1))
    k, v = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 256), np.float32)

    def refused() -> None:
        try:
            spattn.attention(q, k, v)
        except MemoryError:
            return
        raise AssertionError("expected a MemoryError for a result larger than the memory")

    return Times(clock(refused), 1000)


CASES = {
    "table of both positions": Case(table, 8192, 2048, True),
    "table of token types": Case(types, 8192, 2048, True),
    "disc": Case(disc, 8192, 2048, True),
    "classes by table": Case(classes, 16384, 2048, True),
    "truth values added": Case(truth_values, 2048, 1024, True),
    "bool array": Case(bool_array, 4096, 1024),
    "packed sequences": Case(packed, 1 << 18, 1 << 14),
    "predicate and window": Case(predicate_and_window, 16384, 2048),
    "union of 200": Case(union, 200, 200),
    "union of 1000": Case(union, 1000, 1000),
    "union doubled 16 times": Case(doubled, 20, 20),
    "plan causal": Case(plan_of(sp.Causal, 3000), 1 << 20, 1 << 14),
    "plan causal 10 million": Case(plan_of(sp.Causal, 20000), 10**7, 10**5),
    "plan bigbird": Case(plan_of(lambda: sp.BigBird(64), 3000), 1 << 20, 1 << 14),
    "entries at their own places": Case(entries, 2048, 512),
    "steps strided": Case(steps_of(sp.strided(64)), 6000, 1000),
    "steps fixed": Case(steps_of(sp.fixed(64, 4)), 6000, 1000),
    "steps dilated": Case(steps_of(sp.DilatedWindow(64, 0, 4)), 6000, 1000),
    "steps bigbird": Case(steps_of(sp.Causal() & sp.BigBird(64, seed=1)), 6000, 1000),
    "steps in a fixed cache": Case(fixed_cache, 6000, 1000),
    "steps growing": Case(growing, 100_000, 10_000),
    "result beyond memory": Case(beyond_memory, 1 << 26, 1 << 26),
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="prefixes of problem names (default: all)")
    parser.add_argument("--quick", action="store_true", help="small problems, write nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*cannot be evaluated on whole tiles")
    spattn.plan(sp.Causal(), 1000)  # imports the planner
    rows = []
    print(f"{'problem':30}{'size':>10}{'ms':>12}{'most_ms':>12}{'beside_ms':>12}  beside")
    for name, case in CASES.items():
        if args.names and not name.startswith(tuple(args.names)):
            continue
        if case.needs_torch and importlib.util.find_spec("torch") is None:
            print(f"{name:30}skipped: needs torch")
            continue
        tokens = case.quick if args.quick else case.tokens
        found = case.measure(tokens)
        row = {"name": name, "size": tokens, "ms": round(found.ms, 3), "most_ms": round(found.most, 3)}
        row |= {"beside": found.beside, "beside_ms": found.beside_ms and round(found.beside_ms, 3)}
        rows.append(row)
        shown = "".join(f"{'' if row[key] is None else row[key]:>12}" for key in ("ms", "most_ms", "beside_ms"))
        print(f"{name:30}{tokens:>10}{shown}  {found.beside}", flush=True)
    if not args.quick and not args.names:
        notes = (
            "Median wall times; most_ms is the limit, absolute or a multiple of the reference (beside_ms). size: "
            "tokens, keys, or terms of a union. Planning times include the pattern's construction, without the cache; "
            "tests/attacks/ checks the same problems by counts."
        )
        record.write("attacks", rows, notes=notes)
    slow = [f"{row['name']}: {row['ms']} ms (limit {row['most_ms']})" for row in rows if row["ms"] > row["most_ms"]]
    print("\n".join(slow) or "all targets met")


if __name__ == "__main__":
    main()
