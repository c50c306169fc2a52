"""Bytes of a pattern by number of tokens in each format, from the committed results."""

import matplotlib.pyplot as plt
from common import INK, records
from matplotlib.ticker import NullLocator

FORMATS = {
    "affine_rows": ("affine rows", INK),
    "plan": ("plan", "#6f94bd"),
    "csr": ("CSR", "#c0504d"),
    "blocked_csr": ("blocked CSR", "#e0a080"),
    "bitmask": ("bitmask", "#7a9a5a"),
}

results = [row for record in records("formats-zen4") for row in record["results"]]
names = list(dict.fromkeys(row["name"] for row in results)) or ["no results"]
size = (2.3 * len(names), 2.6)
figure, axes = plt.subplots(1, len(names), figsize=size, layout="constrained", sharey=True, squeeze=False)
for axis, name in zip(axes[0], names, strict=True):
    rows = [row for row in results if row["name"] == name]
    for field, (label, colour) in FORMATS.items():
        at = [row["tokens"] for row in rows], [row[f"{field}_kib"] for row in rows]
        axis.loglog(*at, "o-", ms=3, lw=1, color=colour, label=label)
    axis.set_title(name, fontsize=8)
    axis.set_xlabel("tokens", fontsize=8)
    axis.set_xticks([512, 2048, 8192], ["512", "2048", "8192"], minor=False)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(labelsize=7)
axes[0, 0].set_ylabel("KiB", fontsize=8)
figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, loc="outside upper center", ncols=5, frameon=False)
