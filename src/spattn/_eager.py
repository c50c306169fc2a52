"""Keeps torch.compile out of spattn: it would trace the checks, the planning and NumPy as if they were a model's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P, _R = ParamSpec("_P"), TypeVar("_R")


def eager(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, before which a graph that torch.compile is tracing ends and behind which the next one begins."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        traced = getattr(sys.modules.get("torch.compiler"), "is_dynamo_compiling", None)
        if traced is not None and traced():
            return sys.modules["torch"].compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
