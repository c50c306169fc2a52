"""Read serialized patterns."""

from __future__ import annotations

import functools

from ..._util.imports import whole_imports
from .codec import DEEPEST_DATA, decode
from .pattern import Pattern

__all__ = ["from_json"]


@functools.lru_cache(maxsize=32)
def from_json(text: str) -> Pattern:
    """Read what :meth:`Pattern.to_json` wrote; safe on untrusted data.

    Parameters
    ----------
    text : str
        JSON.

    Returns
    -------
    Pattern
        Equal to the one that was written.

    Raises
    ------
    TypeError
        If `text` is not a string.
    ValueError
        If it is not JSON, or does not describe a pattern.
    """
    with whole_imports:  # late: `import spattn` takes little time
        import json

    try:
        found: Pattern = decode(json.loads(text))
    except RecursionError as error:
        raise ValueError(f"data: expected lists and dicts nested at most {DEEPEST_DATA} deep, got more") from error
    return found
