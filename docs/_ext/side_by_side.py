"""Rows of measurements as a table with the contenders side by side."""

from __future__ import annotations


def side_by_side(rows: list[dict], of_rows: str, cells: str, contenders: list[tuple[str, ...]]) -> list[dict]:
    """One row for each value of a field, with a cell for each contender; None stands for what was not measured."""
    found: dict[str, dict] = {}
    for row in rows:
        problem, contender = row[of_rows], row["contender"]
        measured = found.setdefault(problem, {})
        if contender in measured:
            raise ValueError(f"results-by-side: expected one row of {problem!r}, {contender!r}; restrict :where:")
        measured[contender] = row[cells]
    return [
        {"row": problem}
        | {title: next((had[name] for name in names.split(" / ") if name in had), None) for names, title in contenders}
        for problem, had in found.items()
    ]
