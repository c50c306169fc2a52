"""A new pattern is a file and an import: what goes over all patterns takes it up and holds it to every promise."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import spattn

ROOT = Path(__file__).parents[2]
PATTERN = '''
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from .base.check import Range
from .base.pattern import Pattern
from .base.predicate import member
from .base.class_registry import register


@register("log_sparse")
@dataclass(frozen=True)
class LogSparse(Pattern):
    """Keys at distances of 0 and the first `powers` powers of two."""

    powers: Annotated[int, Range(0, 30)]

    def allows(self, q, k):
        return member(np.array([0, *(2**n for n in range(self.powers))]), q - k)
'''
IMPORT = "from .log_sparse import LogSparse as LogSparse\n"
OF_ALL = ["import_is_quick", "lists_them", "composition", "of_anything", "executed_plan", "test_laws", "to_json"]


@pytest.mark.slow
def test_file_and_import_are_all_that_a_pattern_needs(tmp_path):
    """In a copy of the package and of its tests."""
    package = Path(spattn.__file__).parent
    for folder, copy in ((package, "spattn"), (ROOT / "tests", "tests"), (ROOT / "docs" / "_ext", "docs/_ext")):
        shutil.copytree(folder, tmp_path / copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "spattn" / "patterns" / "log_sparse.py").write_text(PATTERN)
    with (tmp_path / "spattn" / "patterns" / "__init__.py").open("a") as file:
        file.write(IMPORT)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--import-mode=importlib",
        "-v",
        "tests/test_properties.py",
        "tests/patterns",
        "tests/cpu/test_backward.py",
        "tests/test_cli.py",
        "tests/test_import.py",
        "tests/test_gallery.py",
        "-k",
        " or ".join(["log_sparse", *OF_ALL]),
    ]
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": path, "SPATTN_HYPOTHESIS_PROFILE": "dev"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    of_it = re.findall(r"^(\S+)\[\S*log_sparse\S*\] PASSED", done.stdout, re.MULTILINE)
    assert len(set(of_it)) >= 11 and "SKIPPED" not in done.stdout, done.stdout
