"""Attention on several processes: the bits of one process, bytes on the wire, and errors on every rank."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM, RANKS = Path(__file__).parent / "rank_program.py", 4


def start(names, folder):
    """Start one process of one thread for each rank."""
    command = [sys.executable, str(PROGRAM), names]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]


def said(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return [line for line in out.splitlines() if "[Gloo]" not in line]


@pytest.fixture
def ranks(tmp_path):
    """``ranks(names)`` starts the processes; none survives the test."""
    started = []

    def make(names):
        started.extend(start(names, tmp_path))
        return started

    yield make
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_bits_of_one_process(ranks):
    """Two, three and four ranks; also errors on every rank, and DTensors."""
    for process in ranks("bits,mismatches,dtensors"):
        assert said(process) == ["bits", "mismatches", "dtensors"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["faults", "faults_compared"])
def test_a_rank_that_dies_and_one_that_stops(ranks, name):
    """The others do not wait longer than the timeout of their group, 4 s."""
    processes = ranks(name)
    for process in processes[:2]:
        begin = time.monotonic()
        assert said(process) == [name]
    assert time.monotonic() - begin < 60
