"""Speed-up over naive attention by sequence length, one row of panels for each device and number of threads."""

import matplotlib.pyplot as plt
from common import INK, records
from matplotlib.ticker import NullFormatter, NullLocator

COLOURS = {
    "dense": (INK, "-", "s"),
    "DeepSpeed fixed": ("#c0504d", "-", "o"),
    "DeepSpeed variable": ("#e08060", "--", "v"),
    "DeepSpeed BigBird": ("#b07aa1", "-", "^"),
    "DeepSpeed BSLongformer": ("#8c6d31", "--", "D"),
    "strided 128": ("#7a9a5a", "-", "o"),
    "fixed 128, 8": ("#3d7a50", "--", "v"),
    "Longformer ±256 + 16": ("#6f94bd", "-", "^"),
    "BigBird, blocks of 64": ("#2aa6a6", "--", "D"),
}
PASSES = ("forward", "forward and backward")

measured = []
for record in records("study_speedup_c*"):
    for threads in sorted({row.get("threads", 0) for row in record["results"]}):
        rows = [row for row in record["results"] if row.get("threads", 0) == threads]
        title = record["machine"].get("gpu") or f"{record['machine']['cpu']}, {threads} thread{'s' * (threads > 1)}"
        measured.append((title, rows))
size = (8, 3.9 * len(measured) + 0.4)
figure, axes = plt.subplots(
    len(measured), 2, figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
)
for line, (title, rows) in zip(axes, measured, strict=True):
    for axis, which in zip(line, PASSES, strict=True):
        for name, (colour, style, marker) in COLOURS.items():
            own = [row for row in rows if row["pass"] == which and row["contender"] == name]
            tokens, times = [row["tokens"] for row in own], [row["times_naive"] for row in own]
            wide = 2.2 if name == "dense" else 1.2
            axis.loglog(tokens, times, style, lw=wide, color=colour, label=name, zorder=3 if name == "dense" else 2)
            for row in own:
                face = "white" if row["times_naive_extrapolated"] else colour
                axis.plot(row["tokens"], row["times_naive"], marker, ms=4, mec=colour, mfc=face, mew=1, zorder=4)
        axis.axhline(1, color="#888888", lw=1, ls=":")
        axis.set_title(f"{title}: {which}", fontsize=9)
        ticks = sorted({row["tokens"] for row in rows})
        axis.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.tick_params(labelsize=8, labelbottom=True)
        axis.grid(True, color="#e5e7eb", lw=0.6)
        axis.set_xlabel("tokens", fontsize=8)
for axis in axes[:, 0]:
    axis.set_ylabel("naive attention's time over spattn's", fontsize=8)
figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, loc="outside upper center", ncols=4, frameon=False)
