"""Check the example's requirements before it computes anything."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import spattn

from . import model


def begin(out: Path, backend: str) -> tuple[ModuleType, str, tuple[model.Encoder, Any]]:
    """Load the model and create the folder `out`.

    Returns
    -------
    module
        :mod:`.figures`, which needs Matplotlib.
    str
        The backend, "cpu" for "auto".
    (Encoder, tokenizer)

    Raises
    ------
    DemoUnavailable
        If the backend, the weights or a package is missing.
    OSError
        If `out` cannot be written.
    """
    try:
        from . import figures
    except ModuleNotFoundError as error:
        raise model.DemoUnavailable(model.missing(error.name or "matplotlib")) from error
    backend = "cpu" if backend == "auto" else backend
    if backend not in spattn.available_backends():
        raise model.DemoUnavailable(f"the backend {backend!r} is not available here; `spattn info` says why")
    loaded = model.load()
    out.mkdir(parents=True, exist_ok=True)
    return figures, backend, loaded
