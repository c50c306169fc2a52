"""Masks of PyTorch's FlexAttention, taken as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._util.imports import whole_imports
from ..._util.index_checks import LONGEST
from ...errors import BackendUnavailableError
from ..base.check import integer
from ..base.content import ByContent, on_host
from ..base.pattern import Pattern
from ..base.predicate import apply
from ..listed.masks import BlockLayout
from ..sequence.queries_at import QueriesAt

if TYPE_CHECKING:
    from ...trace.trace import Ref, Trace

__all__ = ["from_block_mask", "from_mask_mod"]

_BATCH, _HEAD, _QUERY, _KEY = range(4)  # what a mask_mod is called with
_PAIR = np.int64(LONGEST + 1)  # a pair as one number: row * _PAIR + key


@dataclass(frozen=True, eq=False, repr=False)
class MaskMod(ByContent, Pattern):
    """What a mask_mod allows, by the row of the query; `batch` and `heads` are its sizes."""

    trace: Trace
    batch: int
    heads: int

    def sizes(self) -> tuple[int, int]:
        return self.batch, self.heads

    def at(self, batch: int, head: int) -> Pattern:
        one = self.trace
        for argument, number, of in ((_BATCH, batch, self.batch), (_HEAD, head, self.heads)):
            name = "batch" if argument == _BATCH else "head"
            one = one.fix(argument, integer(name, number, 0, of - 1 if of else None) if of != 1 else 0)
        return self if one is self.trace else replace(self, trace=one, batch=1, heads=1)

    def allows(self, q: Any, k: Any) -> Any:
        with whole_imports:
            from ...trace.rules import by_rule
            from ...trace.trace import Constant, Ref

        trace, known = self.trace, {_QUERY: q, _KEY: k}
        if not trace.used <= {_QUERY, _KEY}:
            raise ValueError("MaskMod: it tells batch entries or heads apart; use .at(batch, head)")

        def value(operand: Any) -> Any:
            if not isinstance(operand, Ref):
                return operand.array[()] if isinstance(operand, Constant) else operand
            if operand.number not in known:
                known[operand.number] = self._look_up(operand, q, k)
            return known[operand.number]

        for step in trace.steps:
            if trace.depends[step.result.number] == {_QUERY, _KEY}:
                found = by_rule(step, value)
                if found is not NotImplemented:
                    known[step.result.number] = found
        return value(trace.result)

    def _look_up(self, wanted: Ref, q: Any, k: Any) -> Any:
        """What PyTorch gives at each position of one side; or at each pair, which no tile can be asked for."""
        sides = self.trace.depends[wanted.number]

        def found(positions: np.ndarray) -> np.ndarray:
            arguments = (np.asarray(positions),) if len(sides) == 1 else np.divmod(positions, _PAIR)
            values = self.trace.evaluate(wanted, dict(zip(sorted(sides), arguments, strict=True)))
            return values.astype(np.int64) if values.dtype.kind in "iu" else values

        return apply(found, q if sides == {_QUERY} else k if sides == {_KEY} else q * _PAIR + k)

    def __repr__(self) -> str:
        return f"MaskMod(<{len(self.trace.steps)} operations>)"

    def _description(self) -> dict[str, Any]:
        raise TypeError("to_json(): expected a pattern made of parameters, got a mask_mod, which is a function")


def from_mask_mod(mask_mod: Callable[..., Any], *, batch: int | None = None, heads: int | None = None) -> Pattern:
    """The pairs that a ``mask_mod(b, h, q_idx, kv_idx)`` of FlexAttention allows.

    The function is traced once, now. What it refers to is copied: a tensor that changes later does not change the
    pattern, as with a mask. Called again, this makes a pattern that is equal to the first one, and has its plan, where
    the same operations are done on equal tensors.

    Parameters
    ----------
    mask_mod : callable
        Takes tensors of one integer each, batch entry, query head, row of the query and key, and returns a bool tensor
        without axes. It may look its arguments up in tensors, ``document[q_idx] == document[kv_idx]``.
    batch, heads : int, optional
        Batch entries and query heads that the pattern is made for; any, where they are left out.

    Returns
    -------
    Pattern
        Query indices are rows, as in FlexAttention: with fewer queries than keys row 0 is still the first.

    Raises
    ------
    BackendUnavailableError
        If PyTorch is not installed.
    TypeError
        If `mask_mod` is not callable or returns anything else, asks an index for its number (``if``, ``int()``),
        changes a tensor, draws random numbers with PyTorch, refers to a tensor that has no values of its own, or does
        what :func:`torch.vmap` does not know; if `batch` or `heads` is not an integer.
    ValueError
        If `batch` or `heads` is less than 1; when it is planned, if a tensor is looked up beyond its end.

    Notes
    -----
    Whatever depends on one of query and key is left to PyTorch, once for each position. What depends on both is
    decided on whole tiles where it is made of sums, differences, comparisons, extrema, absolute values, ``//`` and
    ``%`` by constants, and truth values; otherwise every pair of the tiles that nothing else excludes is evaluated,
    with a warning.

    References
    ----------
    Dong et al. Flex Attention: A Programming Model for Generating Optimized Attention Kernels. arXiv:2412.05496.

    Examples
    --------
    >>> import torch
    >>> from spattn.patterns import from_mask_mod
    >>> document = torch.tensor([0, 0, 1, 1])
    >>> def mask_mod(b, h, q_idx, kv_idx):
    ...     return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)
    >>> from_mask_mod(mask_mod).index_set(4, 4).to_dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 1, 1]])
    """
    return QueriesAt(_traced(mask_mod, batch, heads), 0)


def _traced(mask_mod: Callable[..., Any], batch: int | None = None, heads: int | None = None) -> MaskMod:
    if not callable(mask_mod):
        raise TypeError(f"mask_mod: expected a function of b, h, q_idx and kv_idx, got {mask_mod!r}")
    given = [n if n is None else integer(name, n, 1) for name, n in (("batch", batch), ("heads", heads))]
    try:
        with whole_imports:
            from ...trace.recorder import trace
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            "mask_mod: expected PyTorch, whose tensors it takes; pip install torch"
        ) from error
    found = trace(mask_mod, 4)
    own = (0 if argument in found.used else 1 for argument in (_BATCH, _HEAD))
    return MaskMod(found, *(n or size for n, size in zip(given, own, strict=True)))


def from_block_mask(block_mask: Any) -> Pattern:
    """The pairs that a BlockMask of FlexAttention allows.

    As FlexAttention's kernels read it: all pairs of its full blocks, and those pairs of its other blocks that its
    mask_mod allows.

    Parameters
    ----------
    block_mask : torch.nn.attention.flex_attention.BlockMask
        Of ``create_block_mask`` or ``BlockMask.from_kv_blocks``; copied, with what its mask_mod refers to.

    Returns
    -------
    Pattern
        For so many blocks of keys as `block_mask` has, and at most its queries.

    Raises
    ------
    TypeError
        If `block_mask` is no BlockMask, or as :func:`from_mask_mod` for its mask_mod.

    Examples
    --------
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from spattn.patterns import Causal, from_block_mask
    >>> block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 300, 300, device="cpu")
    >>> from_block_mask(block_mask).index_set(300, 300) == Causal().index_set(300, 300)
    True
    """
    fields = ("seq_lengths", "BLOCK_SIZE", "mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks")
    if not all(hasattr(block_mask, name) for name in fields):
        raise TypeError(f"block_mask: expected a BlockMask, got {type(block_mask).__name__}")
    block, tokens = tuple(block_mask.BLOCK_SIZE), max(block_mask.seq_lengths)
    shape = tuple(-(-tokens // size) for size in block)
    asked = BlockLayout(_layout(block_mask.kv_num_blocks, block_mask.kv_indices, shape), block)
    allowed = asked & _traced(block_mask.mask_mod)
    if block_mask.full_kv_num_blocks is not None:
        full = _layout(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, shape)
        allowed = allowed | BlockLayout(full, block)
    return QueriesAt(allowed, 0)


def _layout(counts: Any, listed: Any, shape: tuple[int, int]) -> np.ndarray:
    """Lists of blocks, of which the first `counts` of each row count, as a layout of this shape."""
    counts, listed = on_host(counts), on_host(listed)
    rows, columns = listed.shape[-2:]
    layout = np.zeros((*listed.shape[:-2], rows, columns + 1), dtype=bool)
    np.put_along_axis(layout, np.where(np.arange(columns) < counts[..., None], listed, columns), True, axis=-1)
    widths = [(0, 0)] * (listed.ndim - 2) + [(0, n - have) for n, have in zip(shape, (rows, columns), strict=True)]
    return np.pad(layout[..., :columns], widths)
