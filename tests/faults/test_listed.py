"""Every fault of docs/faults.rst has tests that are named by its number, in the files that the page names."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"^(\d+)\. (.*?)\[([^\]]+)\]$", re.MULTILINE | re.DOTALL)


def numbers_of(source):
    """The numbers in the names of a module's tests: ``test_fault_12_13_strides`` has two."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and (named := re.match(r"test_fault((?:_\d\d)+)_\D", node.name)):
            yield from map(int, named[1].split("_")[1:])


def files_of(page):
    """The files that stand behind each number of the page."""
    return {int(number): set(re.split(r",\s+", files)) for number, _, files in ENTRY.findall(page)}


def test_names_are_read():
    names = "test_fault_07_a", "test_fault_12_13_b", "test_faults_31", "fault_08_c"
    source = "".join(f"def {name}(): ...\n" for name in names)
    assert list(numbers_of(source)) == [7, 12, 13]


def test_the_page_is_read():
    page = "Title\n\n7. *Once.* It is so.\n   [tests/a.py]\n8. *Twice* (x#1). [tests/a.py,\n   tests/b.py]\n"
    assert files_of(page) == {7: {"tests/a.py"}, 8: {"tests/a.py", "tests/b.py"}}


def test_every_fault_has_a_test_where_the_page_says():
    listed = files_of((ROOT / "docs" / "faults.rst").read_text(encoding="utf-8"))
    found = defaultdict(set)
    for file in (ROOT / "tests").rglob("test_*.py"):
        for number in numbers_of(file.read_text(encoding="utf-8")):
            found[number].add(file.relative_to(ROOT).as_posix())
    assert list(listed) == list(range(1, 46)), "one entry a fault, in order"
    assert listed == found
