"""Training loss of the generators, and how often they are right on longer strings, from the committed results."""

import numpy as np
from common import INK, figure, records

STYLES = {
    "attention, 48": (INK, "-"),
    "attention, 48, no positions": (INK, ":"),
    "attention, 16": ("#5b8fc7", "-"),
    "LSTM, 48": ("#c1621f", "-"),
    "LSTM, 16": ("#e0a070", "-"),
}
(record,) = records("dyck-*")
made, (loss, right) = figure(2, height=2.8, width=9.5)
for name, (colour, style) in STYLES.items():
    rows = [row for row in record["results"] if row.get("model") == name]
    steps = record["averaged"] * (0.5 + np.arange(len(rows[0]["losses"])))
    loss.plot(steps, rows[0]["losses"], style, color=colour, label=name, linewidth=1.2)
    right.plot([r["length"] for r in rows], [r["right_percent"] for r in rows], style, color=colour, marker=".")
loss.set_title("training loss", fontsize=9)
loss.set_xlabel("step", fontsize=8)
loss.legend(fontsize=7, frameon=False)
lengths = [r["length"] for r in rows]
right.axvspan(lengths[0], lengths[-1], color="#f2f4f7", zorder=0)
right.set_xscale("log", base=2)
right.set_xticks(lengths, lengths)
right.set_title("closing brackets that are right, %; shaded: longer than in training", fontsize=9)
right.set_xlabel("tokens", fontsize=8)
for axis in (loss, right):
    axis.tick_params(labelsize=7)
