"""Tables of committed benchmark results: a figure on the site exists only if it is in benchmarks/results/*.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from side_by_side import side_by_side
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


class ResultsTable(SphinxDirective):
    """``.. results-table:: NAME [NAME …]`` with ``:columns: field = heading; …``: the same table for each file.

    NAME is a file's name, such as ``peers_cuda-h200``, or without the machine if only one machine has it.

    ``:where: field = value; …`` keeps some rows; a field without a value keeps the rows that have it.
    ``:split-by: field`` makes a table for each of its values.
    ``:of: field`` shows another field than ``results``, a list of rows or one row.
    ``:no-source:`` leaves out where the figures come from, for a second table of the same file.
    Tables of several files are headed by the processor that they were measured on.
    """

    required_arguments = 1
    final_argument_whitespace = True
    option_spec = {
        "columns": directives.unchanged_required,
        "where": directives.unchanged,
        "split-by": directives.unchanged,
        "of": directives.unchanged,
        "no-source": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        """The tables, and after those of a file a line that says where and when it was measured."""
        names = self.arguments[0].split()
        return [node for name in names for node in self._file(self._path(name), len(names) > 1)]

    def _path(self, name: str) -> Path:
        """``NAME.json``, or the only ``NAME-MACHINE.json``."""
        path = RESULTS / f"{name}.json"
        found = [path] if path.exists() else sorted(RESULTS.glob(f"{name}-*.json"))
        if len(found) != 1:
            names = ", ".join(each.stem for each in found) or "those in benchmarks/results/"
            raise self.error(f"{name}: expected a file, one of {names}")
        return found[0]

    def _file(self, path: Path, headed: bool) -> list[nodes.Node]:
        self.env.note_dependency(str(path))
        record = json.loads(path.read_text())
        lines, found = [], record[self.options.get("of", "results")]
        for value, rows in self._tables(found if isinstance(found, list) else [found]):
            lines += self._table([record["machine"]["cpu"]] * headed + [value] * (value is not None), rows)
        lines += ["" if "no-source" in self.options else source_line(path.name, record), ""]
        return self.parse_text_to_nodes(StringList(lines, source=str(path)))

    def _tables(self, rows: list[dict]) -> list[tuple[str | None, list[dict]]]:
        """Rows that are wanted, by the value of the field to split by."""
        wanted = _pairs(self.options.get("where", ""))
        rows = [row for row in rows if all(_has(row, *each) for each in wanted)]
        if "split-by" not in self.options:
            return [(None, rows)]
        groups: dict[str, list[dict]] = {}
        for row in rows:
            groups.setdefault(str(row[self.options["split-by"]]), []).append(row)
        return list(groups.items())

    def _table(self, titles: list[str], rows: list[dict]) -> list[str]:
        return self._lines(titles, rows, _pairs(self.options["columns"]))

    def _lines(self, titles: list[str], rows: list[dict], columns: list[tuple[str, ...]]) -> list[str]:
        lines = [f".. list-table:: {': '.join(titles)}", "   :header-rows: 1", "   :class: results", ""]
        for row in [None, *rows]:
            cells = [heading if row is None else _text(row.get(field)) for field, heading in columns]
            lines += [f"   {'*' if not n else ' '} - {cell}" for n, cell in enumerate(cells)]
        return [*lines, ""]


class ResultsBySide(ResultsTable):
    """``.. results-by-side:: NAME``: a row for each problem, the contenders side by side.

    ``:rows: field = heading`` is what rows are of, ``:cells: field`` what they hold, and ``:columns: contender =
    heading; …`` the contenders; one with alternatives, ``a / b = heading``, shows the first that was measured.
    """

    option_spec = {
        **ResultsTable.option_spec,
        "rows": directives.unchanged_required,
        "cells": directives.unchanged_required,
    }

    def _table(self, titles: list[str], rows: list[dict]) -> list[str]:
        ((of_rows, heading),) = _pairs(self.options["rows"])
        contenders = _pairs(self.options["columns"])
        table = side_by_side(rows, of_rows, self.options["cells"], contenders)
        return self._lines(titles, table, [("row", heading), *((title, title) for _, title in contenders)])


class ResultsIndex(SphinxDirective):
    """``.. results-index::``: one line for each committed file, whatever it holds."""

    def run(self) -> list[nodes.Node]:
        """A bullet list."""
        files = sorted(RESULTS.glob("*.json"))
        lines = []
        for path in files:
            self.env.note_dependency(str(path))
            record = json.loads(path.read_text())
            record = record if isinstance(record, dict) else {}
            lines += [f"- ``{path.name}``: {source_line(None, record)}"]
        return self.parse_text_to_nodes(StringList([*lines, ""], source=str(RESULTS)))


def source_line(name: str | None, record: dict) -> str:
    """What a record says about itself, in reStructuredText."""
    machine = record.get("machine") or record.get("device") or {}
    if isinstance(machine, dict):
        parts = (f"{value} {key}" if isinstance(value, int) else value for key, value in machine.items())
        machine = ", ".join(part for part in parts if isinstance(part, str))
    facts = [f"``{record['command']}``" if "command" in record else "", str(machine), record.get("gpu", "")]
    facts += [f"{key} {record[key]}" for key in ("date", "commit") if key in record]
    head = f"*From* ``{name}``: " if name else ""
    notes = re.sub(r"(?<=\w)_(?!\w)", r"\\_", f" {record['notes']}") if "notes" in record else ""  # no reference
    return head + ("; ".join(fact for fact in facts if fact) or "no header") + f".{notes}"


def _has(row: dict, field: str, *value: str) -> bool:
    """Whether a row has a field or, if one is given, its value; None is a field that is not there."""
    return field in row if not value else str(row.get(field)) == value[0]


def _pairs(text: str) -> list[tuple[str, ...]]:
    """``a = b; c = d`` as pairs."""
    return [tuple(part.strip() for part in pair.split("=", 1)) for pair in text.split(";") if pair.strip()]


def _text(value) -> str:
    if value is None:
        return "–"
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    if isinstance(value, (int, float)):
        return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return re.sub(r"([\\*`|])", r"\\\1", str(value))  # names are no markup


def setup(app):
    """Registers the directives."""
    app.add_directive("results-table", ResultsTable)
    app.add_directive("results-by-side", ResultsBySide)
    app.add_directive("results-index", ResultsIndex)
    return {"version": "1", "parallel_read_safe": True}
