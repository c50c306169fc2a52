"""What importing spattn costs and brings along, and what the installed package consists of."""

import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import spattn

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys
import spattn
print(*sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
print(*sorted(name for name in sys.modules if name.startswith("spattn.")))
"""


def test_import_brings_numpy_and_ml_dtypes_and_nothing_else(python):
    packages, modules = python(PROGRAM).splitlines()
    assert {"numpy", "ml_dtypes", "spattn"} <= set(packages.split())
    foreign = set(packages.split()) & {
        "torch",
        "pycuda",
        "cuda",
        "cupy",
        "jax",
        "matplotlib",
        "hypothesis",
        "scipy",
        "transformers",
    }
    assert not foreign
    assert not {"spattn.cuda", "spattn.testing", "spattn.torch", "spattn.transformers", "spattn.cli"} & set(
        modules.split()
    )


def test_import_is_quick(python):
    """The promise is 0.25 s, which `make bench` measures. Here: a third of the modules that NumPy and ml_dtypes need,
    nearly all of them spattn's own."""
    needed, own, others = python("""
import sys, numpy, ml_dtypes
before = set(sys.modules)
import spattn
new = set(sys.modules) - before
own = {name for name in new if name.partition(".")[0] == "spattn"}
print(len(before), len(own), len(new - own))
""").split()
    assert int(own) + int(others) <= int(needed) / 3 and int(others) <= 12


def test_public_names():
    import spattn

    for name in spattn.__all__:
        assert getattr(spattn, name) is not None
    promised = {"attention", "plan", "patterns", "available_backends", "show_versions", "BackendUnavailableError"}
    assert promised <= set(spattn.__all__)


def test_show_versions(capsys):
    import spattn

    spattn.show_versions()
    printed = capsys.readouterr().out
    for word in (
        "spattn",
        "python",
        "numpy",
        "ml_dtypes",
        "torch",
        "backend cpu",
        "backend cuda",
        "instruction sets",
        "threads",
        "pycuda",
        "GPU",
        "driver",
        "nvcc",
    ):
        assert word in printed, printed


class Driver:
    """Stands in for libcuda.so.1 with two GPUs, or with one that does not start."""

    def __init__(self, status=0):
        self.cuInit = lambda flags: status

    def cuDriverGetVersion(self, at):
        at._obj.value = 12040
        return 0

    def cuDeviceGetCount(self, at):
        at._obj.value = 2
        return 0

    def cuDeviceGet(self, at, ordinal):
        at._obj.value = 10 + ordinal
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = f"Card {device.value}".encode()[: size - 1]
        return 0


def no_driver():
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    "load, driver, gpu",
    [
        (Driver, "CUDA 12.4", "Card 10, Card 11"),
        (lambda: Driver(100), "CUDA 12.4", "CUDA error 100"),
        (no_driver, "cannot open shared object", "unknown without a driver"),
    ],
    ids=["two GPUs", "no GPU", "no driver"],
)
def test_show_versions_where_the_backend_is_missing(capsys, monkeypatch, tmp_path, load, driver, gpu):
    """The parts are named all the same: that is when they are looked for."""
    from spattn import cuda, show_versions
    from spattn.api import versions as _versions

    (tmp_path / "nvcc").touch()
    monkeypatch.setenv("SPATTN_NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setattr(cuda, "unavailable", lambda: "PyCUDA is missing")
    monkeypatch.setattr(_versions.ctypes, "CDLL", lambda name: load())
    show_versions()
    lines = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["backend cuda"].strip() == "unavailable: PyCUDA is missing"
    assert lines["nvcc"].strip() == str(tmp_path / "nvcc")
    assert driver in lines["driver"] and gpu in lines["GPU"]


# -- the package -------------------------------------------------------------------------------------------------------


def tracked(under=""):
    """Files of the work tree that git knows or would add; skips where there is no repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", under or "."]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def expected_in_package():
    """All of src/spattn but what only the build needs."""
    left_out = {"meson.build", ".pyx", ".pxd"}
    return {
        name.removeprefix("src/")
        for name in tracked("src/spattn")
        if not any(name.endswith(end) for end in left_out) and "/kernels/" not in name
    }


@pytest.mark.slow
def test_wheel_carries_every_file_that_it_runs_on(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("spattn/")}
    compiled = sorted(name.partition(".")[0] for name in inside if name.endswith(".so"))
    of_plans = (f"planning/tiles/_{name}" for name in ("along", "bitmasks", "held", "lists", "pairs", "sweep"))
    others = "_util/_memoryviews", "_util/bit_rows", "cpu/_core", "cuda/driver/_launch"
    of_schedules = (f"schedule/{name}" for name in ("_few_queries", "_items", "_proof"))
    names = *others, *of_plans, "request/_philox", *of_schedules, "trace/_cells"
    assert compiled == [f"spattn/{name}" for name in names]
    assert {name for name in inside if not name.endswith(".so")} == expected_in_package()
    assert any(name.endswith(".cu") for name in inside) and any(name.endswith(".cuh") for name in inside)
    assert "spattn/py.typed" in inside


@pytest.mark.slow
def test_sdist_carries_every_tracked_file(sdist):
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()} - {""}
    committed = subprocess.run(
        ["git", "ls-tree", "-r", "-z", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    assert set(committed) - {""} <= inside


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    tracked()
    return build("sdist", tmp_path_factory)


def build(kind, tmp_path_factory):
    """Calls the build backend of pyproject.toml, as a front end would; what lies in it does not depend on the options,
    and so few kernels are built in no time."""
    pytest.importorskip("mesonpy")
    folder = tmp_path_factory.mktemp(kind)
    options = {"setup-args": ["-Disa=[]", "-Doptimization=0"]}
    program = f"import mesonpy; print(mesonpy.build_{kind}({str(folder)!r}, {options!r}))"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / done.stdout.split()[-1]


# Programs, which fork nothing, and modules of PyCUDA, which the backend imports as a whole when it is asked for.
WITHOUT_FORKS = ("cli.py", "cuda")
TRACED = "_operators"  # PyTorch's compiler follows this function of api/attention.py, and knows no locks


def late_imports(node, late=False):
    """Lines of imports that run when a function does, but for those that no fork cuts in two."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [node.lineno] if late else []
    whole = isinstance(node, ast.With) and "whole_imports" in map(ast.unparse, node.items)
    late = not whole and (late or (isinstance(node, ast.FunctionDef) and node.name != TRACED))
    return [line for child in ast.iter_child_nodes(node) for line in late_imports(child, late)]


def test_no_fork_cuts_an_import_in_two():
    root = Path(spattn.__file__).parent
    files = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in WITHOUT_FORKS]
    assert len(files) > 50
    assert not [f"{path}:{line}" for path in files for line in late_imports(ast.parse(path.read_text()))]
    assert late_imports(ast.parse("def f():\n    if x:\n        import json")) == [3]
