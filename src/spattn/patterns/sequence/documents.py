"""Packed documents, shared or per batch entry."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from ..._util.frozen import frozen
from ..._util.index_checks import LONGEST
from ...arrays import untraced
from ...index_set import Runs
from ..base.check import assign, integer, integers, listed
from ..base.class_registry import pattern_class, register
from ..base.content import dynamic, frozen_array, on_device
from ..base.pattern import Pattern, deferrable
from ..base.predicate import rank
from ..hints.closed_forms import NO_RANGES, Bands

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Documents"]


def check_batch(batch: int, entries: int) -> int:
    """Check a batch index; return 0 if all batch entries share one pattern."""
    return integer("batch", batch, 0, entries - 1) if entries > 1 else 0


def check_document_lengths(lengths: Any) -> tuple[int, ...]:
    """Check document lengths and return them as a tuple."""
    lengths = integers("lengths", lengths, 0)
    if sum(lengths) > LONGEST:
        raise ValueError(f"lengths: expected at most {LONGEST} tokens in all, got {sum(lengths)}")
    # (0, n) is one document of n tokens as lengths and as cumulative lengths, and occurs in left-padded batches.
    if len(lengths) > 2 and lengths[0] == 0 < lengths[-1] and all(a <= b for a, b in pairwise(lengths)):
        raise ValueError(
            f"lengths: expected the tokens of each document, got {reprlib.repr(lengths)}, which looks like cumulative "
            "sequence lengths; use Documents.from_cu_seqlens, or drop empty documents"
        )
    return lengths


def check_cu_seqlens(name: str, value: npt.ArrayLike) -> np.ndarray:
    """Check cumulative lengths and return them as int64."""
    starts = frozen_array(name, value, np.int64, (1,))
    if not len(starts) or starts[0] != 0 or (starts[1:] < starts[:-1]).any():
        raise ValueError(f"{name}: expected non-decreasing numbers from 0, got {reprlib.repr(starts.tolist())}")
    if starts[-1] > LONGEST:
        raise ValueError(f"{name}: expected at most {LONGEST} tokens in all, got {starts[-1]}")
    return starts


@register("documents", example=(((10, 4, 14),), 32), typical=(((1500, 700, 1200, 696),), 4096))
@dataclass(frozen=True)
class Documents(Pattern):
    """Packed documents: each query attends to the keys of its own document.

    For documents packed into one sequence without attention across them, usually as ``Causal() & Documents(...)``.

    Parameters
    ----------
    lengths : tuple of int, or tuple of tuples of int
        Tokens per document; a tuple of tuples has one entry per batch entry.

    Raises
    ------
    ValueError
        If `lengths` looks like cumulative sequence lengths: at least three entries that start with 0, never decrease
        and do not end with 0. From :meth:`bind`, if the documents have more than `kv_len` tokens.

    Notes
    -----
    No query attends to keys past the last document.
    """

    lengths: tuple[int, ...] | tuple[tuple[int, ...], ...]

    cu_seqlens: ClassVar[np.ndarray]  # set per instance: (documents + 1,), or (batch, most documents + 1)
    _in_graph = "from_cu_seqlens", ("cu_seqlens",)

    def __post_init__(self) -> None:
        lengths = listed(self.lengths)
        if not hasattr(lengths, "__iter__"):
            raise TypeError(f"lengths: expected a sequence of integers, got {self.lengths!r}")
        lengths = tuple(lengths)
        if any(hasattr(kind, "__iter__") for kind in set(map(type, lengths))):
            assign(self, lengths=tuple(map(check_document_lengths, lengths)))
        else:
            assign(self, lengths=check_document_lengths(lengths))
        untraced(Documents._set_cu_seqlens, self)  # torch.compile fails at arrays of NumPy that are read-only

    def _set_cu_seqlens(self) -> None:
        entries = self._entries()
        ends = np.zeros((len(entries), max(map(len, entries), default=0) + 1), np.int64)
        for row, entry in zip(ends, entries, strict=True):
            np.cumsum(entry, out=row[1 : len(entry) + 1])
            row[len(entry) + 1 :] = row[len(entry)]
        assign(self, cu_seqlens=frozen(ends if self._per_batch else ends[0]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.lengths,)

    @classmethod
    @deferrable
    def from_cu_seqlens(cls, cu_seqlens: npt.ArrayLike, cu_seqlens_k: npt.ArrayLike | None = None) -> Any:
        """Create documents from the cumulative sequence lengths of variable-length attention functions.

        With ``layout="thd"``, :func:`spattn.attention` accepts the same packed arrays as those functions.

        Parameters
        ----------
        cu_seqlens : (documents + 1,) or (batch, documents + 1) int array
            Start of each document and end of the last: ``0, n_0, n_0 + n_1, ...``. A GPU array gives a
            :class:`~spattn.patterns.dynamic.DynamicDocuments`, which each call reads on the device.
        cu_seqlens_k : (documents + 1,) int array, optional
            Cumulative key lengths, if they differ from those of the queries.

        Returns
        -------
        Documents
            Without empty documents. If `cu_seqlens_k` is given, another pattern, which is valid only for q_len ==
            cu_seqlens[-1] and kv_len == cu_seqlens_k[-1]. :func:`from_flash_attention` adds causal masks and windows.

        Raises
        ------
        ValueError
            If an array does not start with 0, decreases or exceeds the maximum sequence length, or the arrays differ
            in length.

        Examples
        --------
        >>> Documents.from_cu_seqlens([0, 5, 10, 10, 20])
        Documents(lengths=(5, 5, 10))
        >>> Documents.from_cu_seqlens([0, 1, 3], [0, 2, 4]).index_set(3, 4).to_dense().astype(int)
        array([[1, 1, 0, 0],
               [0, 0, 1, 1],
               [0, 0, 1, 1]])
        """
        if on_device(cu_seqlens):
            if cu_seqlens_k is not None:
                raise ValueError("cu_seqlens_k: expected None for cu_seqlens on a GPU; copy both to the host")
            return dynamic("DynamicDocuments", cu_seqlens)
        if cu_seqlens_k is None:
            starts = frozen_array("cu_seqlens", cu_seqlens, np.int64, (1, 2))
            entries = [np.diff(check_cu_seqlens("cu_seqlens", entry)) for entry in np.atleast_2d(starts)]
            lengths = tuple(tuple(entry[entry > 0].tolist()) for entry in entries)
            return cls(lengths if starts.ndim == 2 else lengths[0])
        return pattern_class("packed_windows").from_cu_seqlens(cu_seqlens, cu_seqlens_k, name="cu_seqlens")

    @classmethod
    @deferrable
    def from_segment_ids(cls, segment_ids: npt.ArrayLike) -> Documents:
        """Create documents from the document of each token, as JAX libraries describe packed batches.

        Parameters
        ----------
        segment_ids : (kv_len,) or (batch, kv_len) int array
            Equal numbers in a row are one document; so is padding, whose results are to be ignored.

        Returns
        -------
        Documents

        Raises
        ------
        ValueError
            If a number returns after another one; :class:`Clusters` supports any order.

        Examples
        --------
        >>> Documents.from_segment_ids([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
        Documents(lengths=((2, 3, 1), (4, 2)))
        """
        ids = frozen_array("segment_ids", segment_ids, np.int64, (1, 2))
        lengths = []
        for row in np.atleast_2d(ids):
            first = np.flatnonzero(np.concatenate([[len(row) > 0], row[1:] != row[:-1]])[: len(row)])
            if len(np.unique(row[first])) < len(first):
                raise ValueError(
                    "segment_ids: expected the tokens of a document in a row, got a number that returns after others; "
                    "use Clusters(labels)"
                )
            lengths.append(tuple(np.diff(np.append(first, len(row))).tolist()))
        return cls(tuple(lengths) if ids.ndim == 2 else lengths[0])

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        for entry in self._entries():
            if sum(entry) > kv_len:
                raise ValueError(f"lengths: expected at most {kv_len} tokens (kv_len), got {sum(entry)}")
        return self

    @property
    def _per_batch(self) -> bool:
        return isinstance(next(iter(self.lengths), None), tuple)  # all entries are tuples, or none

    def _entries(self) -> tuple[tuple[int, ...], ...]:
        return cast("tuple[tuple[int, ...], ...]", self.lengths if self._per_batch else (self.lengths,))

    def sizes(self) -> tuple[int, int]:
        return (len(self.lengths) if self._per_batch else 1), 1

    def at(self, batch: int, head: int) -> Pattern:
        if not self._per_batch:
            return self
        return Documents(self._entries()[check_batch(batch, len(self.lengths))])

    @property
    def _ends(self) -> np.ndarray:
        entries = self._entries()
        if len(entries) > 1:
            raise ValueError(f"lengths: expected one batch entry, got {len(entries)}; use .at(batch, head)")
        return self.cu_seqlens.reshape(-1)[1:]

    def allows(self, q: Any, k: Any) -> Any:
        starts = np.append(0, self._ends)
        return (rank(starts, q) == rank(starts, k)) & (k < starts[-1])

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        ends = self._ends
        number = np.searchsorted(ends, q, side="right")
        present = (q >= 0) & (number < len(ends))
        bounds = np.concatenate([[0], ends, [0]])
        return Runs.span(np.where(present, bounds[number], 0), np.where(present, bounds[number + 1], 0), kv_len)

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        bounds = np.append(0, self._ends)
        return (Bands(bounds, np.arange(len(bounds)), bounds[:-1], bounds[1:], NO_RANGES),)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        def entry() -> tuple[int, ...]:  # reversed if it would look like cumulative lengths
            lengths = [draw.integer(0, max(1, sizes.kv_len // 2)) for _ in range(draw.integer(0, 6))]
            fitting = [n for n, end in zip(lengths, accumulate(lengths), strict=True) if end <= sizes.kv_len]
            return tuple(reversed(fitting)) if fitting == sorted(fitting) else tuple(fitting)

        return cls(tuple(entry() for _ in range(sizes.batch)) if draw.flag() else entry()), sizes
