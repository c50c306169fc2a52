"""Mask functions of Transformers as patterns.

They are closures over closures: ``and_masks(sliding_window_overlay(512), causal_mask_function)``. What each of them
allows is known by its code, and how wide a window is by what it is closed over.
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
    """A window of no keys, with which no query attends to anything; eager attention then gives a mean of all values."""


_CAUSAL = SlidingWindow(None, 0)
_NUMBERS = torch.zeros((1, 1), dtype=torch.int64)


def known_pattern(mask_function: MaskFunction, kv_offset: int = 0) -> Pattern | None:
    """The pattern of a mask function, if it is one of Transformers' own or made of them by ``and`` and ``or``.

    Parameters
    ----------
    mask_function : callable
        Of batch entry, head, query and key, which are counted from the start of the sequence.
    kv_offset : int
        Where the pattern's first position stands among these.

    Returns
    -------
    Pattern or None
        With positions of queries counted as those of keys are.

    Raises
    ------
    NoWindow
        If one of the functions is a window of no keys.
    """
    rule = _RULES.get(_code(mask_function))
    return None if rule is None else rule(_closed_over(mask_function), kv_offset)


def packed_positions(mask_function: MaskFunction) -> np.ndarray | None:
    """The position of each token in its own sequence, (batch, tokens), if the mask function is for packed ones."""
    if _code(mask_function) is _PACKED:
        starts = _starts(_closed_over(mask_function))
        return np.stack([np.concatenate([np.arange(n) for n in np.diff(entry)]) for entry in starts])
    joined = _closed_over(mask_function)["mask_functions"] if _code(mask_function) in (_AND, _OR) else ()
    return next((found for f in joined if (found := packed_positions(f)) is not None), None)


def both(one: Any, other: Any) -> Pattern:
    """What two patterns allow; of two windows as a window, which tells how far it reaches."""
    if one == Full() or one == other:
        return other
    if other == Full():
        return one
    windows = [_CAUSAL if p == Causal() else p for p in (one, other)]
    if not all(isinstance(w, SlidingWindow) for w in windows):
        return one & other
    sides = ([getattr(w, side) for w in windows] for side in ("left", "right"))
    return SlidingWindow(*(min((n for n in side if n is not None), default=None) for side in sides))


def _code(function: MaskFunction) -> CodeType | None:
    """What tells functions apart that one definition makes anew each time; None for other callable objects."""
    return getattr(function, "__code__", None)


def _closed_over(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


# -- what each of them allows ------------------------------------------------------------------------------------------


def _all_of(given: dict[str, Any], kv_offset: int) -> Pattern | None:
    patterns = [known_pattern(f, kv_offset) for f in given["mask_functions"]]
    return None if None in patterns else functools.reduce(both, patterns)


def _documents(given: dict[str, Any], kv_offset: int) -> Pattern | None:
    """Packed sequences, which are never in a cache."""
    return None if kv_offset else Documents(tuple(tuple(np.diff(entry).tolist()) for entry in _starts(given)))


def _starts(packed: dict[str, Any]) -> list[np.ndarray]:
    """Where each sequence of a batch entry starts, and where the last one ends."""
    numbers = packed["packed_sequence_mask"].cpu().numpy()
    return [np.flatnonzero(np.diff(entry, prepend=entry[0] - 1, append=entry[-1] + 1)) for entry in numbers]


def _in_each_sequence(given: dict[str, Any], kv_offset: int) -> Pattern | None:
    """What another one allows by positions in packed sequences, beside the former: the same where distances decide."""
    inner = known_pattern(given["mask_function"], kv_offset)
    return inner if inner is not None and inner.translation_invariant else None


def _any_of(given: dict[str, Any], kv_offset: int) -> Pattern | None:
    patterns = [known_pattern(f, kv_offset) for f in given["mask_functions"]]
    return None if None in patterns else functools.reduce(operator.or_, patterns)


def _at_least(least: int, window: int) -> int:
    if window < least:
        raise NoWindow(f"sliding_window: expected at least {least} in a layer that attends with it, got {window}")
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
if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # since 5.23
    _RULES[masking_utils.remap_positions_for_packed_sequence(lambda: None, _NUMBERS).__code__] = _in_each_sequence
