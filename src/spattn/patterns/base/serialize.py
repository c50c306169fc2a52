"""Deserialize patterns."""

from __future__ import annotations

import functools

from ..._util.imports import whole_imports
from .codec import decode
from .pattern import Pattern

__all__ = ["from_json"]


@functools.lru_cache(maxsize=32)
def from_json(text: str) -> Pattern:
    """Deserialize a pattern from :meth:`Pattern.to_json`; safe on untrusted data.

    Parameters
    ----------
    text : str
        JSON.

    Returns
    -------
    Pattern
        Equal to the serialized one.

    Raises
    ------
    TypeError
        If `text` is not a string.
    ValueError
        If it is not JSON, or does not describe a pattern.
    """
    with whole_imports:  # late: keeps `import spattn` fast
        import json

    found: Pattern = decode(json.loads(text))
    return found
