"""docs/glossary.rst: each term is defined once, and the house words of its table are in no identifier of src."""

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "glossary.rst").read_text(encoding="utf-8")
SOURCES = {".py", ".pyi", ".pyx", ".pxd", ".h", ".cpp", ".cu", ".cuh"}
IDENTIFIER = re.compile(r"[^\W\d]\w*")
# Docstrings, comments of C++ and of Cython, and strings; a preprocessor directive is no comment.
PROSE = re.compile(
    r'"""[\s\S]*?"""'
    r"|/\*[\s\S]*?\*/|//[^\n]*"
    r"|#(?!\s*(?:include|define|undef|if|ifdef|ifndef|elif|else|endif|pragma|error)\b)[^\n]*"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'"
)


def defined(page):
    """The terms of the page's glossaries; a line may have several."""
    found, inside = [], False
    for line in page.splitlines():
        inside = line == ".. glossary::" or inside and (not line or line[0] == " ")
        if inside and re.match(r" {3}\S", line):
            found += line.strip().split(", ")
    return found


def entries(page):
    """(term, its definition as one line) of each entry of the page's glossaries."""
    for block in page.split(".. glossary::\n")[1:]:
        for term, text in re.findall(r"^ {3}(\S.*)\n((?:(?: {6}.*)?\n)+)", block, re.MULTILINE):
            yield term, " ".join(text.split())


def house_words(page):
    """The first column of the page's table; a row may have several names."""
    rows = re.findall(r"^   \* - (``.*)$", page, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"``(\w+)``", row)}


def identifiers(source, python):
    """The identifiers of a source, without those in comments and strings."""
    if python:
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        return {token.string for token in tokens if token.type == tokenize.NAME}
    return set(IDENTIFIER.findall(PROSE.sub(" ", source)))


def words(identifier):
    """The words of an identifier in any case: ``kFarScore`` and ``FAR_SCORE`` both have ``far`` and ``score``."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


def uses(identifier, name):
    """Whether an identifier has the words of a name in a row; the last one may be a plural."""
    found, wanted = f"_{'_'.join(words(identifier))}_", "_".join(words(name))
    return f"_{wanted}_" in found or f"_{wanted}s_" in found


def test_the_page_is_parsed():
    page = "\n\n.. glossary::\n\n   one\n      A ``b``.\n\n   two, three\n      More\n      of it.\n\nEnd\n\n   no\n"
    assert defined(page) == ["one", "two", "three"]
    assert list(entries(page)) == [("one", "A ``b``."), ("two, three", "More of it.")]
    assert house_words("   * - house\n     - field\n   * - ``a``, ``b_c``\n     - ``d``\n") == {"a", "b_c"}


def test_identifiers_are_found():
    python = '"""far"""\nnear = f(x)  # far\n'
    native = "#define FAR_AWAY 1\n# far\nint near(int x);  // far\n/* far */ char c = 'f', *s = \"far\";\n"
    assert identifiers(python, True) == {"near", "f", "x"}
    assert identifiers(native, False) == {"define", "FAR_AWAY", "int", "near", "x", "char", "c", "s"}
    assert words("kFarScores") == ["k", "far", "scores"] and words("_SM90_path") == ["sm", "90", "path"]
    for name in ("far_score", "kFarScores", "FAR_SCORE", "FarScoreTable"):
        assert uses(name, "far_score") and uses(name, "far") and not uses(name, "core")


def test_every_term_is_defined_once_in_at_most_three_sentences():
    terms = defined(PAGE)
    assert len(terms) > 60 and len(set(terms)) == len(terms)
    long = [term for term, text in entries(PAGE) if len(re.findall(r"[.](?: |$)", re.sub(r"``.*?``", "", text))) > 3]
    assert len(list(entries(PAGE))) > 60 and long == []


def test_house_words_are_in_no_identifier():
    names, files = house_words(PAGE), [file for file in (ROOT / "src").rglob("*") if file.suffix in SOURCES]
    assert len(names) > 10 and len(files) > 100
    used = {file: identifiers(file.read_text(encoding="utf-8"), file.suffix in {".py", ".pyi"}) for file in files}
    found = {name: {file.name for file in files if any(uses(x, name) for x in used[file])} for name in names}
    assert {name: where for name, where in found.items() if where} == {}
