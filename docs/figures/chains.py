"""Time of chains of separate operators over one fused call, from all results of benchmarks/scores/chains.py."""

import matplotlib.pyplot as plt
from common import INK, records

UNFUSED = {
    "times_numpy": ("NumPy", "#c0504d"),
    "times_torch": ("PyTorch, eager", "#e0a080"),
    "times_reused": ("faster of both, memory reused", "#6f94bd"),
    "times_tuned": ("faster of both, tuned", "#7a9a5a"),
}

measured = records("chains_c*")
figure, axes = plt.subplots(
    1, max(len(measured), 1), figsize=(4.6 * max(len(measured), 1), 5.0), layout="constrained", squeeze=False
)
for axis, record in zip(axes[0], measured, strict=False):
    rows = [row for row in record["results"] if row["pattern"] == "causal"]
    fields = [field for field in UNFUSED if field in rows[0]]
    for n, field in enumerate(fields):
        label, colour = UNFUSED[field]
        at = [place + 0.8 * (n + 0.5) / len(fields) - 0.4 for place in range(len(rows))]
        bars = axis.barh(at, [row[field] for row in rows], 0.8 / len(fields), color=colour, label=label)
        axis.bar_label(bars, fmt="%.1f", fontsize=6, padding=2)
    axis.axvline(1, color=INK, linewidth=1, label="one fused call")
    axis.set_yticks(range(len(rows)), [row["chain"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_title(f"{record['machine'].get('gpu') or record['machine']['cpu']}, causal", fontsize=9)
    axis.set_xlabel("time over the fused call's", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
if measured:
    handles = axes[0, 0].get_legend_handles_labels()  # of the CPU, which has all contenders
    figure.legend(*handles, fontsize=8, loc="outside upper center", ncols=3, frameon=False)
else:
    axes[0, 0].set_title("not measured yet")
