"""The score function, the sinks and the dropout of a call, as kernels take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from ..score.program import Program
    from .dropout import Dropout

__all__ = ["Portion", "ScoreOperands", "TableType"]


class TableType(NamedTuple):
    """The type of a captured array; kernels are compiled for it.

    Attributes
    ----------
    dtype : str
    shape, strides : tuple of int
        Strides in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Portion(NamedTuple):
    """The terms of gradients of tables and sinks that one of several ranks adds, and how it exchanges the sums.

    Attributes
    ----------
    rows : (q_len,) bool array
        Query rows whose terms of the sinks' gradients the rank adds.
    items : (items,) bool array
        Work items of the rank's plan, in row order, whose terms of the tables' gradients it adds.
    exchange : callable
        ``exchange(x)`` of an (n, words) array of integers returns a slice, a part of range(n) for each rank, and these
        rows of the arrays of all ranks, (ranks, rows, words).
    """

    rows: np.ndarray
    items: np.ndarray
    exchange: Callable[[np.ndarray], tuple[slice, np.ndarray]]


class ScoreOperands(NamedTuple):
    """The score function, the sinks and the dropout of one call, with the values of captured numbers and arrays.

    Kernels apply the function to the scaled score of every allowed pair, before they take the maximum. The backward
    pass applies its derivative. The last query has the position of the last key.

    Attributes
    ----------
    program : Program or None
        None is the identity.
    parameters : tuple of float or int
        Captured numbers, in the order of the numbers of ``parameter`` operations.
    tables : tuple of arrays
        Captured arrays, in the order of the numbers of ``look_up`` operations, on the call's device and of its array
        library.
    types : tuple of TableType
        Types of the tables.
    sinks : (heads_q,) array or None
        A logit per query head that takes part in the softmax without a value: float32, or float64 if q is.
    wanted : tuple of bool
        Which tables need a gradient in the backward pass.
    dropout : Dropout or None
        The weights that kernels drop after the softmax.
    portion : Portion or None
        In the backward pass on the CPU, the terms that this process adds; None means all.
    """

    program: Program | None
    parameters: tuple[float, ...] = ()
    tables: tuple[Any, ...] = ()
    types: tuple[TableType, ...] = ()
    sinks: Any = None
    wanted: tuple[bool, ...] = ()
    dropout: Dropout | None = None
    portion: Portion | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """The part that a cached dispatch depends on, without values."""
        return self.program, self.types, self.sinks is not None, self.wanted, self.dropout is not None
