"""Positions of ``config.spattn_pattern`` in padded and packed batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..patterns import Pattern, PerBatch
from ..patterns.authoring import ByContent, apply
from ..patterns.base.predicate import allowed

__all__ = ["renumbered"]


def renumbered(
    pattern: Pattern, packed: np.ndarray | None, valid: torch.Tensor | None, kv_offset: int, tokens: int
) -> Pattern:
    """Map a pattern from positions within each sequence to indices in a padded or packed batch.

    `packed` (batch, tokens) holds positions within packed sequences. `valid` (batch, tokens so far) is False at
    padding; left padding is not counted and gets position 0. The first of `tokens` tokens has index `kv_offset`, which
    is nonzero if a cache dropped earlier ones.
    """
    before = np.zeros(1, np.int64) if valid is None else (valid.cumsum(1) == 0).sum(1).cpu().numpy()
    if pattern.translation_invariant or (packed is None and not kv_offset and not before.any()):
        return pattern
    if packed is None:
        packed = np.maximum(np.arange(kv_offset, kv_offset + tokens) - before[:, None], 0)
    entries = tuple(_Renumbered(pattern, positions) for positions in packed)
    return PerBatch(entries) if len(entries) > 1 else entries[0]


@dataclass(frozen=True, eq=False, repr=False)
class _Renumbered(ByContent, Pattern):
    """Pattern `inner`, evaluated at ``positions[i]`` for token i."""

    inner: Pattern
    positions: np.ndarray

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        tokens = int(self.positions.max(initial=-1)) + 1
        return replace(self, inner=self.inner.bind(tokens, tokens))

    def sizes(self) -> tuple[int, int]:
        return self.inner.sizes()

    def at(self, batch: int, head: int) -> Pattern:
        return replace(self, inner=self.inner.at(batch, head))

    def allows(self, q: Any, k: Any) -> Any:
        return allowed(self.inner, apply(self._look_up, q), apply(self._look_up, k))

    def _look_up(self, tokens: np.ndarray) -> np.ndarray:
        """Look up positions of tokens; clip indices out of range, which occur in the padding of tiles."""
        return self.positions[np.clip(tokens, 0, len(self.positions) - 1)]
