"""History of the package: each benchmark at each measured commit, from the committed results."""

import matplotlib.pyplot as plt
from common import records

record = next(iter(records("history-zen4")), {"results": [], "dates": [], "commits": []})
steps = [row for own in records("history_steps-zen4") for row in own["results"]]
panels = {
    "forward, ms": ["forward"],
    "backward, ms": ["backward"],
    "plan, ms": ["plan"],
    "bytes of a plan, KiB": ["bytes of a plan"],
    "peak memory, MiB": ["peak memory, plan", "peak memory, forward"],
    "import beyond NumPy's, ms": ["import"],
}
days = [date[5:10] for date in record["dates"]]
firsts = [n for n, day in enumerate(days) if day not in days[:n]]
figure, axes = plt.subplots(len(panels), 1, figsize=(8, 15), layout="constrained", sharex=True)
for axis, (title, benchmarks) in zip(axes, panels.items(), strict=True):
    for row in record["results"]:
        if row["benchmark"] in benchmarks:
            label = row["problem"] or row["benchmark"].partition(", ")[2]
            axis.plot(
                range(len(days)),
                [float("nan") if v is None else v for v in row["values"]],
                "o-",
                ms=2,
                lw=1,
                label=label,
            )
    for step in steps:
        if set(step["benchmarks"]) & set(benchmarks):
            axis.axvline(step["at"], color="#8899aa", lw=0.5, zorder=0)
            at = (step["at"], 1.01)
            axis.annotate(step["step"], at, xycoords=axis.get_xaxis_transform(), fontsize=6, ha="center")
    if title.startswith(("forward", "plan", "bytes")):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    else:
        axis.set_ylim(bottom=0)
    axis.set_ylabel(title, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.set_xticks(firsts, [days[n] for n in firsts])
    if axis.get_legend_handles_labels()[1][1:]:
        axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
axes[-1].set_xlabel("commits, in order; the first of each day is labelled", fontsize=8)
