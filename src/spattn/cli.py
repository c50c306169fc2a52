"""The command ``spattn``: info and draw; ``python -m spattn`` is the same.

Exit codes: 0 success; 1 failure, such as a missing package or an unwritable file; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from . import patterns
from .api.versions import show_versions, version
from .errors import BackendUnavailableError
from .patterns.base.class_registry import pattern_class
from .patterns.registry import make, parse, signature

__all__ = ["main"]

_PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
_LONGEST_PICTURE = 8192  # maximum number of queries and of keys
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _Failure(Exception):
    """A failure with a one-line message; the exit code is 1."""


class _Usage(Exception):
    """Wrong usage, with a one-line message; the exit code is 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with arguments `argv` (default: ``sys.argv[1:]``) and return its exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except _Usage as error:
        return _complain(parser, error, 2)
    except (_Failure, BackendUnavailableError, OSError) as error:
        return _complain(parser, error, 1)
    except KeyboardInterrupt:
        return _complain(parser, "interrupted", _INTERRUPTED)


def _complain(parser: argparse.ArgumentParser, what: object, code: int) -> int:
    print(f"{parser.prog}: error: {what}", file=sys.stderr)
    return code


class _Version(argparse.Action):
    """Print the version; it is read only on demand, because package metadata is slow to read."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"{parser.prog} {version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spattn",
        description="Exact sparse attention on CPU and GPU.",
        epilog="Run 'spattn COMMAND --help' for help on a command. Exit codes: 0 success, 1 failure, 2 usage error.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    info = commands.add_parser(
        "info",
        help="print versions, instruction sets, devices and backend availability",
        description="Print versions, instruction sets, threads, GPU, and why a backend is unavailable. Include the "
        "output in bug reports.",
    )
    info.set_defaults(run=_info)

    draw = commands.add_parser(
        "draw",
        help="draw a pattern",
        description="Draw the (query, key) pairs that a pattern allows. Without PATTERN, list all patterns and their "
        "parameters.",
        epilog="Examples: spattn draw 'longformer(32, global_tokens=4)' --q-len 128 -o longformer.png; "
        "spattn draw 'causal & (sinks(4) | sliding_window(15, 0))'",
    )
    draw.add_argument(
        "pattern",
        metavar="PATTERN",
        nargs="?",
        help="a registered name with parameters in parentheses, a composition with & | - ~, or the JSON from "
        "Pattern.to_json()",
    )
    draw.add_argument(
        "--param",
        metavar="K=V",
        action="append",
        default=[],
        type=_parameter,
        help="parameter of a pattern given by name only, V as a Python literal; may be repeated",
    )
    draw.add_argument("--q-len", metavar="N", type=_length, default=64, help="number of queries (default: 64)")
    draw.add_argument("--kv-len", metavar="N", type=_length, help="number of keys (default: same as --q-len)")
    draw.add_argument("--head", metavar="N", type=int, default=0, help="head of a per-head pattern (default: 0)")
    draw.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help=f"output file ({', '.join(_PICTURE_SUFFIXES)}; default: the name of the pattern, or pattern.png)",
    )
    draw.set_defaults(run=_draw)

    return parser


def _length(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= _LONGEST_PICTURE:
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to {_LONGEST_PICTURE}, got {text!r}")
    return value


def _parameter(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected K=V, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # an unquoted string: attention=bidirectional


def _info(options: argparse.Namespace) -> int:
    show_versions()
    return 0


def _draw(options: argparse.Namespace) -> int:
    if options.pattern is None:
        return _list_patterns()
    name = options.pattern if options.pattern in patterns.registry.names() else "pattern"
    output = options.output or Path(f"{name}.png")
    if output.suffix not in _PICTURE_SUFFIXES:
        raise _Usage(f"--output: expected a file name ending in {', '.join(_PICTURE_SUFFIXES)}; got {output}")
    pattern = _pattern(options.pattern, dict(options.param))
    kv_len = options.kv_len or options.q_len
    try:
        import matplotlib

        matplotlib.use("Agg")
        axes = patterns.show.draw(pattern, options.q_len, kv_len, head=options.head)
    except ModuleNotFoundError as error:
        raise _Failure(f"{error.name} is not installed: pip install {error.name}") from error
    except ValueError as error:  # lengths or head do not match the pattern
        raise _Usage(error) from error
    axes.figure.savefig(output, dpi=150, bbox_inches="tight")
    print(f"wrote {output.resolve()}")
    return 0


def _list_patterns() -> int:
    for name in patterns.registry.names():
        summary = (pattern_class(name).__doc__ or "").partition("\n")[0].replace("``", "`")
        print(f"{signature(name)}\n    {summary}")
    return 0


def _pattern(text: str, params: dict[str, object]) -> patterns.Pattern:
    try:
        if text.isidentifier():
            return make(text, **params)
        if params:
            raise _Usage(f"--param: requires a pattern given by name only, got {text!r}")
        return patterns.from_json(text) if text.lstrip().startswith("{") else parse(text)
    except (TypeError, ValueError) as error:
        raise _Usage(error) from error
