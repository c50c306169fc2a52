"""The example's figures, drawn by Matplotlib without a display."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (the backend has to be chosen first)
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator  # noqa: E402

from spattn import patterns  # noqa: E402

from .results import PARTS, Case, Profile, Shift, Timing  # noqa: E402

_DPI = 130
_MARKERS = "osD^vP*X<>"
_DENSE = {"color": "black", "linewidth": 2.5, "marker": "o", "markersize": 6}


def speed(path: Path, dense: dict[int, Timing], cases: list[Case], dense_label: str, machine: str) -> None:
    """Time and speed-up over length, both axes logarithmic, with naive dense attention as the baseline."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6.4), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)
    lengths = sorted(dense)
    left.plot(lengths, [1e3 * dense[n].seconds for n in lengths], label=dense_label, **_DENSE)
    right.plot(lengths, [1.0] * len(lengths), label=dense_label, **_DENSE)
    for number, name in enumerate(dict.fromkeys(case.pattern for case in cases)):
        own = sorted((c for c in cases if c.pattern == name), key=lambda c: c.tokens)
        style = {"marker": _MARKERS[number % len(_MARKERS)], "color": f"C{number}", "linewidth": 1.6, "label": name}
        left.plot([c.tokens for c in own], [1e3 * c.timing.seconds for c in own], **style)
        right.plot([c.tokens for c in own], [c.speedup for c in own], **style)
    for axes, what in ((left, "time of one forward call (ms)"), (right, "speed-up over naive dense (×)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_xlabel("tokens")
        axes.set_ylabel(what)
        axes.grid(True, alpha=0.3)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Attention on MiniLM's own q, k, v (12 heads of 32, float32)\n{machine}", fontsize=11)
    _save(figure, path)


def embeddings(path: Path, shifts: list[Shift]) -> None:
    """Cosine to the dense embedding over the share of computed pairs."""
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for number, s in enumerate(shifts):
        axes.errorbar(
            100 * s.pairs,
            s.cosine_mean,
            yerr=[[s.cosine_mean - s.cosine_min], [0]],
            fmt=_MARKERS[number],
            color="black" if s.pattern == "dense" else f"C{number}",
            capsize=4,
            markersize=8,
            label=s.pattern,
        )
    axes.set_xlabel("pairs computed (% of all pairs of the texts)")
    axes.set_ylabel("cosine to the dense embedding\n(mean; whisker: worst text)")
    axes.set_xlim(0, 105)
    axes.grid(True, alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    axes.set_title("How far sparse attention moves MiniLM's embeddings", fontsize=11)
    _save(figure, path)


def layers(path: Path, profiles: list[Profile], caption: str) -> None:
    """Time of the parts of each layer, one panel per contender, on one scale."""
    figure, grid = plt.subplots(1, len(profiles), figsize=(13, 4.8), layout="constrained", sharey=True)
    for axes, profile in zip(grid, profiles, strict=True):
        at, bottom = range(len(profile.layers)), [0.0] * len(profile.layers)
        for part in PARTS:
            height = [1e3 * layer[part] for layer in profile.layers]
            axes.bar(at, height, bottom=bottom, label=part)
            bottom = [low + high for low, high in zip(bottom, height, strict=True)]
        axes.bar([-1], [1e3 * profile.embedding], color="grey", label="embedding")
        axes.bar([len(profile.layers)], [1e3 * profile.rest], color="lightgrey", label="rest, of all layers")
        axes.set_xticks([-1, *at, len(profile.layers)], ["emb.", *map(str, at), "rest"])
        axes.set_title(f"{profile.name}: {1e3 * profile.whole:.0f} ms", fontsize=11)
        axes.set_xlabel("layer")
        axes.grid(True, axis="y", alpha=0.3)
    grid[0].set_ylabel("time of one forward pass (ms)")
    grid[-1].legend(frameon=False)
    figure.suptitle(f"Where MiniLM's time goes in Transformers\n{caption}", fontsize=11)
    _save(figure, path)


def pattern_pictures(path: Path, tokens: int = 64) -> None:
    """Small versions of the timed patterns, to show their structure."""
    shown = {
        "causal": patterns.Causal(),
        "sliding window ±6": patterns.SlidingWindow(6),
        "dilated window ±6, every 4th": patterns.DilatedWindow(6, 6, dilation=4),
        "Longformer ±6 + 2 global": patterns.longformer(12, global_tokens=2),
        "BigBird, blocks of 4": patterns.BigBird(4),
        "strided 8": patterns.strided(8),
        "fixed 8, 1 summary": patterns.fixed(8, 1),
        "three packed documents": patterns.Documents((20, 32, 12)),
    }
    figure, grid = plt.subplots(2, 4, figsize=(13, 7), layout="constrained")
    for axes, (name, pattern) in zip(grid.flat, shown.items(), strict=True):
        patterns.show.draw(pattern, tokens, tokens, ax=axes)
        density = pattern.index_set(tokens, tokens).density
        axes.set_title(f"{name}\n{100 * density:.0f} % of the pairs", fontsize=10)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
