"""Six patterns, for the front page."""

import matplotlib.pyplot as plt
import numpy as np
from common import CELLS, cells_of

from spattn import patterns as sp

n = 48
shown = {
    "causal window": sp.SlidingWindow(8, 0),
    "dilated window": sp.DilatedWindow(4, dilation=3),
    "Longformer": sp.longformer(8, global_tokens=(0, 1, 24)),
    "strided": sp.strided(7),
    "fixed": sp.fixed(8, 2),
    "3×3 neighborhood\non a 6×8 grid": sp.Neighborhood((6, 8), 3),
}
figure, axes = plt.subplots(1, 6, figsize=(10, 2.1), layout="constrained")
for axis, (title, pattern) in zip(axes, shown.items(), strict=True):
    axis.imshow(cells_of(pattern, np.arange(n), np.arange(n)), cmap=CELLS, vmin=0, vmax=2, interpolation="nearest")
    axis.set_title(title, fontsize=8)
    axis.set_xticks([])
    axis.set_yticks([])
