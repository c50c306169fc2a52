"""Generate mutants of Python, Cython, C++ and CUDA sources from their syntax.

A mutant is one edit of a source file. Operators:

    boundary   <  and <=;  >  and >=
    equal      == and !=;  is and is not;  in and not in
    plus       +  and -
    times      *  and //  (C++: *  and /)
    logic      and and or;  &  and |  (C++: && and ||)
    not        without not, ~ or !
    constant   n becomes n + 1
    flag       True and False
    extreme    min and max;  any and all
    guard      if, elif, while: the condition is False
    return     return x: returns None                       (Python only)
    keyword    a call without one keyword argument, but strict= of zip  (Python only)
    statement  without a call, an assignment to an element or attribute, an assert, break, continue

Type annotations, decorators, docstrings, messages (f-strings, raise, warnings.warn), comments, preprocessor lines,
template arguments and static_assert are not mutated.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from . import native, python

__all__ = ["Mutant", "mutants_of"]


@dataclass(frozen=True)
class Mutant:
    """An edit of ``source[start:end]``. `file`, `function`, `operator` and `number` identify it: edits elsewhere do not
    change them."""

    file: str
    function: str
    operator: str
    number: int
    line: int
    start: int
    end: int
    new: str

    @property
    def place(self) -> str:
        """The identity within the file."""
        return f"{self.function} {self.operator} {self.number}"

    @property
    def identity(self) -> str:
        return f"{self.file}::{self.place}"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]

    def change(self, source: str) -> str:
        """The edit in one line, for a report."""
        begin, end = source.rfind("\n", 0, self.start) + 1, source.find("\n", self.end)
        before, after = source[begin : self.start], source[self.end : end if end >= 0 else None]
        old = source[self.start : self.end]
        new = self.new.replace(old, "...") if len(old) > 5 else self.new
        old = f"{old[:30]} ... {old[-30:]}" if len(old) > 80 else old
        return " ".join(f"{before}[{old} → {new or 'nothing'}]{after}".split())


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in source order."""
    is_python, is_cython = file.endswith(".py"), file.endswith((".pyx", ".pxd"))
    sites = python.sites(source) if is_python else native.sites(source, is_cython)
    numbers: Counter[tuple[str, str]] = Counter()
    lines = [0, *(match.end() for match in re.finditer("\n", source))]
    made = []
    for site in sorted(set(sites), key=lambda site: (site.start, site.end, site.operator)):
        numbers[site.function, site.operator] += 1
        number = numbers[site.function, site.operator]
        line = bisect_right(lines, site.start)
        made.append(Mutant(file, site.function, site.operator, number, line, site.start, site.end, site.new))
    return made
