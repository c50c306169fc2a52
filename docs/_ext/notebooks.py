"""A notebook beside each page that has examples, made from the page's Markdown twin; its cells are the examples."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def notebook(markdown: str) -> nbformat.NotebookNode:
    """Text as Markdown cells, examples with prompts as code cells, one for each block."""
    cells, end = [], 0
    for block in BLOCK.finditer(markdown):
        examples = doctest.DocTestParser().get_examples(block[2])
        if not examples:  # a part of the text
            continue
        cells += _text(markdown[end : block.start()])
        cells += _code(examples)
        end = block.end()
    cells += _text(markdown[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # the same in every build
    made = new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    nbformat.validate(made)
    return made


def _text(markdown: str) -> list:
    return [new_markdown_cell(markdown.strip())] if markdown.strip() else []


def _code(examples: list[doctest.Example]) -> list:
    """One cell; an example that raises, as the page says, has its own, which does not stop the notebook."""
    cells, lines = [], []
    for example in examples:
        if example.exc_msg is None:
            lines.append(example.source.rstrip())
            continue
        cells += [new_code_cell("\n".join(lines))] if lines else []
        cells.append(new_code_cell(example.source.rstrip(), metadata={"tags": ["raises-exception"]}))
        lines = []
    return cells + ([new_code_cell("\n".join(lines))] if lines else [])


def offer(app, pagename, templatename, context, doctree) -> None:
    """Say to the template which other forms a page has."""
    from docutils import nodes  # tests of the notebooks do without Sphinx

    if doctree is None:  # the search, the index, sources
        return
    context["twin"] = f"{pagename}.html.md"
    if "generated" not in pagename and any(doctree.findall(nodes.doctest_block)):
        context["notebook"] = f"{pagename}.ipynb"
        app.env.notebooks = {*getattr(app.env, "notebooks", ()), pagename}


def write_notebooks(app, error) -> None:
    """Beside the pages, when their Markdown twins are there."""
    for page in sorted(getattr(app.env, "notebooks", ())) if error is None and app.builder.name == "html" else ():
        source = Path(app.outdir, f"{page}.html.md").read_text(encoding="utf-8")
        nbformat.write(notebook(source), Path(app.outdir, f"{page}.ipynb"))


def setup(app):
    """Behind sphinx_llm, which writes the twins at priority 101."""
    app.connect("html-page-context", offer)
    app.connect("build-finished", write_notebooks, priority=200)
    return {"version": "1", "parallel_read_safe": True}
