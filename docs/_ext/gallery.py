"""The pattern gallery, written from the registry when the site is built. Nobody edits it when a pattern is added."""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
import numpy as np

import spattn
from spattn import patterns
from spattn.patterns.base.class_registry import pattern_class
from spattn.patterns.base.recipe import Recipe
from spattn.patterns.registry import signature

FOLDER = Path("gallery") / "generated"
PUBLIC_MODULES = ("spattn.patterns", "spattn.patterns.deepspeed", "spattn.patterns.authoring")
LONGEST_REPR = 160
_SMALL = 512  # tokens of a sequence that is a few tiles only
MOST_HEADS = 3  # drawn side by side, for patterns that tell heads apart


class Entry(NamedTuple):
    """A page of the gallery."""

    file: str
    title: str
    use: str
    text: list[str]
    definition: str | None
    example: tuple[patterns.Pattern, int]
    typical: tuple[patterns.Pattern, int]


def write_gallery(app, config) -> None:
    """One page and one picture for each registered name and each known composition, and their overviews."""
    if app.tags.has("sphinx_llm_markdown"):  # the second builder of a build: all is written
        return
    folder = Path(app.srcdir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    groups = {
        "deepspeed": [_registered(name) for name in patterns.registry.names() if name.startswith("deepspeed")],
        "registered": [_registered(name) for name in patterns.registry.names() if not name.startswith("deepspeed")],
        "compositions": [_composition(*entry) for entry in patterns.show.gallery().items()],
    }
    wanted = {f"{group}.inc" for group in groups}
    for group, entries in groups.items():
        _write(folder / f"{group}.inc", _overview(entries))
        for entry in entries:
            wanted |= {f"{entry.file}.rst", f"{entry.file}.png", f"{entry.file}-small.png"}
            _write(folder / f"{entry.file}.rst", _page(entry))
            _draw(folder / f"{entry.file}.png", *entry.example)
            _draw_small(folder / f"{entry.file}-small.png", *entry.example)
    for file in folder.iterdir():
        if file.name not in wanted:
            file.unlink()


def _registered(name: str) -> Entry:
    cls = pattern_class(name)
    path = public_path(cls)
    title = path.removeprefix("spattn.patterns.")
    called = signature(name).removeprefix(name)  # without types, which are told by each parameter
    directive = "autofunction" if issubclass(cls, Recipe) else "autoclass"
    text = [f"Registered as ``{name}``.", "", f".. {directive}:: {path}{called}", ""]
    return Entry(f"pattern-{name}", title, _use(cls), text, _definition(cls), cls.example(), cls.typical())


def _use(cls: type) -> str:
    """When to use a pattern: the paragraph after the first line of its docstring, or else that line."""
    paragraphs = (inspect.getdoc(cls) or "").split("\n\n")
    told = len(paragraphs) > 1 and not paragraphs[1].startswith("Parameters\n")
    return " ".join(paragraphs[told].split())


def _definition(cls: type) -> str:
    """The class's own methods that decide what is allowed: ``allows``, or what its family's ``bind`` asks for."""
    if issubclass(cls, Recipe):
        return _recipe(cls)
    own, wanted, found = _own_methods(cls), ["allows", "bind"], []
    while wanted:
        name = wanted.pop(0)
        method = own.get(name) or getattr(cls, name, None)
        if name in found or not callable(method):
            continue
        found.append(name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        used = (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        wanted += [name for name in used if name in own and not hasattr(patterns.Pattern, name)]
    shown = (inspect.getsource(own[name]) for name in found if name in own and name != "bind")
    return "\n\n".join(textwrap.dedent(source).strip() for source in shown)


def _recipe(cls: type[Recipe]) -> str:
    """The function of a recipe without its decorator and docstring."""
    source = textwrap.dedent(inspect.getsource(cls.function))
    function, lines = ast.parse(source).body[0], source.splitlines()
    docstring = function.body[0]
    return "\n".join(lines[function.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno :])


def _own_methods(cls: type) -> dict:
    """Functions that stand in the class itself, also those behind properties."""
    behind = {n: getattr(x, "fget", None) or getattr(x, "function", None) or x for n, x in vars(cls).items()}
    return {name: x for name, x in behind.items() if inspect.isfunction(x) and inspect.getsourcefile(x) != "<string>"}


def _composition(name: str, known: tuple[patterns.Pattern, int]) -> Entry:
    pattern, length = known
    text = ["This composition is defined as", "", ".. code-block:: text", ""]
    text += [*(f"   {line}" for line in textwrap.wrap(_shortened(pattern), 100)), ""]
    file = "composition-" + re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return Entry(file, name, f"``{_shortened(pattern)}``", text, None, known, known)


def public_path(cls: type) -> str:
    """The name under which users import a class."""
    public = cls.public if issubclass(cls, Recipe) else cls
    for module in PUBLIC_MODULES:
        if getattr(importlib.import_module(module), cls.__name__, None) is public:
            return f"{module}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _shortened(pattern) -> str:
    text = " ".join(repr(pattern).split())
    return text if len(text) <= LONGEST_REPR else f"{text[:LONGEST_REPR]} …"


def _page(entry: Entry) -> str:
    lines = [f".. _{entry.file}:", "", entry.title, "=" * len(entry.title), ""]
    lines += [*_picture(entry), *entry.text]
    if entry.definition is not None:
        source = textwrap.dedent(entry.definition).splitlines()
        lines += ["Definition", "-" * 10, "", ".. code-block:: python", "", *(f"   {line}" for line in source), ""]
    lines += _planned(*entry.typical)
    return "\n".join(lines) + "\n"


def _picture(entry: Entry) -> list[str]:
    pattern, length = entry.example
    index_set, heads = pattern.index_set(length, length), _heads_drawn(pattern)
    width = 400 if heads == 1 else 700
    lengths = f"{length} × {length} tokens"
    lines = [f".. figure:: {entry.file}.png", f"   :alt: {entry.title} at {lengths}", f"   :width: {width}px", ""]
    counts = f"{index_set.nnz} pairs{' in head 0' if heads > 1 else ''}, density {index_set.density:.3g}"
    lines += [f"   ``{_shortened(pattern)}`` at {lengths}: {counts}.", "", ".. raw:: html", ""]
    return [*lines, *(f"   {_view(pattern, length, head, heads)}" for head in range(heads)), ""]


def _view(pattern, length: int, head: int, heads: int) -> str:
    """The allowed keys of each query, as ranges, from which _static/pattern_view.js draws the picture anew."""
    index_set = pattern.index_set(length, length, head=head)
    keys = (index_set.row(query) for query in range(length))
    gaps = ((row, np.flatnonzero(np.diff(row) > 1) + 1) for row in keys)
    ranges = [[[int(run[0]), int(run[-1]) + 1] for run in np.split(row, gap) if len(run)] for row, gap in gaps]
    title = f' data-title="head {head}"' if heads > 1 else ""
    data = html.escape(json.dumps(ranges, separators=(",", ":")))
    return f'<div class="pattern-view"{title} data-keys="{length}" data-ranges="{data}"></div>'


def _planned(pattern, length: int) -> list[str]:
    """The plan and where its closed forms come from."""
    plan = spattn.plan(pattern, length, batch=max(1, pattern.sizes()[0]))
    cls, base = type(pattern), patterns.Pattern
    runs = "uses closed forms" if cls.runs is not base.runs else "evaluates the predicate"
    views = "contiguous tiles" if _whole(pattern, length) else "affine views"
    told = textwrap.wrap(" ".join(repr(plan).split()), 76)
    small = ["At this length most cells of a tile are empty; efficiency grows with length."] if length < _SMALL else []
    return [
        "Plan",
        "-" * 4,
        "",
        f"The plan of ``{_shortened(pattern)}`` at {length} × {length} tokens:",
        "",
        ".. code-block:: text",
        "",
        *(f"   {line}" for line in told),
        "",
        f"The index set {runs}; the plan uses {views}.",
        *small,
        "",
    ]


def _whole(pattern, length: int) -> bool:
    variants, _ = pattern.variants(*(max(1, size) for size in pattern.sizes()))
    parts = [part for own in variants for part in own.bind(length, length).parts(length, length)]
    return all(part.query is None and part.key is None for part in parts)


def _overview(entries: list[Entry]) -> str:
    """A table: the picture, the name and the use of each pattern."""
    lines = [".. list-table::", "   :widths: 14 26 60", "   :class: gallery", ""]
    for entry in entries:
        lines += [
            f"   * - .. image:: /{FOLDER.as_posix()}/{entry.file}-small.png",
            f"          :target: generated/{entry.file}.html",
            f"          :alt: {entry.title}",
            f"     - :doc:`{entry.title} <generated/{entry.file}>`",
            f"     - {entry.use}",
        ]
    toctree = ["", ".. toctree::", "   :hidden:", "", *(f"   generated/{entry.file}" for entry in entries), ""]
    return "\n".join(lines + toctree)


def _heads_drawn(pattern) -> int:
    return min(max(1, pattern.sizes()[1]), MOST_HEADS)


def _draw(path: Path, pattern, length: int) -> None:
    heads = _heads_drawn(pattern)
    figure, axes = plt.subplots(1, heads, figsize=(4.5 * heads, 4.5), layout="constrained", squeeze=False)
    for head, ax in enumerate(axes[0]):
        patterns.show.draw(pattern, length, ax=ax, head=head, title=f"head {head}" if heads > 1 else None)
    figure.savefig(path, dpi=100, facecolor="white")
    plt.close(figure)


def _draw_small(path: Path, pattern, length: int) -> None:
    """The cells alone, for the table."""
    cells = pattern.index_set(length, length).to_dense()
    plt.imsave(path, ~np.kron(cells, np.ones((4, 4), bool)), cmap="Blues_r", vmin=-0.5, vmax=1)


def _write(path: Path, text: str) -> None:
    """Writes only what changed, so that Sphinx rebuilds only that."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def setup(app):
    """Before Sphinx looks for pages."""
    app.connect("config-inited", write_gallery)
    return {"version": "1", "parallel_read_safe": True}
