"""The wheels that `make wheels` has built work where there is neither a compiler nor an OpenMP library."""

import json
import os
import subprocess
from pathlib import Path

import pytest

# Set by `make wheels`: the folder of the wheels, and the interpreters that they were built for.
WHEELS = os.environ.get("SPATTN_WHEELS")
PYTHONS = os.environ.get("SPATTN_WHEEL_PYTHONS", "").split()

pytestmark = pytest.mark.skipif(WHEELS is None, reason="no wheels to test: make wheels")

PROGRAM = """
import json
import spattn
from spattn import cpu, testing, patterns

q, k, v = testing.inputs(heads_q=4, q_len=1024)
pattern = patterns.Causal() & patterns.SlidingWindow(255, 0)
testing.Expectation(pattern, q, k, v).check(*spattn.attention(q, k, v, pattern, return_lse=True), "the wheel")
with open("/proc/self/maps") as maps:
    files = sorted({line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line})
print(json.dumps({"package": spattn.__file__, "OpenMP": cpu._core.OPENMP, "libraries": files}))
"""


def wheel_for(python):
    """The one wheel that was built for this interpreter."""
    tag = subprocess.check_output([python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"], text=True)
    (wheel,) = Path(WHEELS).resolve().glob(f"spattn-*-{tag.strip()}-*.whl")
    return wheel


@pytest.mark.parametrize("python", PYTHONS)
def test_wheel_in_an_empty_environment(python, tmp_path):
    """Installed with what it depends on, it computes attention with threads, by the OpenMP library that it brings."""
    wheel, environment = wheel_for(python), tmp_path / "environment"
    assert "-manylinux_" in wheel.name
    subprocess.run([python, "-m", "venv", environment], check=True)
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "PYTHON", "SPATTN_"))}
    bare["PATH"] = str(environment / "bin")
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", wheel]
    subprocess.run([environment / "bin/python", *install], env=bare, cwd=tmp_path, check=True)
    printed = subprocess.check_output([environment / "bin/python", "-c", PROGRAM], env=bare, cwd=tmp_path, text=True)
    facts = json.loads(printed)
    assert facts["OpenMP"]
    assert facts["libraries"], "the core is threaded, so it has loaded an OpenMP library"
    assert all(Path(file).is_relative_to(environment) for file in [facts["package"], *facts["libraries"]]), facts
