"""Traced score functions for tokens whose index in an array is not their position."""

from __future__ import annotations

from typing import NamedTuple

from .graph import INPUTS, INT
from .shared_builder import SharedBuilder
from .tracing import Traced

__all__ = ["Shift", "moved"]


class Shift(NamedTuple):
    """What to add to the indices of a call.

    Attributes
    ----------
    entry : int
        Added to the batch entry.
    query : int
        Added to the position of the query.
    key : int
        Added to the position of the key, if that is at least `first`.
    first : int
        Number of keys whose position is their index.
    """

    entry: int = 0
    query: int = 0
    key: int = 0
    first: int = 0


def moved(traced: Traced, shift: Shift) -> Traced:
    """Return the function at shifted indices; it reads the same rows of arrays.

    The shift becomes parameters of the graph, so that calls with other shifts use the same compiled code.
    """
    build = SharedBuilder()
    parameters = [*traced.parameters, shift.entry, shift.query, shift.key]
    entry, query, key = (build.step("parameter", len(parameters) - at, INT) for at in (3, 2, 1))
    k = build.step("input", "k")
    behind = build.step("apply", "le", build.step("constant", shift.first, INT), k)
    inputs = {
        "b": build.step("apply", "add", build.step("input", "b"), entry),
        "q": build.step("apply", "add", build.step("input", "q"), query),
        "offset": build.step("apply", "add", build.step("input", "offset"), query),
        "k": build.step("apply", "where", behind, build.step("apply", "add", k, key), k),
        "score": build.step("input", "score"),
    }
    new: list[int] = []
    for name, operands, dtype, number in traced.graph.operations:
        own = tuple([new[x] for x in operands])
        if name in INPUTS:
            step = inputs[name] if name in inputs else build.step("input", name)
        elif name == "constant":
            step = build.step("constant", number, dtype)
        elif name == "parameter":
            step = build.step("parameter", number, dtype)
        elif name == "look_up":
            step = build.step("look_up", number, dtype, own)
        else:
            step = build.step("apply", name, *own)
        new.append(step)
    (result,) = traced.graph.results
    graph, used, tables = build.result(new[result])
    return Traced(graph, tuple([parameters[x] for x in used]), tuple([traced.tables[x] for x in tables]))
