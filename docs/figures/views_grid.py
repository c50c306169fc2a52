"""Keys read by a query tile of a 2-D neighborhood: 128 consecutive tokens compared with a box of 8 × 16."""

import numpy as np
from common import CELLS, Contiguous, figure, plan_without_cache
from matplotlib.patches import Rectangle

from spattn import patterns as sp
from spattn.planning import positions
from spattn.planning.contract.types import tile_lists

side, tile = 128, (128, 64)
pattern = sp.Neighborhood((side, side), 13)


def reads(plan, position):
    """Grid cells (0 not read, 1 read but unused, 2 used by a query), the queries, and the number of key tiles."""
    c = plan.components[0]
    q_view = plan.views[c["query_view"]]
    q, valid = positions(q_view, np.arange(q_view["tiles"]))
    query_tile = int(np.nonzero((q == position).any(axis=1))[0][0])
    queries = q[query_tile][valid[query_tile]]
    lists = tile_lists(plan)
    entries = range(*lists.indptr[c["first_row"] + query_tile :][:2])
    picture = np.zeros(side * side, dtype=int)
    for e in entries:
        k, real = positions(plan.views[c["key_view"] + lists.key_view[e]], lists.indices[e : e + 1])
        picture[k[real]] = 1
    needed = pattern.allows(queries[:, None], np.arange(side * side)[None, :]).any(axis=0)
    picture[needed] = 2
    return picture.reshape(side, side), queries, len(entries)


made, axes = figure(2, height=2.9)
for axis, title, each in ((axes[0], "consecutive tokens", Contiguous(pattern)), (axes[1], "a box of 8 × 16", pattern)):
    plan = plan_without_cache(each, side * side, tile)
    picture, queries, tiles = reads(plan, 64 * side + 64)
    axis.imshow(picture, cmap=CELLS, vmin=0, vmax=2, interpolation="nearest", alpha=0.85)
    for q in queries:
        axis.add_patch(Rectangle((q % side - 0.5, q // side - 0.5), 1, 1, facecolor="#e4572e", linewidth=0))
    axis.set_title(f"128 queries: {title}\n{tiles} key tiles, efficiency {plan.efficiency:.2f}", fontsize=9)
    axis.set_ylim(104, 24)
    axis.set_xticks([])
    axis.set_yticks([])
