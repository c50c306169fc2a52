"""The two parts of the strided pattern, and one residue class of its columns."""

import numpy as np
from common import cells_of, figure, plan_without_cache, show, visited

from spattn import patterns as sp

n, s, tile = 1024, 8, (32, 64)
pattern = sp.strided(s)
near, far = sp.SlidingWindow(s - 1, 0), sp.Causal() & (sp.Stride(s) - sp.SlidingWindow(s - 1, 0))
made, axes = figure(3, height=3.6)

small = np.arange(64)
show(axes[0], cells_of(pattern, small, small), "Strided(8), the first 64 tokens")
show(
    axes[1],
    np.maximum(cells_of(far, small, small), cells_of(near, small, small) // 2),
    "its two parts: columns (dark)\nand local window (light)",
)

plan = plan_without_cache(pattern, n, tile)
columns = next(c for c in range(len(plan.components)) if plan.views[plan.components[c]["query_view"]]["stride"][2] == s)
lattice = np.arange(int(plan.views[plan.components[columns]["query_view"]]["offset"]), n, s)
show(
    axes[2],
    visited(plan, columns, lattice, lattice),
    f"the columns of one residue class\nof {n} tokens: a dense triangle",
    tile,
    f"every {s}th key",
    f"every {s}th query",
)
