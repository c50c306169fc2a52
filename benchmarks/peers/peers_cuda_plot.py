"""Figure of peers_cuda: TF/s on allowed pairs of spattn and its fastest peer."""

from __future__ import annotations

import json
from pathlib import Path


def plot(results: Path, image: Path) -> None:
    """One panel per length and head dimension, one pair of bars per pattern."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    record = json.loads(results.read_text())
    rows = [row for row in record["results"] if "tflops" in row]
    panels = sorted({(row["tokens"], -row["head_dim"]) for row in rows})
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 3.2 * len(panels)), layout="constrained")
    for axis, (tokens, dim) in zip(axes, panels, strict=True):
        chosen = [row for row in rows if (row["tokens"], -row["head_dim"]) == (tokens, dim)]
        names = list(dict.fromkeys(row["problem"] for row in chosen))
        for at, name in enumerate(names):
            own = next(row for row in chosen if row["problem"] == name and row["contender"] == "spattn")
            peers = [row for row in chosen if row["problem"] == name and row["contender"] != "spattn"]
            best = min(peers, key=lambda row: row["median_ms"])
            axis.barh(at - 0.2, own["tflops"], 0.38, color="#1f4e79")
            axis.barh(at + 0.2, best["tflops"], 0.38, color="#b9b9b9")
            axis.text(own["tflops"], at - 0.2, f" {best['times_spattn']:.3g}×", va="center", fontsize=8)
            axis.text(best["tflops"], at + 0.2, f" {best['contender']}", va="center", fontsize=7, color="#555555")
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(f"{tokens} tokens, head_dim {-dim}", fontsize=10, loc="left")
        axis.set_xlabel("TF/s on allowed pairs (blue: spattn and its speed-up; grey: the fastest peer)", fontsize=8)
    figure.suptitle(f"{record['machine']['gpu']}, bfloat16 forward, 16 heads", fontsize=11)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=120)
    print(f"wrote {image}")
