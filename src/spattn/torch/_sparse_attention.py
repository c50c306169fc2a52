"""Sparse replacement for nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..dispatch.torch_operators import attend, draw_seed
from ..dispatch.torch_text import text_of
from ..patterns import Pattern
from ..patterns.base.check import flag, integer
from ..patterns.conversion import as_pattern
from ..request.dropout import Dropout
from ._drop_ins import Masked, masked

__all__ = ["SparseAttention"]


class SparseAttention(nn.Module):  # type: ignore[misc]
    """Multi-head sparse attention, a replacement for ``nn.MultiheadAttention(..., batch_first=True)``.

    Parameter names, shapes and initialization are those of ``nn.MultiheadAttention``: each loads the other's
    ``state_dict()``. The pattern is not in the state_dict. Attention weights are never materialized.

    Parameters
    ----------
    embed_dim : int
        Embedding dimension, a multiple of `num_heads`.
    num_heads : int
        Number of query heads.
    pattern : Pattern, str, mask_mod or mask, optional
        As for :func:`spattn.attention`, but not a plan; default "full".
    bias : bool, optional
        Whether the projections have a bias.
    num_kv_heads : int, optional
        Number of key and value heads (grouped-query attention); default `num_heads`. ``in_proj_weight`` has
        ``(num_heads + 2 * num_kv_heads) * head_dim`` rows.
    score : callable, optional
        Score function, as for :func:`spattn.attention`. An ``nn.Module`` becomes a submodule, whose parameters train.
        Parameters that another function captures are not the layer's: register them in your model.
    sinks : bool, optional
        Whether the layer learns a sink per query head, the parameter ``sinks``, which starts at 0.
    dropout : float, optional
        Share of the attention weights that training mode drops, `dropout_p` of :func:`spattn.attention`. The seed of
        each call is drawn from PyTorch's default generator on the CPU.
    kdim, vdim : int, optional
        Features of `key` and `value`; default `embed_dim`.
    batch_first : bool, optional
        Whether tensors are (batch, length, features), the default here, or (length, batch, features).
    add_zero_attn : bool, optional
        Whether every query also attends to a key and a value of zeros.
    add_bias_kv : bool, optional
        Must be False: learned keys and values are not supported.
    device, dtype : optional
        Device and dtype of the parameters.

    Attributes
    ----------
    pattern : Pattern
        The pattern; may be reassigned.

    Raises
    ------
    TypeError
        If a number is not an integer, or `pattern` is not a pattern.
    ValueError
        If a number is less than 1; if `num_heads` does not divide `embed_dim`, or `num_kv_heads` does not divide
        `num_heads`; if `add_bias_kv` is True.

    Notes
    -----
    Differences from ``nn.MultiheadAttention``: the third argument is the pattern; query rows with no allowed key are 0,
    not NaN, before the output projection; the host reads masks during planning, which synchronizes with the GPU.

    Examples
    --------
    >>> import torch
    >>> from spattn.patterns import SlidingWindow
    >>> layer = SparseAttention(64, 4, SlidingWindow(16, 0), num_kv_heads=2)
    >>> x = torch.randn(2, 100, 64)
    >>> out, _ = layer(x, x, x)
    >>> out.shape
    torch.Size([2, 100, 64])
    """

    # Disables the dense fast path of PyTorch's encoder layers.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: Pattern | str | Any = "full",
        *,
        bias: bool = True,
        num_kv_heads: int | None = None,
        score: Callable[..., Any] | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        add_zero_attn: bool = False,
        add_bias_kv: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if add_bias_kv:
            raise ValueError("add_bias_kv: only False is supported; append a learned token to key and value yourself")
        if isinstance(pattern, float):
            raise TypeError(
                f"pattern: expected a Pattern as the third argument, got {pattern}; write dropout={pattern}"
            )
        self.batch_first, self.add_zero_attn = flag("batch_first", batch_first), flag("add_zero_attn", add_zero_attn)
        self.embed_dim = integer("embed_dim", embed_dim, 1)
        self.num_heads = integer("num_heads", num_heads, 1)
        self.kdim = self.embed_dim if kdim is None else integer("kdim", kdim, 1)
        self.vdim = self.embed_dim if vdim is None else integer("vdim", vdim, 1)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads, 1)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim: must be a multiple of num_heads ({self.num_heads}), got {self.embed_dim}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: must divide num_heads ({self.num_heads}), got {self.num_kv_heads}")
        if score is not None and not callable(score):
            raise TypeError(f"score: expected a function of (score, b, h, q, k), got {type(score).__name__}")
        if not isinstance(sinks, bool):
            raise TypeError(f"sinks: expected a bool, whether the layer learns sinks, got {type(sinks).__name__}")
        self.pattern = pattern
        if dropout != 0.0:
            Dropout.of(dropout, 0)  # raises an error if it is no share
        self.score = score
        self.dropout = dropout
        self._over_ranks: Callable[..., torch.Tensor] | None = None
        rows = sum(self._rows)
        like = {"device": device, "dtype": dtype}
        packed = self.kdim == self.vdim == self.embed_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, self.embed_dim, **like)) if packed else None
        for name, n, features in zip("qkv", self._rows, (self.embed_dim, self.kdim, self.vdim), strict=True):
            own = None if packed else nn.Parameter(torch.empty(n, features, **like))
            self.register_parameter(f"{name}_proj_weight", own)
        self.in_proj_bias = nn.Parameter(torch.empty(rows, **like)) if bias else None
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **like)
        self.sinks = nn.Parameter(torch.zeros(self.num_heads, **like)) if sinks else None
        self._start()

    def _start(self) -> None:
        for weight in self._weights():
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Return the number of rows of the q, k and v projections."""
        of_heads = self.embed_dim // self.num_heads * self.num_kv_heads
        return self.embed_dim, of_heads, of_heads

    def _weights(self) -> tuple[torch.Tensor, ...]:
        """Return the parameters of the q, k and v projections: one for all of them, or one for each."""
        if self.in_proj_weight is not None:
            return (self.in_proj_weight,)
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    @property
    def pattern(self) -> Pattern:
        return self._pattern

    @pattern.setter
    def pattern(self, pattern: Pattern | str | Any) -> None:
        self._pattern = as_pattern(pattern, (None, self.num_heads, None, None))
        self._text = text_of(self._pattern)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute multi-head attention of `query` over `key` and `value`.

        Parameters
        ----------
        query : (batch, q_len, embed_dim) tensor
            (q_len, batch, embed_dim) if `batch_first` is False; without the batch axis for a single sequence.
        key, value : (batch, kv_len, kdim or vdim) tensor
            Keys and values. Query row i is at position ``i + kv_len - q_len``, as in :func:`spattn.attention`.
        key_padding_mask : (batch, kv_len) tensor, optional
            Boolean mask, True at padding; or additive float mask, 0 at tokens and −inf at padding.
        need_weights : bool, optional
            Must be False: attention weights are never materialized.
        attn_mask : (q_len, kv_len) or (batch * num_heads, q_len, kv_len) tensor, optional
            Further restricts the pattern. Boolean mask, True at pairs that are *not* allowed, as in
            ``nn.MultiheadAttention``; or float mask, which is added to the scores.
        average_attn_weights : bool, optional
            No effect: there are no attention weights.
        is_causal : bool, optional
            A hint that `attn_mask` is causal, which is not needed. Requires `attn_mask`.
        **others
            Not accepted.

        Returns
        -------
        out : (batch, q_len, embed_dim) tensor
            With the axes of `query`.
        None
            In place of the attention weights.

        Raises
        ------
        TypeError
            If a mask is neither boolean nor floating-point, or an argument is unknown; otherwise, as for
            :func:`spattn.attention`.
        ValueError
            If inputs have wrong shapes; if `need_weights` is True; if `is_causal` is True without `attn_mask`; if an
            element of an additive `key_padding_mask` is not 0, −inf or its dtype's minimum, and `attn_mask` is None; as
            for :func:`spattn.attention`.
        """
        for name, given in others.items():
            raise TypeError(f"{name}: not an argument of nn.MultiheadAttention.forward, got {given!r}")
        if need_weights:
            raise ValueError("need_weights: only False is supported: attention weights are never materialized")
        if is_causal and attn_mask is None:
            raise ValueError('is_causal: a hint about attn_mask; without one, write layer.pattern = "causal"')
        batched = query.ndim == 3
        inputs = [
            self._batch_first(*one, batched)
            for one in zip(
                ("query", "key", "value"), (query, key, value), (self.embed_dim, self.kdim, self.vdim), strict=True
            )
        ]
        q, k, v = self._projected(inputs)
        allowed, score = self._masked(key_padding_mask, attn_mask, q, k, batched)
        modified: dict[str, Any] = {} if score is None else {"score": score}
        sinks = self.sinks
        if self.add_zero_attn:  # a key of zeros has the score 0 and no value, like a sink
            zeros = q.new_zeros(self.num_heads)
            sinks = zeros if sinks is None else torch.logaddexp(sinks, zeros)
        if sinks is not None:
            modified["sinks"] = sinks
        if self.training and self.dropout != 0.0:
            modified |= {"dropout_p": self.dropout, "seed": draw_seed()}
        if self._over_ranks is None:
            out = attend(q, k, v, allowed, self._text, self._pattern, **modified)
        elif allowed is not None:
            raise ValueError("attn_mask, key_padding_mask: not supported over several ranks; make them part of pattern")
        else:
            out = self._over_ranks(q, k, v, self._pattern, **modified)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not batched:
            return out[0], None
        return out if self.batch_first else out.transpose(0, 1), None

    def attend_over_ranks(self, attention: Callable[..., torch.Tensor]) -> None:
        """Let another function compute the attention of later calls.

        :class:`spattn.distributed.ContextParallel` calls this.

        Parameters
        ----------
        attention : callable
            ``attention(q, k, v, pattern, score=, sinks=, dropout_p=, seed=)`` returns the output, shaped like v with
            the heads and length of q.
        """
        self._over_ranks = attention

    def _batch_first(self, name: str, x: torch.Tensor, features: int, batched: bool) -> torch.Tensor:
        """Return an input as (batch, length, features)."""
        if x.ndim != 2 + batched or x.shape[-1] != features:
            axes = ("batch, length, " if self.batch_first else "length, batch, ") if batched else "length, "
            raise ValueError(f"{name}: expected shape ({axes}{features}), got {tuple(x.shape)}")
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _projected(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return q, k and v, (batch, heads, length, head_dim)."""
        weights, biases = self._weights(), (None, None, None)
        if len(weights) == 1:
            weights = weights[0].split(self._rows)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.split(self._rows)
        return [
            F.linear(x, weight, bias).unflatten(2, (-1, self.embed_dim // self.num_heads)).transpose(1, 2)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        ]

    def _masked(self, padding: Any, attn_mask: Any, q: torch.Tensor, k: torch.Tensor, batched: bool) -> Masked:
        """Return both masks in one, with the layer's score function."""
        own = Masked(None, self.score)
        if padding is not None:
            padding = _kept("key_padding_mask", padding if batched else padding[None], (k.shape[0], k.shape[2]))
        if attn_mask is None:
            return own._replace(allowed=padding)
        batch, heads, q_len, _ = q.shape
        several = heads if not batched else batch * heads
        shape = (q_len, k.shape[2]) if attn_mask.ndim == 2 else (several, q_len, k.shape[2])
        pairs = _kept("attn_mask", attn_mask, shape)
        pairs = pairs[None, None] if pairs.ndim == 2 else pairs.unflatten(0, (batch, heads))
        found = own.joined(masked(pairs, q, k))
        return found if padding is None else found.joined(masked(padding[:, None, None], q, k))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, {self._pattern!r}, num_kv_heads={self.num_kv_heads}"


def _kept(name: str, mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Validate a mask, and invert a boolean one, so that True marks what takes part."""
    if mask.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name}: expected a boolean or floating-point tensor, got {mask.dtype}; write {name}.bool()")
    return mask if mask.is_floating_point() else ~mask
