"""Cache of Transformers whose layers store keys and values in :class:`spattn.KVCache`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from ..api.kv_cache import KVCache
from ..patterns import Causal, Pattern, SlidingWindow
from ..patterns.base.check import integer
from ._configuration import install, restriction
from ._functions import both
from ._mask import PatternMask, of_layer
from ._without_data import WithoutData

__all__ = ["Cache", "CachedKeys"]


class Cache(transformers.Cache):  # type: ignore[misc]
    """A preallocated cache for ``model.generate(past_key_values=cache)`` of models that use spattn.

    A layer allocates memory at its first tokens, for `max_len` tokens per sequence of that batch. A layer whose mask is
    a sliding window or chunk, by the model or by ``config.spattn_pattern``, keeps at most two windows, and sinks if the
    pattern has them; see :class:`spattn.KVCache`.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        ``model.config``, after ``config.spattn_pattern`` was set.
    max_len : int
        Most tokens per sequence, including padding, the prompt and generated ones.
    chunk : int, optional
        A layer that drops keys keeps those of the newest `chunk` queries, so that `chunk` - 1 tokens can be cropped, as
        assisted generation does. Default 32.

    Raises
    ------
    TypeError
        If `config` is not a configuration, or a number is not an integer.
    ValueError
        If a number is out of range, the model has cross-attention, or its layers need other caches.

    See Also
    --------
    spattn.KVCache : The storage of a layer, for attention without Transformers.

    Notes
    -----
    Beam search, left padding, prompts in pieces, assisted generation and ``reset()`` are supported. The forward pass
    of a model raises ValueError if a sequence would have more than `max_len` tokens, or if the mask of a layer may need
    keys that the cache does not keep. A layer with sinks needs left padding, and scores without bias arrays.

    Layers that drop keys return them without data to the model, which passes them on to spattn; another attention
    implementation raises TypeError. Linear attention layers have Transformers' caches.

    Examples
    --------
    >>> import spattn.transformers, torch
    >>> from spattn.patterns import Sinks, SlidingWindow
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_hidden_layers=2, eos_token_id=None, **sizes))
    >>> model = spattn.transformers.use(model, [Sinks(4) | SlidingWindow(15, 0), None])
    >>> cache = spattn.transformers.Cache(model.config, max_len=1000)
    >>> prompt = torch.randint(99, (1, 100))
    >>> tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=50, do_sample=False)
    >>> cache.get_seq_length(), [layer.nbytes for layer in cache.layers]
    (149, [25344, 256000])
    """

    def __init__(self, config: Any, max_len: int, *, chunk: int = 32) -> None:
        if not isinstance(config, transformers.PreTrainedConfig):
            raise TypeError(f"config: expected model.config, got {type(config).__name__}")
        max_len, chunk = integer("max_len", max_len, 1), integer("chunk", chunk, 1)
        config = config.get_text_config(decoder=True)
        if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
            raise ValueError(
                f"config: {type(config).__name__} has cross-attention, whose keys never change; use "
                "transformers.StaticCache"
            )
        install()
        patterns = restriction(config)
        layers = []
        for index, layer in enumerate(DynamicCache(config=config).layers):
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                own = patterns if isinstance(patterns, Pattern) else patterns[index]
                layers.append(_Layer(own, getattr(layer, "sliding_window", None), max_len, chunk))
            elif type(layer) is LinearAttentionLayer or type(layer).__name__ == "DummyLayer":
                layers.append(layer)
            else:
                raise ValueError(
                    f"config: layer {index} of {type(config).__name__} needs a {type(layer).__name__}, which is not "
                    "supported; use transformers.DynamicCache"
                )
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, _Layer))


class CachedKeys(WithoutData):
    """Keys (batch, heads, tokens, head_dim) of a layer that drops some, without data."""

    layer: _Layer
    kept: torch.Tensor
    """The newest keys, or all."""

    @staticmethod
    def __new__(cls, layer: _Layer, kept: torch.Tensor, tokens: int) -> CachedKeys:
        batch, heads, _, head_dim = kept.shape
        shape = batch, heads, tokens, head_dim
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=kept.dtype, device=kept.device)
        self.layer, self.kept = layer, kept
        return self

    def __repr__(self) -> str:
        return f"CachedKeys({tuple(self.shape)}, kept={self.kept.shape[2]})"

    @property
    def dropped(self) -> int:
        """The number of first keys that are not kept."""
        return int(self.shape[2] - self.kept.shape[2])

    @classmethod
    def computed_with(cls, operation: Any) -> TypeError:
        return TypeError(
            "spattn.transformers.Cache: this model computes with the keys of a layer that drops some "
            f"(operation {operation}); call spattn.transformers.use(model), or use a cache of Transformers"
        )


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of a layer: all tokens of a batch, or only those that the layer's mask needs.

    All entries have the same tokens, including padding, except in a layer with sinks (`with_first`): there, an entry
    begins after its padding. :meth:`update` does not know padding, so :meth:`store` and :meth:`attention` append.
    """

    def __init__(self, own: Pattern, window: int | None, max_len: int, chunk: int) -> None:
        super().__init__()
        self.is_sliding, self.is_croppable = window is not None, True
        pattern: Pattern = both(Causal(), own)
        if window is not None:  # also of chunks, which are within a window
            within = both(SlidingWindow(window - 1, 0), own)
            pattern = within if isinstance(within, SlidingWindow) else SlidingWindow(window - 1, 0)
        else:
            ends = pattern.ends(1) if pattern.sizes() == (1, 1) else None  # others keep all tokens
            pattern = Causal() if ends is None or ends.between else pattern
        self.own, self.pattern, self.max_len, self.chunk = own, pattern, max_len, chunk
        self.tokens = 0
        self._cache: Any = None
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the memory."""
        self.batch_size, heads, _, head_dim = key_states.shape
        self._cache = KVCache(
            self.pattern,
            self.max_len,
            batch=self.batch_size,
            heads_kv=heads,
            head_dim=head_dim,
            head_dim_v=value_states.shape[3],
            like=key_states,
            chunk=self.chunk,
        )
        self.is_initialized = True

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 0 if self._cache is None else self._cache.nbytes

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; return the keys and values that attention needs, or :class:`CachedKeys` for the keys."""
        kind = key_states.device.type
        if torch.is_autocast_enabled(kind):  # it would cast them at each step
            key_states, value_states = (x.to(torch.get_autocast_dtype(kind)) for x in (key_states, value_states))
        if not self.is_initialized or (self.tokens == 0 and self.batch_size != len(key_states)):
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[2]
        if self.tokens + new > self.max_len:
            raise ValueError(
                f"spattn.transformers.Cache: a sequence of {self.tokens} tokens cannot take {new} more, with "
                f"max_len={self.max_len}; make a cache with a larger max_len, or reset() this one"
            )
        if self._new is not None:
            raise ValueError(
                "spattn.transformers.Cache: the layer's last tokens were not given to spattn's attention; call "
                "spattn.transformers.use(model), and reset() this cache"
            )
        if self._cache._rows.first:
            self._new = key_states, value_states
            self.tokens += new
            return CachedKeys(self, key_states, self.tokens), value_states
        keys, values = self._appended(key_states, value_states)
        self.tokens += new
        return (CachedKeys(self, keys, self.tokens) if self._cache._rows.slides else keys), values

    def _appended(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to all entries; return the keys and values that the new queries need."""
        old, new = self._stored(), k.shape[2]
        rows = self._cache._rows
        if old[0].shape[2] + new <= rows.capacity or new <= self.chunk:
            self._cache.append(k, v)
            return self._stored()
        found = tuple(torch.cat(pair, 2) for pair in zip(old, (k, v), strict=True)) if self.tokens else (k, v)
        self._cache.append(k, v)
        return found

    def _stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self._cache
        used = int(cache._columns[0])
        return cache._k[:, :, :used], cache._v[:, :, :used]

    # -- layers with sinks ---------------------------------------------------------------------------------------------

    @property
    def with_first(self) -> bool:
        """Whether the layer keeps first keys and drops later ones."""
        return bool(self._cache._rows.first)

    def store(self, mask: Any) -> None:
        """Append the tokens of the prompt, without their padding."""
        if self._new is None:
            return
        (k, v), valid = self._new, _left_padding(mask)
        counts = None
        if valid is not None:
            counts = valid.sum(1)
            index = np.minimum(np.arange(k.shape[2]) + (k.shape[2] - counts)[:, None], k.shape[2] - 1)
            index = torch.from_numpy(index).to(k.device)[:, None, :, None]
            k, v = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v))
        self._cache.append(k, v, lengths=counts)
        self._new = None

    def attention(self, query: torch.Tensor, mask: Any, module: torch.nn.Module, **options: Any) -> torch.Tensor:
        """Append the new tokens, and compute attention of them to all, each row by the pattern of the layer."""
        valid = _left_padding(mask)
        if mask.source.known != Causal() or of_layer(restriction(mask.source.config), module) != self.own:
            raise ValueError(
                "attention_mask: a layer of spattn.transformers.Cache with sinks needs a causal mask, and the "
                f"spattn_pattern with which the cache was made, {self.own!r}; use a cache of Transformers"
            )
        new = query.shape[2]
        expected = np.full(len(query), self.tokens) if valid is None else valid.sum(1)
        lengths = self._cache.lengths + (0 if self._new is None else new)
        if (lengths != expected).any():
            raise ValueError(
                f"attention_mask: expected a mask of {lengths.tolist()} tokens, as many as the cache has, got "
                f"{expected.tolist()}; a layer with sinks takes padding in its first call only"
            )
        query = query.to(self._cache._k.dtype)
        if self._new is None:  # a layer that shares keys with another one
            return self._cache.attention(query, **options)
        found = []
        for start in range(0, new, self.chunk):
            part = slice(start, start + self.chunk)
            self._cache.append(*(x[:, :, part] for x in self._new))
            found.append(self._cache.attention(query[:, :, part], **options))
        self._new = None
        return torch.cat(found, 2)

    # -- methods of Transformers' layers -------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Return the number of tokens of each sequence, including padding."""
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of the mask, which is that of all tokens, and the offset 0."""
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        """Return `max_len`."""
        return self.max_len

    get_max_cache_shape = get_max_length  # its name before Transformers 5.20

    def reset(self) -> None:
        """Remove all tokens, and keep the memory."""
        self.tokens, self._new = 0, None
        if self._cache is not None:
            self._cache.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens; a positive number is the number of tokens to keep, as it once was."""
        removed = (
            max(self.tokens - tokens_to_remove, 0) if tokens_to_remove > 0 else min(-tokens_to_remove, self.tokens)
        )
        if removed and self._cache is not None:
            try:
                self._cache.crop(np.maximum(self._cache.lengths - removed, 0))
            except ValueError as error:
                raise ValueError(
                    f"tokens_to_remove: a layer of spattn.transformers.Cache with chunk={self.chunk} dropped keys that "
                    f"come back if {removed} tokens are removed; make a cache with chunk > {removed}"
                ) from error
            self.tokens -= removed

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace each batch entry by the one with its index."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch entry, in new memory."""
        if self._cache is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep batch entries, in new memory if their number changes."""
        if self._cache is not None:
            self._cache.reorder(indices)
            self.batch_size = len(self._cache.lengths)


def _left_padding(mask: Any) -> np.ndarray | None:
    """Return the mask of non-padding keys, (batch, tokens), which must be left padding, or None without padding."""
    if not isinstance(mask, PatternMask) or mask.source is None:
        raise ValueError(
            "attention_mask: a layer of spattn.transformers.Cache with sinks needs a mask that Transformers makes, of "
            f"left padding (batch, tokens), got {type(mask).__name__}"
        )
    valid = mask.source.valid
    if valid is not None and (np.diff(valid.astype(np.int8), axis=1) < 0).any():
        raise ValueError(
            "attention_mask: a layer of spattn.transformers.Cache with sinks supports left padding only; use a cache "
            "of Transformers"
        )
    return valid
