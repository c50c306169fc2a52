"""The search for tiles: a predicate evaluated on successively smaller boxes."""

import numpy as np
from common import figure
from matplotlib.colors import ListedColormap

from spattn import patterns as sp
from spattn.planning.symbolic import tile_pairs
from spattn.planning.symbolic.cells import Cells

n = 4096
pattern = sp.SlidingWindow(700, 0) | sp.Sinks(128)
never, undecided, always = 0, 1, 2
COLOURS = ListedColormap(["#ffffff", "#f2b134", "#1f3a5f"])
made, axes = figure(3, height=3.6)
known = None
for axis, box in zip(axes, (1024, 256, 64), strict=True):
    count = n // box
    boxes = Cells.listed(np.arange(n).reshape(count, box))
    q_box, k_box = (a.reshape(-1) for a in np.indices((count, count)))
    result = tile_pairs(boxes, boxes, q_box, k_box, with_keys=False).evaluate(pattern)
    verdict = np.where(result.lo > 0, always, np.where(result.hi > 0, undecided, never)).reshape(count, count)
    asked = count * count if known is None else int(np.repeat(np.repeat(known == undecided, 4, 0), 4, 1).sum())
    known = verdict
    axis.imshow(verdict, cmap=COLOURS, vmin=0, vmax=2, interpolation="nearest")
    left = int((verdict == undecided).sum())
    axis.set_title(f"boxes of {box} × {box}\n{asked} of {count * count} evaluated, {left} undecided", fontsize=8)
    axis.set_xticks([])
    axis.set_yticks([])
