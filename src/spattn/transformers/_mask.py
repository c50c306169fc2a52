"""Mask function for Transformers, which returns a tensor subclass that carries a pattern."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import causal_mask_function

from ..patterns import BlockLocal, Causal, Full, KeyPadding, Pattern, PerBatch, QueriesAt, Sinks
from ..patterns.base.composition import And
from ..patterns.interop import from_mask_mod
from ._configuration import restriction
from ._functions import NoWindow, both, known_pattern, packed_positions
from ._restriction import renumbered
from ._without_data import WithoutData

__all__ = ["PatternMask", "of_layer", "pattern_mask"]

_aten = torch.ops.aten
_DETACH = _aten.detach.default
_COPIES = {_aten.alias.default, _aten.clone.default, _DETACH, _aten._to_copy.default}


@dataclass(frozen=True)
class Source:
    """What a mask was made from, for keys of a cache that dropped some (:meth:`PatternMask.behind`)."""

    known: Pattern | None
    """The pattern of the model's mask function, or None for a traced one."""
    valid: np.ndarray | None
    """The non-padding keys, (batch, kv_len), or None without padding."""
    config: Any
    make: Callable[..., PatternMask]
    """Make the mask for other ``kv_length`` and ``kv_offset``."""


class PatternMask(WithoutData):
    """A pattern as a tensor (batch, 1, q_len, kv_len) without data, which the model passes on like a mask.

    ``mask + bias`` and ``bias + mask`` add a bias to the scores of the allowed pairs, as they do with an additive mask.
    Operations other than these and copies raise TypeError: the result would no longer match the pattern.
    """

    pattern: Pattern | tuple[Pattern, ...] | NoWindow
    """One pattern for all layers or one per layer; or the error to raise if a layer uses this mask."""
    kv_len: int
    """Number of keys of the pattern; later keys are masked."""
    bias: torch.Tensor | None
    """Floats that broadcast to (batch, heads, q_len, kv_len); the dtype of the mask is theirs, or bool if None."""
    source: Source | None

    @staticmethod
    def __new__(
        cls,
        pattern: Any,
        kv_len: int,
        shape: Sequence[int],
        device: Any,
        bias: torch.Tensor | None = None,
        source: Source | None = None,
    ) -> PatternMask:
        dtype = torch.bool if bias is None else bias.dtype
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        self.pattern, self.kv_len, self.bias, self.source = pattern, kv_len, bias, source
        return self

    def __repr__(self) -> str:
        return f"PatternMask({self.pattern!r}, {tuple(self.shape)})"

    def of(self, module: torch.nn.Module) -> Pattern:
        """Return the pattern of a layer."""
        if isinstance(self.pattern, NoWindow):
            raise self.pattern
        return of_layer(self.pattern, module)

    def behind(self, dropped: int, module: torch.nn.Module) -> PatternMask:
        """Return the mask of a layer's keys without the first `dropped` ones, to which no query may attend."""
        source, kept = self.source, self.kv_len - dropped
        if not dropped or source is None:
            return self
        own = of_layer(restriction(source.config), module)
        if min(_last(source.known, self.shape[2]), _last(own, self.shape[2])) > kept:
            raise ValueError(
                f"attention_mask: the cache keeps {kept} of {self.kv_len} keys in layer "
                f"{getattr(module, 'layer_idx', None)}, and this mask may need others; make the cache from the "
                "model's present configuration, or use a dynamic cache"
            )
        return source.make(kv_length=kept, kv_offset=dropped)

    def __add__(self, other: Any) -> PatternMask:
        if not isinstance(other, torch.Tensor) or isinstance(other, PatternMask) or not other.is_floating_point():
            raise self.computed_with("add")
        shape = torch.broadcast_shapes(self.shape, other.shape)
        if shape[2:] != self.shape[2:]:
            raise ValueError(f"attention_mask: a bias of shape {tuple(other.shape)} does not fit {tuple(self.shape)}")
        bias = other if self.bias is None else self.bias + other
        return PatternMask(self.pattern, self.kv_len, shape, self.device, bias, self.source)

    __radd__ = __add__

    @classmethod
    def computed_with(cls, operation: Any) -> TypeError:
        return TypeError(
            "attention_mask: this model computes with its mask, which is a pattern without data "
            f'(operation {operation}); call spattn.transformers.use(model), or use attn_implementation="eager"'
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        mask = args[0]
        # A copy that detaches would cut a learned bias from its gradient.
        learned = isinstance(mask, PatternMask) and mask.bias is not None and mask.bias.requires_grad
        if func not in _COPIES or options.get("dtype", mask.dtype) is not mask.dtype or (learned and func is _DETACH):
            raise cls.computed_with(func)
        device = options.get("device") or mask.device
        bias = None if mask.bias is None else mask.bias.to(device)
        return cls(mask.pattern, mask.kv_len, mask.shape, device, bias, mask.source)


def of_layer(patterns: Pattern | tuple[Pattern, ...], module: torch.nn.Module) -> Pattern:
    """Return the pattern of a layer; `patterns` is one for all layers or one per layer."""
    if isinstance(patterns, Pattern):
        return patterns
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < len(patterns):
        raise ValueError(
            "spattn_pattern: expected one pattern for all layers, because the attention module "
            f"{type(module).__name__} does not identify its layer among {len(patterns)} (layer_idx={layer})"
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
    """Return the mask for "spattn"; has the signature of Transformers' AttentionMaskInterface.

    Query i is at index ``q_offset + i`` and key j at ``kv_offset + j`` of the sequence that `mask_function` describes;
    `attention_mask` (batch, tokens so far) is False at padding. `others`, e.g. flags to skip the mask, are ignored.
    """
    q_offset = int(q_offset)  # may be a device tensor (static caches)
    first, shape = q_offset - kv_offset, (batch_size, 1, q_length, kv_length)
    try:
        known = known_pattern(mask_function, kv_offset)
    except NoWindow as error:  # some models make masks for layer types that no layer uses
        return PatternMask(error, kv_length, shape, device)
    kv_len = kv_length if known is None else _seen(known, first + q_length, kv_length)
    valid = _valid(attention_mask, kv_offset, kv_len)

    def placed(pattern: Pattern) -> Pattern:
        return pattern if pattern == Full() or first == kv_len - q_length else QueriesAt(pattern, first)

    @functools.cache  # layers share few distinct patterns
    def restricted(own: Pattern) -> Pattern:
        """Intersect the mask's pattern with a pattern of the configuration."""
        if own != Full():
            tokens = max(kv_len, first + q_length)
            own = renumbered(own, packed_positions(mask_function), attention_mask, kv_offset, tokens)
        if known is None:
            pattern = both(from_mask_mod(_by_rows(mask_function, q_offset, kv_offset)), placed(own))
        else:
            pattern = placed(both(known, own))
        return pattern if valid is None else both(pattern, _padding(valid))

    own = restriction(config)
    pattern = restricted(own) if isinstance(own, Pattern) else tuple(map(restricted, own))
    make = functools.partial(
        pattern_mask,
        batch_size,
        q_length,
        q_offset=q_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        config=config,
        device=device,
    )
    return PatternMask(pattern, kv_len, shape, device, source=Source(known, valid, config, functools.cache(make)))


def _by_rows(mask_function: Callable[..., Any], q_offset: int, kv_offset: int) -> Callable[..., Any]:
    """Shift a mask function from sequence indices to rows and columns."""
    return lambda b, h, q, k: mask_function(b, h, q + q_offset, k + kv_offset)


def _seen(pattern: Pattern, tokens: int, kv_length: int) -> int:
    """Return the number of keys to which queries may attend.

    A static cache has unused entries at the end, which a causal pattern masks. Dropping them gives all decode steps the
    same pattern.
    """
    causal = both(pattern, Causal()) == pattern
    return min(max(tokens, 0), kv_length) if causal else kv_length


def _last(pattern: Pattern | None, q_len: int) -> float:
    """Return a bound of how many of the last keys the last `q_len` queries see; infinite if unknown."""
    if isinstance(pattern, And):
        return min(_last(p, q_len) for p in pattern.operands)
    if pattern is None or 0 in pattern.sizes():
        return math.inf
    if pattern.sizes() != (1, 1):
        return max(_last(pattern.at(*place), q_len) for place in itertools.product(*map(range, pattern.sizes())))
    if isinstance(pattern, BlockLocal):
        return pattern.block + q_len - 1
    ends = pattern.ends(q_len)
    return math.inf if ends is None or ends.between or ends.first else ends.last


def _valid(attention_mask: torch.Tensor | None, kv_offset: int, kv_len: int) -> np.ndarray | None:
    """Return the mask of non-padding keys, (batch, kv_len), or None without padding."""
    if attention_mask is None:
        return None
    given = attention_mask[:, kv_offset : kv_offset + kv_len].cpu().numpy()
    valid = np.pad(given, ((0, 0), (0, kv_len - given.shape[1])))
    return None if valid.all() else valid


def _padding(valid: np.ndarray) -> Pattern:
    """Return the pattern of non-padding keys.

    Left padding, as in generation, gives a pattern that is independent of kv_len, so all decode steps share it.
    """
    padding = valid.argmax(axis=1)
    if (valid.sum(axis=1) + padding < valid.shape[1]).any():
        return KeyPadding(valid)
    return PerBatch(tuple(~Sinks(int(tokens)) for tokens in padding))
