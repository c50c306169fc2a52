"""The pages agree with the code: cited files and names exist; signatures, layers and numbers are current."""

import ast
import dataclasses
import functools
import re
import symtable
import tomllib
from pathlib import Path

import pytest

from spattn.patterns import deepspeed
from spattn.patterns.base.class_registry import pattern_class
from spattn.patterns.registry import names

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILT = {"generated", "_build"}
PAGES = sorted(page for page in DOCS.rglob("*") if page.suffix in (".rst", ".md") and not BUILT & set(page.parts))
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
CITED = re.compile(r"``([\w./-]+\.\w+)::(\w+)``")
DOTTED = re.compile(r"(?<![\w./-])spattn(?:\.[A-Za-z_]\w*)+")
SOURCE_FILE = re.compile(r"`([\w-]+(?:/[\w.-]+)*\.(?:py|pyx|h|cpp|cu|cuh))`")
ELSEWHERE = {"deepspeed/ops/sparse_attention/sparsity_config.py"}  # files of other projects
DOCUMENT = re.compile(r"(?<![\w.*])[\w/-]+\.(?:md|rst)\b")
ONLINE = "https://github.com/spattn/spattn/blob/main/"  # the address of a file of this repository
FILES = re.compile(r"`((?:tests|benchmarks|tools|src/spattn)/[\w./-]+\.\w+)`")


def defines(source, name):
    """Whether a Python file defines a name at its top level, or another source uses it outside comments."""
    if source.suffix == ".py":
        body = ast.parse(source.read_text(encoding="utf-8")).body
        targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
        return name in [getattr(node, "name", None) for node in body] + [getattr(t, "id", None) for t in targets]
    lines = (line.partition("//")[0] for line in source.read_text(encoding="utf-8").splitlines())
    return any(re.search(rf"\b{name}\b(?!\.)", line) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_citations_exist(page):
    text = page.read_text(encoding="utf-8")
    for path, name in CITED.findall(text):
        file = ROOT / path if path.startswith("tests/") else ROOT / "src/spattn" / path
        assert file.is_file() and defines(file, name), f"{path}::{name}"
    for path in FILES.findall(text):
        assert (ROOT / path).is_file(), path


def binds(module, name):
    """Whether a Python module binds a name at its top level, also by an import or an annotation."""
    try:
        symbol = symtable.symtable(module.read_text(encoding="utf-8"), str(module), "exec").lookup(name)
    except KeyError:
        return False
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace() or symbol.is_annotated()


def resolves(dotted):
    """Whether ``spattn.x.y`` is a package, a module, or a name in one; reads the sources, which need no extras."""
    folder, names = ROOT / "src", dotted.split(".")
    while names and (folder / names[0]).is_dir():
        folder /= names.pop(0)
    if not names:
        return True
    module = folder / f"{names[0]}.py"
    return not names[1:] or binds(module, names[1]) if module.is_file() else binds(folder / "__init__.py", names[0])


def test_dotted_names_are_resolved():
    known = ["spattn.plan", "spattn.patterns.Causal", "spattn.plan.validate", "spattn.grouped_attention"]
    assert [name for name in known if not resolves(name)] == []
    assert not any(map(resolves, ["spattn.planes", "spattn.patterns.Casual", "spattn.planning.invalidate"]))


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_module_and_file_names_exist(page):
    text = page.read_text(encoding="utf-8")
    assert [name for name in DOTTED.findall(text) if not resolves(name)] == []
    tree = [f"/{file.relative_to(ROOT).as_posix()}" for file in documents()]
    named = {name for name in SOURCE_FILE.findall(text) if name not in ELSEWHERE}
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in tree)} == set()


@functools.cache
def documents():
    """Every text file of the repository, except data and build products."""
    folders = ("src", "tests", "tools", "benchmarks", "docs", "examples")
    files = [*ROOT.glob("*.*"), *(file for folder in folders for file in (ROOT / folder).rglob("*.*"))]
    kinds = {".py", ".pyx", ".h", ".cpp", ".cu", ".cuh", ".toml", ".build", ".rst", ".md"}
    return [file for file in files if file.suffix in kinds and not BUILT & set(file.parts)]


def documents_named(text):
    """The documents of this repository that a text names, by path or by address."""
    return DOCUMENT.findall(re.sub(r"https?://\S+", "", text.replace(ONLINE, "")))


def test_addresses_are_recognized():
    text = f"[a]({ONLINE}CHANGELOG.md), https://example.org/b/c.md and docs/design.rst"
    assert documents_named(text) == ["CHANGELOG.md", "docs/design.rst"]


def test_named_documents_exist():
    files = documents()
    pages = [f"/{file.relative_to(ROOT).as_posix()}" for file in files if file.suffix in (".rst", ".md")]
    assert len(files) > 200 and len(pages) > 20
    for file in files:
        named = documents_named(file.read_text(encoding="utf-8"))
        missing = [name for name in named if not any(page.endswith(f"/{name}") for page in pages)]
        assert not missing, file


DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decisions_are_short(page):
    words = page.read_text(encoding="utf-8").split()
    assert len(words) <= 300, f"{len(words)} words; measurements and rejected ideas belong in docs/notebook/"


def test_decisions_are_numbered():
    assert [int(page.name[:3]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))


def test_the_notebook_lists_its_pages():
    pages = {page.stem for page in (DOCS / "notebook").glob("*.md")} - {"index"}
    listed = (DOCS / "notebook" / "index.md").read_text(encoding="utf-8").partition("```{toctree}")[2].split()
    assert pages and pages <= set(listed)


def test_results_are_outputs_of_scripts():
    """Notes by hand belong in docs/notebook/."""
    files = [file.name for file in (ROOT / "benchmarks" / "results").rglob("*.*")]
    assert len(files) > 40 and [f for f in files if not f.endswith(".json")] == ["gpu_tests.txt"]


def test_named_test_files_exist():
    """A kernel's header and a page name the tests of what they describe."""
    found = {}
    for file in documents():
        if file.relative_to(ROOT).parts[0] not in ("tests", "tools", "benchmarks"):
            for name in re.findall(r"\btests/[\w/]+\.py\b", file.read_text(encoding="utf-8")):
                found.setdefault(name, set()).add(file.name)
    assert len(found) > 30
    assert {name: files for name, files in found.items() if not (ROOT / name).is_file()} == {}


def test_pages_cite():
    cited = {page.name: len(CITED.findall(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert cited["design.rst"] > 40 and cited["glossary.rst"] > 20


def layers_of(text):
    """The layers in the first code block of the section "Layers", from the top; two spaces end a layer's modules."""
    block = text.partition("\nLayers\n")[2].partition(".. code-block:: text\n\n")[2].partition("\n\n")[0]
    return [re.split(r" {2,}", line.strip())[0] for line in block.splitlines()]


def test_layers_are_those_of_import_linter():
    """Parentheses mark a module that may be missing; a page does without them."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    (contract,) = (each for each in tools["importlinter"]["contracts"] if each["type"] == "layers")
    layers = [re.sub("[()]", "", layer) for layer in contract["layers"]]
    assert layers_of((DOCS / "design.rst").read_text(encoding="utf-8")) == layers


def test_numbers_of_hypothesis_examples():
    """CONTRIBUTING.md states the examples of each profile of tests/conftest.py, and which profile is the default."""
    source = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    profiles = dict(re.findall(r'register_profile\("(\w+)", max_examples=(\d+)', source))
    (default,) = re.findall(r'"SPATTN_HYPOTHESIS_PROFILE", "(\w+)"', source)
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert list(profiles) == ["dev", "ci", "nightly"]
    for name, count in profiles.items():
        default_mark = re.escape(" (the default)") if name == default else ""
        assert re.search(rf"`{name}` draws {count}{default_mark}[,.]", text), name


def signatures():
    """(call, registered name) of each entry of patterns-definitions.rst."""
    text = (DOCS / "patterns-definitions.rst").read_text(encoding="utf-8")
    yield from re.findall(r"^``(.+?)``, registered as ``(\w+)``", text, re.MULTILINE)
    yield from re.findall(r"^   \* - ``(.+)``\n     - ``(\w+)``\n     - ", text, re.MULTILINE)


def test_all_signatures_are_found():
    assert len({name for _, name in signatures()}) == len(list(signatures())) >= 29


@pytest.mark.parametrize("call, name", list(signatures()), ids=lambda x: x.partition("(")[0])
def test_signatures_are_those_of_the_classes(call, name):
    assert name in names()
    cls, written = pattern_class(name), ast.parse(call, mode="eval").body
    assert written.func.id == cls.__name__ and (name.startswith("deepspeed") == (cls.__module__ == deepspeed.__name__))
    said = {arg.id: None for arg in written.args}
    said |= {keyword.arg: ast.unparse(keyword.value).strip("'") for keyword in written.keywords}
    fields = [field for field in dataclasses.fields(cls) if field.name != "head"]  # at() sets it
    assert said == {f.name: None if f.default is dataclasses.MISSING else str(f.default) for f in fields}
