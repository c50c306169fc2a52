"""The example's three parts in order, their tables, and the files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from . import embeddings, machine, speed
from .budget import Budget
from .device import Device, device_for
from .others import Others
from .progress import Progress
from .results import TOLERANCE, Agreement, Case, Shift, Timings
from .startup import begin

LENGTHS = [1024, 2048, 4096, 8192, 16384]
QUICK_LENGTHS = [1024, 2048, 4096]
MODULES, QUICK_MODULES = 16, 6
SECONDS = 80  # of all measurements; imports and pictures take a few more
_BUSY = 0.1  # share of the processors' time taken by other programs above which timings are unreliable
_print_now = partial(print, flush=True)


def run(
    out: Path,
    backend: str = "auto",
    quick: bool = False,
    say: Callable[[str], None] = _print_now,
    seconds: float = SECONDS,
) -> bool:
    """Run the example and write its pictures and ``demo.json`` to `out`.

    Parameters
    ----------
    out : Path
        Output folder, created if missing.
    backend : {"auto", "cpu", "cuda"}
        Attention backend; "auto" is the CPU, where NumPy's arrays are.
    quick : bool
        Fewer texts, and at most 4096 tokens.
    say : callable
        Receives the lines of the report. Progress lines go to standard error.
    seconds : float
        Time budget of the measurements. On a slow or busy machine they use fewer texts and patterns, repeat
        less, and omit the longest sequences.

    Returns
    -------
    bool
        Whether spattn's results agree with NumPy's within 1e-5.

    Raises
    ------
    DemoUnavailable
        If the backend, the weights or a package is missing.
    OSError
        If `out` cannot be written.
    """
    progress, budget = Progress(), Budget(seconds)
    progress.start("load MiniLM")
    figures, backend, (encoder, tokenizer) = begin(out, backend)
    modules = QUICK_MODULES if quick else MODULES
    agreement, shifts = embeddings.compare(encoder, tokenizer, modules, backend, progress, budget.share(2 / 5))
    _tell_embeddings(say, agreement, shifts)

    lengths = QUICK_LENGTHS if quick else LENGTHS
    device = device_for(backend)
    qkv = speed.real_qkv(encoder, tokenizer, max(lengths), backend, progress, budget.share(1 / 4))
    others = Others()
    timings = speed.measure(qkv, lengths, device, progress, budget)
    taken = others.share()
    _tell_speed(say, timings, device)
    if timings.omitted:
        say(f"    omitted, as the time is spent: {', '.join(map(str, timings.omitted))} tokens (see --seconds)")
    if taken > _BUSY:
        say(f"    other programs took {100 * taken:.0f} % of the processors meanwhile: the times are unreliable")
    say("")

    progress.start("pictures")
    known = machine.facts() | {"taken by other programs": round(taken, 3)}
    line = f"{known['processor']}, {known['cpus']} CPUs; backend {backend}; NumPy {known['numpy']}"
    if taken > _BUSY:
        line += f"; other programs took {100 * taken:.0f} % of the processors"
    figures.speed(out / "speed.png", timings.dense, timings.cases, device.dense_label, line)
    figures.embeddings(out / "embeddings.png", shifts)
    figures.pattern_pictures(out / "patterns.png")

    report: dict[str, Any] = {
        "machine": known,
        "settings": {
            "backend": backend,
            "quick": quick,
            "seconds": seconds,
            "layer": speed.LAYER,
            "heads": qkv[0].shape[1],
            "head_dim": qkv[0].shape[3],
            "dtype": str(qkv[0].dtype),
            "blas_threads": _blas_threads(),
            "note": device.note,
        },
        "agreement": asdict(agreement) | {"tolerance": TOLERANCE, "holds": agreement.holds},
        "embeddings": [asdict(s) for s in shifts],
        "dense": [{"tokens": n} | asdict(t) for n, t in timings.dense.items()],
        "speed": [asdict(c) for c in timings.cases],
        "omitted": timings.omitted,
    }
    (out / "demo.json").write_text(json.dumps(report, indent=1) + "\n")
    for name in ("speed.png", "embeddings.png", "patterns.png", "demo.json"):
        say(f"wrote {(out / name).resolve()}")
    say(f"finished in {progress.seconds:.0f} s")
    return agreement.holds and _errors_hold(timings.cases)


def _blas_threads() -> int | None:
    """Limit of OpenBLAS's threads, set by :func:`.others.set_up_threads` or the caller."""
    limit = os.environ.get("OPENBLAS_NUM_THREADS", "")
    return int(limit) if limit.isdecimal() else None


def _errors_hold(cases: list[Case]) -> bool:
    return all(c.error is None or c.error <= TOLERANCE for c in cases)


def _tell_embeddings(say: Callable[[str], None], agreement: Agreement, shifts: list[Shift]) -> None:
    verdict = "ok" if agreement.holds else "TOO LARGE"
    say(f"(a) dense embeddings of {agreement.texts} texts ({agreement.tokens} tokens) from the standard library:")
    say("    largest absolute difference between spattn in every attention layer and plain NumPy")
    say(
        f"    padded batches {agreement.padded:.1e}, packed without padding {agreement.packed:.1e}; "
        f"tolerance {TOLERANCE:.0e}: {verdict}"
    )
    say("")
    say("(b) sparse patterns: distance from the dense embeddings, and remaining work")
    say("    'found': functions whose nearest module opening is that of their own module")
    say(f"    {'pattern':30} {'pairs':>7} {'efficiency':>10} {'cosine':>7} {'worst':>7} {'found':>8}")
    for s in shifts:
        found = f"{s.found}/{agreement.texts // 2}"
        say(
            f"    {s.pattern:30} {100 * s.pairs:5.1f} % {s.efficiency:10.2f} {s.cosine_mean:7.4f} {s.cosine_min:7.4f} "
            f"{found:>8}"
        )
    omitted = [name for name in embeddings.sparse_patterns() if name not in {s.pattern for s in shifts}]
    if omitted:
        say(f"    omitted, as the time is spent: {'; '.join(omitted)} (see --seconds)")
    say("")


def _tell_speed(say: Callable[[str], None], timings: Timings, device: Device) -> None:
    lengths = sorted(timings.dense)
    say("(c) forward time on the model's own q, k, v, concatenated, 12 heads of 32, float32: ms (speed-up)")
    say(f"    {device.note}")
    if _blas_threads():
        say(f"    NumPy's BLAS is limited to {_blas_threads()} thread(s)")
    say("    " + f"{'tokens':42}" + "".join(f"{n:>16}" for n in lengths))
    say("    " + f"{device.dense_label:42}" + "".join(f"{1e3 * timings.dense[n].seconds:>16.1f}" for n in lengths))
    for name in speed.timed_patterns():
        own = {c.tokens: c for c in timings.cases if c.pattern == name}
        cells = (f"{1e3 * own[n].timing.seconds:.1f} ({own[n].speedup:.1f}×)" for n in lengths)
        say("    " + f"{name:42}" + "".join(f"{cell:>16}" for cell in cells))
    errors = [c.error for c in timings.cases if c.error is not None]
    verdict = "ok" if _errors_hold(timings.cases) else "TOO LARGE"
    say(
        f"    largest absolute difference from the float64 reference at {lengths[0]} tokens: {max(errors):.1e}, "
        f"tolerance {TOLERANCE:.0e}: {verdict}"
    )
