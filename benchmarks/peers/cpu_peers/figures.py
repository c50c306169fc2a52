"""Figures of docs/cpu-roofline.md and docs/systems/sparse_fusion.rst, drawn from the results."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .targets import TARGETS

INK, QUIET, GRID = "#1f2430", "#6b7280", "#e5e7eb"
FORWARD, BOTH, TARGET = "#2a6f97", "#8ab6d6", "#c1121f"
STAGES = {"products": "#2a6f97", "exp": "#e09f3e", "rest": "#d1d5db"}
_STYLE = {
    "font.size": 9,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


def _save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight", facecolor="white", metadata={"Software": None})
    plt.close(figure)
    print(f"wrote {path}")


def peers(rows: list[dict], path: Path) -> None:
    """Ratio of each contender's time to spattn's; one panel per dtype, grouped by problem."""
    rows = [r for r in rows if r["times_spattn"]]
    with plt.rc_context(_STYLE):
        dtypes = [d for d in ("float32", "bfloat16") if any(r["dtype"] == d for r in rows)]
        figure, axes = plt.subplots(
            1, len(dtypes), figsize=(6.2 * len(dtypes), _height(rows)), squeeze=False, sharex=True
        )
        for axis, dtype in zip(axes[0], dtypes, strict=True):
            _peers_panel(axis, [r for r in rows if r["dtype"] == dtype and r["contender"] != "spattn"], dtype)
        figure.suptitle(
            "CPU time over spattn's, 8 heads of 64, one thread (log scale; above 1: spattn is faster)", y=1.0
        )
        figure.tight_layout()
        _save(figure, path)


def _height(rows: list[dict]) -> float:
    """Height in inches: one line per bar and two per heading of the fuller panel."""
    lines = [
        sum(r["dtype"] == d for r in rows) + 2 * len({(r["name"], r["pass"]) for r in rows if r["dtype"] == d})
        for d in {r["dtype"] for r in rows}
    ]
    return 1.0 + 0.19 * max(lines)


def _peers_panel(axis, rows: list[dict], dtype: str) -> None:
    at, ticks, labels, heads = 0.0, [], [], []
    for key in dict.fromkeys((r["name"], r["pass"]) for r in rows):
        group = sorted((r for r in rows if (r["name"], r["pass"]) == key), key=lambda r: r["times_spattn"])
        heads.append((at, f"{group[0]['problem']}, {key[1]}"))
        for row in group:
            at += 1
            axis.barh(at, row["times_spattn"] - 1, left=1, height=0.72, color=FORWARD if key[1] == "forward" else BOTH)
            goal = _target(row, dtype)
            end = max(row["times_spattn"], 1)
            beside = goal if goal and end < goal < 1.7 * end else end
            axis.text(beside * 1.06, at, f"{row['times_spattn']:.3g}×", va="center", fontsize=8, color=QUIET)
            if goal:
                axis.plot([goal, goal], [at - 0.45, at + 0.45], color=TARGET, linewidth=1.8)
            ticks.append(at)
            labels.append(row["contender"])
        at += 1.5
    for y, text in heads:
        axis.text(
            0.01,
            y,
            text,
            transform=axis.get_yaxis_transform(),
            fontsize=8.5,
            fontweight="bold",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(0.5, max(r["times_spattn"] for r in rows) * 2.2)
    axis.axvline(1, color=QUIET, linewidth=0.8)
    axis.set_yticks(ticks, labels)
    axis.set_ylim(at - 0.5, -1)
    axis.grid(axis="x", color=GRID)
    axis.set_title(f"{dtype} (red: target)", loc="left", fontsize=9.5)


def _target(row: dict, dtype: str) -> float | None:
    for problem, which, against, single, half in TARGETS:
        if (problem, which, against) == (row["name"], row["pass"], row["contender"]):
            return single if dtype == "float32" else half
    return None


def roofline(rows: list[dict], path: Path) -> None:
    """Shares of a call's time: products and exponentials at their ceilings, and the rest."""
    with plt.rc_context(_STYLE):
        figure, axis = plt.subplots(figsize=(9.5, 0.34 * len(rows) + 1.4))
        for at, row in enumerate(rows):
            left = 0.0
            for stage in ("products", "exp"):
                part = 100 * row[f"{stage}_ms"] / row["median_ms"]
                axis.barh(at, part, left=left, height=0.7, color=STAGES[stage], label=stage if at == 0 else None)
                left += part
            axis.barh(
                at, max(0, 100 - left), left=left, height=0.7, color=STAGES["rest"], label="rest" if at == 0 else None
            )
            useful = row["share_of_ceiling_pct"]
            axis.plot(
                [useful, useful],
                [at - 0.42, at + 0.42],
                color=INK,
                linewidth=1.6,
                label="share on allowed pairs" if at == 0 else None,
            )
            axis.text(101, at, f"{row['median_ms']:.1f} ms", va="center", fontsize=8, color=QUIET)
        short = {"float32": "fp32", "bfloat16": "bf16"}
        axis.set_yticks(range(len(rows)), [f"{r['problem']}, {r['pass']}, {short[r['dtype']]}" for r in rows])
        axis.invert_yaxis()
        axis.set_xlim(0, 100)
        axis.set_xlabel("% of the measured CPU time, each stage counted at the ceiling measured in the same run")
        axis.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=4, frameon=False)
        axis.grid(axis="x", color=GRID)
        _save(figure, path)


def fusion(pipelines: list[dict], fused: dict, title: str, path: Path) -> None:
    """Left: stages of every pipeline and the fused kernel. Right: inspection plus calls, by number of calls."""
    colors = {"SDDMM": "#2a6f97", "softmax": "#e09f3e", "SpMM": "#7a9e7e"}
    with plt.rc_context(_STYLE):
        figure, (stages, total) = plt.subplots(1, 2, figsize=(13, 0.42 * len(pipelines) + 2.2), width_ratios=(1.5, 1))
        shown = sorted(pipelines, key=lambda r: r["median_ms"])
        stages.barh(0, fused["median_ms"], color=TARGET, height=0.7, label="fused")
        stages.text(fused["median_ms"] + 6, 0, f"{fused['median_ms']:.1f} ms", va="center", fontsize=8, color=QUIET)
        for at, row in enumerate(shown, start=1):
            left = 0.0
            for stage, color in colors.items():
                stages.barh(
                    at, row[f"{stage}_ms"], left=left, color=color, height=0.7, label=stage if at == 1 else None
                )
                left += row[f"{stage}_ms"]
            note = f"{row['median_ms']:.0f} ms, {row['times_fused']:.1f}×"
            stages.text(row["median_ms"] + 6, at, note, va="center", fontsize=8, color=QUIET)
        stages.set_yticks(range(len(shown) + 1), ["spattn, fused", *(r["pipeline"] for r in shown)])
        stages.invert_yaxis()
        stages.set_xlim(0, max(r["median_ms"] for r in shown) * 1.2)
        stages.set_xlabel("CPU milliseconds per call; labels: libraries of SDDMM · softmax · SpMM")
        stages.legend(frameon=False, loc="upper right")
        stages.grid(axis="x", color=GRID)
        _amortisation(total, fused, shown)
        figure.suptitle(title)
        figure.tight_layout()
        _save(figure, path)


def _amortisation(axis, fused: dict, pipelines: list[dict]) -> None:
    calls = range(21)
    lines = [("spattn, fused", fused, TARGET), (f"best unfused ({pipelines[0]['pipeline']})", pipelines[0], "#2a6f97")]
    lines += [
        (r["pipeline"], r, "#e09f3e") for r in pipelines if r["pipeline"].startswith("SciPy") and r is not pipelines[0]
    ][:1]
    for label, row, color in lines:
        axis.plot(
            calls,
            [row["inspect_ms"] + n * row["median_ms"] for n in calls],
            color=color,
            label=label,
            marker="o",
            markersize=3,
        )
    axis.set_yscale("log")
    axis.set_xticks(range(0, 21, 5))
    axis.set_xlabel("calls")
    axis.set_ylabel("CPU milliseconds, inspection included")
    axis.legend(frameon=False, loc="lower right")
    axis.grid(color=GRID)
