"""Patterns that pages build outside of examples with prompts: in blocks of code and by the command ``spattn draw``."""

import ast
import doctest
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from spattn import cli

from .allowed_pairs import ALLOWED
from .recipes import built, check, check_example

DOCS = Path(__file__).parent
FOLDERS = (DOCS, DOCS / "tutorials", DOCS / "systems")
PAGES = {page.name: page for page in (DOCS.parent / "README.md", *(p for f in FOLDERS for p in f.glob("*.rst")))}
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", re.MULTILINE)
DRAWN = re.compile(r"`(spattn\s+draw\s[^`]+)`")
NEEDS_GPU = ("selected_blocks.rst", "torch_tensors.rst")  # selections; examples on the pages have the same patterns
NO_PATTERN = "price.rst"


def blocks():
    """(page, source) of each block of Python without prompts."""
    for name, text in TEXTS.items():
        for block in FENCED.findall(text) + [re.sub("^   ", "", b, flags=re.MULTILINE) for b in INDENTED.findall(text)]:
            if ">>>" not in block:
                yield name, block


def commands():
    """(page, command) of each command that draws a pattern."""
    for name, text in TEXTS.items():
        for command in DRAWN.findall(text):
            yield name, " ".join(command.split())


def test_blocks_and_commands_are_found():
    assert sorted(name for name, _ in blocks()) == sorted(["README.md", "index.rst", NO_PATTERN, *NEEDS_GPU])
    assert [name for name, _ in commands()] == ["README.md", "quickstart.rst"]


@pytest.mark.parametrize("page, block", [b for b in blocks() if b[0] not in (*NEEDS_GPU, NO_PATTERN)])
def test_blocks(page, block):
    """A block runs, gives an output, and its pattern allows the pairs that it should."""
    space = {}
    exec(block, space)
    assert space["out"].shape == space["q"].shape and np.isfinite(space["out"]).all()
    assert built(block, space)
    check_example(page, block, space)


@pytest.mark.parametrize("page, command", list(commands()))
def test_commands(page, command, monkeypatch, tmp_path):
    """A command runs as it is printed, and draws the pairs that it should."""
    pytest.importorskip("matplotlib")
    drawn = []
    draw = cli.patterns.show.draw

    def record(pattern, q_len, kv_len, **options):
        drawn.append((pattern, q_len, kv_len))
        return draw(pattern, q_len, kv_len, **options)

    monkeypatch.setattr(cli.patterns.show, "draw", record)
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[1:]) == 0
    ((pattern, *lengths),) = drawn
    check(page, command, pattern, {}, tuple(lengths))


@pytest.mark.parametrize("page", ALLOWED)
def test_every_entry_is_on_its_page(page):
    sources = [example.source for example in doctest.DocTestParser().get_examples(TEXTS[page])]
    sources += [block for name, block in blocks() if name == page]
    written = {
        ast.unparse(node) for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr)
    }
    assert set(ALLOWED[page]) <= written | {command for name, command in commands() if name == page}


def test_what_an_example_builds():
    space = {}
    exec("from spattn.patterns import Causal, SlidingWindow\nwindow = SlidingWindow(8)", space)
    for source, texts in {
        "window = SlidingWindow(8)": ["SlidingWindow(8)"],
        "print(Causal() & window, ~SlidingWindow(9))": ["Causal() & window", "~SlidingWindow(9)"],
        "rows = SlidingWindow(7).index_set(9, 9)": ["SlidingWindow(7)"],
        "def near(n): return Causal() & SlidingWindow(n)": [],
        "def near(n): return SlidingWindow(3)": ["SlidingWindow(3)"],
        "n = 8": [],
    }.items():
        assert [text for text, _ in built(source, space)] == texts


def test_wrong_patterns_are_noticed():
    space = {}
    exec("from spattn.patterns import SlidingWindow\nwindow = SlidingWindow(9)", space)
    with pytest.raises(AssertionError, match="add the pairs that SlidingWindow.9. allows"):
        check_example("quickstart.rst", "window = SlidingWindow(9)", space)
    with pytest.raises(AssertionError, match="wrong for .*, 82 pairs in all"):
        check("quickstart.rst", "SlidingWindow(8)", space["window"], space)
