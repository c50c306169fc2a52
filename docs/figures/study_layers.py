"""Time of the parts of an encoder before and after, from all results of the study's layers."""

import matplotlib.pyplot as plt
from common import records

PARTS = {
    "attention_ms": ("attention", "#c0504d"),
    "projections_ms": ("projections of q, k, v and the output", "#6f94bd"),
    "MLP_ms": ("MLP", "#7a9a5a"),
    "rest_ms": ("embedding, norms and calls", "#c9c9c9"),
}

measured = records("study_layers_c*")
size = (8, 2.3 * len(measured) + 0.3)
figure, axes = plt.subplots(len(measured), 1, figsize=size, layout="constrained", squeeze=False)
for axis, record in zip(axes[:, 0], measured, strict=True):
    rows = [row for row in record["results"] if row["layer"] == "all"]
    left = [0.0] * len(rows)
    for field, (label, colour) in PARTS.items():
        width = [row[field] + (row["embedding_ms"] if field == "rest_ms" else 0) for row in rows]
        axis.barh(range(len(rows)), width, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, width, strict=True)]
    for at, (row, end) in enumerate(zip(rows, left, strict=True)):
        axis.text(end, at, f" {row['attention_percent']:.0f} % attention", va="center", fontsize=7)
    axis.set_yticks(range(len(rows)), [row["contender"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.2 * max(left))
    axis.set_title(record["machine"].get("gpu") or record["machine"]["cpu"], fontsize=9)
    axis.set_xlabel("ms, one forward of the encoder", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, loc="outside upper center", ncols=4, frameon=False)
