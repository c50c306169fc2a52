"""A new function of the library is a file: ``spattn.score`` finds it, and so do its examples' test and its page."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import spattn

FUNCTION = '''
"""Scores with a margin around the diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..composition import ScoreFunction
from ..functions import where

__all__ = ["margin"]


@dataclass(frozen=True, eq=False, repr=False)
class margin(ScoreFunction):
    """Add a number to the scores of near keys.

    Examples
    --------
    >>> from spattn.score import margin, softcap
    >>> margin(0.5) | softcap(30.0)
    margin(width=0.5) | softcap(cap=30.0)
    """

    width: float
    reach: int = 8

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return where(abs(q - k) < self.reach, score + self.width, score)
'''
PROGRAM = """
import doctest, sys
import spattn
from spattn.score.evaluate import evaluate
from spattn.score.tracing import trace

assert spattn.__file__.startswith(sys.argv[1]) and "margin" in spattn.score.__all__
traced = trace(spattn.score.margin(0.5) | spattn.score.softcap(30.0))
assert traced.parameters == (8, 0.5, 30.0), traced.parameters
print(doctest.testmod(sys.modules["spattn.score.library.margin"]).attempted)
"""


def test_a_file_is_all_that_a_function_needs(tmp_path):
    """In a copy of the package, whose files are links."""
    package = Path(spattn.__file__).parent
    shutil.copytree(
        package, tmp_path / "spattn", ignore=shutil.ignore_patterns("__pycache__"), copy_function=os.symlink
    )
    (tmp_path / "spattn" / "score" / "library" / "margin.py").write_text(FUNCTION)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stdout + done.stderr
