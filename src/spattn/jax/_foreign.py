"""Foreign functions: what XLA's programs call by a name, on the host and on GPUs, and what computes it in Python.

Handlers are made by ctypes and read the structs of XLA's C interface, so nothing is compiled or linked against XLA.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax

from .. import dispatch
from ..arrays import add_plain
from ..arrays._xla import Buffer, Xla
from ..patterns import from_json
from . import _c_api as c_api
from ._at_work import at_work
from ._execution import Execution, new_error

__all__ = ["ATTENTION", "ATTENTION_BACKWARD", "XLA", "Options"]

XLA = Xla()
add_plain(Buffer, XLA)


class Options(NamedTuple):
    """What is the same in all executions of a call: a part of the program."""

    pattern: str
    scale: float
    backend: str
    precision: str | None

    @property
    def text(self) -> str:
        """What travels with the call."""
        return json.dumps(self)


@functools.lru_cache(maxsize=32)
def _options_of(text: str) -> dict[str, Any]:
    options = Options(*json.loads(text))._asdict()
    return options | {"pattern": from_json(options["pattern"])}


def _attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return dispatch.attention(q, k, v, return_lse=True, **options)


def _attention_backward(dout: Any, dlse: Any, *arrays: Any, **options: Any) -> Any:
    return dispatch.attention_backward(dout, *arrays, dlse=dlse, **options)


def _register(name: str, function: Callable[..., Any]) -> list[Any]:
    """Makes the function known to XLA; returns what has to stay as long as XLA may call it."""
    handlers = []
    for platform, on_gpu in (("cpu", False), ("CUDA", True)):
        handler = c_api.Handler(functools.partial(_handle, function, on_gpu))
        address = ctypes.cast(handler, ctypes.c_void_p).value
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform=platform)
        handlers.append(handler)
    return handlers


def _handle(function: Callable[..., Any], on_gpu: bool, at: Any) -> int | None:
    frame = at.contents
    try:
        if not _answer(frame):
            with nullcontext() if on_gpu else at_work(), Execution(frame, on_gpu) as execution:
                _execute(function, execution)
    except BaseException as error:  # none may leave a function that C calls
        return new_error(frame, error)
    return None


def _answer(frame: Any) -> bool:
    """Whether XLA only asked for the handler's version and traits, which it does before all else.

    XLA compares the version with those that it supports, and says so where it does not have it. There are no traits: a
    call may not become a part of a CUDA graph, which would run again with memory that was given back.
    """
    extension = frame.extensions
    while extension and extension.contents.type != c_api.METADATA:
        extension = extension.contents.next
    if extension:
        about = ctypes.cast(extension, ctypes.POINTER(c_api.MetadataExtension)).contents.metadata.contents
        about.version.major, about.version.minor, about.traits = *c_api.VERSION, 0
    return bool(extension)


def _execute(function: Callable[..., Any], execution: Execution) -> None:
    found = function(*execution.operands, **_options_of(execution.text()))
    for made, result in zip(found, execution.results, strict=True):
        if made is not result:  # the backend made an array of its own, in host memory
            XLA.to_numpy(result)[...] = made


ATTENTION, ATTENTION_BACKWARD = "spattn_attention", "spattn_attention_backward"
_handlers = _register(ATTENTION, _attention) + _register(ATTENTION_BACKWARD, _attention_backward)
