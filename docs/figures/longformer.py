"""Longformer and a streaming pattern, for the tutorial on long documents."""

import numpy as np
from common import cells_of, figure, show

from spattn import patterns as sp

n = 64
shown = {
    "Longformer: window 12,\n3 global tokens": sp.longformer(12, global_tokens=(0, 1, 40)),
    "the same with dilation 3": sp.longformer(12, dilation=3, global_tokens=(0, 1, 40)),
    "sinks and a causal window": sp.a_shape(4, 9),
}
made, axes = figure(3, height=2.6, width=7.5)
for axis, (title, pattern) in zip(axes, shown.items(), strict=True):
    show(axis, cells_of(pattern, np.arange(n), np.arange(n)), title)
