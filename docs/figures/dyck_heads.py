"""Attention weights of the trained generator's heads for one string, from the committed results."""

import numpy as np
from common import figure, records

(record,) = records("dyck-*")
k, shown = record["k"], record["attention"]
kinds = "abcdefgh"[:k]
labels = [*kinds, *kinds.upper(), "·"]
text = [labels[token] for token in shown["tokens"]]
heads = [(layer, head) for layer, maps in enumerate(shown["weights"]) for head in range(len(maps))]
made, axes = figure(len(heads), height=3.4, width=12)
for axis, (layer, head) in zip(axes, heads, strict=True):
    axis.imshow(np.sqrt(shown["weights"][layer][head]), cmap="Blues", vmin=0, vmax=1)
    axis.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=9)
    axis.set_xticks(range(len(text)), text, fontsize=5)
    axis.set_yticks(range(len(text)), text, fontsize=5)
    axis.set_xlabel("key", fontsize=8)
axes[0].set_ylabel("query", fontsize=8)
