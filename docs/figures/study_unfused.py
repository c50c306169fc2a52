"""SDDMM, softmax and SpMM as separate kernels on a GPU beside the fused one, from the study's results."""

import matplotlib.pyplot as plt
from common import INK, records

STAGES = {"SDDMM_ms": ("SDDMM", "#6f94bd"), "softmax_ms": ("softmax", "#e0a080"), "SpMM_ms": ("SpMM", "#7a9a5a")}


def draw(record: dict) -> None:
    """One bar per pattern and contender."""
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    rows, at, labels = record["results"], [], []
    for n, row in enumerate(rows):
        at.append(n + 0.7 * (len({each["problem"] for each in rows[: n + 1]}) - 1))
        labels.append(f"{row['problem']}: {row['contender']}")
        left = 0.0
        for field, (label, colour) in STAGES.items():
            if field in row:
                axis.barh(at[-1], row[field], left=left, color=colour, label=label if n == 1 else None)
                left += row[field]
        if not left:
            left = row["median_ms"]
            axis.barh(at[-1], left, color=INK, label="fused" if n == 0 else None)
        times = f" {row['times_fused']:.3g}×" if row["times_fused"] != 1 else ""
        axis.text(left, at[-1], times, va="center", fontsize=7)
    axis.set_yticks(at, labels, fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_title(record["machine"]["gpu"], fontsize=9)
    axis.set_xlabel("ms; × = the whole pipeline's time over the fused kernel's", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    handles = axis.get_legend_handles_labels()
    figure.legend(*handles, fontsize=8, loc="outside upper center", ncols=4, frameon=False)


for measured in records("study_unfused_cuda-*"):  # no figure before it is measured
    draw(measured)
