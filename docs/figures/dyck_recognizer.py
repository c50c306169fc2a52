"""The keys that unmatched brackets attend to, in each layer of the network for Dyck-(2, 3)."""

import sys
from pathlib import Path

import numpy as np
from common import INK, figure
from matplotlib.patches import FancyArrowPatch

sys.path.insert(0, str(Path.cwd().parents[1] / "examples"))
from dyck import recognizer

TEXT = "([]())[([])]("
network = recognizer.Recognizer(2, 3)
tokens = np.array([*("([)]".index(c) for c in TEXT), 4])
x = network.embedding[tokens][None].copy()
x[..., recognizer.POSITION] = np.arange(len(tokens)) / len(tokens)

made, axes = figure(network.depth + 1, height=1.6, width=11)
for layer, axis in enumerate(axes):
    last, scores = layer == network.depth, network.scores(x)
    unmatched = x[0, :, recognizer.MATCHED] == 0
    if last:
        keys = {len(tokens) - 1: recognizer.anywhere(scores[:, 0])[0, -1]}
    else:
        before, after = recognizer.strictly_before(scores[:, 0])[0], recognizer.strictly_after(scores[:, 1])[0]
        sign = x[0, :, recognizer.SIGN]
        keys = {n: (after if sign[n] > 0 else before)[n] for n in np.flatnonzero(unmatched)}
        x = network.match(x)
    for query, key in keys.items():
        if 0 <= key < len(tokens):
            found = last or x[0, query, recognizer.MATCHED] == 1
            style = {"color": "#c1621f" if found else "#8899aa", "linewidth": 1.2 if found else 0.7}
            height = 0.25 if key > query else -0.25
            style |= {"connectionstyle": "arc3,rad=-0.6", "arrowstyle": "->", "mutation_scale": 6}
            axis.add_patch(FancyArrowPatch((query, height), (key, height), **style))
    for n, character in enumerate(TEXT + "·"):
        open_bracket = n < len(TEXT) and unmatched[n]
        axis.text(n, 0, character, ha="center", va="center", fontsize=9, color=INK if open_bracket else "#c3cbd4")
    axis.set(xlim=(-1, len(tokens)), ylim=(-3, 3))
    axis.set_title("last layer: any unmatched?" if last else f"layer {layer + 1}", fontsize=9)
    axis.axis("off")
