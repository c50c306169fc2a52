#!/usr/bin/env python3
"""Check imports within the package: no circles, and no private module imported from outside its folder.

    python tools/import_circles.py

Counts every import: at the top of a module, within a function, and for type checkers only. Exits with 1 and lists the
modules of each circle, and each import of a ``_name`` module from another folder. Part of ``make lint``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "spattn"


def modules() -> dict[str, Path]:
    """Source files by module name."""
    found = {}
    for file in sorted(ROOT.rglob("*.py*")):
        if file.suffix in (".py", ".pyx"):
            parts = ("spattn", *file.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def targets(name: str, file: Path) -> Iterator[str]:
    """Dotted names that a module imports, absolute."""
    if file.suffix == ".pyx":
        yield from re.findall(r"^(?:from|import) (spattn[\w.]*)", file.read_text(), re.MULTILINE)
        return
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            path = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{path}.{alias.name}" for alias in node.names)


def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = modules()
    edges: dict[str, set[str]] = {}
    for name, file in known.items():
        edges[name] = set()
        for target in targets(name, file):
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != name:
                edges[name].add(target)
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for target in edges[name]:
            if target not in number:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], number[target])
        if low[name] == number[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in edges:
        if name not in number:
            visit(name)
    return found


def trespassers(edges: dict[str, set[str]]) -> list[str]:
    """Imports of a private module or package from outside the folder that holds it."""
    found = []
    for name, imported in edges.items():
        for target in imported:
            parts = target.split(".")
            for depth, part in enumerate(parts):
                folder = ".".join(parts[:depth])
                if part.startswith("_") and not part.startswith("__") and f"{name}.".find(f"{folder}.") != 0:
                    found.append(f"{name} imports {target}")
    return sorted(found)


def main() -> int:
    """Print what is wrong; return 1 if something is."""
    sys.setrecursionlimit(10_000)
    edges = graph()
    problems = [f"circle of {len(circle)}: {', '.join(circle)}" for circle in circles(edges)] + trespassers(edges)
    print(*problems or [f"{len(edges)} modules: no import circles, private modules stay in their folders"], sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
