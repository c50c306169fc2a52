"""Helpers of the figures, which draw real patterns and plans."""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

import spattn
from spattn import patterns as sp
from spattn.planning import positions
from spattn.planning.contract.types import tile_lists

INK, TILE, PAPER = "#1f3a5f", "#cfdcec", "#ffffff"
CELLS = ListedColormap([PAPER, TILE, INK])
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class Contiguous(sp.Pattern):
    """A pattern without its hints, planned in tiles of consecutive tokens."""

    pattern: sp.Pattern

    def allows(self, q, k):
        return self.pattern.allows(q, k)


def records(name):
    """Read the committed results of a name, in which * stands for any text, in the order of their files."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{name}.json"))]


def cells_of(pattern, q, k):
    """Array with 2 for allowed pairs and 0 for other pairs."""
    return 2 * np.broadcast_to(pattern.allows(q[:, None], k[None, :]), (len(q), len(k))).astype(int)


def visited(plan, component, q_order, k_order):
    """Cells of one component in the order of its views: 0 not visited, 1 computed but unused, 2 allowed."""
    c = plan.components[component]
    picture = np.zeros((len(q_order), len(k_order)), dtype=int)
    q_at = {p: n for n, p in enumerate(q_order)}
    k_at = {p: n for n, p in enumerate(k_order)}
    for tile in range(c["query_tiles"]):
        q = positions(plan.views[c["query_view"]], np.array([tile]))[0][0]
        row = c["first_row"] + tile
        lists = tile_lists(plan)
        for e in range(lists.indptr[row], lists.indptr[row + 1]):
            view = plan.views[c["key_view"] + lists.key_view[e]]
            k = positions(view, lists.indices[e : e + 1])[0][0]
            allowed = np.broadcast_to(plan.pattern.allows(q[:, None], k[None, :]), (len(q), len(k)))
            at = np.ix_([q_at[p] for p in q], [k_at[p] for p in k])
            picture[at] = np.maximum(picture[at], 1 + allowed)
    return picture


def show(axis, picture, title, grid=None, xlabel="key", ylabel="query"):
    """Draw one square of cells."""
    axis.imshow(picture, cmap=CELLS, vmin=0, vmax=2, interpolation="nearest", aspect="auto")
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(xlabel, fontsize=8)
    axis.set_ylabel(ylabel, fontsize=8)
    axis.tick_params(labelsize=7)
    for line in np.arange(grid[0], picture.shape[0], grid[0]) if grid else ():
        axis.axhline(line - 0.5, color="#8899aa", linewidth=0.3)
    for line in np.arange(grid[1], picture.shape[1], grid[1]) if grid else ():
        axis.axvline(line - 0.5, color="#8899aa", linewidth=0.3)


def plan_without_cache(pattern, tokens, tile):
    """Make a plan with the tile shape of the picture."""
    return spattn.plan(pattern, tokens, tiling=spattn.Tiling(tile=tile))


def figure(columns, height=3.2, width=None):
    """Make a figure with a row of squares."""
    made, axes = plt.subplots(1, columns, figsize=(width or 3.2 * columns, height), layout="constrained")
    return made, np.atleast_1d(axes)
