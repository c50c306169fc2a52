"""The sparse transformer's factorised patterns (Child, Gray, Radford, Sutskever, arXiv:1904.10509 §4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...index_set import Runs
from ..base.check import integer, reach
from ..base.parameters import Positive
from ..base.pattern import Part, Pattern
from ..base.registry import register
from ..hints.lattice import Lattice
from ..hints.parts import residue_parts
from ..sequence.basic import BlockLocal, Causal, Columns, Stride, column_runs
from ..sequence.windows import SlidingWindow

__all__ = ["Fixed", "Strided"]


@register("strided")
@dataclass(frozen=True)
class Strided(Pattern):
    """The last `stride` keys and every `stride`-th key before them.

    For data with a regular period, such as images read row by row, and music.

    Parameters
    ----------
    stride : int
        Length of the local window and distance of the column keys, in tokens.

    Raises
    ------
    TypeError
        If `stride` is not an integer.
    ValueError
        If it is less than 1.

    Notes
    -----
    ``j <= p and (p - j < stride or (p - j) % stride == 0)``; about ``stride + p / stride`` keys a row.

    References
    ----------
    Child, Gray, Radford, Sutskever. Generating Long Sequences with Sparse Transformers. arXiv:1904.10509, §4.2.
    """

    stride: Positive
    translation_invariant = True

    def allows(self, q: Any, k: Any) -> Any:
        s = reach(self.stride)
        return (k <= q) & ((q - s < k) | (q % s == k % s))

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        s = reach(self.stride)
        return Runs.span(q - s + 1, q + 1, kv_len) | Runs.stepped(q % s, q - s + 1, s, kv_len)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        if self.stride == 1:
            return (Part(Causal()),)
        local = SlidingWindow(self.stride - 1, 0)
        far = Causal() & (Stride(self.stride) - local)
        return (Part(local), *residue_parts(far, reach(self.stride), 0, q_len, kv_len))

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(6), 36

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls(128), 16384


@register("fixed")
@dataclass(frozen=True)
class Fixed(Pattern):
    """The query's own block and the last `summary` keys of every block before it.

    For text and other data without a period, where the last tokens of a block can stand for it.

    Parameters
    ----------
    block : int
        Tokens of a block (the paper's stride).
    summary : int
        Tokens at the end of each block that later blocks attend to (the paper's c).

    Raises
    ------
    TypeError
        If a parameter is not an integer.
    ValueError
        If `block` is less than 1, or `summary` not in ``[1, block]``.

    Notes
    -----
    ``j <= p and (j // block == p // block or j % block >= block - summary)``.

    References
    ----------
    Child, Gray, Radford, Sutskever. Generating Long Sequences with Sparse Transformers. arXiv:1904.10509, §4.2.
    """

    block: Positive
    summary: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("summary", self.summary, 1, self.block)

    def allows(self, q: Any, k: Any) -> Any:
        block, start = self._within_reach()
        own = q // block == k // block
        return (k <= q) & (own | (k % block >= start))

    def _within_reach(self) -> tuple[int, int]:
        """Tokens of a block, and the first of its summary; a block out of reach has no later one that sees either."""
        block = reach(self.block)
        return block, block - reach(self.summary)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        block, start = self._within_reach()
        first = q // block * block
        before = column_runs(block, start, block, first, kv_len)
        return Runs.span(first, q + 1, kv_len) | before

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        own = BlockLocal(self.block)
        local = Part(Causal() & own)
        before = -(-kv_len // self.block) - 1  # blocks that a later one can see
        if before <= 0:
            return (local,)
        start = self.block - self.summary
        if self.summary == 1:
            keys = Lattice(start, (self.block,), (before,))
        else:
            keys = Lattice(start, (self.block, 1), (before, self.summary))
        return local, Part(Causal() & (Columns(self.block, start, self.block) - own), None, keys)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(8, 2), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls(128, 8), 16384

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        block = draw.size(1, sizes.kv_len + 3)
        return cls(block, draw.integer(1, block)), sizes
