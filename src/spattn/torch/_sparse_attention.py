"""Sparse replacement for nn.MultiheadAttention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..dispatch.torch_operators import attend, draw_seed
from ..dispatch.torch_text import text_of
from ..patterns import Pattern
from ..patterns.base.check import integer
from ..patterns.conversion import as_pattern
from ..request.dropout import Dropout

__all__ = ["SparseAttention"]

# Arguments of nn.MultiheadAttention.forward, with the only supported values: the defaults, but need_weights=False.
_USUAL = {name: one.default for name, one in inspect.signature(nn.MultiheadAttention.forward).parameters.items()}
_USUAL["need_weights"] = False
# Other constructor arguments of nn.MultiheadAttention, with the only supported values.
_MADE_WITH = {
    "add_bias_kv": False,
    "add_zero_attn": False,
    "kdim": None,
    "vdim": None,
    "batch_first": True,
}


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
    pattern : Pattern, str or bool array, optional
        As for :func:`spattn.attention`; default "full".
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
    device, dtype : optional
        Device and dtype of the parameters.
    **others
        Other arguments of ``nn.MultiheadAttention``; only ``batch_first=True`` and the defaults are supported.

    Attributes
    ----------
    pattern : Pattern
        The pattern; may be reassigned.

    Raises
    ------
    TypeError
        If `embed_dim`, `num_heads` or `num_kv_heads` is not an integer, or `pattern` is not a pattern.
    ValueError
        If a number is less than 1; if `num_heads` does not divide `embed_dim`, or `num_kv_heads` does not divide
        `num_heads`; if another argument has an unsupported value.

    Notes
    -----
    Differences from ``nn.MultiheadAttention``: query rows with no allowed key are 0, not NaN, before the output
    projection; inputs must have a batch axis; the host reads a padding mask during planning, which synchronizes with
    the GPU.

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

    batch_first = True
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
        device: Any = None,
        dtype: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        for name, value in others.items():
            if name not in _MADE_WITH:
                raise TypeError(f"{name}: not an argument of nn.MultiheadAttention, got {value!r}")
            if value != _MADE_WITH[name]:
                raise ValueError(f"{name}: only {_MADE_WITH[name]!r} is supported, got {value!r}")
        self.embed_dim = integer("embed_dim", embed_dim, 1)
        self.num_heads = integer("num_heads", num_heads, 1)
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
        rows = sum(self._rows)
        like = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(rows, self.embed_dim, **like))
        self.in_proj_bias = nn.Parameter(torch.empty(rows, **like)) if bias else None
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **like)
        self.sinks = nn.Parameter(torch.zeros(self.num_heads, **like)) if sinks else None
        self._start()

    def _start(self) -> None:
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Return the number of rows of the q, k and v projections."""
        of_heads = self.embed_dim // self.num_heads * self.num_kv_heads
        return self.embed_dim, of_heads, of_heads

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
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute multi-head attention of `query` over `key` and `value`.

        Parameters
        ----------
        query : (batch, q_len, embed_dim) tensor
        key, value : (batch, kv_len, embed_dim) tensor
            Keys and values. Query row i is at position ``i + kv_len - q_len``, as in :func:`spattn.attention`.
        key_padding_mask : (batch, kv_len) tensor, optional
            Boolean mask, True at padding; or additive float mask, 0 at tokens and −inf at padding.
        need_weights : bool, optional
            Must be False: attention weights are never materialized.
        **others
            Other arguments of ``nn.MultiheadAttention.forward``; only their defaults are supported.

        Returns
        -------
        out : (batch, q_len, embed_dim) tensor
        None
            In place of the attention weights.

        Raises
        ------
        TypeError
            If `key_padding_mask` is neither boolean nor floating-point, or an argument is unknown; otherwise, as for
            :func:`spattn.attention`.
        ValueError
            If inputs have wrong shapes; if `need_weights` is True or another argument is not its default; if an element
            of an additive `key_padding_mask` is not 0, −inf or its dtype's minimum; as for :func:`spattn.attention`.
        """
        self._check(query, key, value, others | {"need_weights": need_weights})
        weights, biases = self.in_proj_weight.split(self._rows), (None, None, None)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.split(self._rows)
        q, k, v = (
            F.linear(x, weight, bias).unflatten(2, (-1, self.embed_dim // self.num_heads)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        valid = None if key_padding_mask is None else _valid(key_padding_mask, key)
        named = {"score": self.score, "sinks": self.sinks}
        modified = {name: given for name, given in named.items() if given is not None}
        if self.training and self.dropout != 0.0:
            modified |= {"dropout_p": self.dropout, "seed": draw_seed()}
        out = attend(q, k, v, valid, self._text, self._pattern, **modified)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None

    def _check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: dict[str, Any]) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.ndim != 3 or x.shape[2] != self.embed_dim:
                raise ValueError(f"{name}: expected shape (batch, length, {self.embed_dim}), got {tuple(x.shape)}")
        for name, value in others.items():
            if name not in _USUAL:
                raise TypeError(f"{name}: not an argument of nn.MultiheadAttention, got {value!r}")
            if value is not _USUAL[name]:
                raise ValueError(f"{name}: only {_USUAL[name]} is supported (masks go to pattern=), got {value!r}")

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, {self._pattern!r}, num_kv_heads={self.num_kv_heads}"


def _valid(padding: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Validate a padding mask, and invert a boolean one, so that True marks tokens."""
    if padding.shape != key.shape[:2]:
        raise ValueError(f"key_padding_mask: expected shape {tuple(key.shape[:2])}, got {tuple(padding.shape)}")
    if padding.dtype != torch.bool and not padding.is_floating_point():
        raise TypeError(f"key_padding_mask: expected a boolean or floating-point tensor, got {padding.dtype}")
    return padding if padding.is_floating_point() else ~padding
