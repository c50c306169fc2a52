"""Every number of FAULTS.md has a test that is named by it."""

import ast
import re
from pathlib import Path

FAULTS = range(1, 45)


def numbers_of(source):
    """The numbers in the names of a module's tests: ``test_fault_12_13_strides`` has two."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and (named := re.match(r"test_fault((?:_\d\d)+)_\D", node.name)):
            yield from map(int, named[1].split("_")[1:])


def test_names_are_read():
    names = "test_fault_07_a", "test_fault_12_13_b", "test_faults_31", "fault_08_c"
    source = "".join(f"def {name}(): ...\n" for name in names)
    assert list(numbers_of(source)) == [7, 12, 13]


def test_every_fault_has_a_test():
    files = Path(__file__).parent.rglob("test_*.py")
    named = {number for file in files for number in numbers_of(file.read_text(encoding="utf-8"))}
    assert not set(FAULTS) - named, "faults without a test"
    assert not named - set(FAULTS), "numbers without a fault"
