"""Context parallelism of existing modules, for ``parallelize_module``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..schedule.shard import Sharding
from ._attention import attention

__all__ = ["ContextParallel"]


class ContextParallel(ParallelStyle):  # type: ignore[misc]
    """Let an attention module attend over a sequence whose rows are on the ranks of a mesh.

    Parameters
    ----------
    pattern : Pattern, Plan, array or str, optional
        As in :func:`attention`; by default "full", or that of a :class:`spattn.torch.SparseAttention`.
    length, sharding : optional
        As in :func:`attention`.
    **options
        Other keywords of :func:`attention`.

    Notes
    -----
    The module is a :class:`spattn.torch.SparseAttention`, whose inputs are then local rows, or any module whose
    ``forward`` takes q, k and v alone, (batch, heads, n, head_dim): local rows, or DTensors, as :func:`attention` does.

    Examples
    --------
    >>> from torch import nn
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> from spattn.distributed import ContextParallel
    >>> def shard_sequence(block: nn.Module, mesh):
    ...     style = ContextParallel("causal", sharding="head_tail", length=4096)
    ...     return parallelize_module(block, mesh, {"attn": style})
    """

    def __init__(
        self,
        pattern: Any = None,
        *,
        length: int | None = None,
        sharding: Sharding | str = "contiguous",
        **options: Any,
    ) -> None:
        super().__init__()
        self._pattern, self._options = pattern, {"length": length, "sharding": sharding, **options}

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        """Replace the module's attention, and return the module."""
        own = self._options

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Any = "full", **more: Any) -> Any:
            given = pattern if self._pattern is None else self._pattern
            return attention(q, k, v, given, device_mesh, **own, **more)

        if hasattr(module, "attend_over_ranks"):
            module.attend_over_ranks(attend)
        else:
            module.forward = lambda q, k, v: attend(q, k, v)
        return module
