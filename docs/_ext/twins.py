"""Nodes that the Markdown builder of sphinx_llm does not know, for the Markdown twins of the pages."""

from __future__ import annotations

from docutils import nodes
from sphinx_design.shared import PassthroughTextElement

BUILDER = "llms-markdown"


def ignore(translator, node) -> None:
    """Write the children alone."""


def skip(translator, node) -> None:
    """HTML is no part of a twin."""
    raise nodes.SkipNode


def paragraph(translator, node) -> None:
    """Stand alone, as a caption does."""
    translator.ensure_eol(2)


def classifier(translator, node) -> None:
    """Follow the name of a parameter."""
    translator.add(f" : {node.astext()}")
    raise nodes.SkipNode


def citation(translator, node) -> None:
    """Begin with the label in brackets."""
    translator.ensure_eol(2)
    translator.add(f"[{node.pop(0).astext()}] ")


def image(translator, node) -> None:
    """Link to the file that the HTML page shows."""
    builder = translator.builder
    name = builder.env.images[node["uri"]][1]
    up = "../" * builder.current_doc_name.count("/")
    translator.add(f"![{node.get('alt', name)}]({up}_images/{name})")
    raise nodes.SkipNode


def superscript(translator, node) -> None:
    """The builder writes powers as subscripts."""
    translator.add(f"<sup>{node.astext()}</sup>")
    raise nodes.SkipNode


HANDLERS = {
    PassthroughTextElement: (ignore, ignore),
    nodes.abbreviation: (ignore, ignore),
    nodes.caption: (paragraph, paragraph),
    nodes.citation: (citation, paragraph),
    nodes.classifier: (classifier, None),
    nodes.image: (image, None),
    nodes.raw: (skip, None),
    nodes.superscript: (superscript, None),
}


def setup(app):
    """Handlers for that builder alone."""
    for node, handlers in HANDLERS.items():
        app.add_node(node, override=True, **{BUILDER: handlers})
    return {"version": "1", "parallel_read_safe": True}
