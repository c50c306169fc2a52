"""README, CONTRIBUTING, CHANGELOG, CITATION and workflows agree with the repository."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spattn._util import renamed

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
WORKFLOWS = sorted((ROOT / ".github").rglob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def goals():
    """The goals that the Makefile declares."""
    (declared,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return set(declared.split())


def called(text):
    """The goals of each ``make`` in a text: ``make PYTHON=… test`` calls test."""
    for words in re.findall(r"\bmake((?: [\w/.='-]+)+)", text):
        yield from (word for word in words.split() if re.fullmatch(r"[a-z][a-z0-9-]*", word))


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if not t.startswith("http")]
    assert [t for t in targets if not (ROOT / t).exists()] == []
    assert page != "README.md" or len(targets) > 10


def test_readme_is_short_and_has_a_picture_of_the_checkout():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


def test_readme_tables_are_those_of_the_results():
    program = "import readme_tables as r; t = r.README.read_text(encoding='utf-8'); print(len(r.TABLE.findall(t)))"
    program += "; assert r.with_tables(t) == t, 'run benchmarks/readme_tables.py'"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_named_goals_exist(page):
    code = re.findall(r"`(make [^`]+)`|^\$ (make [^#\n]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    found = {goal for span in code for text in span for goal in called(text)}
    assert found <= goals() and {"demo", "test"} <= found


def test_contributing_names_every_goal():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert goals() - {"help", "compilers"} <= set(called(text))


def test_folders_of_the_table_are_there():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| to change")[2].partition("\n\n")[0]
    paths = re.findall(r"`((?:src|examples)/[\w/.*]+)`", table)
    assert len(paths) > 15 and [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_github_files(path):
    yaml = pytest.importorskip("yaml")
    text = path.read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    assert "name" in document or path.name == "config.yml"
    for job in document.get("jobs", {}).values():
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert set(called(step.get("run", ""))) <= goals()
            action = step.get("uses", "checkout@v1.0.0")
            assert re.search(r"@v\d+\.\d+\.\d+$", action), f"{action} is not pinned"
            assert not step.get("run", "").startswith(".") or os.access(ROOT / step["run"], os.X_OK)


def test_continuous_integration_has_every_python():
    yaml = pytest.importorskip("yaml")
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    names = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert matrix["python"] == names


def removed_names():
    """The names of modules in the left column of the changelog's table, ``patterns.Strided``; in a row, bare names
    follow the first one's module. Calls of names that still exist have changed arguments."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("## Renamed")[2]
    for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE):
        module = None
        for dotted, call in re.findall(r"`([\w.]+)(\([^`]*)?`", row):
            prefix, _, name = dotted.rpartition(".")
            module = prefix or module
            if module == "selections":
                yield "selections"
            elif module in ("spattn", "patterns", "patterns.deepspeed", "testing"):
                found = f"{module}.{name}".removeprefix("spattn.")
                if not (call and exists(found)):
                    yield found


def exists(dotted):
    try:
        pkgutil.resolve_name(f"spattn.{dotted}")
    except (AttributeError, ImportError):
        return False
    return True


def test_a_removed_name_has_a_hint():
    """Each name in the changelog's table, and no other; the successors exist."""
    assert set(removed_names()) == set(renamed._RENAMED) and len(renamed._RENAMED) > 35
    for old, new in renamed._RENAMED.items():
        module, _, name = f"spattn.{old}".rpartition(".")
        with pytest.raises(AttributeError, match=re.escape(f"{module} has no '{name}'; use {new}")):
            getattr(importlib.import_module(module), name)
        successors = re.findall(r"patterns\.[\w.]+|testing\.\w+|\w+Error", new)
        assert all(map(exists, successors)) and (successors or (ROOT / new).is_dir()), new


@pytest.mark.parametrize("module", ["", ".patterns", ".patterns.deepspeed", ".testing"])
@pytest.mark.parametrize("name", ["strided_", "__wrapped__"])
def test_an_unknown_name_has_the_usual_error(module, name):
    with pytest.raises(AttributeError, match=f"^module 'spattn{module}' has no attribute '{name}'$"):
        getattr(importlib.import_module(f"spattn{module}"), name)


def test_version_is_the_same_everywhere():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PROJECT["version"] in re.findall(r"^## \[(.+?)\]", changes, re.MULTILINE)


def test_goals_of_a_text():
    assert list(called("run: make lint\nmake PYTHON=python3.12 VENV=.venv312 test")) == ["lint", "test"]
