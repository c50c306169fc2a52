"""Full tiles, partial tiles, and the bitmasks that partial tiles share."""

import matplotlib.pyplot as plt
from common import INK, plan_without_cache

from spattn import patterns as sp
from spattn.planning.contract.types import tile_lists

n, tile = 1024, (64, 64)
figure, axes = plt.subplots(1, 2, figsize=(6.8, 3.7), layout="constrained")
for axis, pattern in zip(axes, (sp.SlidingWindow(150), sp.Causal() & sp.BlockLocal(208)), strict=True):
    plan = plan_without_cache(pattern, n, tile)
    c, lists = plan.components[0], tile_lists(plan)
    colours = plt.colormaps["tab20"].colors
    for query_tile in range(c["query_tiles"]):
        for e in range(*lists.indptr[query_tile : query_tile + 2]):
            colour = INK if lists.mask[e] < 0 else colours[lists.mask[e] % len(colours)]
            box = plt.Rectangle((lists.indices[e], query_tile), 0.94, 0.94, color=colour, linewidth=0)
            axis.add_patch(box)
            if lists.mask[e] >= 0:
                at = lists.indices[e] + 0.47, query_tile + 0.5
                axis.text(*at, int(lists.mask[e]), fontsize=6, ha="center", va="center")
    axis.set_xlim(0, n // tile[1])
    axis.set_ylim(n // tile[0], 0)
    axis.set_aspect("equal")
    axis.set_xlabel("key tile", fontsize=8)
    axis.set_ylabel("query tile", fontsize=8)
    axis.tick_params(labelsize=7)
    partial = int((lists.mask >= 0).sum())
    axis.set_title(f"{pattern!r}\n{plan.tiles} tiles, {partial} partial, {len(plan.masks)} bitmasks", fontsize=8)
