"""Convert mask functions of Transformers to patterns.

Mask functions are nested closures: ``and_masks(sliding_window_overlay(512), causal_mask_function)``. The code object
identifies the function, and the closure variables hold its parameters, e.g. the window size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import torch
from transformers import masking_utils

from ..patterns import BlockLocal, Causal, Documents, Full, Pattern, PerBatch, SlidingWindow

__all__ = ["NoWindow", "both", "known_pattern", "packed_positions"]

MaskFunction = Callable[..., Any]


class NoWindow(ValueError):
    """Error for an empty sliding window; eager attention returns the mean of all values instead."""


_CAUSAL = SlidingWindow(-1, 0)
_NUMBERS = torch.zeros((1, 1), dtype=torch.int64)


def known_pattern(mask_function: MaskFunction, kv_offset: int = 0) -> Pattern | None:
    """Return the pattern of a mask function of Transformers, or of an and/or composition of them, else None.

    Position 0 of the pattern is sequence index `kv_offset`. Raises NoWindow if one of the functions is an empty
    window.
    """
    rule = _RULES.get(_code(mask_function))
    return None if rule is None else rule(_closed_over(mask_function), kv_offset)


def packed_positions(mask_function: MaskFunction) -> np.ndarray | None:
    """Return the position of each token within its packed sequence, (batch, tokens), or None if not packed."""
    if _code(mask_function) is _PACKED:
        starts = _starts(_closed_over(mask_function))
        return np.stack([np.concatenate([np.arange(n) for n in np.diff(entry)]) for entry in starts])
    joined = _closed_over(mask_function)["mask_functions"] if _code(mask_function) in (_AND, _OR) else ()
    return next((found for f in joined if (found := packed_positions(f)) is not None), None)


def both(one: Any, other: Any) -> Pattern:
    """Intersect two patterns; two sliding windows give a sliding window."""
    if one == Full() or one == other:
        return other
    if other == Full():
        return one
    windows = [_CAUSAL if p == Causal() else p for p in (one, other)]
    if not all(isinstance(w, SlidingWindow) for w in windows):
        return one & other
    sides = ([getattr(w, side) for w in windows] for side in ("left", "right"))
    return SlidingWindow(*(min((n for n in side if n >= 0), default=-1) for side in sides))


def _code(function: MaskFunction) -> CodeType | None:
    """Return the code object, which all closures of one definition share; None for other callables."""
    return getattr(function, "__code__", None)


def _closed_over(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


# -- conversion rules --------------------------------------------------------------------------------------------------


def _all_of(given: dict[str, Any], kv_offset: int) -> Pattern | None:
    patterns = [known_pattern(f, kv_offset) for f in given["mask_functions"]]
    return None if None in patterns else functools.reduce(both, patterns)


def _documents(given: dict[str, Any], kv_offset: int) -> Pattern | None:
    """Convert a packed sequence mask; packed sequences never use a KV cache."""
    return None if kv_offset else Documents(tuple(tuple(np.diff(entry).tolist()) for entry in _starts(given)))


def _starts(packed: dict[str, Any]) -> list[np.ndarray]:
    """Return sequence boundaries (cu_seqlens) per batch entry."""
    numbers = packed["packed_sequence_mask"].cpu().numpy()
    return [np.flatnonzero(np.diff(entry, prepend=entry[0] - 1, append=entry[-1] + 1)) for entry in numbers]


def _in_each_sequence(given: dict[str, Any], kv_offset: int) -> Pattern | None:
    """Convert a mask on positions within packed sequences: the inner mask if it is translation-invariant, else None."""
    inner = known_pattern(given["mask_function"], kv_offset)
    return inner if inner is not None and inner.translation_invariant else None


def _any_of(given: dict[str, Any], kv_offset: int) -> Pattern | None:
    patterns = [known_pattern(f, kv_offset) for f in given["mask_functions"]]
    return None if None in patterns else functools.reduce(operator.or_, patterns)


def _at_least(least: int, window: int) -> int:
    if window < least:
        raise NoWindow(f"sliding_window: expected at least {least} in a layer that uses it, got {window}")
    return window


def _chunks(given: dict[str, Any], kv_offset: int) -> Pattern:
    size = given["chunk_size"]
    return PerBatch(tuple(BlockLocal(size, (p - kv_offset) % size) for p in given["left_padding"].tolist()))


_AND, _OR = masking_utils.and_masks().__code__, masking_utils.or_masks().__code__
_PACKED = masking_utils.packed_sequence_mask_function(_NUMBERS).__code__
_RULES: dict[CodeType | None, Callable[[dict[str, Any], int], Pattern | None]] = {
    masking_utils.causal_mask_function.__code__: lambda given, kv_offset: Causal(),
    masking_utils.bidirectional_mask_function.__code__: lambda given, kv_offset: Full(),
    masking_utils.sliding_window_overlay(1).__code__: lambda given, kv_offset: SlidingWindow(
        _at_least(1, given["sliding_window"]) - 1, None
    ),
    masking_utils.sliding_window_bidirectional_overlay(1).__code__: lambda given, kv_offset: SlidingWindow(
        _at_least(0, given["sliding_window"])
    ),
    masking_utils.chunked_overlay(1, _NUMBERS).__code__: _chunks,
    _PACKED: _documents,
    _AND: _all_of,
    _OR: _any_of,
}
if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # Transformers 5.23 or later
    _RULES[masking_utils.remap_positions_for_packed_sequence(lambda: None, _NUMBERS).__code__] = _in_each_sequence
