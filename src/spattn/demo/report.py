"""The demo's three parts in order, its tables, and the files that it writes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from ..backends import load as load_backend
from . import embeddings, machine, model, speed
from .device import Device, device_for
from .progress import Progress

LENGTHS = [1024, 2048, 4096, 8192, 16384]
QUICK_LENGTHS = [1024, 2048, 4096]
MODULES, QUICK_MODULES = 16, 6
_BUSY = 0.1  # share of the processors' time that others take above which times are doubtful


def run(out: Path, backend: str = "auto", quick: bool = False, say: Callable[[str], None] = print) -> bool:
    """Runs the demo and writes its pictures and ``demo.json`` to `out`.

    Parameters
    ----------
    out : Path
        Folder for the files; made if it does not exist.
    backend : {"auto", "cpu", "cuda"}
        Who computes the attention; "auto" is the CPU, where NumPy's arrays are.
    quick : bool
        Fewer texts, and at most 4096 tokens.
    say : callable
        Receives the lines of the report.

    Returns
    -------
    bool
        Whether spattn's results agree with NumPy's within 1e-5.

    Raises
    ------
    DemoUnavailable
        If the weights or a package of ``spattn[demo]`` are missing.
    BackendUnavailable
        If `backend` cannot run here.
    OSError
        If `out` cannot be written.
    """
    started = time.perf_counter()
    figures, backend, (encoder, tokenizer) = begin(out, backend)
    progress = Progress()
    modules = QUICK_MODULES if quick else MODULES
    agreement, shifts = embeddings.compare(encoder, tokenizer, modules, backend, progress)
    _tell_embeddings(say, agreement, shifts)

    lengths = QUICK_LENGTHS if quick else LENGTHS
    device = device_for(backend)
    qkv = speed.real_qkv(encoder, tokenizer, max(lengths), backend, progress)
    others = machine.Others()
    timings = speed.measure(qkv, lengths, device, progress)
    taken = others.share()
    _tell_speed(say, timings, device)
    if taken > _BUSY:
        say(f"    other programs took {100 * taken:.0f} % of the processors meanwhile: do not rely on the times")
    say("")

    report: dict[str, Any] = {
        "machine": machine.facts() | {"taken by other programs": round(taken, 3)},
        "settings": {
            "backend": backend,
            "quick": quick,
            "layer": speed.LAYER,
            "heads": qkv[0].shape[1],
            "head_dim": qkv[0].shape[3],
            "dtype": str(qkv[0].dtype),
            "note": device.note,
        },
        "agreement": asdict(agreement) | {"tolerance": embeddings.TOLERANCE, "holds": agreement.holds},
        "embeddings": [asdict(s) for s in shifts],
        "dense": [{"tokens": n} | asdict(t) for n, t in timings["dense"].items()],
        "speed": [asdict(c) for c in timings["cases"]],
    }
    known = report["machine"]
    line = f"{known['processor']}, {known['cpus']} CPUs; backend {backend}; NumPy {known['numpy']}"
    if taken > _BUSY:
        line += f"; not alone: other programs took {100 * taken:.0f} %"
    figures.speed(out / "speed.png", timings["dense"], timings["cases"], device.dense_label, line)
    figures.embeddings(out / "embeddings.png", shifts)
    figures.pattern_pictures(out / "patterns.png")
    (out / "demo.json").write_text(json.dumps(report, indent=1) + "\n")
    for name in ("speed.png", "embeddings.png", "patterns.png", "demo.json"):
        say(f"wrote {(out / name).resolve()}")
    say(f"finished in {time.perf_counter() - started:.0f} s")
    return agreement.holds and _errors_hold(timings["cases"])


def begin(out: Path, backend: str) -> tuple[ModuleType, str, tuple[model.Encoder, Any]]:
    """(module of the pictures, backend, (encoder, its tokenizer)); makes the folder `out` where nothing is missing."""
    figures = _figures()
    backend = "cpu" if backend == "auto" else backend
    load_backend(backend)
    loaded = model.load()
    out.mkdir(parents=True, exist_ok=True)
    return figures, backend, loaded


def _figures() -> ModuleType:
    """The module of the pictures, which needs Matplotlib."""
    try:
        from . import figures
    except ModuleNotFoundError as error:
        raise model.DemoUnavailable(model.missing(error.name or "matplotlib")) from error
    return figures


def _errors_hold(cases: list[speed.Case]) -> bool:
    return all(c.error is None or c.error <= embeddings.TOLERANCE for c in cases)


def _tell_embeddings(
    say: Callable[[str], None], agreement: embeddings.Agreement, shifts: list[embeddings.Shift]
) -> None:
    verdict = "ok" if agreement.holds else "TOO FAR APART"
    say(f"(a) dense embeddings of {agreement.texts} texts ({agreement.tokens} tokens) of the standard library's")
    say("    source, spattn in every attention layer against plain NumPy, largest absolute difference:")
    say(
        f"    padded batches {agreement.padded:.1e}, packed without padding {agreement.packed:.1e}; "
        f"tolerance {embeddings.TOLERANCE:.0e}: {verdict}"
    )
    say("")
    say("(b) sparse patterns: how far the embeddings move, and how much of the work is left")
    say("    'found': functions whose nearest module opening is their own module's")
    say(f"    {'pattern':30} {'pairs':>7} {'efficiency':>10} {'cosine':>7} {'worst':>7} {'found':>8}")
    for s in shifts:
        found = f"{s.found}/{agreement.texts // 2}"
        say(
            f"    {s.pattern:30} {100 * s.pairs:5.1f} % {s.efficiency:10.2f} {s.cosine_mean:7.4f} {s.cosine_min:7.4f} "
            f"{found:>8}"
        )
    say("")


def _tell_speed(say: Callable[[str], None], timings: dict[str, Any], device: Device) -> None:
    lengths = sorted(timings["dense"])
    say("(c) forward time on the model's own q, k, v laid end to end, 12 heads of 32, float32: ms (speed-up)")
    say(f"    {device.note}")
    say("    " + f"{'tokens':42}" + "".join(f"{n:>16}" for n in lengths))
    say("    " + f"{device.dense_label:42}" + "".join(f"{1e3 * timings['dense'][n].seconds:>16.1f}" for n in lengths))
    for name in speed.timed_patterns():
        own = {c.tokens: c for c in timings["cases"] if c.pattern == name}
        cells = (f"{1e3 * own[n].timing.seconds:.1f} ({own[n].speedup:.1f}×)" for n in lengths)
        say("    " + f"{name:42}" + "".join(f"{cell:>16}" for cell in cells))
    errors = [c.error for c in timings["cases"] if c.error is not None]
    verdict = "ok" if _errors_hold(timings["cases"]) else "TOO FAR APART"
    say(
        f"    largest absolute difference to the float64 reference at {lengths[0]} tokens: {max(errors):.1e}, "
        f"tolerance {embeddings.TOLERANCE:.0e}: {verdict}"
    )
