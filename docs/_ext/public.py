"""The pages of the API reference, written from the modules' ``__all__``: what is public is listed, nothing else."""

from __future__ import annotations

import importlib
import inspect
import shutil
from pathlib import Path

from gallery import public_path

from spattn.patterns import Pattern
from spattn.patterns.base.class_registry import pattern_class
from spattn.patterns.registry import names

FOLDER = Path("api") / "generated"
SECTIONS = (
    ("spattn", "Attention and plans", "Attention, gradients, plans, backends and threads."),
    (
        "spattn.patterns",
        "Patterns",
        "The base class of patterns, and functions that create and combine patterns. Each pattern class and recipe has"
        " its own page in the :doc:`gallery </gallery/index>`.",
    ),
    ("spattn.patterns.registry", "Patterns by name", "Registered names, and the serialized form."),
    ("spattn.patterns.interop", "Importers", "Masks of other libraries as patterns."),
    ("spattn.patterns.authoring", "Custom patterns", "Hints, parameters, predicates and registration."),
    ("spattn.patterns.show", "Pictures", "Drawings of patterns, and the gallery of compositions."),
    ("spattn.patterns.dynamic", "Dynamic masks", ""),
    ("spattn.score", "Score functions", ""),
    ("spattn.torch", "PyTorch", ""),
    ("spattn.transformers", "Hugging Face Transformers", ""),
    ("spattn.jax", "JAX", ""),
    ("spattn.distributed", "Several ranks", ""),
    ("spattn.index_set", "Index sets", "The allowed pairs of a pattern at given lengths, as affine runs."),
    ("spattn.testing", "Testing", ""),
    ("spattn.testing.strategies", "Hypothesis strategies", ""),
)
"""Module, title and text of each page; the text is the module's own where none is given."""


def write_reference(app, config) -> None:
    """One page for each section; autosummary makes a page for each name in it."""
    if app.tags.has("sphinx_llm_markdown"):  # the second builder of a build: all is written
        return
    folder = Path(app.srcdir) / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # pages of names that are gone
    folder.mkdir(parents=True)
    for module, title, text in SECTIONS:
        text = text or inspect.cleandoc(importlib.import_module(module).__doc__)
        lines = [title, "=" * len(title), "", text, "", ".. autosummary::", "   :toctree:", ""]
        lines += [f"   ~{module}.{name}" for name in public_names(module)]
        (folder / f"section-{module}.rst").write_text("\n".join(lines) + "\n")
    (folder / "index.inc").write_text("\n".join(overview()) + "\n")


def overview() -> list[str]:
    """Every public name with its summary, linked to its page; pattern classes to theirs in the gallery."""
    lines = []
    for module, title, _ in SECTIONS:
        public = [f"~{module}.{name}" for name in public_names(module)]
        lines += [f":doc:`{title} <generated/section-{module}>`", "", *summaries(public)]
    classes = sorted(public_path(pattern_class(name)) for name in names())
    return [*lines, ":doc:`Pattern classes </gallery/index>`", "", *summaries([f"~{path}" for path in classes])]


def summaries(names: list[str]) -> list[str]:
    return [".. autosummary::", "", *(f"   {name}" for name in names), ""]


def public_names(module: str) -> list[str]:
    """What ``__all__`` lists: functions, classes, data; not patterns, which the gallery has, and no modules."""
    loaded = importlib.import_module(module)
    found = {name: getattr(loaded, name) for name in loaded.__all__}
    recipes = {getattr(pattern_class(name), "public", None) for name in names()}  # in the gallery
    functions = [name for name, value in found.items() if inspect.isfunction(value) and value not in recipes]
    classes = [name for name, value in found.items() if inspect.isclass(value)]
    data = [name for name, value in found.items() if isinstance(value, dict)]
    return sorted(functions) + [c for c in classes if found[c] is Pattern or not issubclass(found[c], Pattern)] + data


def skip_fields(app, what, name, value, skip, options) -> bool | None:
    """Leave out the fields of a NamedTuple, which the parameters of its docstring describe."""
    return True if type(value).__name__ == "_tuplegetter" else None


def setup(app):
    """Before Sphinx looks for pages, so that autosummary finds these."""
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("config-inited", write_reference)
    return {"version": "1", "parallel_read_safe": True}
