"""Copies of rows of tensors, (batch, heads, rows, width): by slices where rows form a few runs, else by indices."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

__all__ = ["RowCopy", "Rows", "runs_of"]

Rows: TypeAlias = "torch.Tensor | slice"
_MOST_RUNS = 16  # copies by slices take 0.6 of the time of copies by indices (H200), but each run is a launch


def runs_of(device: torch.device, *rows: np.ndarray) -> tuple[tuple[Rows, ...], ...]:
    """Return ascending rows of several arrays, which correspond, in runs: a slice, or an index on the device, of each
    array."""
    count = len(rows[0])
    if not count:
        return ()
    ends = np.nonzero(np.any([np.diff(x) != 1 for x in rows], axis=0))[0] + 1
    if len(ends) < _MOST_RUNS:
        return tuple(
            tuple(slice(int(x[begin]), int(x[end - 1]) + 1) for x in rows) for begin, end in pairwise((0, *ends, count))
        )
    return (tuple(_rows(x, device) for x in rows),)


def _rows(rows: np.ndarray, device: torch.device) -> Rows:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device)


class RowCopy(NamedTuple):
    """A copy between an array, (batch, heads, rows, width), and the rows of some heads, (heads, rows, width).

    Parameters
    ----------
    runs : tuple
        Rows of the array and of the heads, from :func:`runs_of`.
    heads : tensor or None
        The heads, counted over the batch; None for all.
    """

    runs: tuple[tuple[Rows, ...], ...]
    heads: torch.Tensor | None

    def pack(self, x: torch.Tensor, to: torch.Tensor) -> None:
        """Copy rows of an array into those of its heads, which are contiguous."""
        batch, heads = x.shape[:2]
        for of_array, of_heads in self.runs:
            if self.heads is None:
                to.view(batch, heads, *to.shape[1:])[:, :, of_heads] = x[:, :, of_array]
            else:
                own = self.heads if isinstance(of_array, slice) else self.heads[:, None]
                to[:, of_heads] = x[own // heads, own % heads, of_array]

    def unpack(self, x: torch.Tensor, to: torch.Tensor) -> None:
        """Copy rows of heads into those of an array, which is contiguous."""
        flat = to.view(-1, *to.shape[2:])
        for of_array, of_heads in self.runs:
            if self.heads is None:
                flat[:, of_array] = x[:, of_heads]
            else:
                own = self.heads if isinstance(of_array, slice) else self.heads[:, None]
                flat[own, of_array] = x[:, of_heads]
