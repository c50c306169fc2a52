"""Dynamic masks: patterns given by GPU arrays, which each call reads on the device.

A model that selects keys at run time holds their indices in device memory. Planning from them would copy them to the
host and synchronize; instead, kernels filter the tiles of a plan by the mask, in stream order. The arrays are not
copied: a call, or a replayed CUDA graph, reads their current values. If PyTorch records gradients, the call copies the
arrays, and the backward pass builds an ordinary pattern from the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from .._util.index_checks import LONGEST
from ..arrays import check_plain, dtype_name, namespace_of, to_host
from .base.check import assign, integer
from .base.class_registry import pattern_class
from .base.composition import per_entry
from .base.pattern import Pattern

__all__ = [
    "DynamicDocuments",
    "DynamicKeyBlocks",
    "DynamicKeyPadding",
    "DynamicMask",
    "DynamicVerticalSlash",
    "MaskedPattern",
]


_HOST = "a dynamic mask supports & with a pattern only; for |, - and ~ use .to_host(kv_len), which synchronizes"


class _HostOnly:
    """Mixin that rejects ``|``, ``-`` and ``~``, which need the values on the host."""

    def __or__(self, other: Any) -> NoReturn:
        raise TypeError(_HOST)

    __ror__ = __sub__ = __rsub__ = __or__

    def __invert__(self) -> NoReturn:
        raise TypeError(_HOST)


class Form(NamedTuple):
    """Shapes and limits of a dynamic mask, which the host knows without reading the arrays."""

    name: str  # "blocks", "lengths", "documents" or "lines"
    batch: int
    heads: int
    counts: tuple[int, ...]  # length of the last axis of each array
    rows: int = 1  # rows per batch entry and head
    block_q: int = 1  # tokens per block; 1 if the mask has no blocks
    block_kv: int = 1
    left: bool = False  # True if padding precedes the keys


class DynamicMask(_HostOnly):
    """Base class of dynamic masks. ``pattern & mask`` is the intersection; a mask alone means ``Full() & mask``.

    For unions and complements, ``mask.to_host(kv_len)`` returns an ordinary pattern.
    """

    name: ClassVar[str]

    def arrays(self) -> tuple[Any, ...]:
        """Return the arrays, each of shape ``([[batch,] heads,] rows, n)``; batch and heads may be 1."""
        raise NotImplementedError

    def form(self) -> Form:
        """Return the shapes and limits."""
        raise NotImplementedError

    def check(self, kv_len: int) -> None:
        """Check that the mask supports `kv_len` keys.

        Parameters
        ----------
        kv_len : int
            Number of keys.

        Raises
        ------
        ValueError
            If the mask does not support them.
        """

    def to_host(self, kv_len: int) -> Pattern:
        """Read the arrays and return an ordinary pattern; synchronizes with the device.

        Parameters
        ----------
        kv_len : int
            Number of keys.

        Returns
        -------
        Pattern
        """
        raise NotImplementedError

    def copied(self) -> DynamicMask:
        """Copy the mask and its arrays.

        Returns
        -------
        DynamicMask
        """
        fields = {name: value for name, value in vars(self).items() if namespace_of(value) is not None}
        own = {name: (value.clone if hasattr(value, "clone") else value.copy)() for name, value in fields.items()}
        return replace(self, **own)  # type: ignore[type-var]

    def __and__(self, other: Any) -> MaskedPattern:
        return MaskedPattern(other, self) if isinstance(other, Pattern) else NotImplemented

    __rand__ = __and__

    def __repr__(self) -> str:
        found = []
        for name, value in vars(self).items():
            array = f"<{dtype_name(value)} {tuple(value.shape)}>" if namespace_of(value) is not None else repr(value)
            found.append(f"{name}={array}")
        return f"{type(self).__name__}({', '.join(found)})"


@dataclass(frozen=True, eq=False)
class MaskedPattern(_HostOnly):
    """Intersection of a pattern and a dynamic mask: ``pattern & mask``.

    Parameters
    ----------
    pattern : Pattern
    selection : DynamicMask
    """

    pattern: Pattern
    selection: DynamicMask

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f"pattern: expected a Pattern, got {type(self.pattern).__name__}")
        if not isinstance(self.selection, DynamicMask):
            raise TypeError(f"selection: expected a DynamicMask, got {type(self.selection).__name__}")

    def to_host(self, kv_len: int) -> Pattern:
        """Read the arrays and return an ordinary pattern; synchronizes with the device.

        Parameters
        ----------
        kv_len : int
            Number of keys.

        Returns
        -------
        Pattern
        """
        return self.pattern & self.selection.to_host(kv_len)

    def __and__(self, other: Any) -> MaskedPattern:
        return MaskedPattern(self.pattern & other, self.selection) if isinstance(other, Pattern) else NotImplemented

    __rand__ = __and__


def selected(pattern: Any) -> MaskedPattern | None:
    """Return a DynamicMask or MaskedPattern as a MaskedPattern; None for any other object."""
    if isinstance(pattern, DynamicMask):
        return MaskedPattern(pattern_class("full")(), pattern)
    return pattern if isinstance(pattern, MaskedPattern) else None


def _class(name: str) -> Callable[..., Pattern]:
    return pattern_class(name)  # by name: an import would be circular, since base.content imports this module


def _check(name: str, value: Any, axes: tuple[int, ...]) -> Any:
    """Check that `value` is a device array of int32 or int64 whose ndim is in `axes`."""
    library = namespace_of(value)
    if library is None or library.name == "jax":
        raise TypeError(f"{name}: expected a PyTorch or CuPy array on a GPU, got {type(value).__name__}")
    check_plain(name, value)
    if library.ordinal(value) is None:
        raise TypeError(f"{name}: expected an array on a GPU, got one in host memory")
    if dtype_name(value) not in ("int32", "int64"):
        raise TypeError(f"{name}: expected int32 or int64, got {dtype_name(value)}")
    if value.ndim not in axes:
        raise ValueError(f"{name}: expected {' or '.join(f'{n}-D' for n in axes)}, got shape {tuple(value.shape)}")
    return value


def _leading(value: Any, own: int) -> tuple[int, int]:
    """Return the sizes (batch, heads) of the leading axes of an array with `own` trailing axes."""
    batch, heads = (1, 1, *value.shape[: value.ndim - own])[-2:]
    return int(batch), int(heads)


@dataclass(frozen=True, eq=False, repr=False)
class DynamicKeyBlocks(DynamicMask):
    """List of key blocks per query block: :class:`spattn.patterns.KeyBlocks` with indices on a GPU.

    Parameters
    ----------
    blocks : int array (batch, heads_kv, query blocks, n) on a GPU
        Key block indices, in any order; indices out of range are ignored. The leading axes are optional. A query at
        position p uses row ``p // block_q``; each call checks that there are ``ceil(kv_len / block_q)`` rows.
    block_q, block_kv : int
        Tokens per query block and per key block.

    References
    ----------
    Yuan et al. Native Sparse Attention. arXiv:2502.11089.
    """

    blocks: Any
    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        assign(
            self,
            blocks=_check("blocks", self.blocks, (2, 3, 4)),
            block_q=integer("block_q", self.block_q, 1),
            block_kv=integer("block_kv", self.block_kv, 1),
        )

    def arrays(self) -> tuple[Any, ...]:
        return (self.blocks,)

    def form(self) -> Form:
        rows, count = map(int, self.blocks.shape[-2:])
        block_q, block_kv = (min(tokens, LONGEST) for tokens in (self.block_q, self.block_kv))
        return Form("blocks", *_leading(self.blocks, 2), (count,), rows, block_q, block_kv)

    def check(self, kv_len: int) -> None:
        rows = -(-kv_len // self.block_q)
        if self.blocks.shape[-2] != rows:
            got = self.blocks.shape[-2]
            raise ValueError(f"blocks: expected {rows} query blocks ({kv_len} tokens of {self.block_q}), got {got}")

    def to_host(self, kv_len: int) -> Pattern:
        blocks = to_host(self.blocks)
        valid = (blocks >= 0) & (blocks < -(-kv_len // self.block_kv))
        return _class("key_blocks")(np.where(valid, blocks, -1), self.block_q, self.block_kv)


@dataclass(frozen=True, eq=False, repr=False)
class DynamicKeyPadding(DynamicMask):
    """Key padding of sequences of different lengths: :class:`spattn.patterns.KeyPadding` with lengths on a GPU.

    Parameters
    ----------
    lengths : int array (batch,) on a GPU
        Number of keys per sequence that are not padding, clipped to [0, kv_len].
    left : bool, optional
        Whether the padding precedes the keys instead of following them.
    """

    lengths: Any
    left: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.left, (bool, np.bool_)):
            raise TypeError(f"left: expected a bool, got {type(self.left).__name__}")
        _check("lengths", self.lengths, (1,))

    def arrays(self) -> tuple[Any, ...]:
        return (self.lengths[:, None, None, None],)

    def form(self) -> Form:
        return Form("lengths", int(self.lengths.shape[0]), 1, (1,), left=bool(self.left))

    def to_host(self, kv_len: int) -> Pattern:
        lengths = np.clip(to_host(self.lengths), 0, kv_len)
        made: Pattern = pattern_class("key_padding").from_lengths(lengths, kv_len, left=self.left)
        return made


@dataclass(frozen=True, eq=False, repr=False)
class DynamicDocuments(DynamicMask):
    """Packed documents: :class:`spattn.patterns.Documents` with cumulative lengths on a GPU.

    Parameters
    ----------
    cu_seqlens : int array (documents + 1,) or (batch, documents + 1) on a GPU
        Start of each document and end of the last, ``0, n_0, n_0 + n_1, ...``; non-decreasing. Documents may be empty,
        for example to keep the shape of the array constant between calls.

    Notes
    -----
    Tokens outside all documents attend to no key, and no query attends to them.
    """

    cu_seqlens: Any

    def __post_init__(self) -> None:
        _check("cu_seqlens", self.cu_seqlens, (1, 2))
        if not self.cu_seqlens.shape[-1]:
            raise ValueError("cu_seqlens: expected at least one number, got none")

    def arrays(self) -> tuple[Any, ...]:
        return (self.cu_seqlens[None] if self.cu_seqlens.ndim == 1 else self.cu_seqlens[:, None, None],)

    def form(self) -> Form:
        (starts,) = self.arrays()
        return Form("documents", *_leading(starts, 2), (int(starts.shape[-1]),))

    def to_host(self, kv_len: int) -> Pattern:
        entries = np.atleast_2d(np.minimum(to_host(self.cu_seqlens), kv_len))
        found = tuple(pattern_class("documents").from_cu_seqlens(starts) for starts in entries)
        made: Pattern = found[0] if len(found) == 1 else pattern_class("per_batch")(found)
        return made


@dataclass(frozen=True, eq=False, repr=False)
class DynamicVerticalSlash(DynamicMask):
    """Causal key columns and diagonals: :class:`spattn.patterns.VerticalSlash` with indices on a GPU.

    Parameters
    ----------
    columns : int array (batch, heads, n) on a GPU
        Key positions; positions out of range are ignored. The leading axes are optional.
    diagonals : int array (batch, heads, m) on a GPU
        Distances ``p - j >= 0`` in tokens, with the same leading axes; distances out of range are ignored.

    References
    ----------
    Jiang et al. MInference 1.0. arXiv:2407.02490.
    """

    columns: Any
    diagonals: Any

    def __post_init__(self) -> None:
        for name in ("columns", "diagonals"):
            _check(name, getattr(self, name), (1, 2, 3))
        if namespace_of(self.columns) is not namespace_of(self.diagonals):
            raise TypeError(f"diagonals: expected an array like columns, got {type(self.diagonals).__name__}")
        if self.columns.shape[:-1] != self.diagonals.shape[:-1]:
            shapes = tuple(self.columns.shape), tuple(self.diagonals.shape)
            raise ValueError(f"diagonals: expected the leading axes of columns, got shapes {shapes[1]} and {shapes[0]}")

    def arrays(self) -> tuple[Any, ...]:
        return self.columns[..., None, :], self.diagonals[..., None, :]

    def form(self) -> Form:
        counts = int(self.columns.shape[-1]), int(self.diagonals.shape[-1])
        return Form("lines", *_leading(self.columns, 1), counts)

    def to_host(self, kv_len: int) -> Pattern:
        columns, diagonals = (
            np.broadcast_to(host, (1, 1, *host.shape)[-3:]) for host in map(to_host, (self.columns, self.diagonals))
        )

        def one(batch: int, head: int) -> Pattern:
            own = (x[batch, head] for x in (columns, diagonals))
            return _class("vertical_slash")(*(np.unique(x[(x >= 0) & (x < kv_len)]).tolist() for x in own))

        batch, heads = columns.shape[:2]
        return per_entry([[one(b, h) for h in range(heads)] for b in range(batch)])
