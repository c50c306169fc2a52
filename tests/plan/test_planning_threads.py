"""Planning among threads, forks and numbers of threads."""

from __future__ import annotations

import pytest

from spattn._util.cached import cached_property

FORKS = """
import os, signal, sys, threading, time
import numpy as np, spattn
from spattn import patterns as p
from spattn.testing import inputs

x = inputs(1, 2, 2, 150, 150, 16)
expected = spattn.attention(*x, p.longformer(20, global_tokens=3))
done, failed = threading.Event(), []

def plan(number):
    while not done.is_set():
        spattn.plan(p.SlidingWindow(number) & ~p.Stride(5, 1), 300)
        spattn.plan(p.BigBird(16, seed=number), 300, heads=2)
        spattn.plan(p.Mask(np.random.default_rng(number).random((90, 90)) < 0.5), 90)
        if not number % 99:
            spattn.clear_plan_cache()
        number += 3

def compute(number):
    while not done.is_set():
        spattn.attention(*x, p.SlidingWindow(number % 149))
        number += 1

def child():
    signal.alarm(20)
    spattn.clear_plan_cache()
    out = spattn.attention(*x, p.longformer(20, global_tokens=3))
    made = spattn.plan(p.BigBird(16, seed=10**6), 300, heads=2)
    os._exit(0 if np.array_equal(out, expected) and made.nnz and spattn.plan_cache_info().plans == 2 else 1)

threads = [threading.Thread(target=work, args=(n,)) for work in (plan, compute) for n in (0, 1)]
for thread in threads:
    thread.start()
lost = []
for number in range({forks}):
    if (pid := os.fork()) == 0:
        child()
    status = os.waitpid(pid, 0)[1]
    if status:
        lost.append((number, os.waitstatus_to_exitcode(status)))
        if len(lost) > 2:
            break
done.set()
for thread in threads:
    thread.join(60)
print(lost, any(thread.is_alive() for thread in threads))
"""


@pytest.mark.slow
def test_no_child_is_lost_that_is_forked_while_threads_plan_and_compute(python):
    assert python("import warnings; warnings.simplefilter('ignore')\n" + FORKS.format(forks=80)) == "[] False\n"


def test_no_fork_cuts_an_import_in_two(python):
    """A thread is in the middle of importing what planning an array needs, and its parent forks: the child can plan."""
    source = """
import importlib.abc, os, signal, sys, threading, time
import numpy as np, spattn
from spattn import patterns as p

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "spattn.planning.tiles.search":
            inside.set()
            time.sleep(0.5)

for name in ("spattn.planning.tiles.search", "spattn.schedule.compiler"):
    sys.modules.pop(name, None)
inside = threading.Event()
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=lambda: spattn.plan(p.Mask(np.eye(20, dtype=bool)), 20))
thread.start()
assert inside.wait(60)
if (pid := os.fork()) == 0:
    signal.alarm(10)
    os._exit(spattn.plan(p.Mask(np.eye(20, dtype=bool)), 20).nnz != 20)
print(os.waitpid(pid, 0)[1])
thread.join(60)
"""
    assert python(source) == "0\n"


def test_a_child_forked_within_a_cached_property_can_use_it(python):
    """A thread of the parent is in the middle of planning's slowest property, for good as far as the child knows."""
    source = """
import os, signal, threading, time
import numpy as np, spattn
from spattn import patterns as p
from spattn.planning.symbolic.cells import Cells

inside, done = threading.Event(), threading.Event()

def wait(positions):
    if threading.current_thread() is not threading.main_thread():
        inside.set()
        done.wait(60)
    return positions

class Slow(np.ndarray):
    def min(self, *args, **options):
        wait(self)
        return np.asarray(self).min(*args, **options)

side = Cells(np.arange(6).reshape(2, 3).view(Slow), np.arange(2), np.zeros(2, np.int64))
thread = threading.Thread(target=lambda: side.bounds)
thread.start()
assert inside.wait(60)
if (pid := os.fork()) == 0:
    signal.alarm(10)
    os._exit(side.bounds[1].tolist() != [2, 5] or spattn.plan(p.Causal(), 20).nnz != 210)
print(os.waitpid(pid, 0)[1])
done.set()
thread.join(60)
"""
    assert python("import warnings; warnings.simplefilter('ignore')\n" + source) == "0\n"


DIGEST = """
import hashlib
import numpy as np, spattn
from spattn import cpu, patterns as p
from spattn.testing import inputs

found = hashlib.sha256()
for heads, n, pattern in ((1, 700, p.Causal()), (3, 500, p.longformer(100, global_tokens=(0, 333))),
                          (2, 900, p.PerHead((p.strided(50), p.BigBird(16))))):
    q, k, v = inputs(1, heads, heads, n, n, 64)
    plan = spattn.plan_for(pattern, q, k, v, backend="cpu")
    for made in (plan, spattn.plan(pattern, n, heads=heads, tiling=spattn.Tiling(workers=7))):
        for name, value in vars(made).items():
            if isinstance(value, (int, np.ndarray)):
                found.update(f"{name}{np.asarray(value).tobytes()}".encode())
    out, lse = cpu.forward(q, k, v, plan, 0.2)
    for x in (out, lse, *cpu.backward(out, q, k, v, out, lse, plan, 0.2)):
        found.update(x.tobytes())
print(found.hexdigest())
"""


def test_plans_and_results_do_not_depend_on_the_number_of_threads(python):
    assert len({python(DIGEST, OMP_NUM_THREADS=str(threads)) for threads in (1, 4, 7)}) == 1


class Squares:
    """How often `square` is computed."""

    def __init__(self, number):
        self.number, self.computed = number, 0

    @cached_property
    def square(self) -> int:
        """The square."""
        self.computed += 1
        return self.number**2


def test_cached_property():
    three, four = Squares(3), Squares(4)
    assert (three.square, three.square, four.square) == (9, 9, 16) and (three.computed, four.computed) == (1, 1)
    assert Squares.square.__doc__ == "The square." and vars(three)["square"] == 9


class Raced:
    """Another thread computes the property in the meantime."""

    @cached_property
    def value(self) -> str:
        vars(self)["value"] = "first"
        return "second"


def test_cached_property_keeps_the_first_result():
    assert Raced().value == "first"
