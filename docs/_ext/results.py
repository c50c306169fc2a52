"""Tables of committed benchmark results: a figure on the site exists only if it is in benchmarks/results/*.json."""

from __future__ import annotations

import json
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


class ResultsTable(SphinxDirective):
    """``.. results-table:: NAME`` with ``:columns: field = heading; …`` and, if wanted, ``:where: field = value``.

    ``:no-source:`` leaves out where the figures come from, for a second table of the same file.
    A file that is not there gives a sentence saying so, not a warning: results are committed when they are measured.
    """

    required_arguments = 1
    option_spec = {
        "columns": directives.unchanged_required, "where": directives.unchanged, "no-source": directives.flag,
    }  # fmt: skip

    def run(self) -> list[nodes.Node]:
        """The table and a line that says where and when it was measured."""
        path = RESULTS / f"{self.arguments[0]}.json"
        if not path.exists():
            return [nodes.paragraph(text=f"Not measured yet: {path.name} is not in benchmarks/results/.")]
        self.env.note_dependency(str(path))
        record = json.loads(path.read_text())
        columns = [tuple(part.strip() for part in c.split("=", 1)) for c in self.options["columns"].split(";")]
        rows = [row for row in record["results"] if self._wanted(row)]
        lines = [".. list-table::", "   :header-rows: 1", "   :class: results", ""]
        for row in [dict(columns), *rows]:
            cells = [_text(row.get(field)) for field, _ in columns]
            lines += [f"   {'*' if not n else ' '} - {cell}" for n, cell in enumerate(cells)]
        lines += ["", "" if "no-source" in self.options else source_line(path.name, record), ""]
        return self.parse_text_to_nodes(StringList(lines, source=str(path)))

    def _wanted(self, row: dict) -> bool:
        if "where" not in self.options:
            return True
        field, value = (part.strip() for part in self.options["where"].split("=", 1))
        return str(row.get(field)) == value


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
    facts = [f"``{record['command']}``" if "command" in record else "", str(machine)]
    facts += [f"{key} {record[key]}" for key in ("date", "commit") if key in record]
    head = f"*From* ``{name}``: " if name else ""
    notes = f" {record['notes']}" if "notes" in record else ""
    return head + ("; ".join(fact for fact in facts if fact) or "no header") + f".{notes}"


def _text(value) -> str:
    if value is None:
        return "–"
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}") if isinstance(value, (int, float)) else str(value)


def setup(app):
    """Registers the directives."""
    app.add_directive("results-table", ResultsTable)
    app.add_directive("results-index", ResultsIndex)
    return {"version": "1", "parallel_read_safe": True}
