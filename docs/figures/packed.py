"""Three documents in one sequence, for the tutorial on packed documents."""

import numpy as np
from common import cells_of, figure, show

from spattn import patterns as sp

n, lengths = 64, (22, 8, 28)
shown = {
    "causal documents,\n6 tokens of padding": sp.Causal() & sp.Documents(lengths),
    "the same in a window of 8": sp.SlidingWindow(7, 0) & sp.Documents(lengths),
    "a shared prefix of 14 tokens": sp.shared_prefix(14, (20, 10, 20)),
}
made, axes = figure(3, height=2.6, width=7.5)
for axis, (title, pattern) in zip(axes, shown.items(), strict=True):
    show(axis, cells_of(pattern, np.arange(n), np.arange(n)), title)
