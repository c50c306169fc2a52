"""Hypothesis profiles, markers, and threads of BLAS: the one place for all of them.

``SPATTN_HYPOTHESIS_PROFILE=dev|ci|nightly`` (or ``--hypothesis-profile``) chooses how many examples a property test
draws. ``dev`` and ``ci`` are deterministic, and ``ci`` draws as many as two cores manage in a quarter of an hour;
``nightly`` looks for news. ``mutants`` is ``dev`` for failures that nobody reads: examples are not made smaller.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, settings

# Before anything imports NumPy. Its products here are small and the tests keep every core busy, so that further threads
# would only wait, and a thread of OpenBLAS that waits takes a whole core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Every plan of the tests, and of the processes that they start, is checked as if a stranger had made it.
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
        from spattn.testing.tables import check_table

        _checks.observers[:] = [check_table]
    config.addinivalue_line("markers", "footprint: measures the memory of a process, to which sanitizers add their own")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; run with `pytest -m gpu`")


def pytest_collection_modifyitems(config, items):
    """GPU tests run only when asked for by ``-m``, so that a plain run needs no GPU and says what it left out."""
    if "gpu" in (config.getoption("-m") or ""):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: pytest -m gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_runtest_setup(item):
    """GPU tests skip with the backend's own reason where it cannot run."""
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
    """``forward(q, k, v, pattern, scale=None) -> (out, lse)``: the reference and each instruction set in turn."""
    import spattn
    from spattn import cpu, reference

    backend, module, options = "cpu", cpu, {"isa": request.param}
    if request.param == "reference":
        backend, module, options = "reference", reference, {}

    def run(q, k, v, pattern, scale=None):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return module.forward(q, k, v, spattn.plan(pattern, backend=backend, like=(q, k, v)), scale, **options)

    return run


@pytest.fixture
def unchecked_plans(monkeypatch):
    """Plans are made as users make them.

    For patterns whose parts() and allows() say different things on purpose, and for two tests of sizes whose checks
    take half a minute each.
    """
    from spattn._util import checks as _checks

    monkeypatch.setenv("SPATTN_CHECK_PLANS", "0")
    monkeypatch.setattr(_checks, "observers", [])


@pytest.fixture
def no_plans():
    """No plan is kept when a test starts, and none of its own afterwards."""
    import spattn

    spattn.clear_plan_cache()
    yield
    spattn.clear_plan_cache()


@pytest.fixture
def peak():
    """The source of ``peak()``: how many KiB a program has taken at most. ``ru_maxrss`` has those of the process that
    started it too, where that is larger."""
    return """
def peak():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM:")).split()[1])
"""


@pytest.fixture
def python(request, tmp_path):
    """Runs a program in a fresh interpreter: ``python(source, **environment) -> its standard output``."""

    # Where memory is measured, plans are made as users make them.
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
