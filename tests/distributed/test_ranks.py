"""Attention on several processes: the bits of one process, bytes on the wire, and errors on every rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

PROGRAM, RANKS = Path(__file__).parent / "rank_program.py", 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """For each rank, the parts of the program that succeeded, and its errors. A process has one thread."""
    folder = tmp_path_factory.mktemp("ranks")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(folder)], env=os.environ | {"OMP_NUM_THREADS": "1"}, **streams
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=240) for process in ranks[:2]]  # rank 3 stops for good
    finally:
        for process in ranks:
            process.kill()
    said += [process.communicate() for process in ranks[2:]]
    return [([line for line in out.splitlines() if "[Gloo]" not in line], err) for out, err in said]


@pytest.mark.parametrize(
    "part", ["bits", "heads", "given", "learned", "memberships", "dtensors", "modules", "graphs", "example"]
)
def test_parts_of_the_program(finished, part):
    """The functions of this name in rank_program.py."""
    for parts, errors in finished:
        assert part in parts, errors


def test_fault_45_ranks_that_die_stall_or_disagree(finished):
    """In the function `faults` of rank_program.py, rank 2 dies and rank 3 stops."""
    for rank, (parts, errors) in enumerate(finished):
        assert "mismatches" in parts and (rank > 1 or "faults" in parts), errors
