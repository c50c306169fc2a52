"""The extensions of the documentation: every public name is in the API reference, and pages become notebooks."""

import importlib
import re
from pathlib import Path

import pytest

from spattn import patterns

DOCS = Path(__file__).parents[1] / "docs"
BACKENDS = {"spattn.cpu", "spattn.cuda"}  # whose names are the contract of backends, docs/contract.rst
MORE = {"deepspeed", "interop", "registry", "authoring", "show", "dynamic"}  # of spattn.patterns


@pytest.fixture
def extension(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "_ext")
    return importlib.import_module


def public_modules():
    """The modules in the table of docs/stability.rst, and those of spattn.patterns and spattn.testing."""
    table = (DOCS / "stability.rst").read_text(encoding="utf-8").partition("list-table::")[2].partition("All other")[0]
    found = {
        name for line in re.findall(r"^   \* - (.*)$", table, re.MULTILINE) for name in re.findall(r"``(.+?)``", line)
    }
    return sorted(found - BACKENDS | {f"spattn.patterns.{name}" for name in MORE} | {"spattn.testing.strategies"})


def test_public_modules_are_found():
    assert len(public_modules()) >= 14 and {"spattn", "spattn.jax", "spattn.distributed"} <= set(public_modules())


@pytest.mark.parametrize("name", public_modules())
def test_every_public_name_is_in_the_reference(extension, name):
    for needed in ("matplotlib", name.removeprefix("spattn.").replace("distributed", "torch")):
        if needed in ("matplotlib", "torch", "jax", "transformers"):
            pytest.importorskip(needed)
    public = extension("public")
    assert name == "spattn.patterns.deepspeed" or name in [module for module, *_ in public.SECTIONS]
    listed, module = public.public_names(name), importlib.import_module(name)
    gallery = {entry.title for entry in map(extension("gallery")._registered, patterns.registry.names())}
    for item in module.__all__:
        if isinstance(getattr(module, item), type(importlib) | str):  # a module, the version
            continue
        assert item in listed or f"{name}.{item}".removeprefix("spattn.patterns.") in gallery, item


def test_a_page_becomes_a_notebook(extension):
    page = """# Title

Text.

```pycon
>>> x = 1
>>> for n in range(2):
...     x += n
```

```python
shown = "not run"
```

```pycon
>>> x
2
>>> 1 / 0
Traceback (most recent call last):
ZeroDivisionError: division by zero
>>> y = x
```

The end.
"""
    cells = extension("notebooks").notebook(page).cells
    assert [(cell.cell_type, cell.source) for cell in cells] == [
        ("markdown", "# Title\n\nText."),
        ("code", "x = 1\nfor n in range(2):\n    x += n"),
        ("markdown", '```python\nshown = "not run"\n```'),
        ("code", "x"),
        ("code", "1 / 0"),
        ("code", "y = x"),
        ("markdown", "The end."),
    ]
    assert [cell.metadata.get("tags") for cell in cells if cell.source == "1 / 0"] == [["raises-exception"]]
    assert extension("notebooks").notebook(page) == extension("notebooks").notebook(page)


def test_contenders_side_by_side(extension):
    side_by_side = extension("side_by_side").side_by_side
    rows = [{"on": on, "contender": who, "ms": ms} for on, who, ms in [("a", "x", 1), ("a", "z", 2), ("b", "y", 3)]]
    contenders = [("x", "X"), ("y / z", "others")]
    assert side_by_side(rows, "on", "ms", contenders) == [
        {"row": "a", "X": 1, "others": 2},
        {"row": "b", "X": None, "others": 3},
    ]
    with pytest.raises(ValueError, match="expected one row of 'a', 'x'"):
        side_by_side([*rows, rows[0]], "on", "ms", contenders)
