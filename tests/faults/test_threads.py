"""docs/faults.rst, "Threads and processes" 32 and 36, both passes: many forks at once, any number of threads."""

import pytest

from spattn import cpu

FORKS = """
import os, signal, threading
import spattn
from spattn import cpu, patterns as p
from spattn.testing import inputs, random

q, k, v = inputs(1, 4, 2, 300, 300, 32)
dout = random(q.shape, seed=1)
plan = spattn.plan_for(p.longformer(50, global_tokens=(0, 111)), q, k, v, backend="cpu")

def results(isa):
    out, lse = cpu.forward(q, k, v, plan, 0.2, isa=isa)
    return [x.tobytes() for x in (out, lse, *cpu.backward(dout, q, k, v, out, lse, plan, 0.2, isa=isa))]

sets = cpu.instruction_sets()
expected = {isa: results(isa) for isa in sets}
threads_before = cpu.num_threads()
lost, wrong, done = [], [], threading.Event()

def fork_often(number):
    for n in range(FORKS):
        isa = sets[(number + n) % len(sets)]
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs is killed
            os._exit(results(isa) != expected[isa])
        status = os.waitpid(child, 0)[1]
        if status:
            lost.append(status)

def compute():
    while not done.is_set():
        for isa in sets:
            if results(isa) != expected[isa]:
                wrong.append(isa)

parents = [threading.Thread(target=fork_often, args=(number,)) for number in range(PARENTS)]
busy = threading.Thread(target=compute)
for thread in (busy, *parents):
    thread.start()
for thread in parents:
    thread.join()
done.set()
busy.join()
print(len(lost), len(wrong), cpu.num_threads() == threads_before > 1)
"""


@pytest.mark.parametrize("parents, forks", [(1, 60), (4, 15)])
def test_fault_32_many_forks_while_other_threads_compute(python, parents, forks):
    """No child hangs, whoever holds which thread, lock or workspace when it is born; all agree to the bit."""
    source = FORKS.replace("FORKS", str(forks)).replace("PARENTS", str(parents))
    assert python(source, OMP_NUM_THREADS="4").split() == ["0", "0", str(cpu._core.OPENMP)]


def test_fault_32_a_child_of_a_child(python):
    """Only the process that imported spattn has OpenMP's threads: none of its descendants waits for them."""
    source = (
        FORKS.partition("lost, wrong")[0]
        + """
import sys

def descend(generations):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        good = all(results(isa) == expected[isa] for isa in sets) and cpu.num_threads() == 1
        os._exit(not good or generations > 1 and descend(generations - 1))
    return os.waitpid(child, 0)[1] != 0

print(descend(3))
"""
    )
    assert python(source, OMP_NUM_THREADS="4") == "False\n"


DIGESTS = """
import hashlib, os
import spattn
from spattn import cpu, patterns as p
from spattn.testing import DTYPES, inputs, random

def threads_alive():
    return len(os.listdir("/proc/self/task"))

cpu._core.team_size = int  # whether cores are occupied or not
before = threads_alive()
for sizes, pattern in (
    ((1, 2, 1, 400, 400), p.longformer(60, global_tokens=(0, 333))),  # long lists, short lists, and merges of both
    ((2, 4, 2, 1, 5000), p.Full()),  # decoding: pieces of one list
    ((1, 6, 2, 3, 3000), p.strided(64)),  # few queries, heads of a group together
    ((1, 1, 1, 70, 4000), p.Causal()),
    ((1, 4, 4, 300, 300), p.Documents((100, 150, 50)) & p.Causal()),
):
    for dtype in DTYPES:
        q, k, v = inputs(*sizes, 32, dtype=dtype)
        plan = spattn.plan_for(pattern, q, k, v, backend="cpu")
        found = hashlib.sha256(plan.work.tobytes() + plan.merge_sources.tobytes())
        for isa in cpu.instruction_sets():
            out, lse = cpu.forward(q, k, v, plan, 0.2, isa=isa)
            gradients = cpu.backward(random(q.shape, dtype), q, k, v, out, lse, plan, 0.2, isa=isa)
            for x in (out, lse, *gradients):
                found.update(x.tobytes())
            print(dtype, isa, sizes, found.hexdigest())
started = threads_alive() - before
assert started == (int(os.environ["OMP_NUM_THREADS"]) - 1) * cpu._core.OPENMP, started
"""


@pytest.fixture(scope="module")
def one_thread():
    """What one thread prints; filled by the first test that asks."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_fault_36_both_passes_on_any_number_of_threads(python, one_thread, threads):
    """Plans, merges, decoding and gradients, in every dtype and on every instruction set."""
    if not one_thread:
        one_thread["prints"] = python(DIGESTS, OMP_NUM_THREADS="1")
    printed = python(DIGESTS, OMP_NUM_THREADS=str(threads))
    assert printed == one_thread["prints"] and len(printed.splitlines()) == 20 * len(cpu.instruction_sets())
