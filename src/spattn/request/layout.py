"""The axis order of q, k, v and results, and their canonical (batch, heads, length, head_dim) views."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

__all__ = ["DEFAULT", "Layout"]

DEFAULT = "bhsd"


@dataclass(frozen=True)
class Layout:
    """The axis order of a call's arrays.

    All other code sees (batch, heads, length, head_dim), or (batch, heads, length) for lse. Both orders are views of
    the same memory. Only token grids without a uniform stride, such as those of a cropped image, are copied.

    Attributes
    ----------
    axes : tuple of str
        Axis names. "total" has the packed tokens of all sequences as one batch entry; "*grid" stands for several token
        axes in row-major order.
    tokens : int
        Index of the token axis.
    grid : tuple of int
        Grid shape of the tokens; () for a single token axis.
    """

    axes: tuple[str, ...]
    tokens: int
    grid: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, q: Any, k: Any, v: Any) -> Layout:
        """Return the layout with this name; raise ValueError if it is unknown or an array has the wrong rank."""
        if name not in _LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(map(repr, _LAYOUTS))}; got {name!r}")
        layout = _LAYOUTS[name]
        more = q.ndim - len(layout.axes)
        if more > 0 and not layout._packed:
            before, after = layout.axes[: layout.tokens], layout.axes[layout.tokens + 1 :]
            layout = cls((*before, "*grid", *after), len(before), tuple(q.shape[len(before) : -len(after)]))
        for argument, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != layout._rank:
                expected, got = ", ".join(layout.axes), tuple(x.shape)
                raise ValueError(f"{argument}: expected shape ({expected}) in layout {name!r}, got {got}")
        return layout

    @property
    def is_default(self) -> bool:
        """Whether the layout is already canonical."""
        return self == _LAYOUTS[DEFAULT]

    @property
    def _rank(self) -> int:
        return len(self.axes) + max(len(self.grid) - 1, 0)

    @property
    def _packed(self) -> bool:
        return "batch" not in self.axes

    @property
    def _joins(self) -> bool:
        """Whether canonical views need a reshape."""
        return len(self.grid) > 0 or self._packed

    @property
    def _tokens_first(self) -> bool:
        return self.axes[-2] == "heads"

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (batch, heads, length, head_dim) of an array with this shape in this layout."""
        batch, one, other, head_dim = self._joined(shape)
        return (batch, other, one, head_dim) if self._tokens_first else (batch, one, other, head_dim)

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Convert canonical `sizes`, with or without head_dim, to the shape in this layout."""
        batch, heads, length, *head_dim = sizes
        entry, tokens = (() if self._packed else (batch,)), self.grid or (length,)
        inner = (*tokens, heads) if head_dim and self._tokens_first else (heads, *tokens)
        return *entry, *inner, *head_dim

    def view(self, x: Any) -> Any:
        """Return the canonical view of an array; None stays None."""
        if x is None:
            return None
        x = x.reshape(self._joined(x.shape)) if self._joins else x
        return x.swapaxes(1, 2) if self._tokens_first and x.ndim == 4 else x

    def back(self, x: Any) -> Any:
        """Convert a canonical array to this layout; None stays None."""
        if x is None:
            return None
        shape = self.shape(x.shape) if self._joins else None
        x = x.swapaxes(1, 2) if self._tokens_first and x.ndim == 4 else x
        return x if shape is None else x.reshape(shape)

    def around(self, run: Callable[..., Any], *, scored: bool = False) -> Callable[..., Any]:
        """Wrap a cached dispatch of canonical arrays, so that it takes and returns arrays in this layout.

        The layout does not concern a score function, sinks and their gradients.
        """

        def call(*operands: Any) -> tuple[Any, ...]:
            *arrays, scale = operands
            return tuple([self.back(x) for x in run(*map(self.view, arrays), scale)])

        def call_with_score(*operands: Any) -> tuple[Any, ...]:
            *arrays, scale, score = operands
            found = run(*map(self.view, arrays), scale, score)
            return *(self.back(x) for x in found[:3]), *found[3:]

        return call_with_score if scored else call

    def check_grid(self, grids: Collection[tuple[int, ...]]) -> None:
        """Raise ValueError if the arrays have a grid that is not the pattern's only grid."""
        if self.grid and not (len(grids) == 1 and self.grid in grids):
            expected = " and ".join(map(str, sorted(grids))) or "one axis of tokens, because the pattern has no grid"
            raise ValueError(f"q: expected the grid of the pattern, {expected}; got {self.grid}")

    def _joined(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape with one token axis and a batch axis."""
        axes = len(self.axes)  # without head_dim the token axis is last
        first, behind = (self.tokens, axes - self.tokens - 1) if len(shape) == self._rank else (axes - 2, 0)
        end = len(shape) - behind
        entry = (1,) if self._packed else ()
        return *entry, *shape[:first], math.prod(shape[first:end]), *shape[end:]


_LAYOUTS = {
    DEFAULT: Layout(("batch", "heads", "length", "head_dim"), 2),
    "bshd": Layout(("batch", "length", "heads", "head_dim"), 1),
    "thd": Layout(("total", "heads", "head_dim"), 0),
}
