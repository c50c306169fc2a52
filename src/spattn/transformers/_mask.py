"""What models of Transformers hand from layer to layer as their mask: a pattern in the shape of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import causal_mask_function

from ..patterns import Causal, Full, KeyPadding, Pattern, PerBatch, QueriesAt, Sinks
from ..patterns.interop import from_mask_mod
from ._configuration import restriction
from ._functions import NoWindow, both, known_pattern, packed_positions
from ._restriction import renumbered

__all__ = ["PatternMask", "of_layer", "pattern_mask"]

_aten = torch.ops.aten
_COPIES = {_aten.alias.default, _aten.clone.default, _aten.detach.default, _aten._to_copy.default}


class PatternMask(torch.Tensor):  # type: ignore[misc]
    """A pattern as a tensor (batch, 1, q_len, kv_len) of bool, which models take for a mask and hand on.

    It has no elements, and whoever asks for them learns so: a mask that was cut or changed would not be the pattern.
    """

    pattern: Pattern | tuple[Pattern, ...] | NoWindow
    """For all layers, or one for each layer; or why no layer can attend with this mask."""
    kv_len: int
    """Keys that the pattern is for: those behind them are allowed to nobody."""

    @staticmethod
    def __new__(cls, pattern: Any, kv_len: int, shape: tuple[int, int, int, int], device: Any) -> PatternMask:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.pattern, self.kv_len = pattern, kv_len
        return self

    def __repr__(self) -> str:
        return f"PatternMask({self.pattern!r}, {tuple(self.shape)})"

    def of(self, module: torch.nn.Module) -> Pattern:
        """The pattern of the layer that attends."""
        if isinstance(self.pattern, NoWindow):
            raise self.pattern
        return of_layer(self.pattern, module)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func not in _COPIES or options.get("dtype", torch.bool) is not torch.bool:
            raise _computed_with(func)
        (mask,) = args
        return cls(mask.pattern, mask.kv_len, tuple(mask.shape), options.get("device") or mask.device)


def _computed_with(operation: Any) -> TypeError:
    return TypeError(
        "attention_mask: expected to reach attention as it is, a pattern without elements; this model computes with "
        f'its mask ({operation}), as one that adds a bias to it does: use attn_implementation="eager" for it'
    )


def _refused(name: str) -> Callable[..., Any]:
    def operator(mask: PatternMask, other: Any) -> Any:
        raise _computed_with(name)

    return operator


# PyTorch's own operators replace a TypeError by Python's, which does not say why. Python asks a subclass first.
for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(PatternMask, _method, _refused(_name))


def of_layer(patterns: Pattern | tuple[Pattern, ...], module: torch.nn.Module) -> Pattern:
    """The pattern of a layer, of one for all of them or one for each."""
    if isinstance(patterns, Pattern):
        return patterns
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < len(patterns):
        raise ValueError(
            "spattn_pattern: expected one pattern for all layers, as the attention of this model "
            f"({type(module).__name__}) does not tell which of {len(patterns)} layers it is of (layer_idx={layer})"
        )
    return patterns[layer]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def pattern_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    device: Any = "cpu",
    **others: Any,
) -> PatternMask:
    """The mask of "spattn", called as Transformers calls each implementation's.

    Queries stand at ``q_offset + i`` and keys at ``kv_offset + j`` of the sequence that `mask_function` is about, and
    `attention_mask` (batch, tokens so far) is False at padding. `others` say when masks may be left out.
    """
    q_offset = int(q_offset)  # a static cache counts on the device
    first, shape = q_offset - kv_offset, (batch_size, 1, q_length, kv_length)
    try:
        known = known_pattern(mask_function, kv_offset)
    except NoWindow as error:  # some models make the masks of all layer types, also of those that no layer has
        return PatternMask(error, kv_length, shape, device)
    kv_len = kv_length if known is None else _seen(known, first + q_length, kv_length)
    valid = _valid(attention_mask, kv_offset, kv_len)

    def placed(pattern: Pattern) -> Pattern:
        return pattern if pattern == Full() or first == kv_len - q_length else QueriesAt(pattern, first)

    @functools.cache  # many layers have few patterns
    def restricted(own: Pattern) -> Pattern:
        """The mask's pattern, where a pattern of the configuration allows it too."""
        if own != Full():
            tokens = max(kv_len, first + q_length)
            own = renumbered(own, packed_positions(mask_function), attention_mask, kv_offset, tokens)
        if known is None:
            pattern = both(from_mask_mod(_by_rows(mask_function, q_offset, kv_offset)), placed(own))
        else:
            pattern = placed(both(known, own))
        return pattern if valid is None else both(pattern, _padding(valid))

    own = restriction(config)
    return PatternMask(
        restricted(own) if isinstance(own, Pattern) else tuple(map(restricted, own)), kv_len, shape, device
    )


def _by_rows(mask_function: Callable[..., Any], q_offset: int, kv_offset: int) -> Callable[..., Any]:
    """The same of rows and columns."""
    return lambda b, h, q, k: mask_function(b, h, q + q_offset, k + kv_offset)


def _seen(pattern: Pattern, tokens: int, kv_length: int) -> int:
    """How many of the keys are there for the queries, which end after so many tokens.

    Behind them a cache of a fixed size has room, which a causal pattern does not see: without it, a step of decoding
    has the pattern of the step before.
    """
    causal = both(pattern, Causal()) == pattern
    return min(max(tokens, 0), kv_length) if causal else kv_length


def _valid(attention_mask: torch.Tensor | None, kv_offset: int, kv_len: int) -> np.ndarray | None:
    """Keys that are no padding, (batch, kv_len); None where all are."""
    if attention_mask is None:
        return None
    given = attention_mask[:, kv_offset : kv_offset + kv_len].cpu().numpy()
    valid = np.pad(given, ((0, 0), (0, kv_len - given.shape[1])))
    return None if valid.all() else valid


def _padding(valid: np.ndarray) -> Pattern:
    """The pattern of keys that are no padding.

    Padding on the left, as generation has it, is said without a length: every step has the pattern of the step before.
    """
    padding = valid.argmax(axis=1)
    if (valid.sum(axis=1) + padding < valid.shape[1]).any():
        return KeyPadding(valid)
    return PerBatch(tuple(~Sinks(int(tokens)) for tokens in padding))
