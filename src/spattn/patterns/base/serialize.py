"""Read serialized patterns."""

from __future__ import annotations

import functools
from typing import Any

from ..._util.imports import whole_imports
from .codec import decode
from .pattern import Pattern

__all__ = ["from_dict", "from_text"]


def from_dict(data: dict[str, Any]) -> Pattern:
    """Reads what :meth:`Pattern.to_dict` wrote; safe on untrusted data.

    Parameters
    ----------
    data : dict
        As read from JSON.

    Returns
    -------
    Pattern
        Equal to the one described.

    Raises
    ------
    ValueError
        If `data` is not such a description.
    """
    found: Pattern = decode(data)
    return found


@functools.lru_cache(maxsize=32)
def from_text(text: str) -> Pattern:
    """Reads what :meth:`Pattern.text` wrote; safe on untrusted data.

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
        If `text` is no text.
    ValueError
        If it is no JSON, or describes no pattern.
    """
    with whole_imports:  # late: `import spattn` takes little time
        import json

    return from_dict(json.loads(text))
