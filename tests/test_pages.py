"""What the documentation's pages say of the code is so: files and names are there, signatures are the classes'."""

import ast
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from spattn.patterns import deepspeed, names
from spattn.patterns._registry import pattern_class

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*") if page.suffix in (".rst", ".md") and "generated" not in page.parts)
CITED = re.compile(r"``([\w./-]+\.\w+)::(\w+)``")
DOCUMENT = re.compile(r"(?<![\w.*])[\w/-]+\.(?:md|rst)\b")
ONLINE = "https://github.com/spattn/spattn/blob/main/"  # where files of this tree are read in a browser
FILES = re.compile(r"`((?:tests|benchmarks|tools|src/spattn)/[\w./-]+\.\w+)`")


def defines(source, name):
    """Whether a file has a name: a Python file defines it at its top, another one uses it outside of comments."""
    if source.suffix == ".py":
        body = ast.parse(source.read_text(encoding="utf-8")).body
        targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
        return name in [getattr(node, "name", None) for node in body] + [getattr(t, "id", None) for t in targets]
    lines = (line.partition("//")[0] for line in source.read_text(encoding="utf-8").splitlines())
    return any(re.search(rf"\b{name}\b(?!\.)", line) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_what_a_page_cites_is_there(page):
    text = page.read_text(encoding="utf-8")
    for path, name in CITED.findall(text):
        file = ROOT / path if path.startswith("tests/") else ROOT / "src/spattn" / path
        assert file.is_file() and defines(file, name), f"{path}::{name}"
    for path in FILES.findall(text):
        assert (ROOT / path).is_file(), path


def documents():
    """Every file that may name a document, but data and what is built."""
    folders = ("src", "tests", "tools", "benchmarks", "docs")
    files = [*ROOT.glob("*.*"), *(file for folder in folders for file in (ROOT / folder).rglob("*.*"))]
    kinds = {".py", ".pyx", ".h", ".cpp", ".cu", ".cuh", ".toml", ".build", ".rst", ".md"}
    return [file for file in files if file.suffix in kinds and not {"generated", "_build"} & set(file.parts)]


def documents_named(text):
    """Those of this tree, also by their address online; not those of other places."""
    return DOCUMENT.findall(re.sub(r"https?://\S+", "", text.replace(ONLINE, "")))


def test_addresses_are_read():
    text = f"[a]({ONLINE}CHANGELOG.md), https://example.org/b/c.md and docs/design.rst"
    assert documents_named(text) == ["CHANGELOG.md", "docs/design.rst"]


def test_every_document_that_is_named_is_in_the_tree():
    files = documents()
    pages = [f"/{file.relative_to(ROOT).as_posix()}" for file in files if file.suffix in (".rst", ".md")]
    assert len(files) > 200 and len(pages) > 20
    for file in files:
        named = documents_named(file.read_text(encoding="utf-8"))
        missing = [name for name in named if not any(page.endswith(f"/{name}") for page in pages)]
        assert not missing, file


def test_pages_cite():
    cited = {page.name: len(CITED.findall(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert cited["design.rst"] > 40 and cited["glossary.rst"] > 20


def test_the_layers_are_those_that_lint_checks():
    """But for layers of modules that are optional, which stand in parentheses."""
    text = (DOCS / "design.rst").read_text(encoding="utf-8").partition("\nLayers\n")[2]
    block = text.partition(".. code-block:: text\n\n")[2].partition("\n\n")[0]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    layers = [layer for layer in tools["importlinter"]["contracts"][0]["layers"] if "(" not in layer]
    assert [re.split(r" {2,}", line.strip())[0] for line in block.splitlines()] == layers


def signatures():
    """(call, registered name) of each entry of the page with the definitions."""
    text = (DOCS / "patterns-definitions.rst").read_text(encoding="utf-8")
    yield from re.findall(r"^``(.+?)``, registered as ``(\w+)``", text, re.MULTILINE)
    yield from re.findall(r"^   \* - ``(.+)``\n     - ``(\w+)``\n     - ", text, re.MULTILINE)


def test_all_signatures_are_read():
    assert len({name for _, name in signatures()}) == len(list(signatures())) >= 29


@pytest.mark.parametrize("call, name", list(signatures()), ids=lambda x: x.partition("(")[0])
def test_signatures_are_those_of_the_classes(call, name):
    assert name in names()
    cls, written = pattern_class(name), ast.parse(call, mode="eval").body
    assert written.func.id == cls.__name__ and (name.startswith("deepspeed") == (cls.__module__ == deepspeed.__name__))
    said = {arg.id: None for arg in written.args}
    said |= {keyword.arg: ast.unparse(keyword.value).strip("'") for keyword in written.keywords}
    fields = [field for field in dataclasses.fields(cls) if field.name != "head"]  # which at() sets
    assert said == {f.name: None if f.default is dataclasses.MISSING else str(f.default) for f in fields}
