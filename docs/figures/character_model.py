"""Three patterns and the training loss of a model with each of them, from the committed results."""

import numpy as np
from common import INK, cells_of, figure, records, show

from spattn import patterns as sp

n = 64
shown = {
    "dense": (sp.Causal(), "#8899aa", "--"),
    "strided": (sp.strided(8), "#c1621f", "-"),
    "window": (sp.SlidingWindow(11, 0), INK, "-"),
}
made, axes = figure(4, height=2.6, width=10.5)
for axis, (name, (pattern, _, _)) in zip(axes, shown.items(), strict=False):
    show(axis, cells_of(pattern, np.arange(n), np.arange(n)), name)

record = next(iter(records("character_model-xeon-amx")), {"results": []})
for row in record["results"]:
    _, colour, style = shown[row["name"]]
    steps = record["averaged"] * (0.5 + np.arange(len(row["losses"])))
    axes[3].plot(steps, row["losses"], style, color=colour, label=row["name"], linewidth=1.2)
axes[3].set_title("training loss", fontsize=9)
axes[3].set_ylim(top=3)
axes[3].set_xlabel("step", fontsize=8)
axes[3].tick_params(labelsize=7)
if record["results"]:
    axes[3].legend(fontsize=8, frameon=False)
