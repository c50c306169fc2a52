"""The words of docs/glossary.rst: each is defined once, and names that it rules out are nowhere in the sources."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "glossary.rst").read_text(encoding="utf-8")
SOURCES = {".py", ".pyx", ".h", ".cpp", ".cu", ".cuh"}


def defined(page):
    """The terms of the page's glossaries; a line may have several."""
    found, inside = [], False
    for line in page.splitlines():
        inside = line == ".. glossary::" or inside and (not line or line[0] == " ")
        if inside and re.match(r" {3}\S", line):
            found += line.strip().split(", ")
    return found


def ruled_out(page):
    """The names in the first column of the page's table."""
    rows = re.findall(r"^   \* - (``.*)$", page, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"``(\w+)``", row)}


def identifiers(source):
    return set(re.findall(r"[^\W\d]\w*", source))


def test_the_page_is_read():
    page = "\n\n.. glossary::\n\n   one\n      Text. Not: ``a``.\n\n   two, three\n      More.\n\nEnd\n\n   no\n"
    assert defined(page) == ["one", "two", "three"]
    assert ruled_out("   * - not\n     - but\n   * - ``a``, ``b_c``\n     - ``d``\n") == {"a", "b_c"}


def test_every_term_is_defined_once():
    terms = defined(PAGE)
    assert len(terms) > 40 and len(set(terms)) == len(terms)


def test_names_that_are_ruled_out_are_not_in_the_sources():
    names, files = ruled_out(PAGE), [file for file in (ROOT / "src").rglob("*") if file.suffix in SOURCES]
    assert len(names) > 15 and len(files) > 100
    used = {file: identifiers(file.read_text(encoding="utf-8")) & names for file in files}
    assert {str(file): found for file, found in used.items() if found} == {}
