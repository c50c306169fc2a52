"""The pattern gallery, written from the registry when the site is built. Nobody edits it when a pattern is added."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
from spattn.patterns._base import pattern_class

import spattn
from spattn import patterns

FOLDER = Path("gallery") / "generated"
PUBLIC_MODULES = ("spattn.patterns", "spattn.patterns.deepspeed")
LONGEST_REPR = 160
MOST_HEADS = 3  # drawn side by side, for patterns that tell heads apart


class Entry(NamedTuple):
    """A page of the gallery."""

    file: str
    title: str
    text: list[str]
    definition: str | None
    example: tuple[patterns.Pattern, int, int] | None


def write_gallery(app, config) -> None:
    """One page and one picture for each registered name and each known composition, and their overviews."""
    folder = Path(app.srcdir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    groups = {
        "deepspeed": [_registered(name) for name in patterns.names() if name.startswith("deepspeed")],
        "registered": [_registered(name) for name in patterns.names() if not name.startswith("deepspeed")],
        "compositions": [_composition(*entry) for entry in patterns.gallery().items()],
    }
    wanted = {f"{group}.inc" for group in groups}
    for group, entries in groups.items():
        _write(folder / f"{group}.inc", _overview(entries))
        for entry in entries:
            wanted |= {f"{entry.file}.rst", f"{entry.file}.png"}
            _write(folder / f"{entry.file}.rst", _page(entry))
            if entry.example is not None:
                _draw(folder / f"{entry.file}.png", *entry.example)
    for file in folder.iterdir():
        if file.name not in wanted:
            file.unlink()


def _registered(name: str) -> Entry:
    cls = pattern_class(name)
    path = public_path(cls)
    title = path.removeprefix("spattn.patterns.")
    text = [f"Registered as ``{name}``.", "", f".. autoclass:: {path}", ""]
    return Entry(f"pattern-{name}", title, text, inspect.getsource(cls.allows), patterns.example(name))


def _composition(name: str, known: tuple[patterns.Pattern, int]) -> Entry:
    pattern, length = known
    text = ["A composition:", "", ".. code-block:: text", "", f"   {_shortened(pattern)}", ""]
    file = "composition-" + re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return Entry(file, name, text, None, (pattern, length, length))


def public_path(cls: type) -> str:
    """The name under which users import a class."""
    for module in PUBLIC_MODULES:
        if getattr(importlib.import_module(module), cls.__name__, None) is cls:
            return f"{module}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _shortened(pattern) -> str:
    text = " ".join(repr(pattern).split())
    return text if len(text) <= LONGEST_REPR else f"{text[:LONGEST_REPR]} …"


def _page(entry: Entry) -> str:
    lines = [f".. _{entry.file}:", "", entry.title, "=" * len(entry.title), ""]
    if entry.example is not None:
        lines += _picture(entry)
    lines += entry.text
    if entry.definition is not None:
        source = textwrap.dedent(entry.definition).splitlines()
        lines += ["Definition", "-" * 10, "", ".. code-block:: python", "", *(f"   {line}" for line in source), ""]
    if entry.example is not None:
        lines += _planned(*entry.example)
    return "\n".join(lines) + "\n"


def _picture(entry: Entry) -> list[str]:
    pattern, q_len, kv_len = entry.example
    index_set, heads = pattern.index_set(q_len, kv_len), _heads_drawn(pattern)
    width = 400 if heads == 1 else 700
    lengths = f"{q_len} × {kv_len} tokens"
    lines = [f".. figure:: {entry.file}.png", f"   :alt: {entry.title} at {lengths}", f"   :width: {width}px", ""]
    counts = f"{index_set.nnz} pairs{' in head 0' if heads > 1 else ''}, density {index_set.density:.3g}"
    return [*lines, f"   ``{_shortened(pattern)}`` at {lengths}: {counts}.", ""]


def _planned(pattern, q_len: int, kv_len: int) -> list[str]:
    """The plan and where its closed forms come from."""
    plan = spattn.plan(pattern, q_len, kv_len, batch=max(1, pattern.sizes()[0]))
    cls, base = type(pattern), patterns.Pattern
    runs = "given in closed form" if cls.runs is not base.runs else "found from the predicate"
    views = "in contiguous tiles" if _whole(pattern, q_len, kv_len) else "in views of its own"
    told = textwrap.wrap(" ".join(repr(plan).split()), 76)
    return [
        "Plan", "-" * 4, "", ".. code-block:: text", "", *(f"   {line}" for line in told), "",
        f"The index set is {runs}; planned {views}.",
        "At so few tokens most of a tile is empty: efficiency grows with length.", "",
    ]  # fmt: skip


def _whole(pattern, q_len: int, kv_len: int) -> bool:
    variants, _ = pattern.variants(*(max(1, size) for size in pattern.sizes()))
    parts = [part for own in variants for part in own.bind(q_len, kv_len).parts(q_len, kv_len)]
    return all(part.query is None and part.key is None for part in parts)


def _overview(entries: list[Entry]) -> str:
    lines = [".. container:: pattern-grid", ""]
    for entry in entries:
        if entry.example is None:
            lines += [f"   :doc:`{entry.title} <generated/{entry.file}>`", ""]
            continue
        lines += [
            f"   .. figure:: /{FOLDER.as_posix()}/{entry.file}.png", f"      :target: generated/{entry.file}.html",
            f"      :alt: {entry.title}", "", f"      :doc:`{entry.title} <generated/{entry.file}>`", "",
        ]  # fmt: skip
    toctree = [".. toctree::", "   :hidden:", "", *(f"   generated/{entry.file}" for entry in entries), ""]
    return "\n".join(lines + toctree)


def _heads_drawn(pattern) -> int:
    return min(max(1, pattern.sizes()[1]), MOST_HEADS)


def _draw(path: Path, pattern, q_len: int, kv_len: int) -> None:
    heads = _heads_drawn(pattern)
    figure, axes = plt.subplots(1, heads, figsize=(4.5 * heads, 4.5), layout="constrained", squeeze=False)
    for head, ax in enumerate(axes[0]):
        patterns.draw(pattern, q_len, kv_len, ax=ax, head=head, title=f"head {head}" if heads > 1 else None)
    figure.savefig(path, dpi=100, facecolor="white")
    plt.close(figure)


def _write(path: Path, text: str) -> None:
    """Writes only what changed, so that Sphinx rebuilds only that."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def setup(app):
    """Before Sphinx looks for pages."""
    app.connect("config-inited", write_gallery)
    return {"version": "1", "parallel_read_safe": True}
