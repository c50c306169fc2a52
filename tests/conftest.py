"""Hypothesis profiles, marks, shared fixtures, and the number of BLAS threads.

``SPATTN_HYPOTHESIS_PROFILE=dev|ci|nightly`` (or ``--hypothesis-profile``) sets the number of examples of a property
test. ``dev`` and ``ci`` are deterministic; with ``ci``, the default, the suite takes a quarter of an hour on two cores.
``nightly`` draws new random examples. ``mutants`` is ``dev`` without shrinking: only the outcome is read.
"""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, settings

# Set before the first import of NumPy. The tests' matrix products are small and pytest-xdist keeps all cores busy: more
# OpenBLAS threads would only spin, each on a whole core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Validate every plan of the tests, and of the processes they start, as a user-supplied plan.
os.environ.setdefault("SPATTN_CHECK_PLANS", "1")

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=20, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile(
    "mutants", settings.get_profile("dev"), phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False
)
settings.register_profile("nightly", max_examples=2000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("SPATTN_HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config):
    if importlib.util.find_spec("spattn"):  # tests/test_wheels.py runs without it
        from spattn._util import checks as _checks
        from spattn.schedule import slow as _slow

        from .tables import check_table

        _checks.observers[:] = [check_table]
        _slow._LEAST_SECONDS = math.inf  # plans are validated, which takes longer than planning
    config.addinivalue_line("markers", "footprint: measures the memory of a process; meaningless under a sanitizer")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; run with `pytest -m gpu`")
    config.addinivalue_line("markers", "family(name): the CUDA kernel family under test, sm80 or sm90; tests/cuda only")
    config.addinivalue_line("markers", "unfollowed: plans predicates that the planner cannot evaluate on whole tiles")
    config.addinivalue_line("markers", "slow: takes more than about two seconds; skip with `-m 'not slow'`")


def pytest_runtest_logreport(report):
    """Append a failure to the file ``SPATTN_TEST_FAILURES`` at once: a run that is stopped prints no summary."""
    path = os.environ.get("SPATTN_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as file:
            print(f"FAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)\n{report.longreprtext}", file=file)


def pytest_collection_modifyitems(config, items):
    """Skip GPU tests unless ``-m`` names ``gpu``: a plain run needs no GPU, and reports them as skipped."""
    if "gpu" in (config.getoption("-m") or ""):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: pytest -m gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_runtest_setup(item):
    """Skip a GPU test with the backend's reason where the backend is unavailable."""
    if "gpu" in item.keywords:
        from spattn import cuda

        reason = cuda.unavailable()
        if reason is not None:
            pytest.skip(reason)


def _kernels():
    from spattn import cpu

    return ["reference", *cpu.instruction_sets()]


def pytest_generate_tests(metafunc):
    if "forward" in metafunc.fixturenames:
        metafunc.parametrize("forward", _kernels(), indirect=True)


@pytest.fixture
def forward(request):
    """``forward(q, k, v, pattern, scale=None) -> (out, lse)``, for the reference and each CPU instruction set."""
    import spattn
    from spattn import cpu, reference

    backend, module, options = "cpu", cpu, {"isa": request.param}
    if request.param == "reference":
        backend, module, options = "reference", reference, {}

    def run(q, k, v, pattern, scale=None):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return module.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend=backend), scale, **options)

    return run


@pytest.fixture
def unchecked_plans(monkeypatch):
    """Plan without the validation that this file switches on.

    For patterns whose parts() deliberately contradict allows(), and for two tests whose plans take half a minute to
    validate.
    """
    from spattn._util import checks as _checks

    monkeypatch.setenv("SPATTN_CHECK_PLANS", "0")
    monkeypatch.setattr(_checks, "observers", [])


@pytest.fixture(autouse=True)
def followed_predicates(request, monkeypatch):
    """Fail if the planner evaluates pairs of a predicate without a rule, unless the test is marked ``unfollowed``."""
    tiling = sys.modules.get("spattn.planning.tiles.tiling")
    if tiling is None or request.node.get_closest_marker("unfollowed"):
        return
    from spattn.planning.tiles import undecided as _undecided

    announce = _undecided.announce

    def checked(pattern, unfollowed, *counts):
        assert not unfollowed, f"{pattern!r}: {unfollowed[0]}"
        announce(pattern, unfollowed, *counts)

    monkeypatch.setattr(tiling, "_NOTED_CELLS", 1)
    monkeypatch.setattr(_undecided, "announce", checked)


@pytest.fixture
def slow_plans(monkeypatch):
    """Let every plan count as slow, so that it warns, with the reasons that the planner notes."""
    from spattn.planning.tiles import tiling as _tiling
    from spattn.schedule import slow as _slow

    monkeypatch.setattr(_slow, "_SECONDS", -1)
    monkeypatch.setattr(_slow, "_LEAST_SECONDS", -1)
    monkeypatch.setattr(_tiling, "_NOTED_CELLS", 1)


@pytest.fixture
def no_plans():
    """Clear the plan cache before and after the test."""
    import spattn

    spattn.clear_plan_cache()
    yield
    spattn.clear_plan_cache()


@pytest.fixture
def peak():
    """The source of ``peak()``, a program's peak memory in KiB.

    ``ru_maxrss`` does not do: after fork and exec it starts at the parent's resident size.
    """
    return """
def peak():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM:")).split()[1])
"""


@pytest.fixture
def python(request, tmp_path):
    """``python(source, **environment) -> stdout`` runs a program in a new interpreter."""

    # The validation of plans would add to the memory that a footprint test measures.
    checked = {"SPATTN_CHECK_PLANS": "0"} if request.node.get_closest_marker("footprint") else {}

    def run(source, *, timeout=240, **environment):
        done = subprocess.run(
            [sys.executable, "-c", source],
            cwd=tmp_path,
            env=os.environ | checked | environment,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
