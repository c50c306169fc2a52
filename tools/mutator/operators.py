"""What each operator of the mutator makes of a token."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OTHER", "TIMES", "Site"]

_PAIRS = {
    "boundary": [("<", "<="), (">", ">=")],
    "equal": [("==", "!="), ("is", "is not"), ("in", "not in")],
    "plus": [("+", "-"), ("+=", "-=")],
    "logic": [("and", "or"), ("&", "|"), ("&&", "||"), ("&=", "|=")],
    "flag": [("True", "False"), ("true", "false")],
    "extreme": [
        ("min", "max"),
        ("minimum", "maximum"),
        ("fmin", "fmax"),
        ("fminf", "fmaxf"),
        ("argmin", "argmax"),
        ("any", "all"),
    ],
}
OTHER = {
    old: (operator, new) for operator, pairs in _PAIRS.items() for pair in pairs for old, new in (pair, reversed(pair))
}
TIMES = {
    "Python": {"*": "//", "//": "*", "/": "*", "*=": "//=", "//=": "*=", "/=": "*="},
    "C++": {"*": "/", "/": "*", "*=": "/=", "/=": "*="},
}


@dataclass(frozen=True)
class Site:
    """An edit that is not numbered yet."""

    function: str
    operator: str
    start: int
    end: int
    new: str
