"""Efficiency in affine views and in contiguous blocks, from the committed results."""

import matplotlib.pyplot as plt
import numpy as np
from common import INK, TILE, records

results = [row for record in records("plan_efficiency-epyc") for row in record["results"]]
rows = [row for row in results if row["tokens"] == 16384]
figure, axis = plt.subplots(figsize=(7, 0.5 + 0.42 * max(len(rows), 1)), layout="constrained")
at = np.arange(len(rows))
axis.barh(at - 0.2, [row["efficiency"] for row in rows], 0.38, label="affine views, 128 × 64", color=INK)
axis.barh(at + 0.2, [row["efficiency_contiguous"] for row in rows], 0.38, label="contiguous, 128 × 128", color=TILE)
axis.set_yticks(at, [row["name"] for row in rows], fontsize=8)
axis.invert_yaxis()
axis.set_xlim(0, 1)
axis.set_xlabel("plan.efficiency at 16384 tokens", fontsize=8)
axis.tick_params(axis="x", labelsize=8)
if rows:
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
