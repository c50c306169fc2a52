"""A layer with the parameters of PyTorch's own attention, over the pairs of a pattern."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..dispatch import as_pattern
from ..dispatch.torch_operators import attend
from ..dispatch.torch_text import text_of
from ..patterns import Pattern
from ..patterns.base.check import integer

__all__ = ["SparseAttention"]

# What else PyTorch's encoder layers hand to attention, all of it as it is by default.
_USUAL = {name: one.default for name, one in inspect.signature(nn.MultiheadAttention.forward).parameters.items()}
_USUAL["need_weights"] = False
# The other parameters of nn.MultiheadAttention, with the values that are supported.
_MADE_WITH = {
    "dropout": 0.0,
    "add_bias_kv": False,
    "add_zero_attn": False,
    "kdim": None,
    "vdim": None,
    "batch_first": True,
}


class SparseAttention(nn.Module):  # type: ignore[misc]
    """Attention of several heads over a pattern, in place of ``nn.MultiheadAttention(..., batch_first=True)``.

    Parameters and their names are the same, so either loads the other's ``state_dict()``, and the same seed gives the
    same numbers. The pattern is not in the state_dict. Attention weights are never materialised.

    Parameters
    ----------
    embed_dim : int
        Features of a token; a multiple of `num_heads`.
    num_heads : int
        Query heads.
    pattern : Pattern, str or bool array, optional
        As for :func:`spattn.attention`; the default is "full".
    bias : bool, optional
        Whether the projections add a bias.
    num_kv_heads : int, optional
        Heads of keys and values, which groups of query heads share; by default `num_heads`. The projection of the input
        is smaller then: ``in_proj_weight`` has ``(num_heads + 2 * num_kv_heads) * head_dim`` rows.
    device, dtype : optional
        Device and dtype of the parameters.
    **others
        The other parameters of ``nn.MultiheadAttention``: ``batch_first=True``, and the defaults of the rest.

    Attributes
    ----------
    pattern : Pattern
        May be set to another one.

    Raises
    ------
    TypeError
        If `embed_dim`, `num_heads` or `num_kv_heads` is no integer, or `pattern` is none.
    ValueError
        If one of them is less than 1, `num_heads` does not divide `embed_dim`, `num_kv_heads` does not divide
        `num_heads`, or another parameter has an unsupported value.

    Notes
    -----
    What differs from PyTorch's layer: rows of queries with no key to attend to are 0 before the last projection, and
    not NaN; inputs have a batch axis; a padding mask is read by the host when a call is planned, which waits for a GPU.

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
    # PyTorch's encoder layers compute attention of layers that have this with kernels of their own, dense.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: Pattern | str | Any = "full",
        *,
        bias: bool = True,
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        for name, value in others.items():
            if name not in _MADE_WITH:
                raise TypeError(f"{name}: expected an argument of nn.MultiheadAttention, got {value!r}")
            if value != _MADE_WITH[name]:
                raise ValueError(f"{name}: only {_MADE_WITH[name]!r} is supported, got {value!r}")
        self.embed_dim = integer("embed_dim", embed_dim, 1)
        self.num_heads = integer("num_heads", num_heads, 1)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads, 1)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim: expected a multiple of {self.num_heads} heads, got {self.embed_dim}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of {self.num_heads} query heads, got {self.num_kv_heads}"
            )
        self.pattern = pattern
        rows = sum(self._rows)
        like = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(rows, self.embed_dim, **like))
        self.in_proj_bias = nn.Parameter(torch.empty(rows, **like)) if bias else None
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **like)
        self._start()

    def _start(self) -> None:
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Rows of the projections to q, k and v."""
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
        """Projects, attends and projects again.

        Parameters
        ----------
        query : (batch, q_len, embed_dim) tensor
        key, value : (batch, kv_len, embed_dim) tensor
            With `query` at the end of them where lengths differ, as :func:`spattn.attention` has it.
        key_padding_mask : (batch, kv_len) tensor, optional
            Of bool, True at padding, which nobody attends to; or of floats, which are added to logits: 0, and −∞ at
            padding.
        need_weights : bool, optional
            False: weights are nowhere written down.
        **others
            What else ``nn.MultiheadAttention`` takes, each as it is there by default.

        Returns
        -------
        out : (batch, q_len, embed_dim) tensor
        None
            In place of the weights.

        Raises
        ------
        TypeError
            If `key_padding_mask` is neither of bool nor of floats, or an argument is unknown; as
            :func:`spattn.attention`.
        ValueError
            If inputs have other shapes, `need_weights` is True or another argument is not as it is by default; if a
            number in `key_padding_mask` is neither 0 nor −∞ nor its dtype's least; as :func:`spattn.attention`.
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
        out = attend(q, k, v, valid, self._text, self._pattern)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None

    def _check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: dict[str, Any]) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.ndim != 3 or x.shape[2] != self.embed_dim:
                raise ValueError(f"{name}: expected shape (batch, length, {self.embed_dim}), got {tuple(x.shape)}")
        for name, value in others.items():
            if name not in _USUAL:
                raise TypeError(f"{name}: expected an argument of nn.MultiheadAttention, got {value!r}")
            if value is not _USUAL[name]:
                raise ValueError(
                    f"{name}: expected {_USUAL[name]}, because the pattern says what is allowed; got {value!r}"
                )

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, {self._pattern!r}, num_kv_heads={self.num_kv_heads}"


def _valid(padding: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A padding mask, of bools the other way round: True at keys."""
    if padding.shape != key.shape[:2]:
        raise ValueError(f"key_padding_mask: expected shape {tuple(key.shape[:2])}, got {tuple(padding.shape)}")
    if padding.dtype != torch.bool and not padding.is_floating_point():
        raise TypeError(f"key_padding_mask: expected a tensor of bool or of floats, got {padding.dtype}")
    return padding if padding.is_floating_point() else ~padding
