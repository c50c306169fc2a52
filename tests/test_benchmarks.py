"""Benchmark scripts, the table that lists them, and the names of their results."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
QUESTIONS = ("distributed", "peers", "planning", "kernels", "regressions", "costs", "workloads", "scores", "study")
SCRIPTS = sorted(path for name in QUESTIONS for path in (FOLDER / name).glob("*.py"))
SCRIPTS = [path for path in SCRIPTS if path.read_text(encoding="utf-8").startswith("#!")]
RESULTS = sorted((FOLDER / "results").glob("*.json"))
REMAKE = {"grouped_cuda-h200"}  # of dirty trees, until an H200 is at hand

XEON = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel name\t: Intel(R) Xeon(R) Processor\nflags\t: sse avx2 avx512f"
EPYC = "vendor_id\t: AuthenticAMD\ncpu family\t: {}\nmodel name\t: AMD EPYC\nflags\t: avx2 {}"


def load_record():
    spec = importlib.util.spec_from_file_location("benchmarks_record", FOLDER / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = load_record()


@pytest.mark.parametrize(
    ("cpuinfo", "slug"),
    [
        (XEON, "xeon-avx512"),
        (XEON + " amx_bf16\n\nprocessor\t: 1\nflags\t: sse", "xeon-amx"),
        (EPYC.format(25, ""), "zen3"),
        (EPYC.format(25, "avx512f"), "zen4"),
        (EPYC.format(26, "avx512f"), "zen5"),
        (EPYC.format(99, "avx512f"), "epyc-avx512"),
        ("vendor_id\t: GenuineIntel\nmodel name\t: 11th Gen Intel(R) Core(TM) i7-1165G7\nflags\t: avx2", "i7-avx2"),
    ],
)
def test_slug_of_a_cpu(cpuinfo, slug):
    assert record.slug(cpuinfo=cpuinfo) == slug


@pytest.mark.parametrize(
    ("gpu", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_slug_of_a_gpu(gpu, slug):
    assert record.slug(gpu, "model name\t: ignored") == slug


def test_slug_of_this_machine():
    assert re.fullmatch(r"[a-z0-9-]+", record.slug())


def test_written_result(tmp_path, monkeypatch):
    monkeypatch.setenv("SPATTN_RESULTS", str(tmp_path / "new"))
    monkeypatch.setenv("SPATTN_COMMIT", "c0ffee")
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    monkeypatch.delenv("SPATTN_ISA", raising=False)
    monkeypatch.setattr(record.sys, "argv", [str(FOLDER / "kernels" / "long_cuda.py"), "--quick"])
    path = record.write("long_cuda", [{"ms": 1}], notes="None.", gpu="NVIDIA H200", shape=[1])
    assert path == tmp_path / "new" / "long_cuda_portable-h200.json"
    written = json.loads(path.read_text())
    assert written["command"] == "python benchmarks/kernels/long_cuda.py --quick"
    assert (written["commit"], written["machine"]["gpu"], written["shape"]) == ("c0ffee", "NVIDIA H200", [1])
    assert record.file_name("small_cpu") == f"small_cpu-{record.slug()}.json"
    monkeypatch.setenv("SPATTN_ISA", "avx2")
    assert record.file_name("small_cpu") == f"small_cpu_avx2-{record.slug()}.json"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_is_named_after_its_machine(path):
    machine = re.fullmatch(r"\w+?-(xeon-amx|zen[345]|epyc|h100|h200)", path.stem)[1]
    written = json.loads(path.read_text(encoding="utf-8"))
    facts = written.get("machine", {})
    gpu = written.get("gpu") or written.get("device") or (facts.get("gpu") if isinstance(facts, dict) else facts)
    if isinstance(gpu, str):
        assert machine == record.slug(gpu)
    elif "_cuda" not in path.stem:
        assert ("Xeon" in facts["cpu"]) == machine.startswith("xeon")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_is_of_a_command_and_a_clean_commit(path):
    text = path.read_text(encoding="utf-8")
    written = json.loads(text)
    assert written["command"] and re.match("[0-9a-f]{7,40}", written["commit"])
    assert bool(re.search('"commit": "[^"]*dirty', text)) == (path.stem in REMAKE)


def results_named(text):
    """Names of results files in a text, of which ``*`` may stand for a part, and those that a page's tables read."""
    files = re.findall(r"[\w*]+-(?:xeon|zen|epyc|h[12]00)[\w*-]*\.json|(?<=benchmarks/results/)[\w*-]+\.json", text)
    tables = re.findall(r"^\.\. results-(?:table|by-side):: (.+)$", text, re.MULTILINE)
    return {*files, *(f"{name}.json" for line in tables for name in line.split())}


def test_results_that_pages_name_exist():
    """A table may leave out the machine if one file has the name."""
    pages = [*ROOT.glob("*.md"), FOLDER / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.rst")]
    pages = [page for page in pages if "_build" not in page.parts]
    named = {(page.name, name) for page in pages for name in results_named(page.read_text(encoding="utf-8"))}
    assert len(named) > 40

    def exists(name):
        machines = list((FOLDER / "results").glob(f"{Path(name).stem}-*.json"))
        return any((FOLDER / "results").glob(name)) or len(machines) == 1

    assert {(page, name) for page, name in named if not exists(name)} == set()


def test_scripts_are_found():
    assert len(SCRIPTS) > 30


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path):
    """Its docstring has a short first line and the command; the README lists it; its path is set before imports."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(FOLDER).as_posix()
    lines = ast.get_docstring(ast.parse(text)).splitlines()
    assert len(lines[0].split()) <= 15 and not lines[1]
    assert f"benchmarks/{name}" in "\n".join(lines) and f"`{name}" in README
    assert "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))" in text


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_script_imports_exists(path):
    """Scripts for a GPU run rarely: a module or function of spattn that is renamed or removed must not break them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith("spattn."):
            module = importlib.import_module(node.module)
            for alias in node.names:
                own = f"{node.module}.{alias.name}"
                assert hasattr(module, alias.name) or importlib.util.find_spec(own) is not None, own


@pytest.mark.parametrize("name", re.findall(r"`([a-z]+/\w+\.py)", README))
def test_listed_script_exists(name):
    assert (FOLDER / name).is_file() or (ROOT / name).is_file()


def test_commits_of_the_history():
    """In order of time, each with what changed, which the page prints."""
    commits = json.loads((FOLDER / "history" / "commits.json").read_text(encoding="utf-8"))
    assert len(commits) >= 40
    assert [entry["date"] for entry in commits] == sorted(entry["date"] for entry in commits)
    assert all(re.fullmatch("[0-9a-f]{12}", entry["commit"]) and entry["why"] for entry in commits)
