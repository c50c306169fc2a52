"""Planning time by number of tokens, for spattn and libraries that visit every pair, from the committed results."""

import matplotlib.pyplot as plt
from common import INK, records

COLOURS = {
    "spattn": INK,
    "create_block_mask": "#c0504d",
    "create_block_mask, compiled": "#e0a080",
    "SciPy CSR": "#7a9a5a",
}

(record,) = records("peers_plan-zen4")
results = record["results"]
names = list(dict.fromkeys(row["name"] for row in results))
figure, axes = plt.subplots(2, 3, figsize=(8, 5), layout="constrained", sharex=True, sharey=True)
for axis in axes.flat[len(names) :]:
    axis.remove()
for axis, name in zip(axes.flat, names, strict=False):
    for contender, colour in COLOURS.items():
        rows = [row for row in results if row["name"] == name and row["contender"] == contender]
        axis.loglog(
            [row["tokens"] for row in rows],
            [row["plan_ms"] for row in rows],
            "o-",
            ms=3,
            lw=1,
            color=colour,
            label=contender,
        )
    axis.set_title(name, fontsize=8)
    axis.set_xlabel("tokens", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.tick_params(labelbottom=True)
for axis in axes[:, 0]:
    axis.set_ylabel("processor time, ms", fontsize=8)
figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, loc="outside upper center", ncols=4, frameon=False)
