"""Draw patterns as query × key matrices, and list well-known compositions."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._util.imports import whole_imports
from ..index_set import AffineRows
from .base.pattern import Pattern
from .papers.recipes import gallery

__all__ = ["draw", "gallery"]

_CELLS_DRAWN = 96  # maximum tokens per side for which single pairs are drawn
_LARGEST_PICTURE = 256  # maximum pixels per side, below the resolution of a small figure
_RUNS_AT_ONCE = 1 << 12


def draw(
    pattern: Pattern,
    q_len: int,
    kv_len: int | None = None,
    *,
    ax: Any = None,
    batch: int = 0,
    head: int = 0,
    color: str = "#2a6f97",
    title: str | None = None,
) -> Any:
    """Draw the allowed pairs as a matrix with one row per query and one column per key.

    Up to 96 tokens, each pair is a cell of a light grid. For longer sequences, the darkness of a pixel is the square
    root of its density, so that single tokens stay visible.

    Parameters
    ----------
    pattern : Pattern
    q_len, kv_len : int
        Lengths in tokens; `kv_len` defaults to `q_len`.
    ax : matplotlib.axes.Axes, optional
        The axes to draw on; a new figure by default.
    batch, head : int, optional
        Batch entry and head, for patterns that differ between them.
    color : str, optional
        Color of allowed pairs.
    title : str, optional
        Title of the axes.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is not installed.
    """
    try:
        with whole_imports:
            from matplotlib import pyplot
            from matplotlib.colors import LinearSegmentedColormap
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("draw() needs matplotlib: pip install matplotlib", name="matplotlib") from error
    kv_len = q_len if kv_len is None else kv_len
    rows = pattern.index_set(q_len, kv_len, batch=batch, head=head)
    if ax is None:
        _, ax = pyplot.subplots(figsize=(4.5, 4.5), layout="constrained")
    shades = LinearSegmentedColormap.from_list("allowed", ["#ffffff", color])
    extent = (0, max(kv_len, 1), max(q_len, 1), 0)
    shade = np.sqrt(density_map(rows))
    ax.imshow(shade, cmap=shades, vmin=0, vmax=1, extent=extent, interpolation="nearest", aspect="equal")
    if max(q_len, kv_len) <= _CELLS_DRAWN:
        _grid_lines(ax, q_len, kv_len)
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    ax.xaxis.set_label_position("top")
    ax.xaxis.tick_top()
    if title is not None:
        ax.set_title(title)
    return ax


def _grid_lines(ax: Any, q_len: int, kv_len: int) -> None:
    ax.set_xticks(np.arange(kv_len + 1), minor=True)
    ax.set_yticks(np.arange(q_len + 1), minor=True)
    ax.grid(which="minor", color="#d9dde0", linewidth=0.6)
    ax.tick_params(which="minor", length=0)
    for side in ax.spines.values():
        side.set_color("#d9dde0")


def density_map(rows: AffineRows) -> np.ndarray:
    """Return the density of each pixel of a picture of at most 256 × 256 pixels, without a dense mask."""
    scale = max(1, -(-max(rows.q_len, rows.kv_len) // _LARGEST_PICTURE))
    row_edges, key_edges = (np.minimum(np.arange(0, n + scale, scale), n) for n in (rows.q_len, rows.kv_len))
    picture = np.zeros((len(row_edges) - 1, len(key_edges) - 1))
    strip = max(1, _RUNS_AT_ONCE // max(1, np.diff(rows.class_indptr).max(initial=0)))
    for first in range(0, rows.q_len, strip):
        row = np.arange(first, min(first + strip, rows.q_len))
        of_row, *runs = rows.flat_runs(row)
        start, step, count = (each[:, None] for each in runs)
        below = np.clip(-((start - key_edges) // step), 0, count)  # keys of each run before each edge
        np.add.at(picture, of_row // scale, np.diff(below, axis=1))
    return picture / np.maximum(np.outer(np.diff(row_edges), np.diff(key_edges)), 1)
