"""Prefix language models (Raffel et al., arXiv:1910.10683)."""

from __future__ import annotations

from typing import Any

from ..base.parameters import Count
from ..base.pattern import Pattern
from ..base.recipe import recipe
from ..grids.per import PerBatch
from ..sequence.basic import Causal, Sinks

__all__ = ["prefix_lm"]


def _random(draw: Any, sizes: Any) -> tuple[tuple[Any, ...], Any]:
    def entry() -> int:
        tokens: int = draw.size(0, sizes.kv_len + 2)
        return tokens

    return (tuple(entry() for _ in range(sizes.batch)) if draw.flag() else entry(),), sizes


@recipe("prefix_lm", example=((8,), 32), typical=((1024,), 4096), random=_random)
def prefix_lm(prefix: Count | tuple[Count, ...]) -> Pattern:
    """A prefix that every query sees, then causal: ``j < prefix or j <= p``.

    For models that read their input bidirectionally and then generate.

    Parameters
    ----------
    prefix : int or tuple of int
        Tokens of the prefix; a tuple has one per batch entry.

    Returns
    -------
    Pattern
        ``Causal() | Sinks(prefix)``, or :class:`PerBatch` of these.

    References
    ----------
    Raffel et al. T5. arXiv:1910.10683, §3.2.1.
    """
    if not isinstance(prefix, tuple):
        return Causal() | Sinks(prefix)
    if not prefix:
        raise ValueError("prefix: expected at least one batch entry, got ()")
    return PerBatch(tuple(Causal() | Sinks(tokens) for tokens in prefix))
