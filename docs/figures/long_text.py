"""Patterns of the byte model, and its loss over CPU time with each of them, from the committed results."""

import numpy as np
from common import INK, cells_of, figure, records, show

from spattn.patterns import Causal, DilatedWindow, Sinks, SlidingWindow, strided

n = np.arange(64)
shown = {
    "full": (Causal(), "#8899aa", "--"),
    "window": (SlidingWindow(15, 0), INK, "-"),
    "dilated": (Causal() & (SlidingWindow(7, 0) | DilatedWindow(8, dilation=4)), "#5b8fc7", "-"),
    "strided": (strided(8), "#c1621f", "-"),
    "global": (Causal() & (Sinks(4) | SlidingWindow(11, 0)), "#5a8f4f", "-"),
}
made, axes = figure(6, height=2.3, width=13)
for axis, (name, (pattern, _, _)) in zip(axes, shown.items(), strict=False):
    show(axis, cells_of(pattern, n, n), name)

(record,) = records("long_text-*")
for row in record["results"]:
    if row["task"] == "predict" and row["name"] in shown:
        _, colour, style = shown[row["name"]]
        curve = [(at["seconds"], at["loss"]) for at in row["curve"]]
        axes[5].plot(*zip(*curve, strict=True), style, color=colour, label=row["name"], marker=".", linewidth=1.2)
axes[5].set_title("held-out loss", fontsize=9)
axes[5].set_xlabel("CPU seconds", fontsize=8)
axes[5].set_xscale("log")
axes[5].set_xticks([1.5, 3, 6, 12, 24], ["1.5", "3", "6", "12", "24"])
axes[5].minorticks_off()
axes[5].tick_params(labelsize=7)
axes[5].legend(fontsize=7, frameon=False)
