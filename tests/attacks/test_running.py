"""Attacks on processes: threads, forks, and memory that many calls keep."""

import pytest


def test_omp_100000_threads(program):
    """More threads than a machine has are asked for: the call works."""
    source = """
import numpy as np
import oracle
import spattn
q, k, v = oracle.arrays(2000, heads=8)
out = spattn.attention(q, k, v, spattn.patterns.Full())
print(out.shape, abs(out[:, :1, :50] - oracle.dense(q[:, :1, :50], k[:, :1], v[:, :1], True)).max() < 1e-5)
"""
    assert program(source, OMP_NUM_THREADS="100000") == "(1, 8, 2000, 8) True\n"


def test_fork_while_planning(program):
    """Children that are forked while other threads plan can plan."""
    source = """
import os, signal, threading
import spattn
from spattn import patterns as P

done = threading.Event()

def keep_planning(left):
    while not done.is_set():
        spattn.plan(P.SlidingWindow(left), 300)
        left += 3

threads = [threading.Thread(target=keep_planning, args=(i,)) for i in range(3)]
for thread in threads:
    thread.start()
hung = forks = 0
while forks < 60 and hung < 3:
    forks += 1
    if (pid := os.fork()) == 0:
        signal.alarm(30)
        os._exit(spattn.plan(P.Causal(), 20).nnz != 210)
    hung += os.waitpid(pid, 0)[1] != 0
done.set()
for thread in threads:
    thread.join()
print(forks, hung)
"""
    assert program(source) == "60 0\n"


@pytest.mark.slow
@pytest.mark.footprint
def test_memory_of_many_masks(program):
    """Attention over 24 masks of 2048 × 2048 keeps less than 225 MB: the 600 MB for 64 masks of the attack."""
    source = """
import numpy as np
import oracle
import spattn

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))

rng, tokens = np.random.default_rng(0), 2048
arrays = oracle.arrays(tokens)
spattn.attention(*arrays, "causal")
before = resident()
for _ in range(24):
    allowed = rng.random((tokens, tokens)) < 0.3
    out = spattn.attention(*arrays, allowed)
q, k, v = arrays
right = abs(out[:, :, :50] - oracle.dense(q[:, :, :50], k, v, allowed[:50])).max() < 1e-4
print((resident() - before) // 10**6, right)
"""
    megabytes, right = program(source).split()
    assert right == "True" and int(megabytes) < 225
