"""Dynamic masks: patterns of indices that live on a GPU, read there by each call.

A model that chooses keys anew in every call has its choice in device memory. To plan it as a pattern the host would
copy it and wait; instead kernels select the tiles of a plan by the mask, in the order of the stream. The arrays are not
copied: a call, or a replayed graph, sees what they hold at that time. Where PyTorch records a gradient, a call keeps a
copy, from which the backward makes the pattern.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from .._util.index_checks import LONGEST
from ..arrays import check_plain, dtype_name, namespace_of, to_host
from .base.check import assign, integer
from .base.pattern import Pattern
from .base.registry import pattern_class

__all__ = [
    "DynamicDocuments",
    "DynamicKeyBlocks",
    "DynamicKeyPadding",
    "DynamicVerticalSlash",
    "Form",
    "MaskedPattern",
    "DynamicMask",
    "selected",
]


_HOST = (
    "a pattern of device arrays supports & with a pattern only; use .to_host(kv_len), which waits for the device, "
    "for |, - and ~"
)


class Form(NamedTuple):
    """What of a selection is known without its numbers, as kernels and bounds need it.

    Attributes
    ----------
    name : {"blocks", "lengths", "documents", "lines"}
    batch, heads : int
        That are told apart.
    counts : tuple of int
        Numbers in a row of each array.
    rows : int
        Rows of an array of one batch entry and head.
    block_q, block_kv : int
        Tokens of a block, 1 where there are none.
    left : bool
        Whether padding stands before the keys.
    """

    name: str
    batch: int
    heads: int
    counts: tuple[int, ...]
    rows: int = 1
    block_q: int = 1
    block_kv: int = 1
    left: bool = False


class DynamicMask:
    """What is allowed by indices on a GPU; see the module's text.

    ``pattern & mask`` allows what both do, and a mask alone stands for ``Full() & mask``. Unions and complements need
    the host: ``mask.to_host(kv_len)`` is an ordinary pattern.
    """

    name: ClassVar[str]

    def arrays(self) -> tuple[Any, ...]:
        """The arrays, each (batch or 1, heads or 1, rows, n), or without the first axes where nothing is told apart."""
        raise NotImplementedError

    def form(self) -> Form:
        """What is known of it without its numbers."""
        raise NotImplementedError

    def check(self, kv_len: int) -> None:
        """Whether it is made for so many keys.

        Parameters
        ----------
        kv_len : int
            Keys of the sequence.

        Raises
        ------
        ValueError
            If it is not.
        """

    def to_host(self, kv_len: int) -> Pattern:
        """The pattern that the numbers make now; waits for them.

        Parameters
        ----------
        kv_len : int
            Keys of the sequence.

        Returns
        -------
        Pattern
        """
        raise NotImplementedError

    def copied(self) -> DynamicMask:
        """The same with arrays of its own, which nobody changes.

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

    def __or__(self, other: Any) -> NoReturn:
        raise TypeError(_HOST)

    __ror__ = __sub__ = __rsub__ = __or__

    def __invert__(self) -> NoReturn:
        raise TypeError(_HOST)

    def __repr__(self) -> str:
        found = []
        for name, value in vars(self).items():
            array = f"<{dtype_name(value)} {tuple(value.shape)}>" if namespace_of(value) is not None else repr(value)
            found.append(f"{name}={array}")
        return f"{type(self).__name__}({', '.join(found)})"


@dataclass(frozen=True, eq=False)
class MaskedPattern:
    """What a pattern and a selection both allow, as ``pattern & selection`` says.

    Parameters
    ----------
    pattern : Pattern
    selection : DynamicMask

    Raises
    ------
    TypeError
        If they are not that.
    """

    pattern: Pattern
    selection: DynamicMask

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f"pattern: expected a Pattern, got {type(self.pattern).__name__}")
        if not isinstance(self.selection, DynamicMask):
            raise TypeError(f"selection: expected a DynamicMask, got {type(self.selection).__name__}")

    def to_host(self, kv_len: int) -> Pattern:
        """The pattern that allows the same now; waits for the numbers.

        Parameters
        ----------
        kv_len : int
            Keys of the sequence.

        Returns
        -------
        Pattern
        """
        return self.pattern & self.selection.to_host(kv_len)

    def __and__(self, other: Any) -> MaskedPattern:
        return MaskedPattern(self.pattern & other, self.selection) if isinstance(other, Pattern) else NotImplemented

    __rand__ = __and__

    def __or__(self, other: Any) -> NoReturn:
        raise TypeError(_HOST)

    __ror__ = __sub__ = __rsub__ = __or__

    def __invert__(self) -> NoReturn:
        raise TypeError(_HOST)


def selected(pattern: Any) -> MaskedPattern | None:
    """What a selection, or one of a pattern, allows; None for anything else."""
    if isinstance(pattern, DynamicMask):
        return MaskedPattern(pattern_class("full")(), pattern)
    return pattern if isinstance(pattern, MaskedPattern) else None


def _check(name: str, value: Any, axes: tuple[int, ...]) -> Any:
    """A device array of int32 or int64 with so many axes."""
    kind = namespace_of(value)
    if kind is None or kind.name == "jax":
        raise TypeError(f"{name}: expected a PyTorch or CuPy array on a GPU, got {type(value).__name__}")
    check_plain(name, value)
    if kind.ordinal(value) is None:
        raise TypeError(f"{name}: expected an array on a GPU, got one in host memory")
    if dtype_name(value) not in ("int32", "int64"):
        raise TypeError(f"{name}: expected int32 or int64, got {dtype_name(value)}")
    if value.ndim not in axes:
        raise ValueError(f"{name}: expected {' or '.join(f'{n}-D' for n in axes)}, got shape {tuple(value.shape)}")
    return value


def _leading(value: Any, own: int) -> tuple[int, int]:
    """Batch entries and heads that an array with so many axes of its own tells apart."""
    batch, heads = (1, 1, *value.shape[: value.ndim - own])[-2:]
    return int(batch), int(heads)


@dataclass(frozen=True, eq=False, repr=False)
class DynamicKeyBlocks(DynamicMask):
    """Lists of key blocks for each block of queries: :class:`spattn.patterns.KeyBlocks` of numbers on a GPU.

    Parameters
    ----------
    blocks : int array (batch, heads_kv, query blocks, n) on a GPU
        Numbers of key blocks, in any order; others than those that there are stand for none. The leading axes may be
        left out. A query's row is ``p // block_q``, so there are ``ceil(kv_len / block_q)`` rows.
    block_q, block_kv : int
        Tokens of a query block and of a key block.

    Raises
    ------
    TypeError
        If `blocks` is not of int32 or int64 on a GPU, or a size not an integer.
    ValueError
        If `blocks` has not two to four axes, or a size is less than 1; from the call, if its rows do not cover
        `kv_len`.

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
        there = (blocks >= 0) & (blocks < -(-kv_len // self.block_kv))
        made: Pattern = pattern_class("key_blocks")(np.where(there, blocks, -1), self.block_q, self.block_kv)
        return made


@dataclass(frozen=True, eq=False, repr=False)
class DynamicKeyPadding(DynamicMask):
    """The keys of sequences of different lengths: :class:`spattn.patterns.KeyPadding` of lengths on a GPU.

    Parameters
    ----------
    lengths : int array (batch,) on a GPU
        Keys that are no padding; fewer than none are none, and more than there are all.
    left : bool, optional
        Whether the padding stands before the keys instead of behind them.

    Raises
    ------
    TypeError
        If `lengths` is not of int32 or int64 on a GPU, or `left` not a bool.
    ValueError
        If `lengths` has not one axis.
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
    """Keys of the query's own document: :class:`spattn.patterns.Documents` of cumulative lengths on a GPU.

    Parameters
    ----------
    cu_seqlens : int array (documents + 1,) or (batch, documents + 1) on a GPU
        Where each document starts, and where the last one ends: ``0, n_0, n_0 + n_1, ...``. They must not fall.
        Documents without tokens may stand anywhere, at the end to have the same number of them in every call.

    Raises
    ------
    TypeError
        If `cu_seqlens` is not of int32 or int64 on a GPU.
    ValueError
        If it has neither one nor two axes, or no number.

    Notes
    -----
    Tokens in front of the first document and past the last one attend to nothing and are seen by nobody.
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
    """Chosen key columns and diagonals, causal: :class:`spattn.patterns.VerticalSlash` of numbers on a GPU.

    Parameters
    ----------
    columns : int array (batch, heads, n) on a GPU
        Key positions; others than those that there are stand for none. The leading axes may be left out.
    diagonals : int array (batch, heads, m) on a GPU
        Distances ``p - j >= 0`` in tokens, likewise.

    Raises
    ------
    TypeError
        If an array is not of int32 or int64 on a GPU.
    ValueError
        If one has not one to three axes, or their leading axes differ.

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
            made: Pattern = pattern_class("vertical_slash")(
                *(np.unique(x[(x >= 0) & (x < kv_len)]).tolist() for x in own)
            )
            return made

        per_head, per_batch = pattern_class("per_head"), pattern_class("per_batch")
        entries = tuple(per_head(tuple(one(b, h) for h in range(columns.shape[1]))) for b in range(columns.shape[0]))
        made: Pattern = entries[0] if len(entries) == 1 else per_batch(entries)
        return made
