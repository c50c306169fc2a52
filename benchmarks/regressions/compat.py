"""One interface to the builds before and after the renames of 0.1.0; delete it with the last older base."""

from __future__ import annotations

import json

import spattn
from spattn import patterns as sp

__all__ = ["describe", "make_plan", "pattern", "read", "registry", "show"]

registry = getattr(sp, "registry", sp)
show = getattr(sp, "show", sp)


def pattern(name: str, *args, **params):
    """The pattern that the function `name` makes, or the class of that name in camel case."""
    made = getattr(sp, name, None)
    return (made if callable(made) else getattr(sp, name.title().replace("_", "")))(*args, **params)


def describe(made) -> dict:
    """The JSON data of a pattern."""
    return json.loads(made.to_json()) if hasattr(made, "to_json") else made.to_dict()


def read(data: dict):
    """The pattern of JSON data."""
    return sp.from_json(json.dumps(data)) if hasattr(sp, "from_json") else sp.from_dict(data)


def make_plan(made, tokens: int, tile: tuple[int, int], **options):
    """The plan with this tile shape."""
    tiling = {"tiling": spattn.Tiling(tile=tile)} if hasattr(spattn, "Tiling") else {"tile": tile}
    return spattn.plan(made, tokens, **tiling, **options)
