"""A dilated window in token order and in the order of its views."""

import numpy as np
from common import Contiguous, figure, plan_without_cache, show, visited

from spattn import patterns as sp

n, d, tile = 1024, 4, (32, 64)
pattern = sp.DilatedWindow(48, dilation=d)
made, axes = figure(2, height=3.7)

contiguous = plan_without_cache(Contiguous(pattern), n, tile)
show(
    axes[0],
    visited(contiguous, 0, range(n), range(n)),
    f"token order\nefficiency {contiguous.efficiency:.2f}",
    tile,
)

plan = plan_without_cache(pattern, n, tile)
order = np.concatenate([np.arange(residue, n, d) for residue in range(d)])
picture = sum(visited(plan, c, order, order) for c in range(len(plan.components)))
show(
    axes[1],
    picture,
    f"order of the views: every {d}th token\nefficiency {plan.efficiency:.2f}",
    tile,
    "key, sorted by residue",
    "query, sorted by residue",
)
